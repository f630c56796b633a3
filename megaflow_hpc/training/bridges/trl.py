"""TRL's ``GRPOTrainer`` on a campaign's rollouts: TRL's model, optimizer and loss, the dataflow's steps.

    from megaflow_hpc.training.bridges.trl import DataflowTrainer, arguments
    from megaflow_hpc.training.dataflow import Dataflow

    flow = Dataflow("runs/fix-bugs")
    trainer = DataflowTrainer(flow, "/models/Qwen3-4B", arguments(flow, "out"))
    trainer.train()                                   # goes on from the last commit that has a checkpoint

``GRPOTrainer`` samples and rewards by itself; here it does neither. One of its steps is one minibatch of the dataflow,
cut into micro-batches; it gets ids, masks, proximal log-probabilities and advantages, the last times their weights and
those of proximal over engine: for a clipped loss as well as for another that is the same as weighting the loss. TRL
averages over what it is given at once; its loss of a micro-batch is scaled to its share of the minibatch, so that the
sum is what our own trainer minimises. After the last minibatch of a step the model is published and the step committed.

It hangs on what TRL does not promise to keep: ``_compute_loss`` and the names of what it is given, ``_prepare_inputs``,
``_get_per_token_logps_and_entropies``, and ``_save_checkpoint`` of transformers. So the version is checked on import.
"""

from __future__ import annotations

import importlib.metadata
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch  # type: ignore[import-not-found]

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.host.atomic import fsync, fsync_tree
from megaflow_hpc.training.dataflow import Dataflow
from megaflow_hpc.training.microbatch import MicroBatch, Minibatch
from megaflow_hpc.training.step import KEPT_CHECKPOINTS, KEPT_VERSIONS, Step
from megaflow_hpc.training.trainer.losses import Loss, importance_weights

TRIED = "1.16"
"""TRL's version, without its last number, whose private methods are those named above."""


def _check_version() -> None:
    try:
        found = importlib.metadata.version("trl")
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(f"TRL is not installed here; pip install 'trl=={TRIED}.*'") from None
    if found.rpartition(".")[0] != TRIED:
        raise ConfigError(
            f"TRL {found}: this bridge hangs on private methods of TRL {TRIED}; pip install 'trl=={TRIED}.*', or use "
            "the project's own trainer (python -m megaflow_hpc.training.trainer)"
        )


_check_version()

from datasets import Dataset  # type: ignore[import-untyped]  # noqa: E402
from transformers import TrainerCallback  # type: ignore[import-not-found]  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # type: ignore[import-not-found]  # noqa: E402

LOSSES = {
    "ppo": ("dapo", "token"),
    "dapo": ("dapo", "token"),
    "grpo": ("grpo", "token"),
    "gspo": ("grpo", "sequence"),
    "dr_grpo": ("dr_grpo", "token"),
    "cispo": ("cispo", "token"),
}
"""Kind of loss → TRL's ``loss_type`` and ``importance_sampling_level``."""


def arguments(flow: Dataflow, output: str | os.PathLike[str], **others: Any) -> Any:
    """Returns TRL's configuration for what the campaign file says; ``others`` are its own fields.

    Raises:
        ConfigError: TRL has no such loss, or how many optimizer steps there are is for you to say.
    """
    settings, config = flow.settings, flow.config
    loss, optimizer = settings.loss, settings.optimizer
    if loss.kind not in LOSSES:
        raise ConfigError(f"training: TRL has no loss {loss.kind!r}; it has {', '.join(sorted(LOSSES))}")
    if "max_steps" not in others:
        each = 1 if loss.minibatch is None else math.ceil(config.batch.tasks / loss.minibatch)
        others["max_steps"] = config.steps * loss.epochs * each
    name, level = LOSSES[loss.kind]
    low, high = loss.band
    fields = {
        "output_dir": os.fspath(output),
        "loss_type": name,
        "importance_sampling_level": level,
        "epsilon": low,
        "epsilon_high": 1 + high if loss.kind == "cispo" else high,  # TRL bounds the ratio itself there
        "entropy_coef": loss.entropy,
        "beta": 0.0,
        "temperature": flow.temperature,
        "learning_rate": optimizer.lr,
        "lr_scheduler_type": optimizer.schedule,
        "warmup_steps": optimizer.warmup,
        "adam_beta1": 0.9,
        "adam_beta2": 0.999,
        "weight_decay": optimizer.weight_decay,
        "max_grad_norm": optimizer.clip_norm or 0.0,
        "bf16": settings.dtype == "bfloat16",
        "gradient_checkpointing": settings.recompute,
        "save_strategy": "no",
        "save_total_limit": KEPT_CHECKPOINTS,
        "logging_steps": 1,
        "report_to": [],
        # Of generations, which there are none of; the smallest that TRL takes.
        "per_device_train_batch_size": 2,
        "num_generations": 2,
        "max_completion_length": 1,
    }
    return GRPOConfig(**(fields | others))


@dataclass(frozen=True)
class _Item:
    """What one optimizer step trains on, on this rank."""

    step: Step
    minibatch: Minibatch
    last: bool
    """Whether it ends the step."""


class DataflowTrainer(GRPOTrainer):
    """A ``GRPOTrainer`` that takes the steps of a dataflow, publishes what it makes of them, and commits them.

    Args:
        flow: with the rank and the number of ranks of this process, if there are several.
        model: a directory or a model, as TRL takes it.
        args: from :func:`arguments`.
        others: further arguments of ``GRPOTrainer``, such as ``peft_config``.

    Raises:
        ConfigError: a loss whose share of a minibatch is not known here, or a dataflow of another rank.
    """

    def __init__(self, flow: Dataflow, model: Any, args: Any, **others: Any) -> None:
        known = sorted({name for name, _ in LOSSES.values()})
        if args.loss_type not in known or args.beta or args.use_adaptive_entropy:
            raise ConfigError(
                f"loss_type {args.loss_type!r}, beta {args.beta:g}: a dataflow's steps carry what the losses "
                f"{', '.join(known)} need, no log-probabilities of a reference model, and no adaptive entropy"
            )
        if args.gradient_accumulation_steps != 1:
            raise ConfigError("gradient_accumulation_steps: leave it at 1; minibatches are cut by training…microbatch")
        args.ignore_data_skip = True  # the dataflow goes on by itself
        nothing = Dataset.from_dict({"prompt": ["-"] * args.generation_batch_size})
        super().__init__(model, _no_reward, args, nothing, **others)
        here = self.accelerator.process_index, self.accelerator.num_processes
        if (flow.rank, flow.ranks) != here:
            raise ConfigError(
                f"rank {here[0]} of {here[1]}: the dataflow was opened as {flow.rank} of {flow.ranks}; "
                "give it rank and ranks"
            )
        self.current_gradient_accumulation_steps = 1  # set by ``train`` otherwise
        self._flow = flow
        self._correction = Loss(
            "dapo", importance=flow.settings.importance.level, truncate=flow.settings.importance.truncate
        )
        self._proximal: dict[tuple[int, bytes], Any] = {}
        self._stream = self._minibatches()
        self.add_callback(_AfterStep(self))

    def train(self, resume_from_checkpoint: str | bool | None = None, **others: Any) -> Any:
        """Trains from the last commit that has a checkpoint, or from the beginning.

        The campaign may end once all its steps are committed; where ``max_steps`` ends before, it stays open.
        """
        commit = self._flow.restore()
        if resume_from_checkpoint is None and commit is not None:
            resume_from_checkpoint = str(self._flow.checkpoint(commit))
        try:
            found = super().train(resume_from_checkpoint, **others)
            newest = self._flow.files.committed()
            if newest is not None and newest.step >= self._flow.config.steps:
                self._flow.close()
        finally:
            self._flow.leave()
        return found

    # --- what transformers and TRL call ---

    def get_train_dataloader(self) -> Any:
        return self._stream

    def training_step(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Any:
        """One optimizer step's gradients: the micro-batches of a minibatch, one after the other."""
        item: _Item = inputs["item"]
        self._item = item
        losses = [super(DataflowTrainer, self).training_step(model, rows, None) for rows in self._micro_batches(item)]
        return torch.stack(losses).sum()

    def _prepare_inputs(self, rows: dict[str, Any]) -> dict[str, Any]:
        return {name: v.to(self.accelerator.device) if torch.is_tensor(v) else v for name, v in rows.items()}

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """TRL's loss of a micro-batch, times its share of the minibatch on all ranks."""
        share = inputs["share"]
        # A mean over the micro-batch's tokens, which counts by their number whatever the policy's loss counts by.
        self.entropy_coef = self.args.entropy_coef * inputs["entropy_share"] / share
        return share * super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    # --- minibatches ---

    def _minibatches(self) -> Iterator[dict[str, _Item]]:
        for step in self._flow.steps():
            minibatches = list(step.minibatches())
            self._proximal = {}
            for minibatch in minibatches:
                for batch in self._packed(minibatch):
                    self._judge(batch)
            for number, minibatch in enumerate(minibatches, 1):
                yield {"item": _Item(step, minibatch, number == len(minibatches))}

    def _packed(self, minibatch: Minibatch) -> Iterator[MicroBatch]:
        return minibatch.microbatches(self._flow.settings.microbatch)

    def _micro_batches(self, item: _Item) -> Iterator[dict[str, Any]]:
        for batch in self._packed(item.minibatch):
            # TRL gathers metrics by row, for which all ranks have to have equally many.
            count = torch.tensor([len(batch.sample)], device=self.accelerator.device)
            rows = to_rows(batch, int(self.accelerator.gather(count).max()))
            yield {**rows, **self._given(batch, rows), **self._shares(batch, len(rows["prompt_ids"]), item.minibatch)}

    def _shares(self, batch: MicroBatch, rows: int, minibatch: Minibatch) -> dict[str, Any]:
        """What TRL's mean counts for; times the ranks, since their gradients are averaged."""
        ranks, tokens = self.accelerator.num_processes, max(minibatch.tokens, 1)
        share = {
            "grpo": rows * ranks / max(minibatch.sequences, 1),
            "dr_grpo": rows * self.max_completion_length * ranks / max(minibatch.samples * minibatch.longest, 1),
        }.get(self.loss_type, 1.0)  # the others divide by the tokens, which they are told
        return {
            "share": share,
            "entropy_share": batch.sampled * ranks / tokens,
            "num_items_in_batch": torch.tensor(float(tokens)),
        }

    def _judge(self, batch: MicroBatch) -> None:
        """Computes the proximal log-probabilities of sequences that have none yet."""
        if all(key in self._proximal for key in batch.sequence_keys()):
            return
        rows = to_rows(batch)
        ids = torch.cat([rows["prompt_ids"], rows["completion_ids"]], 1).to(self.accelerator.device)
        attended = torch.cat([rows["prompt_mask"], rows["completion_mask"]], 1).to(self.accelerator.device)
        with torch.no_grad():
            logprobs, _, _ = self._get_per_token_logps_and_entropies(
                self.model, ids, attended, rows["completion_ids"].shape[1]
            )
        first = rows["prompt_ids"].shape[1]
        for key, length, row in zip(
            batch.sequence_keys(), np.diff(batch.offsets).tolist(), logprobs.float().cpu(), strict=False
        ):
            self._proximal[key] = torch.cat([torch.zeros(first), row[: length - first]])

    def _given(self, batch: MicroBatch, rows: dict[str, Any]) -> dict[str, Any]:
        """Proximal log-probabilities and weighted advantages, in the form of the rows."""
        proximal = torch.cat([torch.zeros(0), *(self._proximal[key] for key in batch.sequence_keys())])
        mask = torch.from_numpy(batch.mask).bool()
        gap = torch.where(mask, proximal - torch.from_numpy(batch.logprobs), torch.zeros_like(proximal))
        weights, _ = importance_weights(self._correction, gap, torch.from_numpy(batch.offsets))
        advantages = torch.from_numpy(batch.advantages * batch.weights) * weights
        lengths, first = rows["prompt_mask"].sum(1) + rows["completion_mask"].sum(1), rows["prompt_ids"].shape[1]
        own = np.diff(batch.offsets)
        return {
            name: torch.from_numpy(_padded(column.numpy(), own, lengths.numpy())[:, first:])
            for name, column in (("old_per_token_logps", proximal), ("advantages", advantages))
        }

    # --- the end of a step ---

    def _after_minibatch(self) -> None:
        if not self._item.last:
            return
        step, config = self._item.step, self._flow.config
        last = step.number == config.steps
        self._publish(step)
        checkpoint = None
        if last or step.number % config.checkpoint_every == 0:
            self._save_checkpoint(self.model, None)
            checkpoint = Path(self.args.output_dir, f"checkpoint-{self.state.global_step}")
            if not self._flow.rank:
                fsync_tree(checkpoint)
                fsync(checkpoint.parent)
        metrics = {name: sum(values) / len(values) for name, values in self._metrics["train"].items() if values}
        step.commit(checkpoint, {name: value for name, value in metrics.items() if math.isfinite(value)})

    def _publish(self, step: Step) -> None:
        folder = self._flow.files.path / f".model-{step.number}-{os.getpid()}"
        self.save_model(str(folder), _internal_call=True)  # on all ranks; the first one writes
        if not self._flow.rank:
            (folder / "training_args.bin").unlink(missing_ok=True)  # a pickle, which no engine needs
            step.publish(folder, move=True, keep=KEPT_VERSIONS)


class _AfterStep(TrainerCallback):
    def __init__(self, trainer: DataflowTrainer) -> None:
        self._trainer = trainer

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._trainer._after_minibatch()


def to_rows(batch: MicroBatch, rows: int = 1) -> dict[str, Any]:
    """Returns a micro-batch as TRL takes it: one sequence a row, padded on the right, and up to ``rows`` without any.

    TRL scores *completions*, the right part of all rows; here that is all from the first sampled token of any row on,
    and ``tool_mask`` says which of it was sampled. So no row is padded on the left, and positions are the engine's.
    """
    own = np.diff(batch.offsets)
    lengths = np.concatenate([own, np.full(max(rows, 1) - len(own), 2)]) if len(own) < max(rows, 1) else own
    ids, mask = (_padded(column, own, lengths) for column in (batch.tokens, batch.mask))
    first = int(mask[: len(own)].argmax(1).min(initial=ids.shape[1])) if len(own) else 1
    there = (np.arange(ids.shape[1]) < lengths[:, None]).astype(np.int64)
    parts = {
        "prompt_ids": ids[:, :first],
        "prompt_mask": there[:, :first],
        "completion_ids": ids[:, first:],
        "completion_mask": there[:, first:],
        "tool_mask": mask[:, first:],
    }
    return {name: torch.from_numpy(np.ascontiguousarray(part)) for name, part in parts.items()}


def _padded(column: Any, own: Any, lengths: Any) -> Any:
    """(T) → (rows, longest), 0 where nothing is."""
    found = np.zeros((len(lengths), int(lengths.max())), column.dtype if column.dtype.kind == "f" else np.int64)
    found[: len(own)][np.arange(found.shape[1]) < own[:, None]] = column
    return found


def _no_reward(completions: list[Any], **_: Any) -> list[float]:
    raise AssertionError("nothing is generated here")
