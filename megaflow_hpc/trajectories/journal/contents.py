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
is as long as it says, and if its last record stands where it says; else the journal is read. Before a record of it
counts as stored it is looked for in the journal. At most :data:`MOST_BYTES` are believed.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, BinaryIO, NamedTuple

import msgspec
from msgspec import Meta

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.host.atomic import file_mode
from megaflow_hpc.trajectories.journal.checks import heading_in
from megaflow_hpc.trajectories.journal.frames import (
    FRAME_SIZE,
    HEADER_SIZE,
    MAX_RECORD,
    frame_head,
    header,
    open_journal,
    pack_record,
    read_frame,
    read_frames,
    read_header,
    starts_frame,
    write_at,
)
from megaflow_hpc.trajectories.journal.headings import HEAD_BYTES, Heading
from megaflow_hpc.types import Status

logger = logging.getLogger(__name__)

SUFFIX = ".contents"
MOST_BYTES = 32 << 20
"""Of a table that are read: some 400,000 rollouts of one start of a pod, or half a gigabyte of memory at the worst.
What is beyond is read from the journal."""
SHORT = 256
"""Bytes of a record within which its deciding fields lie, where ids are short."""

_Offset = Annotated[int, Meta(ge=0, lt=1 << 62)]


class Listed(NamedTuple):
    """A record of a trajectory in its journal."""

    heading: Heading
    end: int
    """Logical offset behind it."""
    size: int
    """Bytes of its frame."""
    part: int
    base: int
    """Bytes in the parts before that one."""


class _Commit(msgspec.Struct, tag_field="kind", tag="contents"):
    """A frame; decoded by its types, so that little memory is enough for whatever else its bytes are."""

    part: _Offset
    base: _Offset
    start: _Offset
    end: _Offset
    records: list[
        tuple[
            _Offset,
            Annotated[int, Meta(gt=FRAME_SIZE, le=FRAME_SIZE + MAX_RECORD)],
            Annotated[str, Meta(min_length=1)],
            Status,
            int,
            int,
            int,
        ]
    ]


_decoder = msgspec.msgpack.Decoder(_Commit)

ListedFields = tuple[int, int, str, str, int, int, int]
"""A :class:`Listed` as it is written: end, size, and the fields of the heading."""


class OpenPart(NamedTuple):
    """A part of a journal that is open for reading."""

    path: Path
    file: BinaryIO
    salt: bytes

    def holds(self, listed: Listed) -> bool:
        """Returns whether a record stands where a table says; of one that is damaged behind its heading, too."""
        start = listed.end - listed.size - listed.base
        if start < HEADER_SIZE:
            return False
        for length in (SHORT, HEAD_BYTES):
            beginning = os.pread(self.file.fileno(), FRAME_SIZE + length, start)
            if starts_frame(beginning, self.salt, start) != listed.size:
                return False
            with suppress(KeyError, TypeError, ValueError):
                return heading_in(beginning[FRAME_SIZE : listed.size]) == listed.heading
        with suppress(ConfigError, KeyError, TypeError, ValueError):  # its fields do not come first
            return heading_in(read_frame(self.path, start).payload) == listed.heading
        return False


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
    journal: OpenPart | None = None
    """That part, as it was looked at."""


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
    first = open_part(parts[0])
    found = _read(path, _salt_of(first.salt)) if first is not None else Contents([])
    if found.records and found.part < len(parts):
        journal = first if found.part == 0 else open_part(parts[found.part])
        before = sum(part.stat().st_size for part in parts[: found.part])
        size = os.fstat(journal.file.fileno()).st_size if journal is not None else 0
        agrees = before >= found.base and size >= found.covered - found.base
        if journal is not None and agrees and journal.holds(found.records[-1]):
            return found._replace(size=size, journal=journal)
    logger.warning("%s: does not agree with its journal, which is read", path)
    return None


def open_part(path: Path) -> OpenPart | None:
    """Opens a part of a journal; ``None`` for one whose creation never finished. Raises as :func:`read_contents`."""
    file = open_journal(path)
    try:
        salt = read_header(file, path)
        return OpenPart(path, file, salt) if salt is not None else None
    except BaseException:
        file.close()
        raise


def _salt_of(salt: bytes) -> bytes:
    """Returns the salt of the table of a journal: a frame of either is none in the other."""
    return bytes(byte ^ 0xFF for byte in salt)


def _read(path: Path, salt: bytes) -> Contents:
    """Returns the whole frames from the beginning on, each beginning where the one before ended."""
    records: list[Listed] = []
    covered = part = base = 0
    try:
        for frame in read_frames(path, MOST_BYTES, wanted=salt):
            said = _decoder.decode(frame.payload)
            if said.start != covered or said.part < part or said.base < base or not said.records:
                break
            behind, listed = max(covered, said.base), list[Listed]()
            for end, size, rollout, status, epoch, attempt, block in said.records:
                if behind + size > end:
                    raise ValueError(f"a record of {size} bytes behind {behind} that ends at {end}")
                listed.append(Listed(Heading(rollout, status, epoch, attempt, block), end, size, said.part, said.base))
                behind = end
            if behind > said.end:
                break
            records += listed
            covered, part, base = said.end, said.part, said.base
    except (ConfigError, ValueError, RecursionError) as error:
        logger.warning("%s: %s; the journal is read from there on", path, error)
    return Contents(records, covered, part, base)
