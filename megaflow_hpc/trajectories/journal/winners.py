"""Which record of which journal is the result of a rollout: one winner each, the same for every reader.

A record is *valid* unless a seal voids it. A seal says for (block, epoch) whose journal counted and up to which byte;
records of that epoch that end behind it, or lie in any other journal, are void. Without a seal all of them count.

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
import logging
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack

from megaflow_hpc.ledger import Ledger
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.trajectories.journal.frames import Frame, read_frame, read_frames, unpack_record
from megaflow_hpc.trajectories.journal.writer import SUFFIX, base_of, owner_of
from megaflow_hpc.types import Attempt, Trajectory

logger = logging.getLogger(__name__)

Seals = Mapping[tuple[int, int], tuple[str, int]]
"""(block, epoch) → (``<pod>.<start>`` or the name of its journal file, bytes of it that count)."""

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
    shard_row: int = -1
    """Its row in the shard of the journal's file; -1 where there is none."""

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
        return trajectory_of(read_frame(path, entry.start), entry.epoch, path)


def trajectory_of(frame: Frame, epoch: int, path: Path) -> Trajectory:
    """The trajectory of a record; without its tokens, and saying so, where these contradict one another."""
    data: Mapping[str, Any] = {}
    try:
        data = _trajectory_data(unpack_record(frame.payload))
        return checked(Trajectory.from_record({**data, "epoch": epoch}))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        data = data or _head(frame.payload)["trajectory"]
        logger.warning("%s: record at byte %d (%s): %r; kept without its tokens", path, frame.start, data["id"], error)
        lost = ("sequences", "turns", "attempts", "artifacts")
        scalars = {key: value for key, value in data.items() if key not in lost}
        for name in ("task_id", "group_id", "policy", "agent"):
            scalars.setdefault(name, "")
        trajectory = Trajectory.from_record({**scalars, "epoch": epoch})
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
    """The ledger's seals, waited for while the run directory is away; none where no ledger has been made yet."""
    return Ledger(run).seals()


def fingerprint(run: RunDir, seals: Seals) -> dict[str, Any]:
    """What a result depends on: journal sizes in bytes by name, and a checksum of the seals."""
    sealed = json.dumps(sorted([*key, *value] for key, value in seals.items()))
    return {
        "journals": {path.name: path.stat().st_size for path in journals(run)},
        "seals": zlib.crc32(sealed.encode()),
    }


def index(run: RunDir, seals: Seals, shards: bool = True) -> Index:
    """Reads every journal once and decides. Damage is logged and skipped: the rest of the campaign stays readable.

    Args:
        run: the run directory.
        seals: what voids records.
        shards: whether shards are read in the place of their journals.

    Raises:
        ConfigError: a file in ``RUN/journal`` is no journal, or of a newer version.
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
    """The winner of each rollout, and those it won over where there are any."""
    best: dict[str, Entry] = {}
    losers: dict[str, list[Entry]] = {}
    for entry in valid:
        other = best.setdefault(entry.id, entry)
        if other is not entry:
            best[entry.id], loser = sorted((entry, other), key=lambda e: e.rank)
            losers.setdefault(entry.id, []).append(loser)
    return best, losers


def entries(path: Path, seals: Seals, start: int = 0, limit: int | None = None) -> tuple[list[Entry], int]:
    """The valid records of one journal file.

    Args:
        path: the file, a part of a journal.
        seals: what voids records.
        start: end of a record that was read before; what lies before it is left out.
        limit: bytes of the file to look at.

    Returns:
        The entries in order, and the end of the last whole record (``start`` if there is none).
    """
    found: list[Entry] = []
    base, end, time_ns = base_of(path), start, 0
    for frame in read_frames(path, limit, tolerant=True, start=start):
        end = frame.end
        time_ns = max(time_ns, frame.time_ns)
        try:
            record = _head(frame.payload)
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
        if counts(seals, block, epoch, path.name, base + frame.end):
            found.append(Entry(rollout, status, epoch, attempt, time_ns, path.name, frame.start))
    return found, end


def counts(seals: Seals, block: int, epoch: int, journal: str, end: int) -> bool:
    """Whether no seal voids a record of ``journal`` that ends at the logical offset ``end``."""
    sealed = seals.get((block, epoch))
    return sealed is None or (owner_of(sealed[0]) == owner_of(journal) and end <= sealed[1])


_WANTED = frozenset({"id", "status", "attempt", "epoch"})
_HEAD_BYTES = 4096


def _head(payload: bytes) -> dict[str, Any]:
    """A record with only so much of its trajectory as decides; all of it where these do not come first."""
    unpacker = msgpack.Unpacker(raw=False, strict_map_key=False, unicode_errors="surrogatepass")
    unpacker.feed(payload[:_HEAD_BYTES])
    record: dict[str, Any] = {}
    try:
        for _ in range(unpacker.read_map_header()):
            key = unpacker.unpack()
            if key != "trajectory":
                record[key] = unpacker.unpack()
                continue
            data: dict[str, Any] = {}
            for _ in range(unpacker.read_map_header()):
                name = unpacker.unpack()
                if name in _WANTED:
                    data[name] = unpacker.unpack()
                else:
                    unpacker.skip()
                if len(data) == len(_WANTED) and {"kind", "epoch", "block"} <= record.keys():
                    return {**record, "trajectory": data}
            break
    except (ValueError, TypeError, msgpack.exceptions.UnpackException):
        pass
    return unpack_record(payload)


def _trajectory_data(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """The trajectory of a record; a worker's packed bytes may have been put in unopened."""
    data = record["trajectory"]
    if isinstance(data, bytes):
        data = unpack_record(data)
    if not isinstance(data, dict):
        raise TypeError(f"a trajectory is a {type(data).__name__}, expected a map")
    return data
