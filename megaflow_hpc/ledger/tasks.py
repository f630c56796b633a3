"""Reads and writes a run's tasks, which are stored in a single file. A pod reads only the tasks of its blocks.

::

    RUN/tasks.jsonl    one line per task, in the order of the plan: {"alike", "images", "task"}
    RUN/tasks.index    position of each line, little-endian:
                       magic "MFHPCTSK" | u64 lines | u64 bytes of tasks.jsonl | u32 CRC of the rest
                       u64 hashes of the ids, ascending | u64 offsets | u32 lengths

    RUN/ledger/tasks.json    task id → :class:`AcceptedTask`, for tasks with accepted changes

The first two files are written before ``run.json``, which contains the number of tasks and the size of tasks.jsonl.
``extend`` appends lines while no pod is left, and then writes ``run.json`` again. If the index is missing or damaged,
readers rebuild it from the lines. If a task's files have changed, a user may accept the change (``resume
--accept-changes``). Readers then use the new digests of the task's files. Instructions and settings stay as planned.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import time
import zlib
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence, ValuesView
from typing import Any, NamedTuple

import msgspec

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.host.atomic import new_file, write_atomic, write_json
from megaflow_hpc.host.files import open_regular, read_regular
from megaflow_hpc.rundir.layout import RunDir, read_json
from megaflow_hpc.rundir.record import PackedTasks, RunRecord, decode

# --- accepted changes ---


class Change(msgspec.Struct):
    """One accepted change to a task's files."""

    at: float
    """Time when the user accepted the change, in Unix seconds."""
    before: str
    """Digest of the files before the change."""
    after: str


class AcceptedTask(msgspec.Struct):
    """A task whose changed files the user has accepted."""

    files: dict[str, Any]
    """Digests of the current files, which replace the digests in the task's metadata."""
    changes: list[Change] = []
    """All accepted changes, oldest first."""


def accepted(run: RunDir) -> dict[str, AcceptedTask]:
    """Returns the tasks with accepted changes, by task id.

    Raises:
        ConfigError: The file is damaged.
    """
    try:
        return read_json(run.accepted_tasks, dict[str, AcceptedTask])
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ConfigError(f"{error}; remove the file and resume with --accept-changes again") from None


def accept(run: RunDir, tasks: Mapping[str, tuple[str, Mapping[str, Any]]]) -> None:
    """Records that the user has accepted changed tasks.

    Args:
        tasks: For each task id, the digest of the files before the change and the digests of the current files.
    """
    accepted_tasks, now = accepted(run), time.time()
    for name, (before, files) in tasks.items():
        task = accepted_tasks.setdefault(name, AcceptedTask({}))
        task.files = dict(files)
        task.changes.append(Change(now, before, str(files["content"])))
    write_json(run.accepted_tasks, msgspec.to_builtins(accepted_tasks))


def accepted_line(run: RunDir) -> str:
    """Describes the accepted changes in one line. Returns an empty string if there are none."""
    tasks = accepted(run)
    if not tasks:
        return ""
    last = max(change.at for task in tasks.values() for change in task.changes)
    shown = f"{', '.join(sorted(tasks)[:3])}{', …' if len(tasks) > 3 else ''}"
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(last))
    return (
        f"{len(tasks)} {'task was' if len(tasks) == 1 else 'tasks were'} changed during the run and accepted (last: "
        f"{when}), so earlier rewards are not comparable: {shown}; digests: {run.accepted_tasks}"
    )


# --- the task file ---


_MAGIC = b"MFHPCTSK"
_HEAD = struct.Struct("<8sQQI")


class PlannedTask(msgspec.Struct, frozen=True):
    """A task and the files of its container images."""

    task: dict[str, Any]
    """Output of :meth:`megaflow_hpc.types.Task.to_dict`."""
    images: dict[str, str] = {}
    """SIF file or directory of each image that the task names, by image name. Images that were not built are
    omitted."""
    alike: int = 1
    """Number of tasks in the campaign with the same agent image, including this task."""

    @property
    def image(self) -> str | None:
        """SIF file or directory of the agent's image. ``None`` if it was not built."""
        return self.images.get(self.task.get("image", ""))


class _Index(NamedTuple):
    hashes: array[int]
    offsets: array[int]
    lengths: array[int]


class _Values(ValuesView[PlannedTask]):
    _mapping: TaskFile

    def __iter__(self) -> Iterator[PlannedTask]:
        return self._mapping.in_order()


def write_tasks(run: RunDir, tasks: Iterable[PlannedTask]) -> PackedTasks:
    """Writes the tasks of a run, before its ``run.json`` exists. Holds only one task in memory at a time."""
    lines: list[tuple[int, int, int]] = []
    end = 0
    with new_file(run.packed_tasks) as file:
        for planned in tasks:
            line = _line(planned)
            file.write(line)
            lines.append((_hash(planned.task["id"]), end, len(line)))
            end += len(line)
    write_atomic(run.tasks_index, _pack(lines, end))
    return PackedTasks(len(lines), end)


def append_tasks(run: RunDir, packed: PackedTasks, tasks: Sequence[PlannedTask]) -> PackedTasks:
    """Appends tasks to the task file of a run while no pod reads it. The caller then writes the result to ``run.json``.

    Readers ignore lines beyond the size in ``run.json``, so a call that is killed changes nothing.
    """
    lines = [_line(planned) for planned in tasks]
    with open(run.packed_tasks, "r+b") as file:
        file.truncate(packed.bytes)
        file.seek(packed.bytes)
        file.writelines(lines)
        file.flush()
        os.fsync(file.fileno())
    return PackedTasks(packed.count + len(lines), packed.bytes + sum(map(len, lines)))


def _line(planned: PlannedTask) -> bytes:
    content = msgspec.to_builtins(planned, enc_hook=str)
    return json.dumps(content, sort_keys=True, default=str, separators=(",", ":")).encode() + b"\n"


def planned_tasks(run: RunDir, record: RunRecord) -> Mapping[str, PlannedTask]:
    """Returns the run's tasks by task id, in planned order. Each access reads the task from disk."""
    return TaskFile(run, record.packed, accepted(run)) if record.packed is not None else {}


def image_files(tasks: Mapping[str, PlannedTask]) -> dict[str, str]:
    """Returns the SIF file or directory of every image that the tasks name, by image name."""
    files: dict[str, str] = {}
    for planned in tasks.values():
        files |= planned.images
    return files


class TaskFile(Mapping[str, PlannedTask]):
    """Tasks by task id. Each access reads a task from disk. Not thread-safe.

    Any access may raise ConfigError if the file is damaged or missing, or OSError if the run directory is unavailable.
    """

    def __init__(self, run: RunDir, packed: PackedTasks, changed: Mapping[str, AcceptedTask]) -> None:
        self._run, self._packed, self._changed = run, packed, changed
        self._descriptor = -1
        self._index: _Index | None = None

    def __del__(self) -> None:
        self._close()

    def __len__(self) -> int:
        return self._packed.count

    def __getitem__(self, task: str) -> PlannedTask:
        index, wanted = self._read_index(), _hash(task)
        number = bisect_left(index.hashes, wanted)
        while number < len(index.hashes) and index.hashes[number] == wanted:
            planned = self._read(index.offsets[number], index.lengths[number])
            if planned.task.get("id") == task:
                return planned
            number += 1
        raise KeyError(task)

    def __iter__(self) -> Iterator[str]:
        for planned in self.in_order():
            yield planned.task["id"]

    def values(self) -> ValuesView[PlannedTask]:
        """Returns a view that reads the file sequentially and holds only one task in memory at a time."""
        return _Values(self)

    def in_order(self) -> Iterator[PlannedTask]:
        """Yields all tasks in planned order."""
        for line in self._lines():
            yield self._decode(line)

    def _lines(self) -> Iterator[bytes]:
        self._open()
        left = self._packed.bytes
        with open_regular(self._run.packed_tasks) as file:
            while left > 0 and (line := file.readline()):
                left -= len(line)
                yield line

    def _read(self, offset: int, length: int) -> PlannedTask:
        try:
            line = os.pread(self._open(), length, offset)
        except OSError:  # the handle may be stale, so the next access reopens the file
            self._close()
            raise
        return self._decode(line)

    def _decode(self, line: bytes) -> PlannedTask:
        try:
            planned = decode(line, PlannedTask)
        except ValueError as error:
            raise self._damaged(f"one of its lines is not a task: {error}") from error
        if change := self._changed.get(planned.task.get("id", "")):
            planned.task["metadata"] = {**planned.task.get("metadata", {}), "files": change.files}
        return planned

    def _open(self) -> int:
        """Opens the file on first use and returns its descriptor. Raises ConfigError if the file is missing or
        damaged."""
        if self._descriptor < 0:
            try:
                with open_regular(self._run.packed_tasks) as file:
                    self._descriptor = os.dup(file.fileno())
            except FileNotFoundError:
                raise self._damaged("it is gone") from None
            if (size := os.fstat(self._descriptor).st_size) < self._packed.bytes:
                self._close()
                raise self._damaged(f"it has {size} bytes, but run.json says {self._packed.bytes}")
        return self._descriptor

    def _close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _read_index(self) -> _Index:
        if self._index is None:
            self._open()
            try:
                data = read_regular(self._run.tasks_index)
            except FileNotFoundError:
                data = b""
            self._index = _unpack(data, self._packed) or self._computed_index()
        return self._index

    def _computed_index(self) -> _Index:
        lines, end = [], 0
        for line in self._lines():
            lines.append((_hash(self._decode(line).task["id"]), end, len(line)))
            end += len(line)
        if len(lines) != self._packed.count:
            raise self._damaged(f"it has {len(lines)} lines, but run.json says {self._packed.count}")
        return _columns(lines)

    def _damaged(self, what: str) -> ConfigError:
        return ConfigError(f"{self._run.packed_tasks}: {what}; the run directory is damaged: restore it, or plan again")


def _hash(task: str) -> int:
    digest = hashlib.blake2b(task.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _columns(lines: list[tuple[int, int, int]]) -> _Index:
    lines.sort()
    hashes, offsets, lengths = zip(*lines, strict=True) if lines else ((), (), ())
    return _Index(array("Q", hashes), array("Q", offsets), array("I", lengths))


def _pack(lines: list[tuple[int, int, int]], size: int) -> bytes:
    data = b"".join(column.tobytes() for column in _columns(lines))
    return _HEAD.pack(_MAGIC, len(lines), size, zlib.crc32(data)) + data


def _unpack(data: bytes, packed: PackedTasks) -> _Index | None:
    """Parses an index file. Returns ``None`` if it is damaged or belongs to another run."""
    body = memoryview(data)[_HEAD.size :]
    if len(data) != _HEAD.size + 20 * packed.count:
        return None
    if _HEAD.unpack_from(data) != (_MAGIC, packed.count, packed.bytes, zlib.crc32(body)):
        return None
    index = _Index(array("Q"), array("Q"), array("I"))
    for column in index:
        size = packed.count * column.itemsize
        column.frombytes(body[:size])
        body = body[size:]
    return index
