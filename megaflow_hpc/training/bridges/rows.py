"""Splits a step into sequences, for trainers that take padded rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.training.dataflow import Step
from megaflow_hpc.training.microbatch import Minibatch, ShownImage
from megaflow_hpc.training.plan import PlannedRollout

if TYPE_CHECKING:
    from megaflow_hpc.training.trainer.vision import Vision

UNLIMITED_TOKENS = 2**62
"""A token limit so high that one micro-batch holds the whole minibatch."""


@dataclass(frozen=True)
class TrainerRow:
    """One sequence of L tokens, at least one of which is trained on. It has the columns of a micro-batch."""

    rollout: PlannedRollout
    tokens: NDArray[np.int32]
    mask: NDArray[np.uint8]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    advantages: NDArray[np.float32]
    weights: NDArray[np.float32]
    images: tuple[ShownImage, ...] = ()
    """Images in the sequence, each with the span of its placeholder tokens."""

    @property
    def first(self) -> int:
        """Index of the first token to train on. The tokens before it form the prompt."""
        return int(self.mask.argmax())

    @property
    def turns(self) -> int:
        """Number of turns, counted as runs of consecutive tokens to train on."""
        return int(np.count_nonzero(np.diff(self.mask, prepend=0) == 1))

    @property
    def reward(self) -> float:
        """Reward of the rollout, or 0 if it has none. A rollout without a reward is trained on only if it has a
        penalty."""
        return self.rollout.reward or 0.0


def pixels_of(row: TrainerRow, vision: Vision | None) -> dict[str, Any]:
    """Returns the model's inputs for the images in a row, as tensors by name. Empty if there are no images.

    Args:
        vision: computes the inputs (``Vision.read`` of :mod:`megaflow_hpc.training.trainer.vision`).

    Raises:
        ConfigError: ``vision`` is missing, or does not reproduce the placeholders.
    """
    if not row.images:
        return {}
    if vision is None:
        raise ConfigError(
            f"rollout {row.rollout.id}: shows images; give batch(…, vision=Vision.read(MODEL)) of "
            "megaflow_hpc.training.trainer.vision"
        )
    from megaflow_hpc.training.trainer.vision import joined

    return joined(vision.inputs(row.images))


def rows(step: Step, minibatch: Minibatch | None = None) -> list[TrainerRow]:
    """Returns the sequences to train on, in the order of their rollouts.

    Args:
        step: a step of a dataflow with one rank.
        minibatch: part of the step; by default the whole step.

    Raises:
        ConfigError: the step has no token to train on, or the dataflow has several ranks.
    """
    chosen = minibatch or step.minibatch()
    if not chosen.tokens:
        raise ConfigError(f"step {step.number}: it has no token to train on, and trainers do not accept an empty batch")
    (packed,) = chosen.microbatches(UNLIMITED_TOKENS)
    if packed.sampled != chosen.tokens:
        raise ConfigError(
            f"step {step.number}: this rank holds {packed.sampled} of {chosen.tokens} tokens to train on; open the "
            "Dataflow with one rank, because this trainer divides batches among ranks itself"
        )
    converted = []
    for s in np.argsort(packed.sample, kind="stable").tolist():
        part = slice(int(packed.offsets[s]), int(packed.offsets[s + 1]))
        row = TrainerRow(
            rollout=step.plan.rollouts[int(packed.sample[s])],
            tokens=packed.tokens[part],
            mask=packed.mask[part],
            logprobs=packed.logprobs[part],
            versions=packed.versions[part],
            advantages=packed.advantages[part],
            weights=packed.weights[part],
            images=packed.images[s] if packed.images else (),
        )
        converted.append(row)
    return converted
