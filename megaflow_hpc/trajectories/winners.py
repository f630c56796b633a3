"""Which record of which journal is the result of a rollout: one winner each, the same for every reader.

A record is *valid* unless a seal voids it. A seal says for (block, epoch) whose journal counted and up to which byte;
records of that epoch that end behind it, or lie in any other journal, are void. Without a seal all of them count.

The identity of a record is (rollout, epoch, attempt). Among the valid records of a rollout

1. ``completed`` and ``truncated`` come before ``failed`` and ``cancelled``: ``resume --failed`` runs a rollout again
   under a higher epoch, and its success replaces the failure, while a failure never replaces a success;
2. then the lowest epoch wins, then the lowest attempt, then the earliest record.

So a success once seen stays. The attempts listed in the valid records that lost are kept with the winner's.

*Commit order.* Within a journal, the order of appending. Journals are merged by the time each frame carries, made
monotone per journal; the clocks of pods only decide the order of rows of different pods, never which rows exist.
"""

from __future__ import annotations

import json
import logging
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megaflow_hpc.ledger import Ledger
from megaflow_hpc.rundir import RunDir
from megaflow_hpc.trajectories.frames import read_frame, read_frames, unpack_record
from megaflow_hpc.types import Attempt, Trajectory

logger = logging.getLogger(__name__)

Seals = Mapping[tuple[int, int], tuple[str, int]]
"""(block, epoch) → (``<pod>.<start>`` or the name of its journal file, bytes of it that count)."""

SUFFIX = ".journal"
_FINAL = ("completed", "truncated")


@dataclass(frozen=True, slots=True)
class Entry:
    """One valid record: what decides, and where it lies."""

    id: str
    status: str
    epoch: int
    attempt: int
    time_ns: int
    """Commit time, monotone within the journal."""
    journal: str
    """File name within ``RUN/journal``."""
    start: int

    @property
    def rank(self) -> tuple[bool, int, int, int, str, int]:
        """The lowest wins."""
        return self.status not in _FINAL, self.epoch, self.attempt, self.time_ns, self.journal, self.start


@dataclass
class Index:
    """The valid records of a run."""

    root: Path
    """``RUN/journal``."""
    winners: list[Entry] = field(default_factory=list)
    """One per rollout, in commit order."""
    losers: dict[str, list[Entry]] = field(default_factory=dict)
    """By rollout id, for the few that have any."""

    def load(self, entry: Entry) -> Trajectory:
        """The trajectory of a winner, with the attempts of the records it won over."""
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
        record = unpack_record(read_frame(path, entry.start).payload)
        data = _trajectory_data(record)
        try:
            return checked(Trajectory.from_record({**data, "epoch": entry.epoch}))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            logger.warning(
                "%s: record at byte %d (%s): %r; kept without its tokens", path, entry.start, entry.id, error
            )
            lost = ("sequences", "turns", "attempts", "artifacts")
            scalars = {key: value for key, value in data.items() if key not in lost}
            trajectory = Trajectory.from_record({**scalars, "epoch": entry.epoch})
            trajectory.error = f"{trajectory.error}\n[tokens lost: the record is inconsistent: {error!r}]".lstrip()
            return trajectory


def checked(trajectory: Trajectory) -> Trajectory:
    """The same trajectory.

    Raises:
        ValueError: its token columns differ in length, or a turn lies outside its sequence.
    """
    for number, sequence in enumerate(trajectory.sequences):
        columns = (sequence.tokens, sequence.logprobs, sequence.loss_mask, sequence.weight_versions)
        lengths = [len(column) for column in columns]
        if len(set(lengths)) != 1:
            raise ValueError(f"sequence {number} has columns of {lengths} tokens")
    for number, turn in enumerate(trajectory.turns):
        if turn.sequence < 0:
            continue
        if turn.sequence >= len(trajectory.sequences):
            raise ValueError(f"turn {number} names sequence {turn.sequence} of {len(trajectory.sequences)}")
        if not 0 <= turn.token_start <= turn.token_end <= len(trajectory.sequences[turn.sequence].tokens):
            raise ValueError(f"turn {number} spans tokens {turn.token_start} to {turn.token_end}, outside its sequence")
    return trajectory


def journals(run: RunDir) -> list[Path]:
    """The journal files of a run, by name."""
    if not run.journal.is_dir():
        return []
    return sorted(path for path in run.journal.iterdir() if path.name.endswith(SUFFIX) and path.name[0] != ".")


def seals_of(run: RunDir) -> Seals:
    """The ledger's seals; none where no ledger has been made yet."""
    return Ledger(run).seals() if (run.ledger / "claims").is_dir() else {}


def fingerprint(run: RunDir, seals: Seals) -> dict[str, Any]:
    """What a result depends on: journal sizes in bytes by name, and a checksum of the seals."""
    sealed = json.dumps(sorted([*key, *value] for key, value in seals.items()))
    return {
        "journals": {path.name: path.stat().st_size for path in journals(run)},
        "seals": zlib.crc32(sealed.encode()),
    }


def index(run: RunDir, seals: Seals) -> Index:
    """Reads every journal once and decides. Damage is logged and skipped: the rest of the campaign stays readable.

    Raises:
        ConfigError: a file in ``RUN/journal`` is no journal, or of a newer version.
    """
    best: dict[str, Entry] = {}
    losers: dict[str, list[Entry]] = {}
    for path in journals(run):
        for entry in _entries(path, seals):
            other = best.get(entry.id)
            if other is None:
                best[entry.id] = entry
                continue
            winner, loser = sorted((entry, other), key=lambda e: e.rank)
            best[entry.id] = winner
            losers.setdefault(entry.id, []).append(loser)
    winners = sorted(best.values(), key=lambda e: (e.time_ns, e.journal, e.start))
    return Index(run.journal, winners, losers)


def _entries(path: Path, seals: Seals) -> list[Entry]:
    name = path.name
    found: list[Entry] = []
    time_ns = 0
    for frame in read_frames(path, tolerant=True):
        time_ns = max(time_ns, frame.time_ns)
        try:
            record = unpack_record(frame.payload)
            if record.get("kind") != "trajectory":
                continue
            data = _trajectory_data(record)
            epoch = int(record.get("epoch", data.get("epoch", 0)))
            block = int(record.get("block", -1))
            attempt = int(data.get("attempt", 0))
            rollout, status = str(data["id"]), str(data["status"])
        except (KeyError, TypeError, ValueError) as error:
            logger.warning("%s: record at byte %d is no trajectory (%r); skipped", path, frame.start, error)
            continue
        sealed = seals.get((block, epoch))
        if sealed is not None:
            owner, length = sealed
            if owner.removesuffix(SUFFIX) != name.removesuffix(SUFFIX) or frame.end > length:
                continue
        found.append(Entry(rollout, status, epoch, attempt, time_ns, name, frame.start))
    return found


def _trajectory_data(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """The trajectory of a record; a worker's packed bytes may have been put in unopened."""
    data = record["trajectory"]
    if isinstance(data, bytes):
        data = unpack_record(data)
    if not isinstance(data, dict):
        raise TypeError(f"a trajectory is a {type(data).__name__}, expected a map")
    return data
