"""Defines samples and groups. Data algorithms receive rollouts in this form."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from megaflow_hpc.trajectory import Trajectory
from megaflow_hpc.types import SEQUENCE_REWARD, TURN_REWARD

SCORE = "score"
"""Name of the reward that a scorer assigns to a whole rollout."""
RoleRewards = Mapping[str, str | None]
"""Maps each role of a policy in its team to the name of the role's reward. ``None`` means the rollout's own reward."""


class TurnTokens(NamedTuple):
    """Location of the tokens that one model call sampled: the range ``[start, end)`` of one of the policy's
    sequences."""

    call: int
    """Number of the call in the rollout, from 0."""
    sequence: int
    start: int
    end: int
    state: str = ""
    """Digest of the last message before the call, such as a tool's output. Empty if there is no such message."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One rollout of a group, without its tokens and messages."""

    id: str
    task: str
    group: str
    index: int
    """Index of the sample in its group."""
    status: str
    """``completed``, ``truncated``, ``failed`` or ``cancelled``."""
    error_kind: str = ""
    """Error kind of a failed rollout. Empty if the rollout did not fail."""
    reward: float = math.nan
    """Reward of the rollout. NaN if it was not verified."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Reward components from the verifier, by name."""
    oldest: int = -1
    """Index among the policy's versions of the oldest weights that sampled a token. -1 if nothing was sampled."""
    newest: int = -1
    """Index among the policy's versions of the newest weights that sampled a token. -1 if nothing was sampled."""
    tokens: int = 0
    """Number of sampled tokens in all sequences."""
    longest: int = 0
    """Number of tokens in the longest sequence, including the prompt."""
    time_ns: int = 0
    """Time at which the rollout's record became durable, in Unix nanoseconds."""
    sequences: int = 1
    """Number of the policy's token sequences in the rollout."""
    turns: tuple[TurnTokens, ...] = ()
    """The policy's model calls, in order."""
    agent_s: float = 0.0
    """Run time of the agent in seconds. 0 if unknown."""
    penalty: float = 0.0
    """Sum of the penalties set by ``data`` operations. It is added to the reward."""
    weight: float = 1.0
    """Weight of the sample's tokens in the loss. A sample with weight 0 is not trained on, but still counts in its
    group."""
    verdict: float = math.nan
    """The verifier's reward if a scorer replaced it. Otherwise NaN."""
    scores: Mapping[str, float] = field(default_factory=dict)
    """The rewards among :attr:`rewards` that a scorer assigned, by name."""
    agent: str = ""
    """Name of the agent in the campaign."""
    roles: tuple[str, ...] = ()
    """Role of each of the policy's sequences. Empty if the agents do not form a team."""
    role_rewards: Mapping[str, float] = field(default_factory=dict)
    """Reward of each role that the policy played, with penalties. Set only for functions of ``advantage.kind``."""

    @property
    def verified(self) -> bool:
        """True if the sample has a reward."""
        return not math.isnan(self.reward)

    @property
    def turn_rewards(self) -> tuple[float, ...]:
        """Reward of each turn in :attr:`turns`. A missing reward is 0. Agents and verifiers name these rewards
        ``turn.N``."""
        return tuple(self.rewards.get(f"{TURN_REWARD}{turn.call}", 0.0) for turn in self.turns)

    @property
    def sequence_rewards(self) -> tuple[float, ...]:
        """Reward of each of the policy's sequences. A missing reward is 0. Only scorers assign these rewards."""
        return tuple(self.rewards.get(f"{SEQUENCE_REWARD}{number}", 0.0) for number in range(self.sequences))


class StoredRollout(NamedTuple):
    """A stored rollout, as passed to a scorer."""

    sample: Sample
    trajectory: Trajectory
    """Complete record of the rollout: messages, turns, tokens, rewards and artifacts of all policies."""


Earlier = Mapping[str, Sequence[Sample]]
"""Passed samples from earlier steps, by task. The newest sample is last."""


@dataclass(frozen=True, slots=True)
class SampleGroup:
    """The samples of one task that were requested together. Advantages are relative to this group."""

    id: str
    task: str
    samples: tuple[Sample, ...]
    """All samples of the group, or only the remaining ones after filtering."""

    def only(self, samples: tuple[Sample, ...]) -> SampleGroup:
        """Returns a copy of the group with only the given samples."""
        return replace(self, samples=samples)

    @property
    def oldest(self) -> int:
        """Index among the policy's versions of the oldest weights that sampled a token in the group. -1 if nothing was
        sampled."""
        return min((sample.oldest for sample in self.samples if sample.oldest >= 0), default=-1)

    @property
    def time_ns(self) -> int:
        """Time at which the last sample became durable, in Unix nanoseconds."""
        return max((sample.time_ns for sample in self.samples), default=0)
