"""What data algorithms see of rollouts: samples, and the groups that they are compared in."""

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
    """Whose fault a failure is; empty without one."""
    reward: float
    """NaN unless verified."""
    rewards: Mapping[str, float]
    """What its verifier said, by name."""
    oldest: int
    """Ordinal of the oldest version that sampled a token of it; -1: nothing was sampled."""
    newest: int
    """The same of the newest."""
    tokens: int
    """Sampled tokens."""
    longest: int
    """Tokens of its longest sequence, prompt included."""
    time_ns: int
    """When it became durable, in nanoseconds since 1970."""
    penalty: float = 0.0
    """What steps of ``data`` have added to its reward."""
    weight: float = 1.0
    """Weight of its tokens in the loss; 0: it counts in its group, and is not trained on."""

    @property
    def verified(self) -> bool:
        """Whether there is a reward."""
        return not math.isnan(self.reward)


@dataclass(frozen=True, slots=True)
class SampleGroup:
    """The samples of one task that are compared with one another, in one round."""

    id: str
    task: str
    samples: tuple[Sample, ...]
    """All of them, each settled: verified, failed or cancelled; once chosen, those that are left."""

    def only(self, samples: tuple[Sample, ...]) -> SampleGroup:
        """Returns the group with some of its samples."""
        return self if len(samples) == len(self.samples) else replace(self, samples=samples)

    @property
    def oldest(self) -> int:
        """Ordinal of the oldest version that sampled a token of it; -1 where nothing was sampled."""
        return min((sample.oldest for sample in self.samples if sample.oldest >= 0), default=-1)

    @property
    def time_ns(self) -> int:
        """When the last of its samples became durable."""
        return max((sample.time_ns for sample in self.samples), default=0)
