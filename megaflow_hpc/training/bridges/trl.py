"""Trains on a campaign's rollouts with TRL's ``GRPOTrainer``: TRL's model, optimizer and loss on the dataflow's steps.

    from megaflow_hpc.training.bridges.trl import DataflowTrainer, arguments
    from megaflow_hpc.training.dataflow import Dataflow, KEPT_CHECKPOINTS, KEPT_VERSIONS, Step

    flow = Dataflow("runs/fix-bugs")
    trainer = DataflowTrainer(flow, "/models/Qwen3-4B", arguments(flow, "out"))
    trainer.train()                                   # continues from the last commit that has a checkpoint

``GRPOTrainer`` normally samples and scores completions. With this bridge, it does neither. Each optimizer step is one
minibatch of the dataflow, split into micro-batches. TRL receives ids, masks, proximal log-probabilities and advantages.
The advantages are multiplied by the sample weights and by the importance weights (proximal over engine), which is
equivalent to weighting the loss. TRL averages over each batch that it receives and, for losses that this package
averages per rollout, per row. So the loss of a micro-batch is scaled by its share of the minibatch, and a row's
advantages by the row's share of the rollout. The sum then equals the loss of this package's own trainer. After the last
minibatch of a step, the model is published and the step is committed.

The bridge depends on private parts of TRL (``_compute_loss`` and its inputs, ``_prepare_inputs``,
``_get_per_token_logps_and_entropies``) and of transformers (``_save_checkpoint``). So TRL's version is checked on
import.
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
from megaflow_hpc.training.dataflow import KEPT_CHECKPOINTS, KEPT_VERSIONS, Dataflow, Step
from megaflow_hpc.training.microbatch import MicroBatch, Minibatch
from megaflow_hpc.training.trainer.losses import Loss, Tokens, importance_weights
from megaflow_hpc.training.trainer.vision import Vision, joined, kinds_of, processor_options, takes_images

TRL_VERSION = "1.16"
"""Supported TRL version without its patch number. The check is strict because the bridge uses private methods."""


IMAGE_INPUTS = ("pixel_values", "image_grid_thw", "num_images", "mm_token_type_ids")
"""Columns that only rows with images have."""


def _check_version() -> None:
    try:
        version = importlib.metadata.version("trl")
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(f"TRL is not installed here; pip install 'trl=={TRL_VERSION}.*'") from None
    if version.rpartition(".")[0] != TRL_VERSION:
        raise ConfigError(
            f"TRL {version}: this bridge uses private methods of TRL {TRL_VERSION}; pip install "
            f"'trl=={TRL_VERSION}.*', or use this package's trainer (python -m megaflow_hpc.training.trainer)"
        )


_check_version()

from accelerate.utils import broadcast_object_list  # type: ignore[import-not-found]  # noqa: E402
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
"""Maps each supported kind of loss to TRL's ``loss_type`` and ``importance_sampling_level``."""


def arguments(flow: Dataflow, output: str | os.PathLike[str], **others: Any) -> Any:
    """Builds TRL's configuration from the campaign file.

    Args:
        flow: the dataflow.
        output: TRL's ``output_dir``.
        others: further fields of ``GRPOConfig``. These take precedence.

    Raises:
        ConfigError: TRL does not have the loss, or ``max_steps`` cannot be derived and must be passed.
    """
    settings, config = flow.settings, flow.config
    loss, optimizer = settings.loss, settings.optimizer
    kinds = (loss.kind, settings.importance, optimizer.schedule)
    if own := [kind for kind in kinds if kind is not None and not isinstance(kind, str)]:
        raise ConfigError(f"training: TRL cannot call {own[0]}; use this package's trainer, or a built-in kind")
    if loss.kind not in LOSSES:
        raise ConfigError(f"training: TRL has no loss {loss.kind!r}; it has {', '.join(sorted(LOSSES))}")
    if "max_steps" not in others:
        each = 1 if loss.minibatch is None else math.ceil(config.batch / loss.minibatch)
        others["max_steps"] = config.steps * loss.epochs * each
    name, level = LOSSES[loss.kind]
    low, high = loss.band
    fields = {
        "output_dir": os.fspath(output),
        "loss_type": name,
        "importance_sampling_level": level,
        "epsilon": low,
        "epsilon_high": 1 + high if loss.kind == "cispo" else high,  # for CISPO, TRL expects the bound itself
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
        # Nothing is generated, so use the smallest settings that TRL accepts.
        "per_device_train_batch_size": 2,
        "num_generations": 2,
        "max_completion_length": flow.trained.max_tokens or 1,  # also the constant of dr_grpo
    }
    return GRPOConfig(**(fields | others))


@dataclass(frozen=True)
class _Item:
    """One rank's share of the minibatch of an optimizer step."""

    step: Step
    minibatch: Minibatch
    last: bool
    """True for the last minibatch of the step."""


class DataflowTrainer(GRPOTrainer):
    """A ``GRPOTrainer`` that trains on the steps of a dataflow, publishes the weights and commits the steps.

    Args:
        flow: a dataflow created with this process's rank and the number of ranks.
        model: a directory or a model, as accepted by TRL.
        args: the result of :func:`arguments`.
        others: other arguments of ``GRPOTrainer``, such as ``peft_config``.

    Raises:
        ConfigError: the loss is not supported, or the dataflow belongs to another rank.
    """

    def __init__(self, flow: Dataflow, model: Any, args: Any, **others: Any) -> None:
        names = sorted({name for name, _ in LOSSES.values()})
        if args.loss_type not in names or args.beta or args.use_adaptive_entropy:
            raise ConfigError(
                f"loss_type {args.loss_type!r}, beta {args.beta:g}: a dataflow's steps support the losses "
                f"{', '.join(names)}, without a reference model and without adaptive entropy"
            )
        if args.gradient_accumulation_steps != 1:
            raise ConfigError("gradient_accumulation_steps: leave it at 1; training…microbatch cuts minibatches")
        args.ignore_data_skip = True  # the dataflow already resumes after the last commit
        nothing = Dataset.from_dict({"prompt": ["-"] * args.generation_batch_size})
        super().__init__(model, _no_reward, args, nothing, **others)
        here = self.accelerator.process_index, self.accelerator.num_processes
        if (flow.rank, flow.ranks) != here:
            raise ConfigError(
                f"rank {here[0]} of {here[1]}: the dataflow was opened as {flow.rank} of {flow.ranks}; "
                "give it rank and ranks"
            )
        self.current_gradient_accumulation_steps = 1  # normally set by ``train``
        self._flow = flow
        if flow.ranks > 1:
            flow.agree = lambda value: broadcast_object_list([value])[0]
        importance = flow.settings.engine_importance
        assert isinstance(importance, str)  # `arguments` refuses functions
        self._correction = Loss("dapo", importance=importance)
        self._proximal: dict[tuple[int, int], Any] = {}
        source = Path(model if isinstance(model, str | os.PathLike) else self.model.config._name_or_path)
        self._vision = Vision.read(source) if takes_images(source) else None
        if self._vision is not None:
            self._vision.options = processor_options(flow.engine_args)
            self._vision.attach(self.accelerator.unwrap_model(self.model))
        self._stream = self._minibatches()
        self.add_callback(_AfterStep(self))

    def train(self, resume_from_checkpoint: str | bool | None = None, **others: Any) -> Any:
        """Trains from the last commit that has a checkpoint, or from the beginning.

        Closes the campaign once all steps are committed. If ``max_steps`` ends the training earlier, the campaign stays
        open.
        """
        commit = self._flow.restore()
        if resume_from_checkpoint is None and commit is not None:
            resume_from_checkpoint = str(self._flow.checkpoint(commit))
        try:
            output = super().train(resume_from_checkpoint, **others)
            newest = self._flow.files.committed()
            if newest is not None and newest.step >= self._flow.config.steps:
                self._flow.close()
        finally:
            self._flow.leave()
        return output

    # --- called by transformers and TRL ---

    def get_train_dataloader(self) -> Any:
        return self._stream

    def training_step(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Any:
        """Computes the gradients of one optimizer step, micro-batch by micro-batch."""
        item: _Item = inputs["item"]
        self._item = item
        total = torch.zeros((), device=self.accelerator.device)  # remains 0 if amendments leave out every rollout
        for rows in self._micro_batches(item):
            total += super().training_step(model, rows, None)
        return total

    def _prepare_inputs(self, rows: dict[str, Any]) -> dict[str, Any]:
        return {name: v.to(self.accelerator.device) if torch.is_tensor(v) else v for name, v in rows.items()}

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Returns TRL's loss of a micro-batch, scaled by its share of the minibatch on all ranks."""
        share = inputs["share"]
        # TRL averages the entropy over the micro-batch's tokens, so scale it by the share of tokens, whatever the loss.
        self.entropy_coef = self.args.entropy_coef * inputs["entropy_share"] / share
        return share * super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    # --- minibatches ---

    def _minibatches(self) -> Iterator[dict[str, _Item]]:
        for step in self._flow.steps():
            minibatches = list(step.minibatches())
            self._proximal = {}
            for minibatch in minibatches:
                for batch in self._packed(minibatch):
                    self._add_proximal(batch)
            for number, minibatch in enumerate(minibatches, 1):
                yield {"item": _Item(step, minibatch, number == len(minibatches))}

    def _packed(self, minibatch: Minibatch) -> Iterator[MicroBatch]:
        return minibatch.microbatches(self._flow.settings.microbatch)

    def _micro_batches(self, item: _Item) -> Iterator[dict[str, Any]]:
        for batch in self._packed(item.minibatch):
            # TRL gathers metrics by row, so all ranks need the same number of rows.
            count = torch.tensor([len(batch.sample)], device=self.accelerator.device)
            rows = to_rows(batch, int(self.accelerator.gather(count).max()), self._vision)
            yield {**rows, **self._given(batch, rows), **self._shares(batch, len(rows["prompt_ids"]), item.minibatch)}

    def _shares(self, batch: MicroBatch, rows: int, minibatch: Minibatch) -> dict[str, Any]:
        """Returns the factors for TRL's means. They include the number of ranks, because gradients are averaged over
        ranks."""
        ranks, tokens = self.accelerator.num_processes, max(minibatch.tokens, 1)
        by_rollout = self.loss_type in ("grpo", "dr_grpo")  # the other losses divide by ``num_items_in_batch``
        return {
            "share": rows * ranks / max(minibatch.samples, 1) if by_rollout else 1.0,
            "entropy_share": batch.sampled * ranks / tokens,
            "num_items_in_batch": torch.tensor(float(tokens)),
        }

    def _add_proximal(self, batch: MicroBatch) -> None:
        """Computes the proximal log-probabilities of sequences that have none yet."""
        if all(key in self._proximal for key in batch.sequence_keys()):
            return
        rows = self._prepare_inputs(to_rows(batch, vision=self._vision))
        images = {name: rows[name] for name in IMAGE_INPUTS if name in rows}
        ids = torch.cat([rows["prompt_ids"], rows["completion_ids"]], 1)
        attended = torch.cat([rows["prompt_mask"], rows["completion_mask"]], 1)
        with torch.no_grad():
            logprobs, _, _ = self._get_per_token_logps_and_entropies(
                self.model, ids, attended, rows["completion_ids"].shape[1], **images
            )
        first = rows["prompt_ids"].shape[1]
        for key, length, row in zip(
            batch.sequence_keys(), np.diff(batch.offsets).tolist(), logprobs.float().cpu(), strict=False
        ):
            self._proximal[key] = torch.cat([torch.zeros(first), row[: length - first]])

    def _given(self, batch: MicroBatch, rows: dict[str, Any]) -> dict[str, Any]:
        """Returns the proximal log-probabilities and the weighted advantages as padded rows."""
        proximal = torch.cat([torch.zeros(0), *(self._proximal[key] for key in batch.sequence_keys())])
        mask = torch.from_numpy(batch.mask).bool()
        own = np.diff(batch.offsets)
        packed = Tokens(
            offsets=torch.from_numpy(batch.offsets),
            mask=mask,
            proximal=torch.where(mask, proximal, torch.zeros_like(proximal)),
            engine=torch.from_numpy(batch.logprobs),
            advantages=torch.from_numpy(batch.advantages),
            weights=torch.from_numpy(batch.weights),
            rollout_tokens=torch.from_numpy(batch.rollout_tokens),
        )
        importance, _ = importance_weights(self._correction, packed)
        advantages = packed.advantages * packed.weights * importance
        if self.loss_type == "grpo":
            sampled = np.add.reduceat(batch.mask, batch.offsets[:-1], dtype=np.int64) if len(own) else own
            advantages = advantages * torch.from_numpy(np.repeat(sampled / batch.rollout_tokens, own)).float()
        lengths, first = rows["prompt_mask"].sum(1) + rows["completion_mask"].sum(1), rows["prompt_ids"].shape[1]
        return {
            name: torch.from_numpy(_padded(column.numpy(), own, lengths.numpy())[:, first:])
            for name, column in (("old_per_token_logps", proximal), ("advantages", advantages))
        }

    # --- end of a step ---

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
        self.save_model(str(folder), _internal_call=True)  # every rank must call this; only the first writes
        if not self._flow.rank:
            (folder / "training_args.bin").unlink(missing_ok=True)  # a pickle file, which engines do not need
            step.publish(folder, move=True, keep=KEPT_VERSIONS)


class _AfterStep(TrainerCallback):
    def __init__(self, trainer: DataflowTrainer) -> None:
        self._trainer = trainer

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._trainer._after_minibatch()


def to_rows(batch: MicroBatch, rows: int = 1, vision: Vision | None = None) -> dict[str, Any]:
    """Converts a micro-batch to TRL's format: one sequence per row, right-padded, with empty rows added up to ``rows``.

    TRL scores *completions*, the right part of every row. In this conversion, all completions start at the earliest
    sampled token of any row, and ``tool_mask`` marks the sampled tokens. So no row is padded on the left, and positions
    equal the engine's. If rows contain images, the result also has their pixels, the number of images in each row, and
    ``mm_token_type_ids``.

    Raises:
        ConfigError: a row contains images, but the model takes none or does not reproduce their placeholders.
    """
    own = np.diff(batch.offsets)
    lengths = np.concatenate([own, np.full(max(rows, 1) - len(own), 2)]) if len(own) < max(rows, 1) else own
    ids, mask = (_padded(column, own, lengths) for column in (batch.tokens, batch.mask))
    first = int(mask[: len(own)].argmax(1).min(initial=ids.shape[1])) if len(own) else 1
    present = (np.arange(ids.shape[1]) < lengths[:, None]).astype(np.int64)
    parts = {
        "prompt_ids": ids[:, :first],
        "prompt_mask": present[:, :first],
        "completion_ids": ids[:, first:],
        "completion_mask": present[:, first:],
        "tool_mask": mask[:, first:],
    }
    made: dict[str, Any] = {name: torch.from_numpy(np.ascontiguousarray(part)) for name, part in parts.items()}
    if batch.images:
        if vision is None:
            raise ConfigError("rollouts show images, but the model that TRL trains takes text only")
        made |= joined([image for shown in batch.images for image in vision.inputs(shown)])
        made["num_images"] = [len(shown) for shown in batch.images] + [0] * (len(lengths) - len(own))
        kinds = np.concatenate([kinds_of(n, shown) for n, shown in zip(own.tolist(), batch.images, strict=True)])
        made["mm_token_type_ids"] = torch.from_numpy(_padded(kinds, own, lengths))
    return made


def _padded(column: Any, own: Any, lengths: Any) -> Any:
    """Splits an array of shape (T,) into sequences, padded with zeros. Returns an array of shape (rows, longest)."""
    padded = np.zeros((len(lengths), int(lengths.max())), column.dtype if column.dtype.kind == "f" else np.int64)
    padded[: len(own)][np.arange(padded.shape[1]) < own[:, None]] = column
    return padded


def _no_reward(completions: list[Any], **_: Any) -> list[float]:
    raise AssertionError("nothing is generated here")
