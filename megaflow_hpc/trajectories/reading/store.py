"""Reads trajectories from a ``trajectories.h5``, or from the run directory of a finished or running campaign.

    with open_trajectories(run.path) as store:
        good = store.select("status == 'completed' and reward >= 0.5")
        for row in store.rows(good):
            print(row.id, row.reward, len(row.messages))
        batch = store.batch(good[:64], pad=0)
        advantage = store.advantages("grpo")

A store is a snapshot: it does not change while it is open, even if the campaign continues. Rows are lazy, and columns
are read on first use, so opening a million trajectories costs no more than opening ten.
"""

from __future__ import annotations

import json
import math
import os
from array import array
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from megaflow_hpc.resources import imported
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.record import read_run
from megaflow_hpc.trajectories.hdf5.columns import Array, Integers
from megaflow_hpc.trajectories.hdf5.file import (
    attribute,
    attribute_text,
    campaign_name,
    recorded_sources,
    root_attributes,
)
from megaflow_hpc.trajectories.hdf5.schema import ROW_COLUMNS, UNKNOWN_AS_NAN
from megaflow_hpc.trajectories.journal.winners import fingerprint, index, seals_of
from megaflow_hpc.trajectories.reading.advantages import Kind, advantages
from megaflow_hpc.trajectories.reading.batch import Oversize, Table, arrow_table, make_batch, plan_batches
from megaflow_hpc.trajectories.reading.conversations import Conversation, ConversationCall, conversations, main
from megaflow_hpc.trajectories.reading.selection import RowTable, select
from megaflow_hpc.trajectories.reading.sources import (
    ClosedSource,
    Flat,
    Hdf5Source,
    JournalSource,
    SequenceView,
    Source,
    WithGiven,
)
from megaflow_hpc.trajectory import Attempt, Image, TokenSequence, Trajectory, Turn, linked, path_to
from megaflow_hpc.types import Artifact

if TYPE_CHECKING:
    import pandas
    import pyarrow


class TrajectoryStore:
    """The trajectories of one campaign, in commit order. A context manager, created by :func:`open_trajectories`."""

    def __init__(self, source: Source, path: Path, run: RunDir | None = None) -> None:
        self.recorded = source
        """The rows as the campaign stored them."""
        self.source = cast(Source, WithGiven(source, run)) if run and run.rewards.is_dir() else source
        """The rows of :attr:`recorded`, with the rewards that ``reverify`` added later."""
        self.path = path
        """The file or run directory that is being read."""

    def __repr__(self) -> str:
        if isinstance(self.recorded, ClosedSource):
            return f"<TrajectoryStore in {self.path}: closed>"
        return f"<TrajectoryStore of {self.campaign!r} in {self.path}: {len(self)} trajectories>"

    def __enter__(self) -> TrajectoryStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the store's files. Reading rows or columns afterwards raises ConfigError."""
        self.source.close()
        self.__dict__ = {name: self.__dict__[name] for name in ("recorded", "source", "path")}  # without cached columns

    @cached_property
    def ids(self) -> list[str]:
        """Rollout ids, in row order."""
        return self.source.ids()

    @cached_property
    def _row_of(self) -> dict[str, int]:
        return {rollout: row for row, rollout in enumerate(self.ids)}

    def __len__(self) -> int:
        return len(self.source)

    def __contains__(self, rollout: object) -> bool:
        return rollout in self._row_of

    def __iter__(self) -> Iterator[Row]:
        return (Row(self.source, row) for row in range(len(self)))

    def __getitem__(self, key: int | str) -> Row:
        """Returns a row by its number or its rollout id. A negative number counts from the end.

        Raises:
            IndexError: The row number is out of range.
            KeyError: The id is unknown.
        """
        return Row(self.source, self._row(key))

    def rows(self, numbers: Iterable[int | str]) -> Iterator[Row]:
        """Yields rows by number or id."""
        return (Row(self.source, self._row(key)) for key in numbers)

    def column(self, name: str) -> Array:
        """Returns a column with one entry per row. The caller must not modify it. Text is returned as ``str`` objects.

        Args:
            name: A column name accepted by :meth:`select`, or ``rewards/<name>``.

        Raises:
            KeyError: The column is unknown.
        """
        return self._table.column(name)

    def select(self, expression: str) -> Integers:
        """Returns the numbers of the rows that match an expression over the columns, in order.

        >>> store.select("status == 'completed' and reward >= 0.5 and policy == 'a'")         # doctest: +SKIP

        Raises:
            ConfigError: The expression does not parse, or names an unknown column.
        """
        return select(expression, self._table)

    def advantages(self, kind: Kind = "grpo", reward: str | None = None, **options: Any) -> NDArray[np.float32]:
        """Returns the group-relative advantage of each row. NaN for rows without a reward.

        Args:
            kind: ``grpo``, ``drgrpo``, ``rloo`` or ``median``; see
                :mod:`~megaflow_hpc.trajectories.reading.advantages`.
            reward: Name of a reward to use instead of the main one.
            options: ``epsilon`` and ``ddof`` of :func:`~megaflow_hpc.trajectories.reading.advantages.advantages`.

        Raises:
            ConfigError: ``kind`` is unknown.
            KeyError: ``reward`` is unknown.
        """
        values = self.column("reward" if reward is None else f"rewards/{reward}")
        return advantages(values, self.source.column("trajectories/group_id"), kind, **options)

    @property
    def reward_names(self) -> tuple[str, ...]:
        """Names of all rewards that any row has."""
        return self._table.rewards

    @cached_property
    def campaign(self) -> str:
        """The campaign's name."""
        if isinstance(self.recorded, Hdf5Source):
            return attribute_text(self.recorded.file, "campaign")
        return campaign_name(RunDir(self.path))

    @cached_property
    def versions(self) -> dict[str, Any]:
        """Versions of the software and models that produced the campaign, if recorded."""
        if isinstance(self.recorded, Hdf5Source):
            return attribute(self.recorded.file, "versions")
        versions: dict[str, Any] = json.loads(root_attributes(RunDir(self.path))["versions"])
        return versions

    def flat(self, ids: Iterable[int | str]) -> Flat:
        """Returns the concatenated token sequences of some trajectories, by row number or id."""
        return self.source.flat(self._rows(ids))

    def lengths(self) -> Integers:
        """Returns the total number of tokens of each row, summed over its sequences."""
        lengths: Integers = self._table.column("tokens")
        return lengths

    def batch(self, ids: Iterable[int | str], pad: int | None = None) -> dict[str, Array]:
        """Returns the token sequences of some trajectories as arrays for a trainer.

        >>> batch = store.batch(store.select("reward == 1"), pad=0)   # doctest: +SKIP
        >>> batch["tokens"].shape == batch["loss_mask"].shape         # doctest: +SKIP
        True

        Args:
            ids: Rollout ids or row numbers, in the order of the result. Rollouts without tokens contribute no
                sequences.
            pad: If ``None``, token columns are flat, with all T tokens. Otherwise they are padded to (S, longest),
                ``tokens`` with this value and other columns with the value that marks tokens as not sampled.

        Returns:
            Token columns, (T,) or (S, longest): ``tokens`` int32; ``loss_mask`` uint8; ``logprobs`` float32, 0 if not
            sampled (NaN in the file); ``weight_version`` int32, -1 if not sampled. ``offsets`` int64 (S+1,): sequence s
            has the tokens ``[offsets[s], offsets[s+1])`` of the flat columns. Per sequence, (S,): ``trajectory`` int64,
            the row number; ``group`` and ``policy``, strings; ``reward`` float32, NaN unless verified.

        Raises:
            KeyError, IndexError: A trajectory does not exist.
        """
        return make_batch(self.source, self._rows(ids), pad)

    def batches(
        self,
        token_budget: int,
        rows: Iterable[int | str] | str | None = None,
        *,
        pad: int | None = None,
        seed: int | None = None,
        shard: tuple[int, int] = (0, 1),
        oversize: Oversize = "error",
    ) -> Iterator[dict[str, Array]]:
        """Yields batches of whole trajectories, each packed up to a token budget. Every row occurs exactly once.

        Args:
            token_budget: Maximum number of entries of each token column, including padding.
            rows: Ids, row numbers or an expression. Default: all rows. Rows without tokens are skipped.
            pad: As in :meth:`batch`.
            seed: Seed for shuffling the rows. If ``None``, adjacent rows stay together, which is fastest to read.
            shard: (rank, ranks) of a parallel trainer. Each rank gets a disjoint set of batches. The ranks' numbers of
                batches differ by at most one.
            oversize: How to handle a trajectory that exceeds the budget on its own: ``error`` or ``skip``.

        Raises:
            ConfigError: A trajectory exceeds the budget, with ``oversize="error"``.
        """
        plan = plan_batches(self.source, self._chosen(rows), token_budget, pad is not None, seed, oversize)
        rank, ranks = shard
        for numbers in plan[rank::ranks]:
            yield make_batch(self.source, numbers, pad)

    def to_arrow(self, table: Table = "rollouts", rows: Iterable[int | str] | str | None = None) -> pyarrow.Table:
        """Returns a table of the store as a ``pyarrow.Table``. Requires pyarrow (``pip install
        "megaflow-hpc[export]"``).

        >>> store.to_arrow("turns", "reward == 1").group_by("rollout").aggregate([("model_s", "sum")])  # doctest: +SKIP

        Args:
            table: ``rollouts``: one row per trajectory, with the columns of ``/trajectories`` in the file, ``tokens``,
                ``sampled_tokens``, ``duration_s`` and ``rewards/NAME``. ``turns``: one row per model call, with
                ``rollout`` (its id), ``turn`` (from 0) and the columns of ``/turns``; sequences are numbered within the
                rollout, tokens within the sequence. ``sequences``: one row per token sequence, with ``rollout``,
                ``policy`` and the lists ``tokens``, ``logprobs``, ``loss_mask`` and ``weight_versions``.
            rows: Ids, row numbers or an expression as in :meth:`select`. Default: all rows.

        Raises:
            ConfigError: The table is unknown, the expression is invalid, or pyarrow is not installed.
        """
        return arrow_table(self.source, self.column, self.reward_names, table, self._chosen(rows))

    def to_pandas(self, table: Table = "rollouts", rows: Iterable[int | str] | str | None = None) -> pandas.DataFrame:
        """Returns a table of :meth:`to_arrow` as a data frame. Requires pandas and pyarrow.

        >>> store.to_pandas().groupby("policy").reward.mean()         # doctest: +SKIP

        Raises:
            ConfigError: As :meth:`to_arrow`, or pandas is not installed.
        """
        imported("pandas")
        return self.to_arrow(table, rows).to_pandas()

    def _chosen(self, rows: Iterable[int | str] | str | None) -> Integers:
        """Converts ids, row numbers or an expression to row numbers. ``None`` means all rows."""
        if rows is None:
            return np.arange(len(self))
        return self.select(rows) if isinstance(rows, str) else self._rows(rows)

    def _rows(self, ids: Iterable[int | str]) -> Integers:
        return np.array([self._row(key) for key in ids], np.int64)

    @cached_property
    def _table(self) -> RowTable:
        return RowTable(self.source)

    def _row(self, key: int | str) -> int:
        if isinstance(key, str):
            if key not in self._row_of:
                raise KeyError(f"{key}: no such rollout in {self.path} ({len(self)} trajectories)")
            return self._row_of[key]
        row = int(key)
        if not -len(self) <= row < len(self):
            raise IndexError(f"row {row} of {len(self)} in {self.path}")
        return row % len(self)


def open_trajectories(path: str | os.PathLike[str]) -> TrajectoryStore:
    """Opens a campaign's trajectories for reading.

    Args:
        path: A run directory (even of a running campaign), or a ``trajectories.h5``. For a run directory, reads its
            ``trajectories.h5`` if that covers all journals. Otherwise reads the journals, with the same result.
            Includes rewards added later by ``reverify``.

    Raises:
        ConfigError: ``path`` does not exist, is not a run directory, or is a foreign, damaged or newer file.
    """
    path = Path(path)
    if not path.is_dir():
        return TrajectoryStore(Hdf5Source(path), path)
    run = RunDir(path)
    if not (os.path.exists(run.journal) or os.path.exists(run.trajectories)):  # unlike Path, false if access is denied
        read_run(run)
    seals = seals_of(run)
    if run.trajectories.exists() and _covers(recorded_sources(run.trajectories), fingerprint(run, seals)):
        return TrajectoryStore(Hdf5Source(run.trajectories), run.trajectories, run)
    return TrajectoryStore(JournalSource(index(run, seals)), run.path, run)


def _covers(recorded: dict[str, Any] | None, now: dict[str, Any]) -> bool:
    """Returns whether a file covers all existing journals. Other journals may have been removed since."""
    if not now["journals"]:
        return True
    if recorded is None or recorded.get("seals") != now["seals"]:
        return False
    return now["journals"].items() <= recorded["journals"].items()


# --- rows -------------------------------------------------------------------------------------------------------------

_SCALARS = frozenset(column.name for column in ROW_COLUMNS) - {"turns"}


class Row:
    """A trajectory whose attributes are read on access. Valid while its store is open."""

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
    """Main reward. NaN if the rollout was not verified."""
    started_at: float
    """Start time, as a Unix timestamp in seconds."""
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
        """The rollout's rewards by name."""
        return self._source.rewards(self.index)

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The main conversation (see :func:`~megaflow_hpc.trajectories.reading.conversations.main`), as OpenAI
        messages."""
        return _main_messages(self.conversations, self.policy)

    @property
    def conversations(self) -> list[Conversation]:
        """All conversations, ordered by their start."""
        source, row = self._source, self.index
        views = source.sequences(row)
        turns = source.turns(row)
        for turn in turns:
            if not turn.policy:
                turn.policy = views[turn.sequence].policy if turn.sequence >= 0 else self.policy
        return conversations(source.messages(row), source.parents(row), turns)

    def conversation_record(self) -> dict[str, Any]:
        """Returns the conversations as plain JSON.

        Returns:
            ``messages`` (the main conversation) and ``conversations`` (all conversations, each with the indices of its
            ``messages``, the ``turns`` that produced them, and its links to other conversations). The indices refer to
            ``messages``, or to ``tree`` if there are several conversations. ``tree`` has all ``messages`` and their
            ``parents``.
        """
        all_conversations = self.conversations
        record: dict[str, Any] = {"messages": _main_messages(all_conversations, self.policy)}
        record["conversations"] = [
            {
                "messages": conversation.nodes,
                "policy": conversation.policy,
                "role": conversation.role,
                "depth": conversation.depth,
                "parent": conversation.parent,
                "shared": conversation.shared,
                "started_by": conversation.started_by,
                "turns": conversation.turns,
            }
            for conversation in all_conversations
        ]
        messages = self._source.messages(self.index)
        parents = self._source.parents(self.index)
        if parents != linked((), len(messages)):
            record["tree"] = {"messages": messages, "parents": parents}
        return record

    def call(self, number: int) -> ConversationCall:
        """Returns a model call: the messages sent, the answer and the turn.

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
    def sequence_roles(self) -> list[str]:
        """The role that sampled each token sequence. Empty strings if the agents do not form a team."""
        roles = {turn.sequence: turn.role for turn in self.turns}
        return [roles.get(number, "") for number in range(len(self.sequences))]

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
        """The rollout's artifacts."""
        return self._source.artifacts(self.index)

    @property
    def images(self) -> dict[str, Image]:
        """The images that the rollout's messages and sequences show, by their SHA-256."""
        return self._source.images(self.index)

    @property
    def image_labels(self) -> dict[str, str]:
        """Short text label of each image, by SHA-256. Reads no image."""
        return {name: image.label for name, image in self._source.images(self.index, with_data=False).items()}

    def trajectory(self) -> Trajectory:
        """Returns the whole trajectory as an object that does not depend on the store."""
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
                list(s.images),
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
            images=self.images,
        )

    def __repr__(self) -> str:
        return f"<trajectory {self.id} {self.status} reward={self.reward:g}>"


def _main_messages(all_conversations: list[Conversation], policy: str) -> list[dict[str, Any]]:
    return all_conversations[main(all_conversations, policy)].messages if all_conversations else []


def _experts(view: SequenceView) -> tuple[array[int], int, int]:
    """Returns the expert fields of a :class:`~megaflow_hpc.trajectory.TokenSequence`."""
    if view.experts is None:
        return array("B"), 0, 0
    return array("B", view.experts.tobytes()), *view.experts.shape[1:]
