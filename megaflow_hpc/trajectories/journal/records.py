"""The records of a journal: the fields that decide over winners, seals that void records, and the trajectories.

A seal says for (block, epoch) whose journal counts and up to which byte; records of that epoch that end behind it, or
lie in any other journal, are void. Without a seal all of them count. Nothing here needs HDF5.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaflow_hpc.trajectories.journal.checks import checked, heading_in, heading_of, salvaged
from megaflow_hpc.trajectories.journal.frames import Frame, read_frames, unpack_record
from megaflow_hpc.trajectories.journal.headings import Heading, head_of, trajectory_data
from megaflow_hpc.trajectories.journal.writer import base_of, owner_of
from megaflow_hpc.trajectory import Trajectory
from megaflow_hpc.types import VERIFIED

logger = logging.getLogger(__name__)

Seals = Mapping[tuple[int, int], tuple[str, int]]
"""(block, epoch) → (``<pod>.<start>`` or the name of its journal file, bytes of it that count)."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One valid record: the fields that decide over winners, and its place."""

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
        """A sort key: among the records of a rollout, the lowest wins."""
        return self.status not in VERIFIED, self.epoch, self.attempt, self.time_ns, self.journal, self.start


def headings(path: Path, start: int = 0, limit: int | None = None) -> Iterator[tuple[Frame, Heading | None]]:
    """Yields the frames of one journal file with their headings; damage is logged and skipped.

    Args:
        path: the file, a part of a journal.
        start: end of a frame read before; what lies before it is left out.
        limit: bytes of the file to look at.

    Returns:
        Frames in order, their ``time_ns`` made monotone; the heading is ``None`` for a record of another kind.
    """
    time_ns = 0
    for frame in read_frames(path, limit, tolerant=True, start=start):
        time_ns = max(time_ns, frame.time_ns)
        heading = None
        try:
            heading = heading_in(frame.payload)
        except (KeyError, TypeError, ValueError) as error:
            logger.warning("%s: record at byte %d is no trajectory (%r); skipped", path, frame.start, error)
        yield frame._replace(time_ns=time_ns), heading


def entries(path: Path, seals: Seals, start: int = 0, limit: int | None = None) -> tuple[list[Entry], int]:
    """Returns the valid records of one journal file in order, and the end of the last whole record (or ``start``).

    Args:
        path, start, limit: as for :func:`headings`.
        seals: what voids records.
    """
    found: list[Entry] = []
    base, end = base_of(path), start
    for frame, heading in headings(path, start, limit):
        end = frame.end
        if heading is not None and counts(seals, heading.block, heading.epoch, path.name, base + end):
            found.append(Entry(*heading[:4], frame.time_ns, path.name, frame.start))
    return found, end


def counts(seals: Seals, block: int, epoch: int, journal: str, end: int) -> bool:
    """Returns whether a record counts, because no seal voids it.

    Args:
        seals: the ledger's seals.
        block, epoch: of the record.
        journal: name of its file.
        end: logical offset of its end.
    """
    sealed = seals.get((block, epoch))
    return sealed is None or (owner_of(sealed[0]) == owner_of(journal) and end <= sealed[1])


def trajectory_of(frame: Frame, epoch: int, path: Path) -> Trajectory:
    """Returns the trajectory of a record that has a heading.

    Where it is not one whole (:func:`~megaflow_hpc.trajectories.journal.checks.checked`) it comes without its tokens,
    its ``error`` says so, and it is logged.
    """
    record: Mapping[str, Any] = {}
    data: Mapping[str, Any] = {}
    try:
        record = unpack_record(frame.payload)
        data = trajectory_data(record)
        return checked(Trajectory.from_record({**data, "epoch": epoch}))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        if not data:
            record = head_of(frame.payload)
            data = trajectory_data(record)
        heading = heading_of({**record, "epoch": epoch}, data)
        logger.warning("%s: record at byte %d (%s): %r; kept without its tokens", path, frame.start, heading.id, error)
        trajectory = salvaged(data, heading)
        trajectory.error = f"{trajectory.error}\n[tokens lost: the record is inconsistent: {error!r}]".lstrip()
        return trajectory
