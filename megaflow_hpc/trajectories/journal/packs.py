"""Packs: files that contain many small journals of one pod, so that the number of files does not grow with every start.

::

    journal/<pod>.<start>.journal         a journal
    journal/<pod>.<start>.1.pack          copies of earlier starts' journals, made by that start

    pack     magic "MFHPCPCK" | journals, byte for byte | table | footer
    table    msgpack {journal: [offset, size]}
    footer   u64 offset of the table | u32 its length | u32 its CRC-32 | magic

A packed journal keeps its name and offsets, so seals, cursors and record locations remain valid, and readers need not
know whether a journal is packed.

*What is packed.* A start packs the journals of earlier starts, whether they were closed or their writer was killed. It
does so some minutes after it began. By then, every earlier start is fenced off, so anything it still writes is ignored.

*Nothing is lost or counted twice.* A pack is complete and durable before it gets its name, and is immutable. A later
start removes an original only after comparing it with its copy. Both may therefore exist for hours, and a reader with
an old directory listing finds at least one of them. Since journals are identified by name, a journal that exists twice
counts once. If an original differs from its copy because its writer was still running, the original is kept, and
readers use it.

*Bounds.* A start writes at most one pack of :data:`PACK_BYTES`. A pack of less than half that size is packed again with
later journals. A pod therefore has fewer than :data:`FAN` small files, apart from files waiting to be removed.
"""

from __future__ import annotations

import logging
import os
import re
import struct
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec

from megaflow_hpc.errors import ConfigError, MegaflowError
from megaflow_hpc.host.atomic import file_mode, fsync
from megaflow_hpc.host.files import open_regular

logger = logging.getLogger(__name__)

JOURNAL, PACK = ".journal", ".pack"
FAN = 16
"""Number of small files (journals or packs) to merge into one pack."""
PACK_BYTES = 32 << 20
"""Maximum size of a pack in bytes. Files larger than half of this are not packed."""
LISTING_AGE_S = 10.0
"""Maximum age in seconds of a directory listing that is used to find a journal's pack."""
_COPY_BYTES = 1 << 20
_PACK_NAME = re.compile(r"[^.].*\.[0-9]+\.[0-9]+\.pack")
_MAX_TABLE = 64 << 20

_MAGIC = b"MFHPCPCK"
_FOOTER = struct.Struct("<QII8s")
_Table = dict[str, tuple[int, int]]


class Packed(NamedTuple):
    """Location of a journal's bytes in a pack."""

    pack: str
    offset: int
    size: int


# --- reading ----------------------------------------------------------------------------------------------------------


class PackedJournal:
    """A packed journal, opened for reading. Provides the methods of a binary file that journal readers use."""

    def __init__(self, file: BinaryIO, packed: Packed) -> None:
        self._file, self._packed, self._position = file, packed, 0

    @property
    def size(self) -> int:
        return self._packed.size

    def seek(self, position: int) -> None:
        self._position = position

    def read(self, size: int) -> bytes:
        size = max(0, min(size, self._packed.size - self._position))
        self._file.seek(self._packed.offset + self._position)
        data = self._file.read(size)
        self._position += len(data)
        return data

    def __enter__(self) -> PackedJournal:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


class _Catalog:
    """The packs in one directory. Each table is read only once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tables: dict[str, _Table] = {}
        self._listed_at = -float("inf")
        self.journals: dict[str, Packed] = {}

    def update(self, names: Iterable[str]) -> None:
        """Reads the tables of new packs, given a directory listing.

        Raises:
            ConfigError: A pack is damaged.
        """
        self._listed_at = time.monotonic()
        packs = {name for name in names if _PACK_NAME.fullmatch(name)}
        if packs == self._tables.keys():
            return
        tables = {name: self._tables[name] for name in packs & self._tables.keys()}
        for name in sorted(packs - self._tables.keys()):
            try:
                tables[name] = read_table(self._folder / name)
            except FileNotFoundError:  # packed again since the listing, while this process paused for minutes
                for later in sorted(filter(_PACK_NAME.fullmatch, os.listdir(self._folder))):
                    with suppress(FileNotFoundError):
                        tables[later] = tables.get(later) or read_table(self._folder / later)
        self._tables = tables
        self.journals = {
            journal: Packed(name, *place) for name, table in sorted(tables.items()) for journal, place in table.items()
        }

    def find(self, journal: str) -> Packed | None:
        """Returns the location of a packed journal. If it is unknown and the listing is old, lists the directory
        again."""
        if journal not in self.journals and time.monotonic() - self._listed_at >= LISTING_AGE_S:
            with suppress(FileNotFoundError):
                self.update(os.listdir(self._folder))
        return self.journals.get(journal)

    def forget(self) -> None:
        """Discards the listing, so that the next :meth:`find` lists the directory again."""
        self._listed_at, self._tables, self.journals = -float("inf"), {}, {}


_catalogs: dict[str, _Catalog] = {}


def _catalog(folder: Path) -> _Catalog:
    return _catalogs.setdefault(os.fspath(folder), _Catalog(folder))


def sizes(folder: Path) -> dict[str, int | None]:
    """Returns the sizes in bytes of all journals in a directory, by name. Lists the directory once.

    The size is ``None`` for a journal in its own file, which may grow. A packed journal never changes.

    Raises:
        ConfigError: A pack is damaged.
    """
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    catalog = _catalog(folder)
    catalog.update(names)
    files = {name for name in names if name.endswith(JOURNAL) and not name.startswith(".")}
    size_by_name: dict[str, int | None] = {name: packed.size for name, packed in catalog.journals.items()}
    size_by_name.update(dict.fromkeys(files))
    return dict(sorted(size_by_name.items()))


def size_of(path: Path) -> int:
    """Returns the size of a journal in bytes.

    Raises:
        FileNotFoundError: The journal does not exist.
    """
    try:
        return path.stat().st_size
    except FileNotFoundError:
        packed = _catalog(path.parent).find(path.name)
        if packed is None:
            raise
        return packed.size


def is_packed_by_later_start(path: Path) -> bool:
    """Returns whether a pack that may contain this journal was written after the pod had restarted.

    Lists the directory once.
    """
    pod, _, start = path.name.removesuffix(JOURNAL).rpartition(".")
    later = re.compile(rf"{re.escape(pod)}\.([0-9]+)\.[0-9]+\.pack")
    matches = (later.fullmatch(name) for name in os.listdir(path.parent)) if start.isdigit() else ()
    return any(match is not None and int(match[1]) > int(start) for match in matches)


def open_packed(path: Path) -> PackedJournal | None:
    """Opens a packed journal. Returns ``None`` if no pack contains it. Raises OSError."""
    catalog = _catalog(path.parent)
    for _ in range(3):
        packed = catalog.find(path.name)
        if packed is None:
            return None
        try:
            return PackedJournal(open_regular(path.parent / packed.pack), packed)
        except FileNotFoundError:  # it was merged into a larger pack in the meantime
            catalog.forget()
    return None


def read_table(pack: Path) -> _Table:
    """Returns (offset, size) of each journal in a pack, by name.

    Raises:
        ConfigError: The pack is damaged.
    """
    with open_regular(pack) as file:
        try:
            end = file.seek(-_FOOTER.size, os.SEEK_END)
            offset, length, crc, magic = _FOOTER.unpack(file.read(_FOOTER.size))
            if magic != _MAGIC or offset + length != end or length > _MAX_TABLE:
                raise ValueError("no footer")
            file.seek(offset)
            data = file.read(length)
            if zlib.crc32(data) != crc:
                raise ValueError("checksum of its table")
            table = msgspec.msgpack.decode(data, type=_Table)
            for journal, (first, size) in table.items():
                if "/" in journal or not journal.endswith(JOURNAL) or not 0 <= first <= first + size <= offset:
                    raise ValueError(f"entry {journal!r}: {first}, {size}")
            return table
        except (OSError, ValueError) as error:
            raise ConfigError(f"{pack}: damaged ({error}); it holds journals: restore the file") from error


# --- packing ----------------------------------------------------------------------------------------------------------


def pack_journals(folder: Path, pod: str, start: str) -> None:
    """Packs the small journals of a pod's earlier starts, and removes originals that an earlier start has packed.

    Call it once, at least :attr:`~megaflow_hpc.ledger.lease.Times.lease_s` after the start began. By then, earlier
    starts can no longer commit records, and all processes see their packs. Errors are only logged, because packing is
    an optimisation.

    Args:
        folder: Directory of the journals.
        pod, start: The calling start.
    """
    if not start.isdigit():
        return
    try:
        packing = _Packing(folder, pod, int(start))
        packing.clean_up()
        packing.pack()
    except (OSError, MegaflowError) as error:
        logger.warning("%s: journals of %s are not packed: %s", folder, pod, error)


class _Packing:
    """Packs the journals of one pod, and removes the originals of packed journals."""

    def __init__(self, folder: Path, pod: str, start: int) -> None:
        self._folder, self._pod, self._start = folder, pod, start
        names = [name for name in os.listdir(folder) if name.startswith((f"{pod}.", f".{pod}."))]
        for name in names:
            if name.startswith(f".{pod}.") and name.endswith(PACK):
                (folder / name).unlink(missing_ok=True)  # left by a killed start
        self._journals = {name for name in names if self._is_earlier(name, JOURNAL)}
        self._packs: dict[str, _Table] = {}
        for name in names:
            if _PACK_NAME.fullmatch(name) and self._is_earlier(_without_level(name), PACK):
                self._packs[name] = read_table(folder / name)

    def _is_earlier(self, name: str, suffix: str) -> bool:
        """Returns whether a name is ``<pod>.<start><suffix>`` of an earlier start of this pod."""
        pod, _, start = name.removesuffix(suffix).rpartition(".")
        return name.endswith(suffix) and pod == self._pod and start.isdigit() and int(start) < self._start

    def clean_up(self) -> None:
        """Removes every file that an earlier start's pack contains as an identical copy. Compares all bytes first."""
        for name in sorted(self._journals):
            path = self._folder / name
            for pack, table in self._packs.items():
                if name in table and _equal(path, 0, path.stat().st_size, self._folder / pack, *table[name]):
                    path.unlink()
                    self._journals.discard(name)
                    break
        for pack in sorted(self._packs, key=_age):
            if all(self._is_in_later(pack, journal) for journal in self._packs[pack]):
                (self._folder / pack).unlink()
                del self._packs[pack]

    def _is_in_later(self, pack: str, journal: str) -> bool:
        """Returns whether a later pack contains an identical copy of a journal."""
        location = self._packs[pack][journal]
        for later in self._later_than(pack):
            table = self._packs[later]
            if journal in table and _equal(self._folder / pack, *location, self._folder / later, *table[journal]):
                return True
        return False

    def _later_than(self, pack: str) -> list[str]:
        return [other for other in self._packs if _age(other) > _age(pack)]

    def pack(self) -> None:
        """Writes one pack from the oldest small files, if there are enough of them."""
        packed = {journal for table in self._packs.values() for journal in table}
        files = {name: {name: (0, (self._folder / name).stat().st_size)} for name in self._journals - packed}
        for pack, table in self._packs.items():
            copied = {journal for later in self._later_than(pack) for journal in self._packs[later]}
            if not table.keys() <= copied:
                files[pack] = table
        sizes = {name: sum(size for _, size in table.values()) for name, table in files.items()}
        small = sorted((name for name in files if sizes[name] <= PACK_BYTES // 2), key=_age)
        taken: list[str] = []
        total = 0
        for name in small:
            if len(taken) > 1 and total + sizes[name] > PACK_BYTES:
                break
            taken.append(name)
            total += sizes[name]
        if len(small) >= FAN or len(taken) < len(small):
            self._write({name: files[name] for name in taken})

    def _write(self, files: Mapping[str, _Table]) -> None:
        name = f"{self._pod}.{self._start}.1{PACK}"  # earlier versions also used numbers other than 1
        temporary = self._folder / f".{name}"
        table: _Table = {}
        try:
            with open(temporary, "xb") as out:
                os.fchmod(out.fileno(), file_mode(self._folder))
                out.write(_MAGIC)
                for source, journals in files.items():
                    for journal, (offset, size) in journals.items():
                        table[journal] = out.tell(), size
                        for piece in _pieces(self._folder / source, offset, size):
                            out.write(piece)
                data = msgspec.msgpack.encode(table)
                out.write(data + _FOOTER.pack(out.tell(), len(data), zlib.crc32(data), _MAGIC))
                out.flush()
                os.fsync(out.fileno())
        except OSError:  # the disk may be full, so free the space
            temporary.unlink(missing_ok=True)
            raise
        os.link(temporary, self._folder / name)  # never replaces a pack
        temporary.unlink()
        fsync(self._folder)


def _without_level(pack: str) -> str:
    """Converts the name ``<pod>.<start>.<level>.pack`` to ``<pod>.<start>.pack``."""
    return pack.removesuffix(PACK).rpartition(".")[0] + PACK


def _age(name: str) -> tuple[int, str]:
    """Returns the sort key of a journal or pack: the start that wrote it, then its name."""
    path = _without_level(name).removesuffix(PACK) if name.endswith(PACK) else name.removesuffix(JOURNAL)
    return int(path.rpartition(".")[2]), name


def _pieces(path: Path, offset: int, size: int) -> Iterator[bytes]:
    """Yields exactly ``size`` bytes of a file. Raises OSError if there are fewer."""
    with open_regular(path) as file:
        file.seek(offset)
        while size:
            piece = file.read(min(size, _COPY_BYTES))
            if not piece:
                raise OSError(f"{path}: shorter than expected")
            size -= len(piece)
            yield piece


def _equal(path: Path, offset: int, size: int, other: Path, other_offset: int, other_size: int) -> bool:
    """Returns whether two ranges of two files contain the same bytes."""
    if size != other_size:
        return False
    pairs = zip(_pieces(path, offset, size), _pieces(other, other_offset, size), strict=True)
    return all(ours == theirs for ours, theirs in pairs)
