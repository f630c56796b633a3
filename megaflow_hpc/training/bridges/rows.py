"""The sequences of a step, one by one, for trainers whose batches are padded lines."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.training.microbatch import Minibatch
from megaflow_hpc.training.plan import PlannedRollout
from megaflow_hpc.training.step import Step

EVERYTHING = 2**62
"""Tokens of a micro-batch that holds whatever there is."""


@dataclass(frozen=True)
class TrainerRow:
    """One sequence of L tokens, at least one of which counts. Columns are as those of a micro-batch."""

    rollout: PlannedRollout
    tokens: NDArray[np.int32]
    mask: NDArray[np.uint8]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    advantages: NDArray[np.float32]
    weights: NDArray[np.float32]

    @property
    def first(self) -> int:
        """Index of the first token to train on. All tokens before it are the prompt."""
        return int(self.mask.argmax())

    @property
    def turns(self) -> int:
        """Number of runs of consecutive tokens to train on."""
        return int(np.count_nonzero(np.diff(self.mask, prepend=0) == 1))

    @property
    def reward(self) -> float:
        """Of its rollout; 0 for one that was never verified and is trained on for a penalty."""
        return self.rollout.reward or 0.0


def rows(step: Step, minibatch: Minibatch | None = None) -> list[TrainerRow]:
    """Returns the sequences of a minibatch that count, by default of the whole step, in the order of its rollouts.

    Raises:
        ConfigError: none counts, or they are shared among several ranks.
    """
    chosen = minibatch or step.minibatch()
    if not chosen.tokens:
        raise ConfigError(f"step {step.number}: no token of it counts, and an empty batch is taken by no trainer")
    (packed,) = chosen.microbatches(EVERYTHING)
    if packed.sampled != chosen.tokens:
        raise ConfigError(
            f"step {step.number}: this rank holds {packed.sampled} of {chosen.tokens} tokens that count; make the "
            "Dataflow with one rank: this trainer divides batches among ranks itself"
        )
    found = []
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
        )
        found.append(row)
    return found
