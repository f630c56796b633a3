"""Samples and their groups: rollouts in the form that data algorithms use."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from megaflow_hpc.trajectory import Trajectory
from megaflow_hpc.types import TURN_REWARD

SCORE, SEQUENCE_REWARD = "score", "sequence."
"""Name of a scorer's reward for a whole rollout, and prefix of the names of its rewards for sequences."""
RoleRewards = Mapping[str, str | None]
"""Role of a policy in its team → name of the role's reward; ``None`` is the rollout's own reward."""


class TurnTokens(NamedTuple):
    """The sampled tokens of one model call: ``[start, end)`` of one of the policy's sequences."""

    call: int
    """Number of the call in the rollout, from 0."""
    sequence: int
    start: int
    end: int
    state: str = ""
    """Digest of the last message before the call, such as a tool's output. Empty if the call has no messages."""


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
    """Reward of the rollout; NaN if it was not verified."""
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
    """Time at which the rollout became durable, in Unix nanoseconds."""
    sequences: int = 1
    """Number of the policy's sequences."""
    turns: tuple[TurnTokens, ...] = ()
    """The policy's model calls, in order."""
    agent_s: float = 0.0
    """Run time of the agent in seconds; 0 if unknown."""
    penalty: float = 0.0
    """Sum of the penalties from steps of ``data``, added to the reward."""
    weight: float = 1.0
    """Weight of the sample's tokens in the loss. At 0 the sample still counts in its group, but is not trained on."""
    verdict: float = math.nan
    """The verifier's reward, if a scorer replaced it; NaN without a scorer."""
    scores: Mapping[str, float] = field(default_factory=dict)
    """The rewards in :attr:`rewards` that a scorer gave."""
    agent: str = ""
    """Name of the agent in the campaign."""
    roles: tuple[str, ...] = ()
    """Role of each of the policy's sequences. Empty without a team."""
    role_rewards: Mapping[str, float] = field(default_factory=dict)
    """Role that the policy played → its reward. Only functions of ``advantage.kind`` get it."""

    @property
    def verified(self) -> bool:
        """True if the sample has a reward."""
        return not math.isnan(self.reward)

    @property
    def turn_rewards(self) -> tuple[float, ...]:
        """Reward of each of :attr:`turns`, or 0 if it has none. Agents and verifiers name them ``turn.N``."""
        return tuple(self.rewards.get(f"{TURN_REWARD}{turn.call}", 0.0) for turn in self.turns)

    @property
    def sequence_rewards(self) -> tuple[float, ...]:
        """Reward of each of the policy's sequences, or 0 if it has none. Scorers give them."""
        return tuple(self.rewards.get(f"{SEQUENCE_REWARD}{number}", 0.0) for number in range(self.sequences))


class StoredRollout(NamedTuple):
    """A rollout in the form that a scorer receives."""

    sample: Sample
    trajectory: Trajectory
    """The whole record: messages, turns, tokens, rewards and artifacts, of all policies."""


Earlier = Mapping[str, Sequence[Sample]]
"""Task → passed samples of earlier steps, newest last."""


@dataclass(frozen=True, slots=True)
class SampleGroup:
    """The samples of one task in one round. Advantages are relative to this group."""

    id: str
    task: str
    samples: tuple[Sample, ...]
    """All samples of the group; after filtering, only the remaining ones."""

    def only(self, samples: tuple[Sample, ...]) -> SampleGroup:
        """Returns a copy of the group with only the given samples."""
        return replace(self, samples=samples)

    @property
    def oldest(self) -> int:
        """Ordinal of the oldest version that sampled a token in the group; -1 if nothing was sampled."""
        return min((sample.oldest for sample in self.samples if sample.oldest >= 0), default=-1)

    @property
    def time_ns(self) -> int:
        """Time at which the last sample became durable, in Unix nanoseconds."""
        return max((sample.time_ns for sample in self.samples), default=0)
