"""Reads trajectories from a run directory, finished or not, or from one ``trajectories.h5``.

    with open_trajectories(run.path) as store:
        good = store.select("status == 'completed' and reward >= 0.5")
        for row in store.rows(good):
            print(row.id, row.reward, len(row.messages))
        batch = store.batch(good[:64], pad=0)
        advantage = store.advantages("grpo")

A store is a snapshot: it does not change while it is open, whatever the campaign does. Rows are lazy, and columns are
read when they are first used: opening costs the same for ten trajectories and for a million.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.record import read_run
from megaflow_hpc.trajectories.hdf5.attributes import campaign_name, root_attributes
from megaflow_hpc.trajectories.hdf5.columns import text
from megaflow_hpc.trajectories.hdf5.file import attribute, recorded_sources
from megaflow_hpc.trajectories.journal.winners import Seals, fingerprint, index, seals_of
from megaflow_hpc.trajectories.reading.advantages import Kind, advantages
from megaflow_hpc.trajectories.reading.batch import Oversize, make_batch, plan_batches
from megaflow_hpc.trajectories.reading.journal_source import JournalSource
from megaflow_hpc.trajectories.reading.row import Row
from megaflow_hpc.trajectories.reading.selection import select
from megaflow_hpc.trajectories.reading.sources import Flat, Hdf5Source, Source
from megaflow_hpc.trajectories.reading.table import RowTable

LOOK_UPS = 16
"""Number of ids looked up one by one before all are put into a dictionary."""


class TrajectoryStore:
    """The trajectories of one campaign, in commit order; a context manager. :func:`open_trajectories` makes it."""

    def __init__(self, source: Source, path: Path) -> None:
        self._source = source
        self._looked_up = 0
        self.path = path
        """The file or run directory being read."""

    def __enter__(self) -> TrajectoryStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes its files; rows and columns cannot be read afterwards."""
        self._source.close()

    @property
    def source(self) -> Source:
        """The source of its rows."""
        return self._source

    @cached_property
    def ids(self) -> list[str]:
        """Rollout ids by row number."""
        return self._source.ids()

    @cached_property
    def _row_of(self) -> dict[str, int]:
        return {rollout: row for row, rollout in enumerate(self.ids)}

    def _number(self, rollout: str) -> int | None:
        """Returns the row of an id. The first few are searched in the column: a dictionary of a million is slow."""
        if isinstance(self._source, Hdf5Source) and "_row_of" not in self.__dict__ and self._looked_up < LOOK_UPS:
            self._looked_up += 1
            column = self._source.column("trajectories/id")
            found = np.flatnonzero(
                column == (rollout.encode("utf-8", "replace") if column.dtype.kind == "S" else rollout)
            )
            return int(found[0]) if len(found) else None
        return self._row_of.get(rollout)

    def __len__(self) -> int:
        return len(self._source)

    def __contains__(self, rollout: object) -> bool:
        return isinstance(rollout, str) and self._number(rollout) is not None

    def __iter__(self) -> Iterator[Row]:
        return (Row(self._source, row) for row in range(len(self)))

    def __getitem__(self, key: int | str) -> Row:
        """Returns a row by its number, negative from the end, or by its rollout id.

        Raises:
            IndexError: there is no such row.
            KeyError: there is no such id.
        """
        return Row(self._source, self._row(key))

    def rows(self, numbers: Iterable[int | str]) -> Iterator[Row]:
        """Yields rows by number or id."""
        return (Row(self._source, self._row(key)) for key in numbers)

    def column(self, name: str) -> NDArray[Any]:
        """Returns a column (n) with one entry per row, which must not be changed; text as objects of ``str``.

        Args:
            name: a column that :meth:`select` knows, or ``rewards/<name>``.

        Raises:
            KeyError: there is no such column.
        """
        table = self._table
        reward = name.removeprefix("rewards/")
        if name in table.names:
            values = table.column(name)
        elif name.startswith("rewards/") and reward in table.rewards:
            values = table.reward(reward)
        else:
            known = [*table.names, *(f"rewards/{reward}" for reward in table.rewards)]
            raise KeyError(f"{name}: no column; there are: {', '.join(known)}")
        return text(values) if values.dtype.kind in "SO" else values

    def select(self, expression: str) -> NDArray[np.int64]:
        """Returns the numbers of the rows for which an expression over the columns is true, in order.

        >>> store.select("status == 'completed' and reward >= 0.5 and policy == 'a'")         # doctest: +SKIP

        Raises:
            ConfigError: it does not parse, or names an unknown column; the message says where.
        """
        return select(expression, self._table)

    def advantages(self, kind: Kind = "grpo", reward: str | None = None, **options: Any) -> NDArray[np.float32]:
        """Returns how much better each row (n) did than the others of its group; NaN where it has no reward.

        Args:
            kind: ``grpo``, ``drgrpo``, ``rloo`` or ``median``; see
                :mod:`~megaflow_hpc.trajectories.reading.advantages`.
            reward: name of one of several rewards, to be used instead of the reward.
            options: ``epsilon`` and ``ddof`` of :func:`~megaflow_hpc.trajectories.reading.advantages.advantages`.

        Raises:
            ConfigError: there is no such kind.
            KeyError: there is no such reward.
        """
        values = self.column("reward" if reward is None else f"rewards/{reward}")
        return advantages(values, self._source.column("trajectories/group_id"), kind, **options)

    @property
    def reward_names(self) -> tuple[str, ...]:
        """Names of the rewards that any row has."""
        return self._table.rewards

    @cached_property
    def campaign(self) -> str:
        """The campaign's name."""
        if isinstance(self._source, Hdf5Source):
            return str(self._source.file.attrs.get("campaign", ""))
        return campaign_name(RunDir(self.path))

    @cached_property
    def versions(self) -> dict[str, Any]:
        """Versions of the software and models it was made by, from the file's attribute; empty without one."""
        if isinstance(self._source, Hdf5Source):
            return attribute(self._source.file, "versions")
        found = json.loads(root_attributes(RunDir(self.path))["versions"])
        return found if isinstance(found, dict) else {}

    def flat(self, ids: Iterable[int | str]) -> Flat:
        """Returns the token sequences of some trajectories end to end, by row number or id."""
        return self._source.flat(self._rows(ids))

    def lengths(self) -> NDArray[np.int64]:
        """Returns the number of tokens of each row (n), over all its sequences."""
        found: NDArray[np.int64] = self._table.column("tokens")
        return found

    def batch(self, ids: Iterable[int | str], pad: int | None = None) -> dict[str, NDArray[Any]]:
        """Returns the token sequences of some trajectories, ready for a trainer.

        Args:
            ids: rollout ids or row numbers, in the order of the result; a rollout without tokens adds no sequence.
            pad: ``None`` for flat token columns of all T tokens; a number for columns (S, longest), padded with it in
                ``tokens`` and elsewhere with the value of tokens that were not sampled.

        Returns:
            ``tokens`` int32, ``loss_mask`` uint8, ``logprobs`` float32 (0 where not sampled, where the store has NaN:
            a product with the mask is right), ``weight_version`` int32 (-1 where not sampled): (T,) or (S, longest).
            ``offsets`` int64 (S+1): sequence s is tokens ``[offsets[s], offsets[s+1])`` of the flat columns. Per
            sequence, (S,): ``trajectory`` int64, the row number; ``group`` and ``policy``, strings; ``reward`` float32,
            NaN unless verified.

        Raises:
            KeyError, IndexError: no such trajectory.
        """
        return make_batch(self._source, self._rows(ids), pad)

    def batches(
        self,
        token_budget: int,
        rows: Iterable[int | str] | str | None = None,
        *,
        pad: int | None = None,
        seed: int | None = None,
        shard: tuple[int, int] = (0, 1),
        oversize: Oversize = "error",
    ) -> Iterator[dict[str, NDArray[Any]]]:
        """Yields batches of whole trajectories, each packed up to a number of tokens; every row once.

        Args:
            token_budget: largest number of entries of each token column, padding included.
            rows: ids, row numbers or an expression; all rows by default. Rows without tokens are left out.
            pad: as in :meth:`batch`.
            seed: shuffles the rows; ``None`` keeps neighbours together, which reads fastest.
            shard: (rank, ranks) of a parallel trainer; ranks take different batches, in numbers that differ by at most
                one.
            oversize: ``error`` or ``skip`` for a trajectory that alone is over the budget.

        Raises:
            ConfigError: a trajectory is over the budget, with ``oversize="error"``.
        """
        chosen = (
            self.select(rows) if isinstance(rows, str) else np.arange(len(self)) if rows is None else self._rows(rows)
        )
        for numbers in plan_batches(self._source, chosen, token_budget, pad is not None, seed, oversize)[
            shard[0] :: shard[1]
        ]:
            yield make_batch(self._source, numbers, pad)

    def _rows(self, ids: Iterable[int | str]) -> NDArray[np.int64]:
        if isinstance(ids, np.ndarray) and ids.dtype.kind in "iu":
            rows = ids.astype(np.int64)
            if len(rows) and (rows.min() < -len(self) or rows.max() >= len(self)):
                raise IndexError(
                    f"row {rows[(rows < -len(self)) | (rows >= len(self))][0]} of {len(self)} in {self.path}"
                )
            return rows % max(len(self), 1)
        return np.array([self._row(key) for key in ids], np.int64)

    @cached_property
    def _table(self) -> RowTable:
        return RowTable(self._source)

    def _row(self, key: int | str) -> int:
        if isinstance(key, str):
            number = self._number(key)
            if number is None:
                raise KeyError(f"{key}: no such rollout in {self.path} ({len(self)} trajectories)")
            return number
        row = int(key)
        if not -len(self) <= row < len(self):
            raise IndexError(f"row {row} of {len(self)} in {self.path}")
        return row % len(self)


def open_trajectories(path: str | os.PathLike[str], seals: Seals | None = None) -> TrajectoryStore:
    """Opens a campaign's trajectories for reading.

    Args:
        path: a run directory, also of a running campaign, or one ``trajectories.h5``. Of a run directory the file is
            read if it holds all that the journals do, else the journals, which show the same.
        seals: the seals of a run directory, instead of those of its ledger.

    Raises:
        ConfigError: ``path`` is missing, not a run directory, or a foreign, damaged or newer file.
    """
    path = Path(path)
    if not path.is_dir():
        return TrajectoryStore(Hdf5Source(path), path)
    run = RunDir(path)
    if not (run.journal.is_dir() or run.trajectories.exists()):
        read_run(run)
    seals = seals_of(run) if seals is None else seals
    recorded = recorded_sources(run.trajectories)
    now = fingerprint(run, seals)
    if run.trajectories.exists() and _covers(recorded, now):
        return TrajectoryStore(Hdf5Source(run.trajectories), run.trajectories)
    return TrajectoryStore(JournalSource(index(run, seals)), run.path)


def _covers(recorded: dict[str, Any] | None, now: dict[str, Any]) -> bool:
    """Returns whether a file holds all the journals of now; journals may have been removed since it was made."""
    if not now["journals"]:
        return True
    if recorded is None:
        return False
    known = recorded["journals"]
    same = all(known.get(name) == size for name, size in now["journals"].items())
    return same and recorded.get("seals") == now["seals"]
