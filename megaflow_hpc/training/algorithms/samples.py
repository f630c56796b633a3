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
    """Index of the sample in its group."""
    status: str
    """``completed``, ``truncated``, ``failed`` or ``cancelled``."""
    error_kind: str
    """Error kind of a failed rollout; empty if there was no error."""
    reward: float
    """NaN if not verified."""
    rewards: Mapping[str, float]
    """Reward components from the verifier, by name."""
    oldest: int
    """Ordinal of the oldest version that sampled a token; -1 if nothing was sampled."""
    newest: int
    """Ordinal of the newest version that sampled a token; -1 if nothing was sampled."""
    tokens: int
    """Number of sampled tokens."""
    longest: int
    """Number of tokens in the longest sequence, including the prompt."""
    time_ns: int
    """When the rollout became durable, in Unix nanoseconds."""
    penalty: float = 0.0
    """Sum of the penalties from steps of ``data``, added to the reward."""
    weight: float = 1.0
    """Weight of the sample's tokens in the loss. At 0 the sample still counts in its group, but is not trained on."""

    @property
    def verified(self) -> bool:
        """True if the sample has a reward."""
        return not math.isnan(self.reward)


@dataclass(frozen=True, slots=True)
class SampleGroup:
    """The samples of one task in one round. Advantages are relative to this group."""

    id: str
    task: str
    samples: tuple[Sample, ...]
    """All samples of the group; after filtering, only the remaining ones."""

    def only(self, samples: tuple[Sample, ...]) -> SampleGroup:
        """Returns a copy of the group with only the given samples."""
        return self if len(samples) == len(self.samples) else replace(self, samples=samples)

    @property
    def oldest(self) -> int:
        """Ordinal of the oldest version that sampled a token in the group; -1 if nothing was sampled."""
        return min((sample.oldest for sample in self.samples if sample.oldest >= 0), default=-1)

    @property
    def time_ns(self) -> int:
        """When the last sample became durable, in Unix nanoseconds."""
        return max((sample.time_ns for sample in self.samples), default=0)
