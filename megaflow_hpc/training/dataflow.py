"""Builds training steps from complete groups of a campaign's rollouts. Uses each group exactly once.

    from megaflow_hpc.training.dataflow import Dataflow

    flow = Dataflow("runs/fix-bugs", policy="default")
    state = flow.restore()                       # the last commit that has a checkpoint, or None
    for step in flow.steps():                    # first repeats steps after that commit
        for minibatch in step.minibatches():
            for batch in minibatch.microbatches(tokens=32768):
                loss(model, batch, minibatch).backward()
            optimizer.step()
        version = step.publish(folder)
        step.commit(checkpoint, metrics={"entropy": 0.4})

Trainer and campaign share only the run directory. The trainer reads rollouts from the journals, requests tasks by
adding blocks, and publishes weights by a rename. So the trainer, the pods and the engines can crash and restart
independently of each other. The plan of a step is stored before it is used (:mod:`~megaflow_hpc.training.plan`). After
a crash, the steps since the last checkpoint are repeated with the same rollouts.

In a distributed trainer, every rank creates a ``Dataflow`` with its ``rank``. Rank 0 plans, requests, publishes and
commits. The other ranks follow its plans.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from megaflow_hpc.config.training import PolicyTraining, TrainingConfig
from megaflow_hpc.errors import ConfigError
from megaflow_hpc.host.files import remove_tree
from megaflow_hpc.ledger import OpenLease
from megaflow_hpc.rundir.amendments import TRAINER, Amendment, Amendments, settings
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.marks import Marks
from megaflow_hpc.rundir.record import read_run
from megaflow_hpc.rundir.training import Commit, Trainer
from megaflow_hpc.rundir.weights import Checksum, Version, current, ordinals, publish
from megaflow_hpc.training import methods
from megaflow_hpc.training.algorithms.samples import SCORE
from megaflow_hpc.training.buffer import DamagedRecord, Routing, Sequences, check_experts
from megaflow_hpc.training.microbatch import Minibatch, split
from megaflow_hpc.training.plan import Columns, PlannedRollout, StepPlan, TrainingFiles, amended
from megaflow_hpc.training.planning import NO_TASK_LEFT, Planning
from megaflow_hpc.training.policy import request_evaluation, trained_policy
from megaflow_hpc.training.readiness import PodWatch
from megaflow_hpc.trajectory import Image, TokenSequence

logger = logging.getLogger(__name__)

FIRST_POLL_S, MAX_POLL_S = 0.05, 0.5
"""Minimum and maximum poll interval in seconds while a step waits for rollouts. The interval doubles after each poll.
It starts short, to request rollouts soon after the engines have loaded
the weights just published."""
STATS_PER_S = 200
"""Maximum number of journal files to check per second. With many pods, the poll interval grows accordingly."""
SAY_INTERVAL_S = 30.0
"""Seconds between two log lines that report what a step is waiting for."""
KEPT_CHECKPOINTS = 3
"""Number of recent checkpoints that a trainer keeps."""
KEPT_VERSIONS = 3
"""Number of recent weight versions that a trainer keeps. An engine may still serve an older version while it loads the
next."""


class UnreadableRollout(ConfigError):
    """The record of a planned rollout is damaged. ``rollout`` is the rollout's id."""

    def __init__(self, rollout: str, cause: object) -> None:
        super().__init__(f"rollout {rollout}: {cause}")
        self.rollout = rollout


class Step:
    """One training step. After a restart, and with any number of ranks, it has the same rollouts.

    Attributes:
        plan: the stored plan. Rollouts that amendments leave out have weight 0.
        amendments: number of amendments recorded when the step started.
        columns: extra values for each token. The trainer sets them before it takes minibatches.
        wait_s: seconds spent waiting for the step's rollouts.
        plan_s: seconds spent reading and planning.
    """

    def __init__(
        self, flow: Dataflow, plan: StepPlan, wait_s: float = 0.0, plan_s: float = 0.0, amendments: int = 0
    ) -> None:
        self._flow, self.plan, self.wait_s, self.plan_s = flow, plan, wait_s, plan_s
        self.amendments = amendments
        self.columns: Columns = {}

    def __repr__(self) -> str:
        rollouts, groups = len(self.plan.rollouts), len(set(self.groups))
        return f"<Step {self.number}: {rollouts} rollouts in {groups} groups, {self.tokens} sampled tokens>"

    @property
    def number(self) -> int:
        """Step number, from 1."""
        return self.plan.step

    @cached_property
    def groups(self) -> list[int]:
        """Index of each rollout's group in the step."""
        seen: dict[str, int] = {}
        return [seen.setdefault(rollout.group, len(seen)) for rollout in self.plan.rollouts]

    @cached_property
    def _digest(self) -> str:
        return self._flow.files.digest(self.number)

    @property
    def temperature(self) -> float:
        """Sampling temperature of the step's tokens. A trainer divides logits by it."""
        return self._flow.temperature

    @property
    def tokens(self) -> int:
        """Number of sampled tokens in the step."""
        return sum(sum(rollout.sampled) for rollout in self.plan.rollouts)

    def minibatches(self) -> Iterator[Minibatch]:
        """Yields the minibatches of all ``loss.epochs``. Each epoch shuffles them again."""
        loss = self._flow.settings.loss
        for epoch in range(loss.epochs):
            if loss.minibatch is None:
                yield self.minibatch()
                continue
            random = np.random.default_rng([*self.plan.seed, epoch])
            for rollouts in split(self.groups, loss.minibatch, random):
                yield self.minibatch(rollouts)

    def minibatch(self, rollouts: list[int] | None = None) -> Minibatch:
        """Returns one minibatch with the given rollouts, as indices in the plan. By default, it contains the whole
        step."""
        chosen = list(range(len(self.plan.rollouts))) if rollouts is None else rollouts
        flow, copies = self._flow, self._flow.settings.parallel.copies  # consecutive ranks that share micro-batches
        share = flow.rank // copies, max(flow.ranks // copies, 1)
        planned = self.plan.rollouts
        return Minibatch(planned, chosen, self.groups, self.sequences, flow.ordinal, *share, self.columns, self.images)

    def sequences(self, rollout: int) -> list[TokenSequence]:
        """Reads the policy's sequences in the rollout with this index in the plan.

        Raises:
            UnreadableRollout: the rollout's record is damaged.
            ConfigError: the journal cannot be read.
        """
        return self._flow.sequences(self.plan.rollouts[rollout])

    def images(self, rollout: int) -> Mapping[str, Image]:
        """Reads the images in the rollout with this index in the plan. Returns them by SHA-256.

        Raises:
            UnreadableRollout: the rollout's record is damaged.
            ConfigError: the journal cannot be read.
        """
        return self._flow.images(self.plan.rollouts[rollout])

    def statistics(self) -> dict[str, float]:
        """Returns statistics about rewards, tokens, staleness and dropped rollouts, by name."""
        plan = self.plan
        rewards = plan.rewards
        stale = plan.staleness
        causes = Counter(plan.drops.values())
        scores = [
            rollout.scores[SCORE] for rollout in plan.rollouts if SCORE in rollout.scores and not rollout.replayed
        ]
        return {
            "reward": math.fsum(rewards) / len(rewards) if rewards else math.nan,
            **self._by_agent(),
            **self._by_role(),
            **({"score": math.fsum(scores) / len(scores)} if scores else {}),
            "rollouts": len(plan.rollouts),
            "groups": len(set(self.groups)),
            "tokens": self.tokens,
            "staleness": sum(stale) / len(stale) if stale else 0.0,
            "staleness_max": max(stale, default=0),
            **{f"dropped/{cause}": count for cause, count in sorted(causes.items())},
        }

    def _by_agent(self) -> dict[str, float]:
        """Returns each agent's mean reward and number of rollouts. Returns nothing if the policy has only one agent."""
        agents = self._flow.trained.agents
        if len(agents) < 2:
            return {}
        numbers: dict[str, float] = {}
        for agent in agents:
            own = [rollout for rollout in self.plan.rollouts if rollout.agent == agent.title and not rollout.replayed]
            rewards = [rollout.reward for rollout in own if rollout.reward is not None]
            numbers[f"rollouts/{agent.short_title}"] = len(own)
            if rewards:
                numbers[f"reward/{agent.short_title}"] = math.fsum(rewards) / len(rewards)
        return numbers

    def _by_role(self) -> dict[str, float]:
        """Returns the mean reward of each role that the policy played."""
        by_role: dict[str, list[float]] = {}
        for rollout in self.plan.rollouts:
            for role, reward in rollout.roles.items() if not rollout.replayed else ():
                by_role.setdefault(role, []).append(reward)
        return {f"reward/{role}": math.fsum(rewards) / len(rewards) for role, rewards in by_role.items()}

    def publish(
        self,
        folder: str | os.PathLike[str],
        *,
        move: bool = False,
        keep: int | None = None,
        checksums: Mapping[str, Checksum] | None = None,
    ) -> Version:
        """Publishes a model directory as the weights after this step. Idempotent.

        With the setting ``publish_delta``, publishes only the difference from the last full version if it is small.

        Args:
            folder: directory with weights in the engine's format.
            move: move the directory instead of copying it. It must be on the run directory's file system.
            keep: number of the policy's newest versions to keep. Older versions are removed.
            checksums: known checksums of files in ``folder``. These files are not read again.

        Raises:
            ConfigError: ``folder`` is not a model directory with weights.
            LedgerError: a later trainer has taken over.
        """
        flow = self._flow
        if flow.rank:
            return current(flow.run, flow.policy)
        flow.check()
        for other, every in flow.settings.snapshot.items():
            if self.number % every == 0:
                token = f"{flow.policy}-step-{self.number:06d}"
                publish(flow.run, folder, other, keep=keep, token=token, digest=self._digest, checksums=checksums)
        # The version is identified by the plan, because a repeated step may produce different bits on a GPU.
        made = publish(
            flow.run,
            folder,
            flow.policy,
            move=move,
            keep=keep,
            token=f"step-{self.number:06d}",
            digest=self._digest,
            delta=flow.config.publish_delta,
            checksums=checksums,
        )
        if move:  # not moved if a delta was written, or if the step was published earlier
            remove_tree(folder, ignore_errors=True)
        return made

    def commit(
        self, checkpoint: str | os.PathLike[str] | None = None, metrics: Mapping[str, float] | None = None
    ) -> None:
        """Records that the step is done, and requests new rollouts if a batch is due.

        Args:
            checkpoint: durable directory with the trainer's state after this step. A later start continues from it.
            metrics: finite numbers by name. They are stored in the commit and in ``metrics.jsonl``.

        Raises:
            ConfigError: the checkpoint directory is missing.
            LedgerError: a later trainer has taken over.
        """
        flow = self._flow
        if flow.rank:
            return
        where = None if checkpoint is None else flow.files.checkpoint_name(checkpoint)
        all_metrics = {**self.statistics(), **(metrics or {})}
        commit = Commit(
            step=self.number,
            plan=self._digest,
            columns=flow.files.columns_digest(self.number) if self.columns else "",
            checkpoint=where,
            weights=current(flow.run, flow.policy).version,
            trainer=flow.trainer,
            amendments=self.amendments,
            metrics={name: float(value) for name, value in all_metrics.items() if math.isfinite(value)},
            at=time.time(),
        )
        flow.files.commit(commit)
        with open(flow.files.metrics, "a", encoding="utf-8") as lines:
            lines.write(json.dumps({"step": self.number, "at": round(commit.at, 3), **commit.metrics}) + "\n")
        flow.committed(commit)


class Dataflow:
    """Provides the training steps of one policy of a run.

    Args:
        run: the run directory.
        policy: the policy to train. Optional if the campaign trains only one.
        rank, ranks: rank of this process in a distributed trainer, and the number of ranks.
        training: a ``training`` section, for a campaign that has none. Training then uses the planned rollouts as they
            arrive, and requests no others.
        say: called at most every 30 s with a line about what a step is waiting for. Default: the line is logged.
        agree: collective function that returns rank 0's value on all ranks. Values must be representable in JSON.
            Required with several ranks, so that all ranks apply the same amendments. All ranks must call it equally
            often. It is available as an attribute.

    Raises:
        ConfigError: the run, the policy, its model or the ``training`` section is missing, or the source file of a user
            function was changed.
    """

    def __init__(
        self,
        run: RunDir | str | os.PathLike[str],
        policy: str | None = None,
        *,
        rank: int = 0,
        ranks: int = 1,
        training: TrainingConfig | None = None,
        say: Callable[[str], None] | None = None,
        agree: Callable[[Any], Any] = lambda value: value,
    ) -> None:
        if not 0 <= rank < ranks:
            raise ValueError(f"rank {rank} of {ranks}: expected 0 to {ranks - 1}")
        self.run = run if isinstance(run, RunDir) else RunDir(run)
        self.run.check_ours()
        self.record = read_run(self.run)
        planned = self.record.config.training
        self.config = training or planned or _missing(self.run)
        self._digests = methods.prepare(self.run, self.config, self.record.beside)
        self.trained = trained_policy(self.run, self.record, policy, self.config)
        self.rank, self.ranks = rank, ranks
        self.files = TrainingFiles(self.run, self.policy)
        self.trainer = 0
        """Sequence number of this start of the trainer, or 0 before it is registered."""
        self.tell = say or logger.info
        self.routing: Routing | None = None
        """Sizes of the trained mixture-of-experts model. If set, records whose experts do not fit count as damaged."""
        self._said_at = 0.0
        self._paced = planned is not None and training is None
        self._ordinals: dict[int, int] = {}
        over = self.config.over_length
        longest = over.longest if over and over.how != "drop" else None
        self._sequences = Sequences(self.run, self.policy, longest)
        self._amendments, self.agree = Amendments(self.run, self.policy), agree
        self._planned_as = self.config, self.settings
        self.planning = Planning(
            self.run, self.files, self.trained, self.config, self._paced, self._sequences, self.ordinal
        )
        self._committed = 0
        self._pods = PodWatch(self.run)
        self._lease: OpenLease | None = None
        self._flags = Marks(self.run)

    def __repr__(self) -> str:
        return f"<Dataflow of policy {self.policy!r} in {self.run}: {self._committed} of {self.config.steps} steps>"

    @property
    def policy(self) -> str:
        """Name of the policy."""
        return self.trained.name

    @property
    def settings(self) -> PolicyTraining:
        """Settings of the policy, from ``training.policies.NAME`` in the campaign file."""
        return self.trained.settings

    @property
    def temperature(self) -> float:
        """Sampling temperature of the policy. A trainer divides logits by it."""
        return self.trained.temperature

    @property
    def engine_args(self) -> Mapping[str, Any]:
        """Options of the policy's engine, as in the campaign file."""
        return self.trained.model.get("args") or {}

    # --- start and end ---

    def restore(self) -> Commit | None:
        """Returns the last commit whose checkpoint exists, or ``None``. Its ``checkpoint`` is an absolute path.

        >>> if (state := flow.restore()) is not None:                 # doctest: +SKIP
        ...     logits = np.load(f"{state.checkpoint}/logits.npy")

        Raises:
            ConfigError: the files of an earlier start are damaged.
        """
        commit = self.files.committed(with_checkpoint=True)
        self._committed = commit.step if commit else 0
        return commit and msgspec.structs.replace(commit, checkpoint=str(self.checkpoint(commit).absolute()))

    def checkpoint(self, commit: Commit) -> Path:
        """Returns the checkpoint directory of a commit."""
        assert commit.checkpoint is not None
        return self.run.path / commit.checkpoint

    def steps(self) -> Iterator[Step]:
        """Yields the steps after the last checkpoint, until the training is complete.

        Raises:
            ConfigError: a reward is infinite, or the run directory is damaged.
            LedgerError: a later trainer has taken over.
            StarvedError: no pod has run or been queued for a quarter of an hour.
            OSError: the run directory has not answered for too long.
        """
        self.restore()
        self.start()
        number = self._committed
        while self._amend(number + 1) and number < self.config.steps:
            number += 1
            began = time.monotonic()
            plan = self.files.read(StepPlan, number)
            waited = 0.0
            if plan is not None:
                self._check_records(plan)
            else:
                plan, waited = self._await_plan(number)
                if plan is None:
                    break
            yield self._step(plan, waited, max(0.0, time.monotonic() - began - waited))
        self.close()

    def start(self) -> None:
        """Registers this trainer and keeps the campaign open. Only rank 0 acts, and only on the first call."""
        if self.rank or self.trainer:
            return
        self.files.create()
        methods.record(self.run, self._digests)
        if self._paced:  # first, because a trainer without an open lease counts as ended
            self._lease = OpenLease(self.run, self.policy)
            self._lease.keep()
        self.trainer = self.files.enter(Trainer.here(self.policy))

    def close(self) -> None:
        """Stops requesting rollouts, so that the campaign can end. The campaign stays open until this is called."""
        if self._lease is not None:
            self._lease.close()
            self._lease = None

    def leave(self) -> None:
        """Releases this process's lease. The campaign stays open, so that the trainer can be started again."""
        if self._lease is not None:
            self._lease.leave()
            self._lease = None

    def check(self) -> None:
        """Checks that no newer trainer of the policy was started.

        Raises:
            LedgerError: a newer trainer was started.
        """
        if self.trainer:
            self.files.check(self.trainer)

    # --- amendments ---

    def amend(self, amendment: Amendment) -> None:
        """Records and logs a change to a step that cannot be trained as planned."""
        self.check()
        number = self._amendments.claim(amendment)
        left_out = f"leaves out {', '.join(amendment.rollouts)}" if amendment.rollouts else "changes"
        self.tell(f"{self.run}: amendment {number}: step {amendment.step} {left_out}: {amendment.cause}")

    def again(self, step: Step) -> Step:
        """Rebuilds a step, and applies the amendments recorded since it started."""
        plan = self.files.read(StepPlan, step.number)
        assert plan is not None, step.number
        return self._step(plan, step.wait_s, step.plan_s)

    def _step(self, plan: StepPlan, wait_s: float, plan_s: float) -> Step:
        count, amendments = self._amend(plan.step)
        return Step(self, amended(plan, amendments), wait_s, plan_s, count)

    def _amend(self, step: int) -> tuple[int, list[Amendment]]:
        """Applies the settings that amendments change from this step on. Returns the number of amendments recorded, and
        those that apply to the step."""
        commit = self.files.read(Commit, step)
        count = commit.amendments if commit else len(self._amendments.read())
        together = self.agree(msgspec.to_builtins([count, self._amendments.in_force(step, count)]))
        count, in_force = msgspec.convert(together, tuple[int, list[Amendment]])
        config, policy = self._planned_as
        changed = settings(in_force)
        optimizer = policy.optimizer.model_copy(update={k: v for k, v in changed.items() if k == "lr"})
        rows = {k: v for k, v in changed.items() if k == "microbatch"}
        self.trained = replace(self.trained, settings=policy.model_copy(update={"optimizer": optimizer, **rows}))
        self.config = config.model_copy(update={k: v for k, v in changed.items() if k == "steps"})
        self.planning.control.steps = self.config.steps
        return count, in_force

    def _check_records(self, plan: StepPlan) -> None:
        """Leaves rollouts with damaged records out of a step that was planned before the trainer restarted."""
        for rollout in () if self.rank else plan.rollouts:
            try:
                self.sequences(rollout)
            except UnreadableRollout as error:
                self.leave_out(plan.step, rollout.id, error)

    def leave_out(self, step: int, rollout: str, cause: object) -> None:
        """Records an amendment that leaves a rollout out of a step, unless an earlier one already does."""
        if all(rollout not in amendment.rollouts for amendment in self._amendments.in_force(step)):
            amendment = Amendment(step=step, rollouts=(rollout,), cause=str(cause), by=TRAINER, at=time.time())
            self.amend(amendment)

    # --- requests ---

    def add(self, tasks: Sequence[str], token: str, samples: int | None = None) -> None:
        """Requests tasks immediately, in addition to those that ``training.prompts`` chooses.

        Steps take complete groups first. A step may use more groups than a batch, if groups would otherwise be too old
        for the next step. Call this method between two steps. Otherwise the tasks are sampled with the weights from
        before the step.

        Args:
            tasks: ids of the campaign's tasks.
            token: idempotency key. A restarted trainer can repeat the call with the same key.
            samples: number of rollouts in each group. Default: the policy's usual number.

        Raises:
            ConfigError: a task is unknown or reserved for evaluation, or the policy runs no tasks.
            LedgerError: the token is not a valid file name, or was used for other tasks.
        """
        if not self.trained.samples:
            raise ConfigError(f"{self.run}: policy {self.policy!r} runs no tasks (samples: 0)")
        if unknown := sorted({*tasks} - {*self.trained.tasks}):
            raise ConfigError(f"{self.run}: policy {self.policy!r} does not train on task {', '.join(unknown[:3])}")
        if not self.rank:
            self.start()
            self.planning.control.add(tasks, token, samples)

    def committed(self, commit: Commit) -> None:
        """Updates the state after the commit of a step, and requests the rollouts and the evaluation that are due."""
        self._committed = max(self._committed, commit.step)
        self.request()
        evaluate = self.config.evaluate
        if evaluate and self._paced and self.trained.samples and commit.step % evaluate.every == 0:
            request_evaluation(self.run, self.trained, evaluate.samples, commit.step)

    def add_checkpoint(self, step: int, checkpoint: str | os.PathLike[str]) -> None:
        """Adds a checkpoint to the commit of its step. Use it if the step was committed before the checkpoint was
        durable.

        Raises:
            ConfigError: the checkpoint directory is missing.
            LedgerError: a later trainer has taken over.
        """
        commit = self.files.read(Commit, step)
        if not self.rank and commit is not None:
            name = self.files.checkpoint_name(checkpoint)
            self.files.commit(msgspec.structs.replace(commit, checkpoint=name, trainer=self.trainer))

    def request(self) -> None:
        """Requests the rollouts that are due. Only rank 0 acts."""
        if not self.rank:
            self.planning.request(self._committed)

    # --- reading ---

    def ordinal(self, version: int) -> int:
        """Converts a campaign-wide weight version to its index among the policy's versions. The initial model has index
        0."""
        if version not in self._ordinals:
            self._ordinals = ordinals(self.run, self.policy, self._ordinals)
        return self._ordinals.get(version, 0)

    def sequences(self, rollout: PlannedRollout) -> list[TokenSequence]:
        """Reads the policy's sequences of a rollout.

        Raises:
            UnreadableRollout: its record is damaged.
            ConfigError: the file system cannot read it.
        """
        try:
            sequences = self._sequences.at(rollout.place)
            if self.routing:
                for sequence in sequences:
                    check_experts(sequence, self.routing)
        except DamagedRecord as error:
            raise UnreadableRollout(rollout.id, error) from None
        return sequences

    def images(self, rollout: PlannedRollout) -> Mapping[str, Image]:
        """Reads the images of a rollout. Raises the errors of :meth:`sequences`."""
        try:
            return self._sequences.images(rollout.place)
        except DamagedRecord as error:
            raise UnreadableRollout(rollout.id, error) from None

    # --- plans ---

    def try_plan(self, number: int) -> StepPlan | None:
        """Returns the plan of a step. Returns ``None`` if it still needs rollouts that have not arrived.

        Raises:
            LedgerError: a newer trainer has taken over.
            OSError: the run directory is unavailable. Calling again is safe.
        """
        if self.rank:
            return self.files.read(StepPlan, number)
        self.check()
        self.request()
        return self.planning.plan(number, self.trainer)

    def _await_plan(self, number: int) -> tuple[StepPlan | None, float]:
        """Waits for the next plan. Returns it with the seconds spent waiting. The plan is ``None`` if the training ends
        first."""
        waited, began, interval_s = 0.0, time.monotonic(), FIRST_POLL_S
        self._pods.begin()
        while True:
            plan = self.try_plan(number)
            if plan is not None:
                return plan, waited
            if reason := self._end_before(number):
                self.tell(f"{self.run}: {reason}; {number - 1} of {self.config.steps} steps are done")
                return None, waited
            if not self.rank and time.monotonic() - began > SAY_INTERVAL_S:
                self._say_what_is_missing(number)
            time.sleep(interval_s)
            waited += interval_s
            interval_s = min(2 * interval_s, max(MAX_POLL_S, self.planning.journals / STATS_PER_S))

    def _end_before(self, step: int) -> str:
        """Returns the reason why the step can never be planned. Returns an empty string if it still can."""
        if self._flags.cancelled:
            return "the campaign is cancelled"
        if self._flags.finished and not self.planning.complete_groups:
            return "the campaign is finished"
        return self.planning.ends or ("" if self.planning.wanted(step) else NO_TASK_LEFT)

    def _say_what_is_missing(self, number: int) -> None:
        gone = self._pods.look()
        if time.monotonic() - self._said_at > SAY_INTERVAL_S:
            self._said_at = time.monotonic()
            self.tell(f"step {number} waits for {self.planning.missing(number)}{gone and f'; {gone}'}")


def _missing(run: RunDir) -> TrainingConfig:
    raise ConfigError(
        f"{run}: its campaign file has no section training; add one before planning, or give training=TrainingConfig(…)"
    )
