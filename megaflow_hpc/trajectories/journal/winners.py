"""Decides which record of which journal is the result of a rollout: one winner each, the same for every reader.

A record is *valid* unless a seal voids it (:mod:`~megaflow_hpc.trajectories.journal.records`).

The identity of a record is (rollout, epoch, attempt). Among the valid records of a rollout

1. ``completed`` and ``truncated`` come before ``failed`` and ``cancelled``: ``resume --failed`` runs a rollout again
   under a higher epoch, and its success replaces the failure, while a failure never replaces a success;
2. then the lowest epoch wins, then the lowest attempt, then the earliest record.

So a success once seen stays. The attempts listed in the valid records that lost are kept with the winner's.

Records are found in the shards of finished parts of journals, where there are any, and else in the journals themselves:
both say the same.

*Commit order.* Within a journal, the order of appending. Journals are merged by the time each frame carries, made
monotone per journal; the clocks of pods only decide the order of rows of different pods, never which rows exist.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megaflow_hpc.ledger import Ledger
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.trajectories.journal.frames import read_frame
from megaflow_hpc.trajectories.journal.records import Entry, Seals, entries, trajectory_of
from megaflow_hpc.trajectories.journal.writer import SUFFIX
from megaflow_hpc.trajectory import Attempt, Trajectory


@dataclass
class Index:
    """The valid records of a run."""

    root: Path
    """``RUN/journal``."""
    winners: list[Entry] = field(default_factory=list)
    """One per rollout, in commit order."""
    losers: dict[str, list[Entry]] = field(default_factory=dict)
    """The other valid records by rollout id, for the few rollouts that have any."""

    def in_shard(self, entry: Entry) -> bool:
        """Whether a winner may be taken from a shard: with losers, attempts are put together."""
        return entry.shard_row >= 0 and entry.id not in self.losers

    def load(self, entry: Entry) -> Trajectory:
        """Reads the trajectory of a winner, with the attempts of the records it won over.

        Raises:
            ConfigError: the record is no longer where the index found it.
        """
        trajectory = self._read(entry)
        others = self.losers.get(entry.id)
        if others:
            attempts: list[Attempt] = []
            for other in sorted([entry, *others], key=lambda e: (e.epoch, e.attempt, e.time_ns)):
                listed = trajectory.attempts if other is entry else self._read(other).attempts
                attempts += [attempt for attempt in listed if attempt not in attempts]
            trajectory.attempts = attempts
        return trajectory

    def _read(self, entry: Entry) -> Trajectory:
        path = self.root / entry.journal
        return trajectory_of(read_frame(path, entry.start), entry.epoch, path)


def journals(run: RunDir) -> list[Path]:
    """Returns the journal files of a run, sorted by name."""
    if not run.journal.is_dir():
        return []
    return sorted(path for path in run.journal.iterdir() if path.name.endswith(SUFFIX) and path.name[0] != ".")


def seals_of(run: RunDir) -> Seals:
    """Returns the ledger's seals; waits while the run directory does not answer. Without a ledger there are none."""
    return Ledger(run).seals()


def fingerprint(run: RunDir, seals: Seals) -> dict[str, Any]:
    """Returns what a result depends on: journal sizes in bytes by name, and a checksum of the seals."""
    sealed = json.dumps(sorted([*key, *value] for key, value in seals.items()))
    return {
        "journals": {path.name: path.stat().st_size for path in journals(run)},
        "seals": zlib.crc32(sealed.encode()),
    }


def index(run: RunDir, seals: Seals, shards: bool = True) -> Index:
    """Reads every journal once and decides over winners. Damage is logged and skipped: the rest stays readable.

    Args:
        run: the run directory.
        seals: what voids records.
        shards: whether shards are read in the place of their journals.

    Raises:
        ConfigError: a file in ``RUN/journal`` is not a journal, or of a newer version.
    """
    from megaflow_hpc.trajectories.journal.shards import (
        shard_entries,  # reads HDF5, which following a journal does not need
    )

    def valid() -> Iterator[Entry]:
        for path in journals(run):
            found = shard_entries(run, path, seals) if shards else None
            yield from entries(path, seals)[0] if found is None else found

    best, losers = decide(valid())
    winners = sorted(best.values(), key=lambda e: (e.time_ns, e.journal, e.start))
    return Index(run.journal, winners, losers)


def decide(valid: Iterable[Entry]) -> tuple[dict[str, Entry], dict[str, list[Entry]]]:
    """Returns the winner of each rollout by id, and the entries it won over where there are any."""
    best: dict[str, Entry] = {}
    losers: dict[str, list[Entry]] = {}
    for entry in valid:
        other = best.setdefault(entry.id, entry)
        if other is not entry:
            best[entry.id], loser = sorted((entry, other), key=lambda e: e.rank)
            losers.setdefault(entry.id, []).append(loser)
    return best, losers
