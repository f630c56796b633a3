"""Gathers the journals of a run into one self-contained ``RUN/trajectories.h5``.

A gather first reads the headings of all records and decides which ones win. It then writes the winners in commit order,
holding one batch of records in memory at a time.

The file is published by rename, so readers see either the old or the new file. A gather that is asked to stop keeps the
rows written so far. The next gather continues from there, unless the journals have changed. After a gather is killed,
the next one starts from the beginning. A running campaign can be gathered too.
"""

from __future__ import annotations

import logging
import os
import struct
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import msgspec

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.host.files import open_regular
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.record import read_run
from megaflow_hpc.trajectories.hdf5.columns import offset_faults
from megaflow_hpc.trajectories.hdf5.file import (
    SOFTWARE,
    attribute,
    attribute_text,
    campaign_name,
    open_file,
    recorded_sources,
    root_attributes,
)
from megaflow_hpc.trajectories.hdf5.publishing import Unfinished, published, unfinished
from megaflow_hpc.trajectories.hdf5.schema import escape
from megaflow_hpc.trajectories.hdf5.writer import TrajectoryWriter
from megaflow_hpc.trajectories.journal.winners import Index, RecordEntry, Seals, fingerprint, index, seals_of

logger = logging.getLogger(__name__)

KEEP_INDEX_S = 5.0
"""An index that took at least this many seconds to build is kept for the next gather."""
_ID_BATCH = 1 << 16
"""Number of ids to compare at a time, to bound memory."""


def gather(
    run: RunDir | str | os.PathLike[str],
    seals: Seals | None = None,
    *,
    rebuild: bool = False,
    stop: Callable[[], bool] = lambda: False,
) -> Path:
    """Writes ``RUN/trajectories.h5`` unless it is up to date with the journals.

    Args:
        run: The run directory.
        seals: (block, epoch) → (``<pod>.<start>``, valid bytes). Default: the ledger's seals.
        rebuild: Write the file even if it is up to date.
        stop: Called after each row. Returns whether to stop and keep the rows written so far.

    Returns:
        The path of the file.

    Raises:
        ConfigError: A journal is foreign or has a newer version, or a journal from which the existing file was gathered
            is missing.
        Unfinished: ``stop`` returned true. The next call continues.
        OSError: There is no space left, or the directory is read-only. The existing file is unchanged.
    """
    run = run if isinstance(run, RunDir) else RunDir(run)
    seals = seals_of(run) if seals is None else seals
    now = fingerprint(run, seals)  # taken first, so that records appended in the meantime make the file stale
    before = recorded_sources(run.trajectories)
    if before is not None and _is_up_to_date(run, before, now, rebuild):
        for kept in (unfinished(run.trajectories), _kept_index(run)):
            if kept.exists():  # skip this on a file system that is mounted read-only
                kept.unlink(missing_ok=True)
        return run.trajectories
    winners = _index(run, seals, now)
    total = len(winners.winners)
    with published(run.trajectories) as temporary:
        done = _resume(unfinished(run.trajectories), temporary, now, winners)
        with TrajectoryWriter(temporary, campaign_name(run), now, root_attributes(run), append=done > 0) as writer:
            for trajectory in winners.trajectories(done):
                writer.append(trajectory)
                if stop():
                    break
        if len(writer) < total:
            raise Unfinished(
                f"{run}: stopped after {len(writer)} of {total} rollouts; continue with: megaflow-hpc gather {run}"
            )
    _kept_index(run).unlink(missing_ok=True)
    return run.trajectories


def _index(run: RunDir, seals: Seals, now: dict[str, Any]) -> Index:
    """Decides which records win. If that takes long, keeps the result until the file is published.

    A gather that continues the work of a stopped one can then skip reading all journals again, which on a busy node may
    take most of its walltime.
    """
    path = _kept_index(run)
    try:
        if (kept := read_index(path, run.journal, now)) is not None:
            return kept
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        logger.warning("%s: %s; reading the journals again", path, error)
    began = time.monotonic()
    winners = index(run, seals)
    if time.monotonic() - began >= KEEP_INDEX_S:
        try:
            with published(path) as temporary:
                write_index(temporary, winners, now)
        except (OSError, UnicodeEncodeError) as error:  # the disk is full, or an id contains lone surrogates
            logger.warning("%s: %s; a gather that is stopped will read the journals again", path, error)
    return winners


def _kept_index(run: RunDir) -> Path:
    return run.trajectories.with_name(f".{run.trajectories.name}.index")


def _resume(kept: Path, temporary: Path, now: dict[str, Any], winners: Index) -> int:
    """Renames the unfinished file of a stopped gather to ``temporary``, and returns its number of rows.

    Removes the file and returns 0 if it does not match the journals.
    """
    try:
        os.rename(kept, temporary)  # before it is checked, so that no other gather replaces it meanwhile
    except FileNotFoundError:
        if not temporary.exists():  # otherwise a network file system has repeated the request
            return 0
    rows = _rows_that_fit(temporary, now, winners)
    if not rows:
        temporary.unlink()
    return rows


def _rows_that_fit(kept: Path, now: dict[str, Any], winners: Index) -> int:
    """Returns the number of rows in an unfinished file. 0 if it is damaged or does not match the journals and this
    version."""
    try:
        with open_file(kept) as file:
            if attribute(file, "sources") != now or attribute_text(file, "software") != SOFTWARE:
                return 0
            ids = file["trajectories/id"]
            for first in range(0, len(ids), _ID_BATCH):
                expected = [escape(entry.id).encode() for entry in winners.winners[first : first + _ID_BATCH]]
                if ids[first : first + _ID_BATCH].tolist() != expected[: len(ids) - first]:
                    return 0
            return 0 if any(offset_faults(file)) else len(ids)
    except (ConfigError, OSError, LookupError, ValueError) as error:
        logger.warning("%s: %s; gathering begins again", kept, error)
        return 0


def gathered(path: str | os.PathLike[str]) -> Path:
    """Returns the campaign file for a path: the path itself, or the ``trajectories.h5`` of a run directory.

    Warns if the run's journals contain records that are missing from the file.

    Raises:
        ConfigError: The directory is not a run directory, or was not gathered.
    """
    if not Path(path).is_dir():
        return Path(path)
    run = RunDir(path)
    remedy = f"megaflow-hpc gather {run}"
    if not run.trajectories.exists():
        read_run(run)
        raise ConfigError(f"{run}: was not gathered yet; write its trajectories.h5 with: {remedy}")
    before = recorded_sources(run.trajectories)
    now = fingerprint(run, seals_of(run))
    if before is not None and now["journals"].items() - before["journals"].items():
        logger.warning("%s: the run has stored more since; bring it up to date with: %s", run.trajectories, remedy)
    return run.trajectories


def _is_up_to_date(run: RunDir, before: dict[str, Any], now: dict[str, Any], rebuild: bool) -> bool:
    """Returns whether the existing file is up to date, given its fingerprint and that of the journals.

    Raises:
        ConfigError: The file is stale, but a journal from which it was gathered is missing.
    """
    gone = sorted(before["journals"].keys() - now["journals"].keys())
    if not gone:
        return before == now and not rebuild
    left = {name: size for name, size in before["journals"].items() if name not in gone}
    if rebuild or left != now["journals"]:
        raise ConfigError(
            f"{run.trajectories}: was made from journals that no longer exist ({', '.join(gone)}), so rebuilding it "
            f"would lose their rollouts; restore them to {run.journal}, or move the file away to gather what is left"
        )
    return True


T = TypeVar("T")

# --- the index, kept in a file ----------------------------------------------------------------------------------------

_PIECE = struct.Struct("<II")
_ENTRIES = 1 << 16
"""Number of entries per chunk."""

_Fields = tuple[str, str, int, int, int, int, int, int]
"""An index entry: (id, status, epoch, attempt, time_ns, journal number, start, size)."""


class _Contents(msgspec.Struct, array_like=True):
    journals: list[str]
    winners: int


def write_index(path: Path, index: Index, fingerprint: dict[str, Any]) -> None:
    """Writes an index to a file, in chunks that bound memory. Raises OSError.

    Each chunk is ``u32 length | u32 crc | msgpack``, little-endian. The first chunk contains the fingerprint of the
    journals, the second their names and the number of winners. The remaining chunks are lists of entries, winners
    first.

    Args:
        fingerprint: Fingerprint of the journals and seals from which the index was made.
    """
    numbers: dict[str, int] = {}
    for entry in chain(index.winners, *index.losers.values()):
        numbers.setdefault(entry.journal, len(numbers))
    with open(path, "xb") as file:
        _write(file, fingerprint)
        _write(file, _Contents(list(numbers), len(index.winners)))
        entries = chain(index.winners, *index.losers.values())
        while piece := [_fields(entry, numbers) for entry in islice(entries, _ENTRIES)]:
            _write(file, piece)


def read_index(path: Path, root: Path, fingerprint: dict[str, Any]) -> Index | None:
    """Reads an index. Returns ``None`` if it was built from other journals or seals.

    Args:
        root: Directory of the journals.

    Raises:
        OSError: The file is missing or unreadable.
        ValueError: The file is damaged.
    """
    with open_regular(path) as file:
        pieces = _pieces(file)
        if _decoded(next(pieces, b""), dict[str, Any]) != fingerprint:
            return None
        contents = _decoded(next(pieces, b""), _Contents)
        index = Index(root)
        for piece in pieces:
            for fields in _decoded(piece, list[_Fields]):
                journal = contents.journals[fields[5]]
                entry = RecordEntry(fields[0], sys.intern(fields[1]), *fields[2:5], journal, *fields[6:])
                if len(index.winners) < contents.winners:
                    index.winners.append(entry)
                else:
                    index.losers.setdefault(entry.id, []).append(entry)
    if len(index.winners) < contents.winners:
        raise ValueError("truncated")
    return index


def _fields(entry: RecordEntry, numbers: dict[str, int]) -> _Fields:
    order = entry.epoch, entry.attempt, entry.time_ns
    return entry.id, entry.status, *order, numbers[entry.journal], entry.start, entry.size


def _write(file: BinaryIO, content: object) -> None:
    data = msgspec.msgpack.encode(content)
    file.write(_PIECE.pack(len(data), zlib.crc32(data)))
    file.write(data)


def _pieces(file: BinaryIO) -> Iterator[bytes]:
    while head := file.read(_PIECE.size):
        if len(head) < _PIECE.size:
            raise ValueError("truncated")
        length, crc = _PIECE.unpack(head)
        data = file.read(length)
        if len(data) < length or zlib.crc32(data) != crc:
            raise ValueError("damaged")
        yield data


def _decoded(data: bytes, kind: type[T]) -> T:
    return msgspec.msgpack.decode(data, type=kind)
