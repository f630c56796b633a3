"""One trajectory of a store, read lazily."""

from __future__ import annotations

import math
from array import array
from typing import Any

from megaflow_hpc.trajectories.hdf5.schema import ROW_COLUMNS, UNKNOWN_AS_NAN
from megaflow_hpc.trajectories.reading.conversations import Conversation, ConversationCall, conversations, main
from megaflow_hpc.trajectories.reading.sources import SequenceView, Source
from megaflow_hpc.trajectory import Attempt, TokenSequence, Trajectory, Turn, linked, path_to
from megaflow_hpc.types import Artifact

_SCALARS = frozenset(column.name for column in ROW_COLUMNS) - {"turns"}


class Row:
    """One trajectory. Attributes are read on access. Valid while its store is open."""

    __slots__ = ("_source", "index")

    id: str
    task_id: str
    group_id: str
    policy: str
    agent: str
    status: str
    error_kind: str
    error: str
    node: str
    job_id: str
    sample_index: int
    attempt: int
    epoch: int
    reward: float
    """NaN if the rollout was not verified."""
    started_at: float
    """Unix seconds."""
    finished_at: float

    def __init__(self, source: Source, index: int) -> None:
        self._source = source
        self.index = index
        """Row number in the store."""

    def __getattr__(self, name: str) -> Any:
        if name in _SCALARS:
            return self._source.scalar(name, self.index)
        raise AttributeError(f"a trajectory has no attribute {name!r}")

    @property
    def rewards(self) -> dict[str, float]:
        """Reward name → value, for this rollout."""
        return self._source.rewards(self.index)

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The main conversation (see :func:`~megaflow_hpc.trajectories.reading.conversations.main`), as OpenAI
        messages."""
        found = self.conversations
        return found[main(found, self.policy)].messages if found else []

    @property
    def conversations(self) -> list[Conversation]:
        """All conversations, ordered by their start."""
        source, row = self._source, self.index
        views = source.sequences(row)
        turns = source.turns(row)
        for turn in turns:
            if not turn.policy:  # not recorded in files of version 1
                turn.policy = views[turn.sequence].policy if turn.sequence >= 0 else self.policy
        return conversations(source.messages(row), source.parents(row), turns)

    def conversation_record(self) -> dict[str, Any]:
        """Returns the conversations as plain JSON.

        Returns:
            ``messages`` (the main conversation) and ``conversations`` (all of them, each with the indices of its
            ``messages``, the ``turns`` that produced them, and its links). If there are other conversations, the
            indices refer to ``tree``, which has ``messages`` and their ``parents``.
        """
        found = self.conversations
        record: dict[str, Any] = {"messages": found[main(found, self.policy)].messages if found else []}
        record["conversations"] = [
            {
                "messages": conversation.nodes,
                "policy": conversation.policy,
                "parent": conversation.parent,
                "shared": conversation.shared,
                "started_by": conversation.started_by,
                "turns": conversation.turns,
            }
            for conversation in found
        ]
        messages = self._source.messages(self.index)
        parents = self._source.parents(self.index)
        if parents != linked((), len(messages)):
            record["tree"] = {"messages": messages, "parents": parents}
        return record

    def call(self, number: int) -> ConversationCall:
        """Returns one model call: the messages sent, the answer and its turn.

        If the call was not a chat call, or has no link to its answer, ``messages`` is empty and the answer is ``None``.
        """
        turn = self.turns[number]
        messages = self._source.messages(self.index)
        path = path_to(self._source.parents(self.index), turn.message)
        if not path:
            return ConversationCall([], None, turn)
        return ConversationCall([messages[node] for node in path[:-1]], messages[path[-1]], turn)

    @property
    def sequences(self) -> list[SequenceView]:
        """The token sequences, as numpy arrays."""
        return self._source.sequences(self.index)

    @property
    def turns(self) -> list[Turn]:
        """The model calls. Sequence numbers and token spans are relative to this trajectory, unlike in the file."""
        return self._source.turns(self.index)

    @property
    def attempts(self) -> list[Attempt]:
        """Every attempt at the rollout, including superseded ones."""
        return self._source.attempts(self.index)

    @property
    def artifacts(self) -> list[Artifact]:
        """The files stored with the rollout."""
        return self._source.artifacts(self.index)

    def trajectory(self) -> Trajectory:
        """Returns the whole trajectory, detached from the store."""
        scalars = {name: getattr(self, name) for name in _SCALARS & Trajectory.__dataclass_fields__.keys()}
        for name in UNKNOWN_AS_NAN:
            if math.isnan(scalars[name]):
                scalars[name] = None
        sequences = [
            TokenSequence(
                s.policy,
                array("i", s.tokens.tobytes()),
                array("f", s.logprobs.tobytes()),
                array("B", s.loss_mask.tobytes()),
                array("i", s.weight_versions.tobytes()),
                *_experts(s),
            )
            for s in self.sequences
        ]
        return Trajectory(
            **scalars,
            rewards=self.rewards,
            messages=self._source.messages(self.index),
            parents=self._source.parents(self.index),
            sequences=sequences,
            turns=self.turns,
            attempts=self.attempts,
            artifacts=self.artifacts,
        )

    def __repr__(self) -> str:
        return f"<trajectory {self.id} {self.status} reward={self.reward:g}>"


def _experts(view: SequenceView) -> tuple[array[int], int, int]:
    """Returns the fields of a :class:`~megaflow_hpc.trajectory.TokenSequence` that hold experts."""
    if view.experts is None:
        return array("B"), 0, 0
    return array("B", view.experts.tobytes()), *view.experts.shape[1:]
