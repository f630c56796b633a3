"""The training loop. It takes steps from a dataflow, updates the policy, writes checkpoints, publishes weights and
commits.

One step::

    plan (dataflow) → proximal log-probabilities of the whole step → epochs × minibatches × micro-batches →
    start of a checkpoint, every few steps → publish → commit

The checkpoint is written while training continues. Once it is durable, the trainer adds it to its step's commit.

If trainer and engine share GPUs, the trainer acquires them after planning and releases them before the commit. A
trainer may be killed at any time. The next start reads the last checkpoint and repeats the later steps from the same
plans. Nothing is published twice. On SIGTERM, the loop finishes the current step and writes a checkpoint. If it is
waiting for rollouts, it stops immediately.

The trainer computes proximal log-probabilities itself, before the step's first update. If a step is a single update,
they come from that update's forward pass. The engine's log-probabilities are used for importance weights and for the
metric ``mismatch``.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch  # type: ignore[import-not-found]

from megaflow_hpc.config.sections import Method
from megaflow_hpc.errors import ConfigError, MegaflowError
from megaflow_hpc.host.files import remove_tree
from megaflow_hpc.rundir.amendments import TRAINER, Amendment
from megaflow_hpc.rundir.training import Commit
from megaflow_hpc.rundir.weight_source import why_not_served
from megaflow_hpc.training.algorithms.choice import REPLAYED_STEPS
from megaflow_hpc.training.dataflow import KEPT_CHECKPOINTS, KEPT_VERSIONS, Dataflow, Step, UnreadableRollout
from megaflow_hpc.training.gpu_turns import GpuTurns
from megaflow_hpc.training.methods import guarded, out_of_memory
from megaflow_hpc.training.microbatch import MicroBatch, Minibatch
from megaflow_hpc.training.staleness import ASYNCHRONOUS_BATCHES
from megaflow_hpc.training.trainer import checkpoint, losses, probe
from megaflow_hpc.training.trainer.columns import OutOfMemory, UnusableRollout, columns_of
from megaflow_hpc.training.trainer.metrics import StageClock, WeightedMean
from megaflow_hpc.training.trainer.model import ProcessGroup, Reader, load, row_of
from megaflow_hpc.training.trainer.optimizer import Optimizer
from megaflow_hpc.training.trainer.vision import BadImage, processor_options

MAX_MISMATCH = 1.0
"""Maximum mean absolute difference between the engine's and the trainer's log-probabilities in the first update after a
start. Rounding and staleness cannot explain more: bfloat16 against float32 gives 0.01."""

MAX_NOT_FINITE = 3
"""Training stops after this many consecutive steps with a non-finite gradient."""

Proximal = dict[tuple[int, int], np.ndarray[Any, Any]]
"""Log-probabilities of each sequence, by (index of the rollout in the step, index of the sequence in the rollout)."""


class TrainingStopped(Exception):
    """Raised if the training loop is stopped while it waits for rollouts."""


class StepAmended(Exception):
    """Raised after a step was amended. Training must restart from the last checkpoint."""


class TrainingLoop:
    """Trains one policy of a run on this rank.

    Args:
        flow: the dataflow of this rank.
        ranks: all ranks.
        read: creates and shards the model. Default: :func:`~.model.load` does it.

    Attributes:
        stopping: set to true to stop after the current step. :meth:`stop` also interrupts waiting for rollouts.

    Raises:
        ConfigError: the model cannot be loaded, or differs from the model that the engine serves.
    """

    def __init__(self, flow: Dataflow, ranks: ProcessGroup, read: Reader | None = None) -> None:
        self.flow, self.ranks = flow, ranks
        probe.check(flow.config, flow.record.config.team)
        settings = flow.settings
        served = str(flow.trained.model.get("path") or "")
        base = settings.base or served
        if not base:
            raise ConfigError(f"{flow.run}: policy {flow.policy!r} has no model path; set training.policies.*.base")
        if why := why_not_served(Path(base), Path(served)):
            raise ConfigError(why)
        self._turns = GpuTurns(flow)
        self._turns.take(0)  # loading the model moves parameters to the GPUs
        torch.manual_seed(flow.trained.seed)
        self.policy = load(
            base,
            settings.dtype,
            ranks,
            lora=settings.lora,
            recompute=settings.recompute,
            parallel=settings.parallel.model_dump(),
            frozen_vision=settings.vision == "frozen",
            read=read,
        )
        if self.policy.vision is not None:
            self.policy.vision.options = processor_options(flow.engine_args)
        self.policy.temperature = flow.temperature
        flow.routing = self.policy.routing
        options = settings.optimizer.model_dump(include={"lr", "weight_decay", "clip_norm", "offload"})
        self.optimizer = Optimizer(self.policy, **options)
        loss = settings.loss
        self.loss = losses.Loss(
            kind=_function(loss.kind),
            clip=loss.band,
            entropy=loss.entropy,
            importance=_function(settings.engine_importance),
            length=flow.trained.max_tokens,
        )
        self._copies = settings.parallel.copies
        self.stopping = self._waiting = False
        self._compared = self._updated = False
        self._saving: checkpoint.Saving | None = None
        """The checkpoint that is being written. Its step's commit does not name it yet."""
        self._not_finite = 0
        """Number of consecutive steps that updated nothing because no gradient was finite."""
        self._moved = False
        """True if the current step has changed the weights."""

    def stop(self, *_: object) -> None:
        """Stops the training. Can be used as a signal handler."""
        self.stopping = True
        if self._waiting:
            raise TrainingStopped

    def steps(self) -> Iterator[dict[str, float]]:
        """Trains until the training is complete or :meth:`stop` is called. Yields the metrics of each step after its
        commit.

        Raises:
            ConfigError: the rollouts come from another model, several consecutive steps had non-finite gradients, or
                the first update does not fit into memory. Weights are unchanged.
            MegaflowError: a later update does not fit into memory. The next start continues from the last checkpoint.
            StepAmended: a step cannot be trained as planned. The next start trains it with the new amendment.
            LedgerError: a later trainer has taken over.
        """
        try:
            yield from self._steps()
        finally:
            with contextlib.suppress(MegaflowError):  # the step has failed, or a newer trainer has taken over
                self._finish_checkpoint()

    def _steps(self) -> Iterator[dict[str, float]]:
        flow, files = self.flow, self.flow.files
        newest, state = files.committed(), flow.restore()
        self._not_finite = self._not_finite_before(state.step if state else 0)
        published = newest.step if newest else 0
        needed = flow.checkpoint(state) if state else None
        if needed:
            checkpoint.restore(needed, self.optimizer, self.ranks)
        if self.ranks.first:
            for left in files.path.glob(".export-*"):
                remove_tree(left, ignore_errors=True)
            checkpoint.discard(files.checkpoints, published)
        self._give(StageClock(self.ranks.device))
        for step in self._planned():
            clock = StageClock(self.ranks.device)
            began = time.perf_counter()
            self._take(step.number, clock)
            step, metrics = self._train_amended(step, clock)
            self.stopping = bool(self.ranks.broadcast(self.stopping))
            last = step.number >= flow.config.steps or self.stopping
            due = last or step.number % flow.config.checkpoint_every == 0
            if self._saving and (due or self.ranks.broadcast(self._saving.done)):
                with clock("checkpoint"):
                    self._finish_checkpoint()
            if due:
                with clock("checkpoint"):
                    self._saving = checkpoint.save(files.checkpoints, step.number, self.optimizer, self.ranks)
            if step.number > published and self._moved:
                with clock("publish"):
                    self._publish(step)
            self._moved = False
            self._give(clock)
            seconds = clock.seconds | {"wait": step.wait_s, "plan": step.plan_s}
            metrics["seconds"] = time.perf_counter() - began + step.wait_s + step.plan_s
            metrics |= {f"seconds/{name}": spent for name, spent in seconds.items()}
            step.commit(metrics=metrics)
            if last:
                self._finish_checkpoint()
            self._count_not_finite(step, metrics, repeated=step.number <= published)
            yield {"step": float(step.number), **step.statistics(), **metrics}
            if self.stopping:
                return

    def _finish_checkpoint(self) -> None:
        """Waits until the last checkpoint is durable, adds it to its step's commit and removes old checkpoints."""
        saving, self._saving = self._saving, None
        if saving is None:
            return
        path = saving.finish()
        if self.ranks.first:
            self.flow.add_checkpoint(saving.step, path)
            checkpoint.prune(self.flow.files.checkpoints, KEPT_CHECKPOINTS, path)
            self.flow.files.prune_columns(min(int(kept.name) for kept in path.parent.glob("[0-9]*")))

    def _planned(self) -> Iterator[Step]:
        steps = self.flow.steps()
        while not self.stopping:
            self._waiting = True
            step = next(steps, None)
            self._waiting = False
            if step is None:
                return
            yield step

    def _take(self, step: int, clock: StageClock) -> None:
        if self._turns.shared:
            self._waiting = True
            with clock("sleep"):
                clock.seconds["wake"] = self._turns.take(step)
            self._waiting = False
            with clock("move"):
                self.optimizer.to(self.ranks.device)

    def _give(self, clock: StageClock) -> None:
        if self._turns.shared:
            with clock("move"):
                self.optimizer.to("cpu")
                self.ranks.barrier()
            self._turns.give()

    @property
    def _kept_versions(self) -> int:
        """Number of weight versions to keep. Columns may need all versions that sampled a step's tokens."""
        bound = self.flow.config.staleness
        ahead = ASYNCHRONOUS_BATCHES if bound is None else bound
        if any(step.replay for step in self.flow.config.data):
            ahead += REPLAYED_STEPS
        return max(KEPT_VERSIONS, ahead + 2) if self.flow.settings.columns else KEPT_VERSIONS

    def _publish(self, step: Step) -> None:
        folder = self.flow.files.path / self.ranks.broadcast(f".export-{step.number}-{time.time_ns()}")
        checksums = checkpoint.export(folder, self.policy, self.ranks)
        step.publish(folder, move=True, keep=self._kept_versions, checksums=checksums)
        self.ranks.barrier()

    # --- one step ---

    def _train_amended(self, step: Step, clock: StageClock) -> tuple[Step, dict[str, float]]:
        """Trains a step. If a rollout is unusable or does not fit into memory, amends the step and trains it again.

        If the failed attempt made no update, the step starts again immediately. Otherwise, training restarts. With
        several ranks, training always restarts, because the other ranks are waiting in collective operations.
        """
        while True:
            self._updated = False
            try:
                return step, self._train(step, clock)
            except (UnreadableRollout, UnusableRollout, OutOfMemory) as error:
                failure = error
            failure.__traceback__ = failure.__context__ = None  # these would keep the attempt's tensors alive
            self.optimizer.clear()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            if isinstance(failure, UnreadableRollout):
                self.flow.leave_out(step.number, failure.rollout, failure)
            elif isinstance(failure, UnusableRollout):
                for rollout in failure.rollouts:
                    self.flow.leave_out(step.number, step.plan.rollouts[rollout].id, failure)
            else:
                self._make_room(step, failure)
            if self._updated or self.ranks.count > 1:
                raise StepAmended(f"step {step.number} is amended")
            step = self.flow.again(step)

    def _make_room(self, step: Step, failure: OutOfMemory) -> None:
        """Halves the row size from this step on. If a row with a single sequence does not fit, leaves out its rollout
        instead."""
        if not failure.sequences:
            raise ConfigError(f"{self.policy.source}: out of memory without any rollout: {failure}; use more GPUs")
        rows = f"out of memory with a row of {failure.tokens} tokens: {failure}"
        if len(failure.sequences) == 1:
            self.flow.leave_out(step.number, step.plan.rollouts[failure.sequences[0]].id, rows)
        else:
            half = max(1, min(self.flow.settings.microbatch, failure.tokens) // 2)
            self.flow.amend(Amendment(step=step.number, microbatch=half, cause=rows, by=TRAINER, at=time.time()))

    @contextlib.contextmanager
    def _fitting(self, batch: MicroBatch) -> Iterator[None]:
        """Converts torch's out-of-memory errors on GPUs and CPUs to :class:`OutOfMemory`."""
        try:
            yield
        except (MemoryError, RuntimeError) as error:
            if out_of_memory(error):
                raise OutOfMemory(batch.sample.tolist(), len(batch.tokens), error) from None
            raise

    @contextlib.contextmanager
    def _whole_update(self) -> Iterator[None]:
        """Ends the training if memory runs out during an optimizer step, because some parameters may have changed
        already.

        Shorter rows would not help, so the step is not amended. The next start continues from the last checkpoint. If
        even the first step does not fit, a configuration error is raised.
        """
        try:
            yield
        except (MemoryError, RuntimeError) as error:
            if not out_of_memory(error):
                raise
            begun = self.flow.files.committed() is not None
            cause = str(error).partition("\n")[0]
            text = (
                f"{self.policy.source}: out of memory in the optimizer's step, whatever the length of rows: {cause}; "
                "use more GPUs, optimizer.offload: true or lora (megaflow-hpc training fit predicts the memory)"
            )
            if not begun:
                raise ConfigError(f"{text}; no step was taken") from None
            raise MegaflowError(f"{text}; the next start continues from the last checkpoint") from None

    def _not_finite_before(self, step: int) -> int:
        """Returns the number of committed steps up to ``step`` with non-finite gradients since the last update."""
        count = 0
        for number in reversed(self.flow.files.numbers(Commit)):
            commit = self.flow.files.read(Commit, number)
            if commit is not None and number <= step:
                if commit.metrics.get("updates"):
                    break
                count += bool(commit.metrics.get("not_finite"))
        return count

    def _count_not_finite(self, step: Step, metrics: Mapping[str, float], repeated: bool) -> None:
        if metrics["not_finite"]:
            self.flow.tell(f"{self.flow.run}: step {step.number}: {metrics['not_finite']:.0f} updates were not finite")
        if metrics["updates"]:
            self._not_finite = 0
        else:
            self._not_finite += bool(metrics["not_finite"])
        # An earlier start has already stopped at a repeated step. If this start did too, no start would get past the
        # step.
        if metrics["not_finite"] and self._not_finite >= MAX_NOT_FINITE and not repeated:
            raise ConfigError(
                f"{self.flow.run}: the gradients of the last {self._not_finite} steps were not finite, and the weights "
                f"are unchanged since; look at grad_norm and log_ratio_max of the steps before in "
                f"{self.flow.files.metrics}, lower the learning rate (megaflow-hpc training set RUN lr=…), then start "
                "the trainer again, or continue from an earlier version in a new campaign"
            )

    def _train(self, step: Step, clock: StageClock) -> dict[str, float]:
        columns = self.flow.settings.columns
        if columns:
            with clock("columns"):
                step.columns = columns_of(self.flow, step, columns, self.policy, self.ranks)
        minibatches = [minibatch for minibatch in step.minibatches() if minibatch.tokens]
        several = len(minibatches) > 1 or self.loss.kind == "m2po"
        proximal = self._proximal(step, clock) if several else None
        minibatch_metrics: list[dict[str, float]] = []
        total, fresh = WeightedMean(), WeightedMean()
        seen: set[int] = set()
        not_finite = 0
        for minibatch in minibatches:
            tally, norm, rate = self._update(step, minibatch, proximal, clock)
            if not math.isfinite(norm):
                not_finite += 1
                continue
            minibatch_metrics.append(tally.report() | {"grad_norm": norm, "lr": rate})
            total.join(tally)
            if seen.isdisjoint(minibatch.rollouts):  # the policy was not trained on these yet
                fresh.join(tally)
            seen.update(minibatch.rollouts)
        values: dict[str, list[float]] = {}  # without advantages, a minibatch has only grad_norm
        for each in minibatch_metrics:
            for name, value in each.items():
                values.setdefault(name, []).append(value)
        metrics = {name: sum(of_it) / len(of_it) for name, of_it in values.items()}
        metrics |= {name: max(of_it) for name, of_it in values.items() if name in losses.MAXIMA}
        metrics |= fresh.sampling()
        rewards = step.plan.rewards
        threshold = self.flow.trained.pass_threshold
        passed = sum(reward >= threshold for reward in rewards) / len(rewards) if rewards else math.nan
        busy = sum(clock.seconds.get(name, 0.0) for name in ("proximal", "forward", "backward", "optimizer"))
        return metrics | {
            "pass_rate": passed,
            "version": float(step.plan.version),
            "updates": float(len(minibatch_metrics)),
            "computed_tokens": float(total.rows),
            "not_finite": float(not_finite),
            "tokens_per_s": total.rows / busy if busy else 0.0,
        }

    @torch.no_grad()
    def _proximal(self, step: Step, clock: StageClock) -> Proximal:
        """Computes the proximal log-probabilities of the step's sequences and gathers them from all ranks."""
        mine: Proximal = {}
        with clock("proximal"):
            for batch in self._packed(step.minibatch()):
                with self._fitting(batch):
                    logprobs = self.policy(*self._row(batch))[0].cpu().numpy()
                mine |= {key: logprobs[part] for key, part in _sequences(batch)}
            return {key: value for part in self.ranks.gather(mine) for key, value in part.items()}

    def _update(
        self, step: Step, minibatch: Minibatch, proximal: Proximal | None, clock: StageClock
    ) -> tuple[WeightedMean, float, float]:
        """Makes one optimizer step, unless a gradient is not finite. Returns the token statistics of all ranks, the
        gradient norm and the learning rate."""
        packed = self._packed(minibatch)
        limit = math.inf
        if self.loss.kind == "m2po":
            held = list(packed)
            here = [self._tokens(batch, self._stored_proximal(batch, proximal), "cpu") for batch in held]
            together = [tokens for part in self.ranks.gather(here)[:: self._copies] for tokens in part]
            limit, packed = losses.second_moment_limit(together, losses.SECOND_MOMENT), iter(held)
        tally = WeightedMean()
        while True:
            with clock("data"):
                batch = next(packed, None)
            if batch is None:
                break
            with clock("forward"), self._fitting(batch):
                new, entropies = self.policy(*self._row(batch))
                before = new.detach() if proximal is None else self._stored_proximal(batch, proximal)
                tokens = self._tokens(batch, before, self.ranks.device)
                entropies = entropies if self.loss.entropy else entropies.detach()
                loss, sums = losses.policy_loss(self.loss, new, entropies, tokens, minibatch, limit)
            with clock("backward"), self._fitting(batch):
                loss.backward()
            tally.add(len(batch.tokens), sums)
        with clock("optimizer"):
            tally = tally.of_all(self.ranks, self._copies)
            metrics = tally.report()
            if not math.isfinite(mismatch := metrics.get("mismatch", 0.0)):
                self.optimizer.clear()
                return tally, mismatch, math.nan
            self._check_engine(metrics)
            rate = self._rate(step.number, metrics)
            with self._whole_update():
                norm = self.optimizer.step(rate)
            if math.isfinite(norm):
                self._moved = self._updated = True
        return tally, norm, rate

    def _rate(self, step: int, metrics: dict[str, float]) -> float:
        """Returns the learning rate of an update. A user's schedule may derive it from the update's metrics."""
        optimizer, steps = self.flow.settings.optimizer, self.flow.config.steps
        rate = optimizer.rate(step, steps)
        if isinstance(optimizer.schedule, Method) and metrics:  # empty if no rollout has an advantage
            rate = probe.scheduled(optimizer.schedule, step, steps, rate, metrics)
        return rate

    def _packed(self, minibatch: Minibatch) -> Iterator[MicroBatch]:
        """Yields the micro-batches of a minibatch. Omits sequences that cannot contribute a gradient."""
        return minibatch.microbatches(self.flow.settings.microbatch, skip_zero=not self.loss.needs_all_tokens)

    def _row(self, batch: MicroBatch) -> tuple[Any, ...]:
        """Returns the model's inputs for a micro-batch. An empty micro-batch becomes a single token to ignore."""
        if not len(batch.tokens):
            return row_of([], self.policy)
        largest = int(batch.tokens.max())
        if largest >= self.policy.words:
            raise ConfigError(
                f"{self.policy.source}: has {self.policy.words} tokens, but rollouts of {self.flow.run} hold token "
                f"{largest}: they come from a model with another tokenizer; no step was taken"
            )
        device = self.ranks.device
        if batch.images or self.policy.vision is not None:
            return self._row_with_images(batch)
        tokens, positions = (torch.from_numpy(a).to(device, torch.int64) for a in (batch.tokens, batch.positions))
        where = torch.from_numpy(batch.mask.nonzero()[0]).to(device)
        experts = None if batch.experts is None else torch.from_numpy(batch.experts).to(device)
        return tokens, positions, batch.offsets.tolist(), where, experts

    def _row_with_images(self, batch: MicroBatch) -> tuple[Any, ...]:
        """Returns the model's inputs for a row with images. Raises an error if the model takes text only."""
        if batch.experts is not None:
            raise ConfigError(
                f"{self.policy.source}: routed experts cannot be replayed in an image-text model; leave "
                "enable-return-routed-experts out of the engine's args"
            )
        images = batch.images or ((),) * len(batch.sample)
        parts = [
            (batch.tokens[part], batch.mask[part].nonzero()[0], shown)
            for (_, part), shown in zip(_sequences(batch), images, strict=True)
        ]
        try:
            return row_of(parts, self.policy)
        except BadImage as error:
            raise UnusableRollout([int(batch.sample[error.sequence])], error) from None

    def _tokens(self, batch: MicroBatch, proximal: Any, device: Any) -> losses.Tokens:
        def on_device(values: np.ndarray[Any, Any]) -> Any:
            """Copies a column to the device. An empty column becomes a single 0, because an empty row has one token."""
            return torch.from_numpy(values if len(values) else np.zeros(1, values.dtype)).to(device)

        return losses.Tokens(
            offsets=on_device(batch.offsets if len(batch.tokens) else np.array([0, 1])),
            mask=on_device(batch.mask).bool(),
            proximal=proximal.to(device),
            engine=on_device(batch.logprobs),
            advantages=on_device(batch.advantages),
            weights=on_device(batch.weights),
            rollout_tokens=on_device(batch.rollout_tokens),
            columns={name: on_device(values) for name, values in batch.columns.items()},
        )

    def _stored_proximal(self, batch: MicroBatch, proximal: Proximal | None) -> Any:
        """Returns the precomputed proximal log-probabilities (T) of a micro-batch's tokens."""
        assert proximal is not None
        parts = [torch.from_numpy(proximal[key]) for key, _ in _sequences(batch)]
        return torch.cat(parts) if parts else torch.zeros(1)

    def _check_engine(self, report: Mapping[str, float]) -> None:
        if (mismatch := report.get("mismatch")) is None:
            return
        if not self._compared and mismatch > MAX_MISMATCH:
            raise ConfigError(
                f"{self.policy.source}: its log-probabilities of sampled tokens differ from the engine's by "
                f"{mismatch:.2g} on average (rounding: 0.01): {self.flow.run} was sampled by another model, at a "
                f"temperature other than {self.policy.temperature:g}, or long ago; no step was taken"
            )
        self._compared = True


def _sequences(batch: MicroBatch) -> Iterator[tuple[tuple[int, int], slice]]:
    """Yields the key and slice of each sequence. Keys are the same in every minibatch and on every rank."""
    for key, begin, end in zip(
        batch.sequence_keys(), batch.offsets[:-1].tolist(), batch.offsets[1:].tolist(), strict=True
    ):
        yield key, slice(begin, end)


def _function(kind: Any) -> Any:
    """Returns a callable for a user's function, and the name of a built-in kind unchanged."""
    return guarded(kind) if isinstance(kind, Method) else kind
