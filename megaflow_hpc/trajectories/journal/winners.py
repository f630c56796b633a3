"""Decides which record is the result of a rollout, and reads it. All readers share the following rules.

For each (block, epoch), a seal names the only journal that counts, and its length in bytes. Records of that epoch that
end after this length, or are in another journal, are *void*. Without a seal, all records of an epoch are valid.

The identity of a record is (rollout, epoch, attempt). Among the valid records of a rollout

1. ``completed`` and ``truncated`` come before ``failed`` and ``cancelled``: ``resume --failed`` runs a rollout again in
   a higher epoch, so that a success replaces a failure, but never the reverse;
2. then the lowest epoch wins, then the lowest attempt, then the earliest record.

Once a reader has seen a success, it is therefore final. The winner also receives the attempts of the losing valid
records.

*Commit order.* Within a journal, records are in append order. Journals are merged by the timestamp of each frame, made
monotonic within a journal. The pods' clocks only affect the order of rows of different pods, never which rows exist.
"""

from __future__ import annotations

import json
import logging
import sys
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from megaflow_hpc.ledger import Ledger
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.trajectories.journal import packs
from megaflow_hpc.trajectories.journal.checks import checked, heading_in, heading_of, salvaged
from megaflow_hpc.trajectories.journal.frames import (
    HEADER_SIZE,
    Frame,
    Heading,
    head_of,
    read_frame,
    read_frames,
    read_frames_at,
    trajectory_data,
    unpack_record,
)
from megaflow_hpc.trajectory import Attempt, Trajectory
from megaflow_hpc.types import VERIFIED

logger = logging.getLogger(__name__)

SUFFIX = packs.JOURNAL
BATCH_BYTES = 64 << 20
"""Number of bytes of records that :meth:`Index.trajectories` reads before it decodes them."""
RENEW_BYTES = 8 << 20
"""Number of journal bytes that :class:`StoredRollouts` reads between two calls of ``renew``."""

Seals = Mapping[tuple[int, int], tuple[str, int]]
"""Valid part of superseded journals. Maps (block, epoch) to the only valid journal, as ``<pod>.<start>`` or file name,
and its number of valid bytes."""


@dataclass(frozen=True, slots=True)
class RecordEntry:
    """Location of a valid record, and the fields that decide whether it wins."""

    id: str
    status: str
    epoch: int
    attempt: int
    time_ns: int
    """Commit time, monotonic within the journal."""
    journal: str
    """Name of the journal in ``RUN/journal``."""
    start: int
    """Offset of the record's frame in the journal."""
    size: int
    """Size of the record's frame in bytes."""

    @property
    def rank(self) -> tuple[bool, int, int, int, str, int]:
        """Sort key. The record of a rollout with the lowest rank wins."""
        return self.status not in VERIFIED, self.epoch, self.attempt, self.time_ns, self.journal, self.start


@dataclass
class Index:
    """The valid records of a run."""

    root: Path
    """The journal directory, ``RUN/journal``."""
    winners: list[RecordEntry] = field(default_factory=list)
    """One record per rollout, in commit order."""
    losers: dict[str, list[RecordEntry]] = field(default_factory=dict)
    """Valid records that lost, by rollout id. Omits rollouts that have none."""

    def load(self, entry: RecordEntry) -> Trajectory:
        """Reads a winner's trajectory, including the attempts of the records that lost.

        Raises:
            ConfigError: The record is no longer at its indexed position.
        """
        path = self.root / entry.journal
        return self._decode(entry, read_frame(path, entry.start))

    def trajectories(self, first: int = 0) -> Iterator[Trajectory]:
        """Yields the trajectories of the winners in commit order, starting at winner ``first``. Raises the errors of
        :meth:`load`.

        Records are read in batches of about :data:`BATCH_BYTES`, so that each journal is opened once per batch and read
        sequentially.
        """
        for batch in _batches(self.winners[first:]):
            frames = self._read(batch)
            for entry in batch:
                yield self._decode(entry, frames.pop(entry))

    def _read(self, batch: list[RecordEntry]) -> dict[RecordEntry, Frame]:
        by_journal: dict[str, list[RecordEntry]] = {}
        for entry in batch:
            by_journal.setdefault(entry.journal, []).append(entry)
        frames: dict[RecordEntry, Frame] = {}
        for journal, own in by_journal.items():
            starts = [entry.start for entry in own]
            frames.update(zip(own, read_frames_at(self.root / journal, starts), strict=True))
        return frames

    def _decode(self, entry: RecordEntry, frame: Frame) -> Trajectory:
        trajectory = trajectory_of(frame, entry.epoch, self.root / entry.journal)
        losers = self.losers.get(entry.id)
        if not losers:
            return trajectory
        attempts: list[Attempt] = []
        for record in sorted([entry, *losers], key=lambda e: (e.epoch, e.attempt, e.time_ns)):
            read = trajectory
            if record is not entry:
                path = self.root / record.journal
                read = trajectory_of(read_frame(path, record.start), record.epoch, path)
            attempts += [attempt for attempt in read.attempts if attempt not in attempts]
        trajectory.attempts = attempts
        return trajectory


def _batches(winners: list[RecordEntry]) -> Iterator[list[RecordEntry]]:
    """Splits winners into batches of about :data:`BATCH_BYTES`, with at least one record each."""
    batch: list[RecordEntry] = []
    size = 0
    for entry in winners:
        if batch and size + entry.size > BATCH_BYTES:
            yield batch
            batch = []
            size = 0
        batch.append(entry)
        size += entry.size
    if batch:
        yield batch


# --- a run ------------------------------------------------------------------------------------------------------------


def journals(run: RunDir) -> list[Path]:
    """Returns the paths of a run's journals, sorted by name. For a packed journal, no file exists at its path."""
    return [run.journal / name for name in packs.sizes(run.journal)]


def sizes_of(run: RunDir, skip: Collection[str] = ()) -> dict[str, int]:
    """Returns the size of each journal in bytes, by name, except those to skip. Raises OSError."""
    sizes = {name: size for name, size in packs.sizes(run.journal).items() if name not in skip}
    return {name: packs.size_of(run.journal / name) if size is None else size for name, size in sizes.items()}


def seals_of(run: RunDir) -> Seals:
    """Returns the ledger's seals. Returns an empty mapping if there is no ledger. Blocks while the run directory is
    unavailable."""
    return Ledger(run).seals()


def fingerprint(run: RunDir, seals: Seals) -> dict[str, Any]:
    """Returns a fingerprint of a gathered file's inputs: journal sizes in bytes by name, and a checksum of the
    seals."""
    sealed = json.dumps(sorted([*key, *value] for key, value in seals.items()))
    return {
        "journals": sizes_of(run),
        "seals": zlib.crc32(sealed.encode()),
    }


def index(run: RunDir, seals: Seals) -> Index:
    """Reads the headings of every journal once and decides which records win.

    Damage is logged and skipped, so that all other records remain readable.

    Raises:
        ConfigError: A file in ``RUN/journal`` is not a journal, or has a newer version.
    """
    best, losers = decide(entry for path in journals(run) for entry in entries(path, seals)[0])
    return Index(run.journal, in_commit_order(best.values()), losers)


def decide(valid: Iterable[RecordEntry]) -> tuple[dict[str, RecordEntry], dict[str, list[RecordEntry]]]:
    """Returns each rollout's winning entry and, if it has any, its losing entries, both by rollout id."""
    best: dict[str, RecordEntry] = {}
    losers: dict[str, list[RecordEntry]] = {}
    for entry in valid:
        other = best.setdefault(entry.id, entry)
        if other is not entry:
            best[entry.id], loser = sorted((entry, other), key=lambda e: e.rank)
            losers.setdefault(entry.id, []).append(loser)
    return best, losers


def in_commit_order(of_journals: Iterable[RecordEntry]) -> list[RecordEntry]:
    """Sorts entries of several journals into commit order."""
    return sorted(of_journals, key=lambda e: (e.time_ns, e.journal, e.start))


# --- a journal --------------------------------------------------------------------------------------------------------


def entries(path: Path, seals: Seals, start: int = 0, limit: int | None = None) -> tuple[list[RecordEntry], int]:
    """Returns the valid records of one journal file in order, and the end of the last complete record (or ``start``).

    Args:
        path, start, limit: As for :func:`headings`.
        seals: The ledger's seals, which decide which records are valid.
    """
    valid: list[RecordEntry] = []
    end = start
    for frame, heading in headings(path, start, limit):
        end = frame.end
        if heading is not None and counts(seals, heading.block, heading.epoch, path.name, end):
            size = frame.end - frame.start
            status = sys.intern(heading.status)  # share one string among millions of entries
            order = heading.epoch, heading.attempt, frame.time_ns
            valid.append(RecordEntry(heading.id, status, *order, path.name, frame.start, size))
    return valid, end


def headings(path: Path, start: int = 0, limit: int | None = None) -> Iterator[tuple[Frame, Heading | None]]:
    """Yields the frames of one journal file with their headings. Damage is logged and skipped.

    Args:
        path: The journal file.
        start: Offset to start at: the end of an earlier frame.
        limit: Number of bytes of the file to read.

    Returns:
        Frames in order, with monotonic ``time_ns``. The heading is ``None`` unless the record is a trajectory.
    """
    time_ns = 0
    for frame in read_frames(path, limit, tolerant=True, start=start):
        time_ns = max(time_ns, frame.time_ns)
        heading = None
        try:
            heading = heading_in(frame.payload)
        except (KeyError, TypeError, ValueError) as error:
            logger.warning("%s: record at byte %d is not a trajectory (%r); skipped", path, frame.start, error)
        yield frame._replace(time_ns=time_ns), heading


def counts(seals: Seals, block: int, epoch: int, journal: str, end: int) -> bool:
    """Returns whether a record is valid. A seal may void it.

    Args:
        seals: The ledger's seals.
        block, epoch: Block and epoch of the record.
        journal: Name of its journal file.
        end: Its end offset in that file.
    """
    sealed = seals.get((block, epoch))
    if sealed is None:
        return True
    owner, valid_bytes = sealed
    return owner.removesuffix(SUFFIX) == journal.removesuffix(SUFFIX) and end <= valid_bytes


def trajectory_of(frame: Frame, epoch: int, path: Path) -> Trajectory:
    """Decodes the trajectory of a record that has a heading.

    If the trajectory fails validation (:func:`~megaflow_hpc.trajectories.journal.checks.checked`), it is returned
    without its tokens. Its ``error`` says so, and the log names the record.
    """
    record: Mapping[str, Any] = {}
    data: Mapping[str, Any] = {}
    try:
        record = unpack_record(frame.payload)
        data = trajectory_data(record)
        return checked(Trajectory.from_record({**data, "epoch": epoch}))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        if not data:  # the record cannot be unpacked as a whole, but its heading can
            record = head_of(frame.payload)
            data = trajectory_data(record)
        heading = heading_of({**record, "epoch": epoch}, data)
        logger.warning("%s: record at byte %d (%s): %r; kept without its tokens", path, frame.start, heading.id, error)
        trajectory = salvaged(data, heading)
        trajectory.error = f"{trajectory.error}\n[tokens lost: the record is inconsistent: {error!r}]".lstrip()
        return trajectory


# --- the rollouts of a block ------------------------------------------------------------------------------------------


class StoredBlock(NamedTuple):
    """An earlier epoch of a block that has been sealed."""

    epoch: int
    owner: str
    """Pod start that owned the block, ``<pod>.<start>``."""
    sealed: int
    """Length in bytes at which the owner's journal was sealed. Later records are void."""


class _Record(NamedTuple):
    end: int
    rollout: str


@dataclass
class _Journal:
    """State of one journal at the last read."""

    size: int
    """Size of the file in bytes before the read. 0 if the file is missing."""
    length: int
    """End offset of the last complete record."""
    records: dict[tuple[int, int], list[_Record]] = field(default_factory=dict)
    """Records of rollouts that did not fail, by (block, epoch)."""


class StoredRollouts:
    """Finds which rollouts of a block its earlier owners have already stored, from the headings in their journals.

    A pod that takes over a block reads the whole journal of each earlier owner once. Not thread-safe.

    Args:
        renew: Called before each journal and every few megabytes, to keep the caller's lease valid.
    """

    def __init__(self, run: RunDir, renew: Callable[[], object] = lambda: None) -> None:
        self._folder = run.journal
        self._renew = renew
        self._journals: dict[str, _Journal] = {}
        """Journal of each owner, by ``<pod>.<start>``."""

    def ids(self, block: int, held: Iterable[StoredBlock]) -> set[str]:
        """Returns the ids of a block's rollouts that are stored and did not fail.

        Raises:
            ConfigError: A file is not a journal, or has a newer version.
            OSError: The run directory is unavailable.
        """
        stored: set[str] = set()
        for epoch, owner, sealed in held:
            journal = self._journals.get(owner)
            if journal is None or journal.length < sealed:
                journal = self._read(owner)
            records = journal.records.get((block, epoch), ())
            stored.update(record.rollout for record in records if record.end <= sealed)
        return stored

    def length(self, owner: str) -> int:
        """Returns the end offset of a journal's last complete record. A pod that takes over a block seals the journal
        there.

        Returns 0 if there is no journal. Reads the journal again only if it has grown. Raises the errors of
        :meth:`ids`.
        """
        journal = self._journals.get(owner)
        if journal is None or journal.size != self._size(owner):
            journal = self._read(owner)
        return journal.length

    def _read(self, owner: str) -> _Journal:
        """Reads a journal and caches the result. Errors are not cached, so the next call retries."""
        self._renew()
        size = self._size(owner)
        journal = _Journal(size, min(HEADER_SIZE, size))
        renewed = 0
        for frame, heading in headings(self._path(owner)) if size else ():
            journal.length = frame.end
            if heading is not None and heading.status != "failed":
                of_claim = journal.records.setdefault((heading.block, heading.epoch), [])
                of_claim.append(_Record(frame.end, heading.id))
            if frame.end - renewed >= RENEW_BYTES:
                renewed = frame.end
                self._renew()
        self._renew()
        self._journals[owner] = journal
        return journal

    def _size(self, owner: str) -> int:
        try:
            return packs.size_of(self._path(owner))
        except FileNotFoundError:
            return 0

    def _path(self, owner: str) -> Path:
        return self._folder / f"{owner}{SUFFIX}"
