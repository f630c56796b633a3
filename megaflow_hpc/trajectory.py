"""Records of a rollout: the gateway's recording, and the trajectory that is stored.

Token columns are :class:`array.array`, so that they cross process borders as bytes and become numpy without a copy:
token ids and weight versions ``'i'`` (int32), log-probabilities ``'f'`` (float32), loss masks ``'B'`` (uint8).
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from megaflow_hpc.types import Artifact, Rollout, known_fields


@dataclass
class TokenSequence:
    """Consecutive calls, each of whose prompts extends the previous one. All four columns have one entry per token."""

    policy: str = ""
    tokens: array[int] = field(default_factory=lambda: array("i"))
    logprobs: array[float] = field(default_factory=lambda: array("f"))
    """NaN for tokens that were not sampled."""
    loss_mask: array[int] = field(default_factory=lambda: array("B"))
    """1 for tokens that the policy sampled freely, under its own sampling settings; otherwise 0."""
    weight_versions: array[int] = field(default_factory=lambda: array("i"))
    """-1 for tokens that were not sampled."""

    def to_record(self) -> dict[str, Any]:
        """Returns the sequence as a mapping for msgpack, with columns as native-endian bytes."""
        return {"policy": self.policy, **{name: getattr(self, name).tobytes() for name in _COLUMNS}}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> TokenSequence:
        """Returns the sequence that :meth:`to_record` packed."""
        found = cls(policy=record["policy"])
        for name in _COLUMNS:
            getattr(found, name).frombytes(record[name])
        return found


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
    """The policy that answered. Empty in older recordings."""
    message: int = -1
    """Index of its answer in the rollout's messages; -1 if unknown, or if it was not a chat call."""
    started_by: int = -1
    """Set if this call began a new conversation, as a sub-agent does, while an earlier call waited for tool results:
    the number of that earlier call. Otherwise -1."""


@dataclass
class Attempt:
    """One attempt at a rollout, kept whatever its outcome. Times are in seconds UTC."""

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
    """The gateway's recording of one rollout, handed over when the agent is done."""

    sequences: list[TokenSequence] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)
    """All messages of all calls, in OpenAI form. They are a tree: conversations share their common beginning."""
    parents: list[int] = field(default_factory=list)
    """For each message, the index of the message before it in its conversation. -1 for a first message."""
    calls: list[dict[str, Any]] = field(default_factory=list)
    """For each turn, further data for a replay: the request's ``id``, ``asked`` (a digest of the conversation), and the
    answer's ``text`` if it is not a message.
    """
    over_budget: str = ""
    """Why a call was refused, if the rollout's budget was used up."""
    constrained: int = 0
    """Number of calls whose tokens have loss mask 0, because options of the request differed from the policy's sampling
    settings or constrained the answer."""
    inexact: int = 0
    """Number of calls recorded with less than the engine can give: ``plain`` in place of ``split``, or only
    ``text``."""
    protocols: dict[str, int] = field(default_factory=dict)
    """Number of calls by the way they were recorded. ``split`` and ``replay``: every token is known. ``plain``: the
    sampled tokens are known, and a history that encodes to other tokens starts a new sequence. ``text``: no token is
    known."""


@dataclass
class Trajectory:
    """Everything that is kept of one rollout: one journal record, one row of ``trajectories.h5``."""

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
    """Rank in the pod that ran it. -1 if unknown."""
    seed: int = -1
    """Seed for its sampling. Model call n, from 0, got ``(seed + n) % 2**31``. -1 without a seed."""
    reward: float | None = None
    """``None`` unless the rollout was verified."""
    rewards: dict[str, float] = field(default_factory=dict)
    started_at: float = 0.0
    finished_at: float = 0.0
    setup_s: float | None = None
    """Seconds until the agent began. ``None`` if unknown, as all times below."""
    agent_s: float | None = None
    """Seconds of the agent, including its model calls and commands."""
    verify_s: float | None = None
    """Seconds of the verifier."""
    cpu_s: float | None = None
    """CPU seconds of all processes in its sandboxes, including verification."""
    memory_peak_mb: float | None = None
    """Largest memory usage seen in one of its sandboxes, in MB (10^6 bytes)."""
    disk_peak_mb: float | None = None
    """Largest disk usage measured in one of its sandboxes, in MB."""
    constrained: int = 0
    """Number of model calls whose tokens have loss mask 0, because the calls were constrained."""
    inexact: int = 0
    """Number of model calls of which some tokens are unknown, because the engine cannot report them."""
    messages: list[dict[str, Any]] = field(default_factory=list)
    """Messages of all conversations, as a tree."""
    parents: list[int] = field(default_factory=list)
    """For each message, the index of the message before it; see :func:`linked` for messages without an entry."""
    sequences: list[TokenSequence] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    attempts: list[Attempt] = field(default_factory=list)
    artifacts: list[Artifact] = field(default_factory=list)

    def to_record(self) -> dict[str, Any]:
        """Returns the fields for msgpack, with token columns as native-endian bytes."""
        record = {f.name: getattr(self, f.name) for f in fields(self)}
        record["sequences"] = [sequence.to_record() for sequence in self.sequences]
        for name in ("turns", "attempts", "artifacts"):
            record[name] = [dict(vars(item)) for item in getattr(self, name)]  # flat: asdict's deep copies are slow
        return record

    @classmethod
    def begin(cls, rollout: Rollout, attempt: int, status: str, **known: Any) -> Trajectory:
        """Returns the trajectory of an attempt that begins and ends now, unless ``known`` sets other values."""
        now = time.time()
        names = ("id", "task_id", "group_id", "policy", "agent", "sample_index")
        of_rollout = {name: getattr(rollout, name) for name in names}
        times = {"started_at": now, "finished_at": now}
        return cls(**of_rollout, **{**times, **known}, attempt=attempt, status=status)

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Trajectory:
        """Returns the trajectory that :meth:`to_record` packed. Ignores unknown keys; missing ones get defaults."""
        kept = known_fields(cls, record)
        kept["sequences"] = [TokenSequence.from_record(s) for s in record.get("sequences", ())]
        kept["turns"] = [Turn(**known_fields(Turn, t)) for t in record.get("turns", ())]
        kept["attempts"] = [Attempt(**known_fields(Attempt, a)) for a in record.get("attempts", ())]
        kept["artifacts"] = [Artifact(**known_fields(Artifact, a)) for a in record.get("artifacts", ())]
        return cls(**kept)


def linked(parents: Sequence[int], count: int) -> list[int]:
    """Returns the parents of ``count`` messages. Messages without an entry, as in older recordings, form a chain."""
    return [*parents[:count], *range(len(parents) - 1, count - 1)]


def path_to(parents: Sequence[int], message: int) -> list[int]:
    """Returns the indices of a conversation's messages, from the first one to ``message``; empty for -1."""
    path = []
    while message >= 0:
        path.append(message)
        message = parents[message]
    return path[::-1]
