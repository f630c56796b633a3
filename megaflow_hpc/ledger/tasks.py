"""A run's tasks, packed into one file from which a pod reads those of the blocks that it holds, and no others.

::

    RUN/tasks.jsonl    a line for each task, in the order of the plan: {"alike", "images", "task"}
    RUN/tasks.index    where each line lies, little-endian:
                       magic "MFHPCTSK" | u64 lines | u64 bytes of tasks.jsonl | u32 crc of the rest
                       u64 hashes of the ids, ascending | u64 offsets | u32 lengths

Both are written once, before ``run.json``, which says how many tasks there are and how large the first file is. The
index is a help: where it is missing or damaged, lines are counted anew. Runs of earlier versions have their tasks in
``run.json`` itself.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import sys
import zlib
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, ValuesView
from typing import Any, NamedTuple, TypeVar

import msgspec

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.host.atomic import new_file, write_atomic
from megaflow_hpc.host.files import open_regular, read_regular
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.record import PackedTasks, RunRecord, decode

_MAGIC = b"MFHPCTSK"
_HEAD = struct.Struct("<8sQQI")

T = TypeVar("T")


class PlannedTask(NamedTuple):
    """A task, and what a pod needs to know of it beside."""

    task: dict[str, Any]
    """As :meth:`megaflow_hpc.types.Task.to_dict` gives it."""
    images: dict[str, str]
    """Image name in the task → SIF file or directory; those that were not built are left out."""
    alike: int = 1
    """Tasks of the campaign, this one counted, whose agents' image has the same name."""

    @property
    def image(self) -> str | None:
        """The file or directory of its agent's image; ``None`` where that was not built."""
        return self.images.get(self.task.get("image", ""))


class _Line(msgspec.Struct):
    task: dict[str, Any]
    images: dict[str, str] = {}
    alike: int = 1


class _OnlyId(msgspec.Struct):
    id: str


class _LineOfId(msgspec.Struct):
    task: _OnlyId


class _Index(NamedTuple):
    hashes: array[int]
    offsets: array[int]
    lengths: array[int]


class _Values(ValuesView[PlannedTask]):
    _mapping: TaskFile

    def __iter__(self) -> Iterator[PlannedTask]:
        return self._mapping.in_order()


def write_tasks(run: RunDir, tasks: Iterable[PlannedTask]) -> PackedTasks:
    """Writes the tasks of a run that has no ``run.json`` yet; holds one of them in memory at a time."""
    places: list[tuple[int, int, int]] = []
    end = 0
    with new_file(run.packed_tasks) as file:
        for planned in tasks:
            line = _line_of(planned)
            file.write(line)
            places.append((_hash(planned.task["id"]), end, len(line)))
            end += len(line)
    write_atomic(run.tasks_index, _packed(places, end))
    return PackedTasks(len(places), end)


def planned_tasks(run: RunDir, record: RunRecord) -> Mapping[str, PlannedTask]:
    """Returns the tasks of a run by id, in the order of its plan; nothing is read before it is asked for."""
    if record.packed is not None:
        return TaskFile(run, record.packed)
    return {}


def image_files(tasks: Mapping[str, PlannedTask]) -> dict[str, str]:
    """Returns the files of all images of a run by their names."""
    found: dict[str, str] = {}
    for planned in tasks.values():
        found |= planned.images
    return found


class TaskFile(Mapping[str, PlannedTask]):
    """The tasks of one run, each read when it is asked for. For one thread.

    Every look may raise ConfigError, where the file is damaged or gone, and OSError, where the run directory does not
    answer.
    """

    def __init__(self, run: RunDir, packed: PackedTasks) -> None:
        self._run, self._packed = run, packed
        self._file = -1
        self._index: _Index | None = None

    def __del__(self) -> None:
        self._close()

    def __len__(self) -> int:
        return self._packed.count

    def __getitem__(self, task: str) -> PlannedTask:
        index, wanted = self._read_index(), _hash(task)
        place = bisect_left(index.hashes, wanted)
        while place < len(index.hashes) and index.hashes[place] == wanted:
            line = self._line(index.offsets[place], index.lengths[place])
            if line.task.get("id") == task:
                return PlannedTask(line.task, line.images, line.alike)
            place += 1
        raise KeyError(task)

    def __iter__(self) -> Iterator[str]:
        for line in self._lines():
            yield self._decoded(line, _LineOfId).task.id

    def values(self) -> ValuesView[PlannedTask]:
        """Returns a view that reads the file from its beginning on, and holds one task in memory at a time."""
        return _Values(self)

    def in_order(self) -> Iterator[PlannedTask]:
        """Yields every task in the order of the plan."""
        for line in self._lines():
            said = self._decoded(line, _Line)
            yield PlannedTask(said.task, said.images, said.alike)

    def _lines(self) -> Iterator[bytes]:
        self._open()
        with open_regular(self._run.packed_tasks) as file:
            yield from file

    def _line(self, offset: int, length: int) -> _Line:
        try:
            data = os.pread(self._open(), length, offset)
        except OSError:  # a network file system has forgotten the file that was open
            self._close()
            raise
        return self._decoded(data, _Line)

    def _decoded(self, line: bytes, kind: type[T]) -> T:
        try:
            return decode(line, kind)
        except ValueError as error:
            raise self._damaged(f"a line of it is no task: {error}") from error

    def _open(self) -> int:
        """Returns the descriptor of the file, which is opened once. Raises OSError."""
        if self._file < 0:
            try:
                with open_regular(self._run.packed_tasks) as opened:
                    file = os.dup(opened.fileno())
            except FileNotFoundError:
                raise self._damaged("it is gone") from None
            self._file = file
            if (size := os.fstat(file).st_size) != self._packed.bytes:
                self._close()
                raise self._damaged(f"it has {size} bytes where run.json says {self._packed.bytes}")
        return self._file

    def _close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _read_index(self) -> _Index:
        if self._index is None:
            self._open()
            try:
                data = read_regular(self._run.tasks_index)
            except FileNotFoundError:
                data = b""
            self._index = _unpacked(data, self._packed) or self._counted()
        return self._index

    def _counted(self) -> _Index:
        """Returns the index as the lines themselves have it."""
        places, end = [], 0
        for line in self._lines():
            places.append((_hash(self._decoded(line, _LineOfId).task.id), end, len(line)))
            end += len(line)
        if len(places) != self._packed.count:
            raise self._damaged(f"it has {len(places)} lines where run.json says {self._packed.count}")
        return _columns(places)

    def _damaged(self, what: str) -> ConfigError:
        return ConfigError(f"{self._run.packed_tasks}: {what}; the run directory is damaged: restore it, or plan again")


def _line_of(planned: PlannedTask) -> bytes:
    content = msgspec.to_builtins(planned._asdict(), enc_hook=str)
    return json.dumps(content, sort_keys=True, default=str, separators=(",", ":")).encode() + b"\n"


def _hash(task: str) -> int:
    digest = hashlib.blake2b(task.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _columns(places: list[tuple[int, int, int]]) -> _Index:
    places.sort()
    hashes, offsets, lengths = zip(*places, strict=True) if places else ((), (), ())
    return _Index(array("Q", hashes), array("Q", offsets), array("I", lengths))


def _packed(places: list[tuple[int, int, int]], size: int) -> bytes:
    columns = _columns(places)
    if sys.byteorder == "big":
        for column in columns:
            column.byteswap()
    data = b"".join(column.tobytes() for column in columns)
    return _HEAD.pack(_MAGIC, len(places), size, zlib.crc32(data)) + data


def _unpacked(data: bytes, packed: PackedTasks) -> _Index | None:
    """Returns the index that a file holds; ``None`` where it is not the one of this run, or damaged."""
    body = memoryview(data)[_HEAD.size :]
    if len(data) != _HEAD.size + 20 * packed.count:
        return None
    if _HEAD.unpack_from(data) != (_MAGIC, packed.count, packed.bytes, zlib.crc32(body)):
        return None
    found = _Index(array("Q"), array("Q"), array("I"))
    begin = 0
    for column in found:
        end = begin + packed.count * column.itemsize
        column.frombytes(body[begin:end])
        begin = end
        if sys.byteorder == "big":
            column.byteswap()
    return found
