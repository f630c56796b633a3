"""The table of contents of a journal: which rollouts it holds, so that whoever takes a block over need not read it.

``journal/<pod>.<start>.contents`` lies beside the parts of a journal. It is appended to after each fsync of the journal
and never fsynced itself: it tells nothing that is not durable, and what a power loss takes of it is read from the
journal's own frames. It is written in the frames of :mod:`~megaflow_hpc.trajectories.journal.frames`, under a salt that
follows from its journal's, each of them for one commit::

    {"kind": "contents", "part": int, "base": int, "start": int, "end": int,
     "records": [[end, size, id, status, epoch, attempt, block], …]}

``start`` is the ``end`` of the frame before: between the two lies nothing but these records and other kinds. Offsets
are logical, ``base`` is the bytes before the part, ``size`` that of the record's frame.

Nobody depends on it. It is believed as far as it is whole and without a gap, if it is of this journal, if the journal
is as long as it says, and if its last record stands where it says; else the journal is read.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.host.atomic import file_mode
from megaflow_hpc.trajectories.journal.checks import heading_in
from megaflow_hpc.trajectories.journal.frames import (
    FRAME_SIZE,
    HEADER_SIZE,
    frame_head,
    header,
    open_journal,
    pack_record,
    read_frame,
    read_header,
    read_journal,
    starts_frame,
    write_at,
)
from megaflow_hpc.trajectories.journal.headings import HEAD_BYTES, Heading

logger = logging.getLogger(__name__)

SUFFIX = ".contents"


class Listed(NamedTuple):
    """A record of a trajectory in its journal."""

    heading: Heading
    end: int
    """Logical offset behind it."""
    size: int
    """Bytes of its frame."""


ListedFields = tuple[int, int, str, str, int, int, int]
"""A :class:`Listed` as it is written: end, size, and the fields of the heading."""


class Contents(NamedTuple):
    """What a table tells of a journal, as far as it may be believed."""

    records: list[Listed]
    covered: int = 0
    """Logical offset up to which it tells of the journal."""
    part: int = 0
    """The part in which that lies."""
    base: int = 0
    """Bytes in the parts before that one."""
    size: int = 0
    """Bytes of that part, perhaps more than it tells of."""


def contents_path(journal: Path) -> Path:
    """Returns the path of the table of the journal whose part 0 is ``journal``."""
    return journal.with_name(f"{journal.name.removesuffix('.journal')}{SUFFIX}")


class ContentsWriter:
    """Appends to the table of one journal; without one after the first error, since a gap makes the rest useless.

    Args:
        journal: part 0.
        salt: of part 0.
    """

    def __init__(self, journal: Path, salt: bytes) -> None:
        self._path, self._salt = contents_path(journal), _salt_of(salt)
        self._file: int | None = None
        self._given_up = False
        self._written = 0
        self._covered = 0

    def add(self, part: int, base: int, end: int, records: Sequence[ListedFields]) -> None:
        """Notes records that are durable. Never raises OSError.

        Args:
            part: number of the part in which they lie.
            base: bytes in the parts before it.
            end: logical offset up to which the journal is durable.
        """
        if self._given_up or not records:
            return
        content = {"kind": "contents", "part": part, "base": base, "start": self._covered, "end": end}
        payload = pack_record({**content, "records": records})
        try:
            if self._file is None:
                self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
                if (mode := file_mode(self._path.parent)) != 0o600:
                    os.fchmod(self._file, mode)
                self._written = write_at(self._file, header(self._salt), 0)
            frame = frame_head(payload, self._salt, self._written, time.time_ns()) + payload
            self._written = write_at(self._file, frame, self._written)
        except OSError as error:
            logger.warning("%s: %s; whoever takes this pod's blocks over reads its journal", self._path, error)
            self._given_up = True
            self.close()
        self._covered = end

    def close(self) -> None:
        """Closes the file. May be called twice."""
        if self._file is not None:
            os.close(self._file)
            self._file, self._given_up = None, True


def read_contents(parts: Sequence[Path]) -> Contents | None:
    """Returns what the table of a journal tells; ``None`` where there is none, or none that may be believed.

    Args:
        parts: the journal's files, in order.

    Raises:
        ConfigError: the journal is none, or of a newer version.
        OSError: the run directory does not answer.
    """
    path = contents_path(parts[0]) if parts else None
    if path is None or not path.exists():
        return None
    with open_journal(parts[0]) as first:
        salt = read_header(first, parts[0])
        found = _read(path, _salt_of(salt)) if salt is not None else Contents([])
        size = None
        if salt is not None and found.records and found.part == 0:
            size = _agreed_size(found, parts[0], first, salt)
    if found.part and found.part < len(parts):
        before = sum(part.stat().st_size for part in parts[: found.part])
        with open_journal(parts[found.part]) as last:
            salt = read_header(last, parts[found.part])
            if salt is not None and before >= found.base:
                size = _agreed_size(found, parts[found.part], last, salt)
    if size is None:
        logger.warning("%s: does not agree with its journal, which is read", path)
        return None
    return found._replace(size=size)


def _salt_of(salt: bytes) -> bytes:
    """Returns the salt of the table of a journal: a frame of either is none in the other."""
    return bytes(byte ^ 0xFF for byte in salt)


def _read(path: Path, salt: bytes) -> Contents:
    """Returns the whole frames from the beginning on, each beginning where the one before ended."""
    records: list[Listed] = []
    covered = part = base = 0
    try:
        for _, said in read_journal(path, salt=salt):
            if said["start"] != covered or said["part"] < part:
                break
            listed = [Listed(Heading(*heading), end, size) for end, size, *heading in said["records"]]
            ends = [covered, *(each.end for each in listed), said["end"]]
            if said["base"] < base or not listed or ends != sorted(ends):
                break
            records += listed
            covered, part, base = said["end"], said["part"], said["base"]
    except (ConfigError, KeyError, TypeError, ValueError) as error:
        logger.warning("%s: %r; the journal is read from there on", path, error)
    return Contents(records, covered, part, base)


def _agreed_size(contents: Contents, path: Path, file: BinaryIO, salt: bytes) -> int | None:
    """Returns the size of the part that a table ends in; ``None`` where it and its journal do not agree.

    The part has to be as long as its table says, and to hold the last record of it where it says.
    """
    last, size = contents.records[-1], os.fstat(file.fileno()).st_size
    start = last.end - last.size - contents.base
    if start < HEADER_SIZE or size < contents.covered - contents.base:
        return None
    file.seek(start)
    beginning = file.read(FRAME_SIZE + HEAD_BYTES)
    if starts_frame(beginning, salt, start) != last.size:
        return None
    with suppress(ConfigError, KeyError, TypeError, ValueError):
        try:
            heading = heading_in(beginning[FRAME_SIZE : last.size])
        except (KeyError, TypeError, ValueError):  # its fields do not come first
            heading = heading_in(read_frame(path, start).payload)
        return size if heading == last.heading else None
    return None
