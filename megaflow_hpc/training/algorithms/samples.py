"""Samples and their groups: the view that data algorithms have of rollouts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Sample:
    """One rollout."""

    id: str
    task: str
    group: str
    index: int
    """Number among the samples of its group."""
    status: str
    """``completed``, ``truncated``, ``failed`` or ``cancelled``."""
    error_kind: str
    """Kind of the error of a failed rollout; empty without an error."""
    reward: float
    """NaN if not verified."""
    rewards: Mapping[str, float]
    """Rewards of the verifier by name."""
    oldest: int
    """Ordinal of the oldest version that sampled a token; -1 if nothing was sampled."""
    newest: int
    """Ordinal of the newest version that sampled a token; -1 if nothing was sampled."""
    tokens: int
    """Sampled tokens."""
    longest: int
    """Tokens of the longest sequence, including the prompt."""
    time_ns: int
    """Time when the rollout became durable, in nanoseconds since 1970."""
    penalty: float = 0.0
    """Sum of the penalties from steps of ``data``, added to the reward."""
    weight: float = 1.0
    """Weight of its tokens in the loss. With 0 the sample counts in its group, but is not trained on."""

    @property
    def verified(self) -> bool:
        """True if the sample has a reward."""
        return not math.isnan(self.reward)


@dataclass(frozen=True, slots=True)
class SampleGroup:
    """The samples of one task in one round, which are compared with one another."""

    id: str
    task: str
    samples: tuple[Sample, ...]
    """All samples, each verified, failed or cancelled; after choosing, the remaining ones."""

    def only(self, samples: tuple[Sample, ...]) -> SampleGroup:
        """Returns the group with some of its samples."""
        return self if len(samples) == len(self.samples) else replace(self, samples=samples)

    @property
    def oldest(self) -> int:
        """Ordinal of the oldest version that sampled a token of the group; -1 if nothing was sampled."""
        return min((sample.oldest for sample in self.samples if sample.oldest >= 0), default=-1)

    @property
    def time_ns(self) -> int:
        """Time when the last sample became durable."""
        return max((sample.time_ns for sample in self.samples), default=0)
