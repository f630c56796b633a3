"""Records of a rollout: the gateway's recording, and the stored trajectory.

Token columns are :class:`array.array`, so they cross process boundaries as bytes and become numpy arrays without a
copy. Token ids and weight versions are ``'i'`` (int32), log-probabilities ``'f'`` (float32), loss masks ``'B'``
(uint8).
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from megaflow_hpc.types import Artifact, Rollout, known_fields


@dataclass
class TokenSequence:
    """Consecutive calls in which each prompt extends the previous prompt. All four columns have one entry per token."""

    policy: str = ""
    tokens: array[int] = field(default_factory=lambda: array("i"))
    logprobs: array[float] = field(default_factory=lambda: array("f"))
    """Log-probability of each token. NaN for tokens that were not sampled."""
    loss_mask: array[int] = field(default_factory=lambda: array("B"))
    """1 for tokens that the policy sampled freely with its own sampling settings, otherwise 0."""
    weight_versions: array[int] = field(default_factory=lambda: array("i"))
    """Version of the weights that sampled each token. -1 for tokens that were not sampled."""
    experts: array[int] = field(default_factory=lambda: array("B"))
    """Experts that the engine chose for each token, as a flattened array (tokens, layers, experts per token) of
    native-endian integers of 1 or 2 bytes. A token whose bytes are all 255 (:data:`UNROUTED`) has unknown experts.
    Empty if the engine does not report experts."""
    expert_layers: int = 0
    experts_per_token: int = 0

    @property
    def expert_row(self) -> int:
        """Size in bytes of each token's entry in ``experts``."""
        return len(self.experts) // len(self.tokens) if self.tokens else 0

    def first(self, count: int | None) -> TokenSequence:
        """Returns a sequence of the first ``count`` tokens, or this sequence if it is not longer."""
        if count is None or len(self.tokens) <= count:
            return self
        cut = {name: getattr(self, name)[:count] for name in _COLUMNS}
        return replace(self, **cut, experts=self.experts[: count * self.expert_row])

    def to_record(self) -> dict[str, Any]:
        """Returns a mapping that msgpack can encode, with the columns as native-endian bytes."""
        record = {"policy": self.policy, **{name: getattr(self, name).tobytes() for name in _COLUMNS}}
        if self.experts:
            shape = {"expert_layers": self.expert_layers, "experts_per_token": self.experts_per_token}
            record |= {"experts": self.experts.tobytes(), **shape}
        return record

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> TokenSequence:
        """Restores a sequence from :meth:`to_record`."""
        found = cls(policy=record["policy"])
        for name in _COLUMNS:
            getattr(found, name).frombytes(record[name])
        if "experts" in record:
            found.experts.frombytes(record["experts"])
            found.expert_layers, found.experts_per_token = record["expert_layers"], record["experts_per_token"]
        return found


UNROUTED = b"\xff"
"""Byte that fills the experts of a token if the engine reported no experts for it."""
_COLUMNS = ("tokens", "logprobs", "loss_mask", "weight_versions")


@dataclass
class Turn:
    """One model call. Its sampled tokens are ``[token_start, token_end)`` of the rollout's sequence ``sequence``."""

    sequence: int
    token_start: int
    token_end: int
    finish_reason: str = ""
    model_s: float = 0.0
    sandbox_s: float = 0.0
    agent_s: float = 0.0
    wait_s: float = 0.0
    server: str = ""
    policy: str = ""
    """The policy that generated the response. Empty in older recordings."""
    message: int = -1
    """Index of the response in the rollout's messages. -1 if unknown, or if this was not a chat call."""
    started_by: int = -1
    """For the first call of a sub-agent, the number of the call that started the sub-agent. -1 for other calls."""
    role: str = ""
    """Role that the agent called. Empty in a campaign without a team."""


@dataclass
class Attempt:
    """One attempt at a rollout, kept regardless of its outcome. Times are in seconds since the Unix epoch."""

    attempt: int
    status: str
    error_kind: str = ""
    error: str = ""
    node: str = ""
    job_id: str = ""
    started_at: float = 0.0
    finished_at: float = 0.0


@dataclass
class Recording:
    """The gateway's recording of one rollout, returned when the agent has finished."""

    sequences: list[TokenSequence] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)
    """All messages of all calls, in OpenAI format. They form a tree, because conversations share common prefixes."""
    parents: list[int] = field(default_factory=list)
    """For each message, the index of the previous message in its conversation. -1 for the first message of a
    conversation."""
    calls: list[dict[str, Any]] = field(default_factory=list)
    """For each turn, additional data for replay: the request's ``id``, ``asked`` (a digest of the conversation), the
    response's ``text`` if it is not a message, and the numbers of prompt and sampled ``tokens`` if no ids are known."""
    over_budget: str = ""
    """Reason why a call was refused, if the rollout exhausted its budget. Empty otherwise."""
    constrained: int = 0
    """Number of calls whose tokens have loss mask 0, because request options differed from the policy's sampling
    settings or constrained the response."""
    inexact: int = 0
    """Number of calls recorded with less detail than an engine can provide: ``plain`` instead of ``split``, or only
    ``text``."""
    protocols: dict[str, int] = field(default_factory=dict)
    """Number of calls by recording protocol. ``split`` and ``replay``: every token is known. ``plain``: the sampled
    tokens are known, and a history that encodes to different tokens starts a new sequence. ``text``: no tokens are
    known."""


@dataclass
class Trajectory:
    """All stored data of one rollout. It is one record of a journal and one row of ``trajectories.h5``."""

    id: str
    task_id: str
    group_id: str
    policy: str
    agent: str
    status: str
    sample_index: int = 0
    attempt: int = 0
    epoch: int = 0
    error_kind: str = ""
    error: str = ""
    node: str = ""
    job_id: str = ""
    rank: int = -1
    """Rank in the pod that ran the rollout. -1 if unknown."""
    seed: int = -1
    """Sampling seed. Model call n, counted from 0, uses ``(seed + n) % 2**31``. -1 if the rollout has no seed."""
    reward: float | None = None
    """Reward of the rollout, or ``None`` if it was not verified."""
    rewards: dict[str, float] = field(default_factory=dict)
    started_at: float = 0.0
    finished_at: float = 0.0
    setup_s: float | None = None
    """Seconds until the agent started, or ``None`` if unknown."""
    agent_s: float | None = None
    """Seconds spent in the agent, including its model calls and commands, or ``None`` if unknown."""
    verify_s: float | None = None
    """Seconds spent in the verifier, or ``None`` if unknown."""
    cpu_s: float | None = None
    """CPU seconds of all processes in the rollout's sandboxes, including verification, or ``None`` if unknown."""
    memory_peak_mb: float | None = None
    """Highest memory usage of any of the rollout's sandboxes in MB (10^6 bytes), or ``None`` if unknown."""
    disk_peak_mb: float | None = None
    """Highest measured disk usage of any of the rollout's sandboxes in MB, or ``None`` if unknown."""
    constrained: int = 0
    """Number of model calls whose tokens have loss mask 0; see :attr:`Recording.constrained`."""
    inexact: int = 0
    """Number of model calls recorded with less detail than an engine can provide; see :attr:`Recording.inexact`."""
    messages: list[dict[str, Any]] = field(default_factory=list)
    """Messages of all conversations in OpenAI format. ``parents`` links them to a tree."""
    parents: list[int] = field(default_factory=list)
    """For each message, the index of the previous message. :func:`linked` fills in missing entries."""
    sequences: list[TokenSequence] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    attempts: list[Attempt] = field(default_factory=list)
    artifacts: list[Artifact] = field(default_factory=list)

    def __repr__(self) -> str:
        return f"<Trajectory {self.id!r}: {self.status}, reward {self.reward}, {len(self.turns)} turns>"

    def to_record(self) -> dict[str, Any]:
        """Returns the fields as a mapping that msgpack can encode, with token columns as native-endian bytes."""
        record = {f.name: getattr(self, f.name) for f in fields(self)}
        record["sequences"] = [sequence.to_record() for sequence in self.sequences]
        for name in ("turns", "attempts", "artifacts"):
            record[name] = [dict(vars(item)) for item in getattr(self, name)]  # shallow: asdict makes slow deep copies
        return record

    @classmethod
    def begin(cls, rollout: Rollout, attempt: int, status: str, **known: Any) -> Trajectory:
        """Creates the trajectory of an attempt that starts and ends now. ``known`` sets further fields, and may
        override these times."""
        now = time.time()
        names = ("id", "task_id", "group_id", "policy", "agent", "sample_index")
        of_rollout = {name: getattr(rollout, name) for name in names}
        times = {"started_at": now, "finished_at": now}
        return cls(**of_rollout, **{**times, **known}, attempt=attempt, status=status)

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Trajectory:
        """Restores a trajectory from :meth:`to_record`. Ignores unknown keys. Missing keys get the default values of
        their fields."""
        kept = known_fields(cls, record)
        kept["sequences"] = [TokenSequence.from_record(s) for s in record.get("sequences", ())]
        kept["turns"] = [Turn(**known_fields(Turn, t)) for t in record.get("turns", ())]
        kept["attempts"] = [Attempt(**known_fields(Attempt, a)) for a in record.get("attempts", ())]
        kept["artifacts"] = [Artifact(**known_fields(Artifact, a)) for a in record.get("artifacts", ())]
        return cls(**kept)


def linked(parents: Sequence[int], count: int) -> list[int]:
    """Returns the parents of ``count`` messages. Each message without an entry, as in older recordings, follows the
    previous message."""
    return [*parents[:count], *range(len(parents) - 1, count - 1)]


def path_to(parents: Sequence[int], message: int) -> list[int]:
    """Returns the message indices of a conversation, from the first message to ``message``. The list is empty for
    -1."""
    path = []
    while message >= 0:
        path.append(message)
        message = parents[message]
    return path[::-1]
