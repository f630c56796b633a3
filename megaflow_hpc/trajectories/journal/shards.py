"""Shards: finished parts of journals as HDF5, so that a campaign is opened and gathered without decoding them again.

``RUN/shards/<pod>.<start>+NNNN.h5`` holds every record of the journal part of that name, those that lose or are void
included: which records count is up to readers. It has the columns of the schema and, per row, where the record lies::

    /journal/start, end     int64, bytes of the frame within the file of the part
    /journal/time_ns        int64, commit time, monotone within the part
    /journal/block          int64

The tokens, messages and artifacts of a part begin where those of the part before end within their chunks (offsets count
from there), so that the chunks of a pod's shards can be gathered as they are, one shard behind the other.

A shard is made by a child process of rank 0 when a part is finished
(:mod:`~megaflow_hpc.trajectories.journal.shard_maker`), published by rename, and never changed. It is only ever a copy:
without it, or where it is damaged or does not fit its journal, readers take the journal.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

import h5py
import numpy as np

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.host.files import open_regular
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.trajectories.hdf5.columns import offset_faults, read, texts
from megaflow_hpc.trajectories.hdf5.file import open_file
from megaflow_hpc.trajectories.hdf5.numbering import lead_behind
from megaflow_hpc.trajectories.hdf5.publishing import published
from megaflow_hpc.trajectories.hdf5.writer import TrajectoryWriter
from megaflow_hpc.trajectories.journal.records import Entry, Seals, counts, headings, trajectory_of
from megaflow_hpc.trajectories.journal.writer import SUFFIX, base_of, part_path

logger = logging.getLogger(__name__)

_PLACES = ("start", "end", "time_ns", "block")


def shard_path(run: RunDir, journal: str) -> Path:
    """Returns the path of a journal file's shard, whether there is one or not."""
    return run.shards / f"{journal.removesuffix(SUFFIX)}.h5"


def write_shard(run: RunDir, journal: Path) -> Path:
    """Makes the shard of a journal file that is not written any more, and returns its path.

    Raises:
        ConfigError: the file is not a journal.
        OSError: no space left, or a read-only directory.
    """
    target = shard_path(run, journal.name)
    size = journal.stat().st_size
    places: list[tuple[int, int, int, int]] = []
    with published(target) as temporary:
        with TrajectoryWriter(temporary, run.path.name, lead=_lead(run, journal)) as writer:
            for frame, heading in headings(journal, limit=size):
                if heading is not None:
                    writer.append(trajectory_of(frame, heading.epoch, journal))
                    places.append((frame.start, frame.end, frame.time_ns, heading.block))
        columns = np.array(places, np.int64).reshape(-1, len(_PLACES)).T
        with h5py.File(temporary, "r+", locking=False) as file:
            for name, values in zip(_PLACES, columns, strict=True):
                file[f"journal/{name}"] = values
            file.attrs["journal"] = journal.name
            file.attrs["journal_bytes"] = np.int64(size)
            file.attrs["journal_base"] = np.int64(base_of(journal))
            file.attrs["journal_head"] = np.frombuffer(_head(journal), np.uint8)
    return target


def _lead(run: RunDir, journal: Path) -> dict[str, int]:
    """Returns the ``lead`` by which a part's columns continue the shard of the part before, if there is one."""
    stem, _, number = journal.name.removesuffix(SUFFIX).rpartition("+")
    if not stem:
        return {}
    before = open_shard(run, part_path(journal.with_name(f"{stem}{SUFFIX}"), int(number) - 1))
    if before is None:
        return {}
    with before:
        return lead_behind(before)


def open_shard(run: RunDir, journal: Path) -> h5py.File | None:
    """Returns the open shard of a journal file; ``None`` without one, or where it is damaged or of other bytes."""
    path = shard_path(run, journal.name)
    if not path.exists():
        return None
    try:
        file = open_file(path)
    except ConfigError as error:
        logger.warning("%s; the journal is read instead", error)
        return None
    try:
        fits = (
            file.attrs["journal"] == journal.name
            and int(file.attrs["journal_bytes"]) == journal.stat().st_size
            and bytes(file.attrs["journal_head"]) == _head(journal)
            and all(len(file[f"journal/{name}"]) == len(file["trajectories/id"]) for name in _PLACES)
        )
        bad = next(offset_faults(file), "") if fits else ""
    except (KeyError, OSError, TypeError, ValueError):
        fits, bad = False, ""
    if bad:
        logger.warning("%s: %s; the journal is read instead", path, bad)
        file.close()
        return None
    if not fits:
        logger.warning("%s: does not belong to %s as it is; the journal is read instead", path, journal)
        file.close()
        return None
    return file


def shard_entries(run: RunDir, journal: Path, seals: Seals) -> list[Entry] | None:
    """Returns the valid records of a journal file from its shard; ``None`` without one.

    Args:
        run: the run directory.
        journal: the file, a part of a journal.
        seals: what voids records.
    """
    file = open_shard(run, journal)
    if file is None:
        return None
    try:
        with file:
            base = int(file.attrs["journal_base"])
            words = [texts(file[f"trajectories/{name}"]).tolist() for name in ("id", "status")]
            numbers = [read(file[f"trajectories/{name}"]).tolist() for name in ("epoch", "attempt")]
            starts, ends, times, blocks = (read(file[f"journal/{name}"]).tolist() for name in _PLACES)
    except OSError as error:
        logger.warning("%s: damaged (%s); the journal is read instead", shard_path(run, journal.name), error)
        return None
    found = []
    for row, (rollout, status, epoch, attempt) in enumerate(zip(*words, *numbers, strict=True)):
        if counts(seals, blocks[row], epoch, journal.name, base + ends[row]):
            found.append(Entry(rollout, status, epoch, attempt, times[row], journal.name, starts[row], row))
    return found


def _head(journal: Path) -> bytes:
    """Returns the journal's header, which names it: its salt is unique."""
    with open_regular(journal) as file:
        return file.read(24)


def main() -> None:
    """Writes the shard of one journal at low priority; its arguments are the run directory and the journal."""
    os.nice(10)
    run, journal = sys.argv[1:]
    write_shard(RunDir(run), Path(journal))


if __name__ == "__main__":
    main()
