"""Pod events: ``RUN/events/<pod>.<start>.jsonl``, one JSON object per line, append-only.

Only :class:`EventWriter` writes these files; :class:`EventReader` reads them. Nothing depends on them for correctness,
so they are flushed but not fsynced. A separate thread writes them, so the event loop never waits for a disk. Each line
has ``t`` (Unix seconds) and ``event`` (the kind). Readers ignore unknown kinds, incomplete lines and unknown keys.
"""

from __future__ import annotations

import json
import math
import os
import re
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, BinaryIO, ClassVar, Generic, TypeVar, get_args

import msgspec
from msgspec import Meta

from megaflow_hpc.host import descriptors
from megaflow_hpc.host.atomic import file_mode
from megaflow_hpc.host.files import behind_hole, open_regular
from megaflow_hpc.types import Status

FORMAT_VERSION = 1
"""Written to the first line of a file. Files without it, from the first releases, also have version 1."""
ERROR_CHARS = 300
"""Maximum length of an error in an event, in characters. The trajectory contains the full error."""
PIECE = 16 << 20
"""Bytes of an event file that are read at a time. Pods never write longer lines."""


Time = Annotated[float, Meta(ge=0, le=253_402_300_799)]
"""Unix seconds, up to the end of the year 9999. A record with a value out of range is damaged."""
Count = Annotated[int, Meta(ge=0, lt=1 << 53)]
Number = Annotated[float, Meta(ge=-3.4028234663852886e38, le=3.4028234663852886e38)]
"""A measurement or a reward. Limited to the range of float32, so that sums cannot overflow. Never NaN."""


Outcome = Annotated[str, Meta(pattern=rf"\A(?:{'|'.join(get_args(Status))})\Z")]
"""Status of a rollout that has ended (:data:`~megaflow_hpc.types.Status`)."""


class Event(msgspec.Struct, kw_only=True, omit_defaults=True, tag_field="event"):
    """Base of all events; one line of an event file. Fields that are ``None`` are not written.

    The most frequent kinds contain only strings and numbers, so the garbage collector does not track them
    (``gc=False``).
    """

    t: Time = 0.0
    """Unix seconds, set by :meth:`EventWriter.write`."""


class PodEvent(Event, tag="pod"):
    """The pod started, is draining or ended. ``state`` is ``started``, ``draining`` or the pod's last word."""

    state: str
    format_version: Count | None = None
    job_id: str | None = None
    node: str | None = None
    ranks: Count | None = None
    """MPI ranks of the pod."""
    stored: Count | None = None
    """Number of rollouts that this pod has stored."""
    why: str | None = None


class WorkerEvent(Event, tag="worker"):
    """A worker rank is ``ready``, ``lost`` or ``excluded`` (it gets no more work)."""

    rank: Count
    state: str
    slots: Count | None = None
    node: str | None = None
    why: str | None = None
    rollouts: Count | None = None
    """Number of rollouts that were running on a lost worker."""


class EngineEvent(Event, tag="engine"):
    """An engine server in the pod's own allocation is ready to serve."""

    rank: Count
    state: str
    node: str


class ClaimEvent(Event, tag="claim"):
    """A block was ``claimed``, ``done`` or ``released``, or the pod ``gave`` part of it to another pod."""

    block: Count
    epoch: Count
    state: str
    rollouts: Count | None = None


class StartEvent(Event, tag="start", gc=False):
    """An attempt at a rollout started on a rank."""

    id: str
    rank: Count
    attempt: Count


class RolloutEvent(Event, tag="rollout", omit_defaults=False, gc=False):
    """A rollout was stored."""

    id: str
    status: Outcome
    kind: str = ""
    """Kind of the error. Empty if there was no error."""
    error: str = ""
    reward: Number | None = None
    seconds: Number = 0.0
    turns: Count = 0
    inexact: Count = 0
    """Number of turns whose sampled token ids are not exact."""
    constrained: Count = 0
    """Number of turns with constrained tokens."""
    cpu_s: Number | None = None
    """CPU seconds of the rollout's sandboxes. ``None`` if unknown, as for the next two fields."""
    memory_peak_mb: Number | None = None
    disk_peak_mb: Number | None = None


class AttemptEvent(Event, tag="attempt", gc=False):
    """An attempt failed and will be retried. ``kind`` is the cause."""

    id: str
    attempt: Count
    kind: str
    error: str = ""
    rank: Count | None = None


class EndpointsEvent(Event, tag="endpoints"):
    """The pod's set of engine servers changed."""

    servers: list[str]


AnyEvent = PodEvent | WorkerEvent | EngineEvent | ClaimEvent | StartEvent | RolloutEvent | AttemptEvent | EndpointsEvent


def shown(error: str) -> str:
    """Truncates an error for use in an event."""
    return error[:ERROR_CHARS]


def rounded(value: float | None, digits: int) -> float | None:
    """Rounds a measurement for use in an event. Returns ``None`` if it is unknown or NaN."""
    return None if value is None or math.isnan(value) else round(value, digits)


_LAST = re.compile(rb'"event": "pod".*"state": "(done|drained|paused)"')
"""Matches the last event of a pod, after which its file is closed."""
T = TypeVar("T", bound=Event)
_decoder: msgspec.json.Decoder[AnyEvent] = msgspec.json.Decoder(AnyEvent)
_encoder = msgspec.json.Encoder()


def encode(event: Event) -> bytes:
    """Encodes an event as one line. A NaN reward becomes ``null``."""
    try:
        return msgspec.json.format(_encoder.encode(event), indent=0) + b"\n"
    except UnicodeEncodeError:  # lone surrogates, from program output that is not valid text
        return json.dumps(msgspec.to_builtins(event)).encode() + b"\n"


def decode(line: bytes) -> AnyEvent | None:
    """Decodes a line. Returns ``None`` if the line is incomplete or its kind is unknown."""
    try:
        try:
            return _decoder.decode(line)
        except msgspec.ValidationError:
            return None
        except ValueError:  # NaN or lone surrogates: written by Python's json, but invalid JSON
            return msgspec.convert(json.loads(line, parse_constant=lambda _: None), AnyEvent)
    except (ValueError, RecursionError):
        return None


class EventWriter:
    """Appends events to one file.

    :meth:`write` is thread-safe. :meth:`flush` and :meth:`close` must be called from a single thread.
    """

    def __init__(self, path: Path) -> None:
        self._file = open(path, "ab")  # noqa: SIM115 - stays open as long as the pod runs
        os.fchmod(self._file.fileno(), file_mode(path.parent))
        self._lines: deque[bytes] = deque()

    def write(self, event: Event) -> None:
        """Timestamps an event and queues it for the next flush."""
        event.t = round(time.time(), 3)
        self._lines.append(encode(event))

    def flush(self) -> None:
        """Writes queued events. If the disk is full, events are dropped without an error."""
        if not self._lines:
            return
        lines = [self._lines.popleft() for _ in range(len(self._lines))]
        try:
            self._file.write(b"".join(lines))
            self._file.flush()
        except OSError:
            pass

    def close(self) -> None:
        """Writes queued events and closes the file. Disk errors are ignored."""
        self.flush()
        try:
            self._file.close()
        except OSError:
            pass


class EventReader(Generic[T]):
    """Follows the event files of a run. Files stay open between reads, as far as the descriptor limit allows.

    Args:
        folder: ``RUN/events``.
        only: Kind of event to decode. Empty decodes every kind.
        about: Rollout whose events are decoded. Empty decodes all events.
        begin: Called with each file before its first read. Returns the number of bytes to skip, and the events that
            stand in for them. By default nothing is skipped.
    """

    _readers: ClassVar[weakref.WeakSet[EventReader[Any]]] = weakref.WeakSet()

    def __init__(
        self,
        folder: Path,
        only: str = "",
        about: str = "",
        begin: Callable[[Path], tuple[int, list[T]]] | None = None,
    ) -> None:
        self._folder, self._begin = folder, begin
        self._mark = f'"event": "{only}"'.encode() if only else b""
        self._about = f'"id": "{about}"'.encode("utf-8", "replace") if about else b""
        self._offsets: dict[Path, int] = {}
        self._ended: set[Path] = set()
        """Files that will not grow any further."""
        self._open: dict[Path, BinaryIO] = {}
        self._most_open = 0
        self._readers.add(self)

    def read(self, pods: Iterable[str] | None = None) -> Iterator[tuple[str, list[AnyEvent | T]]]:
        """Yields each file's ``<pod>.<start>`` and the events appended since the last call, possibly none.

        Args:
            pods: Pods whose files are read. Defaults to all pods.
        """
        others = sum(len(reader._open) for reader in list(self._readers) if reader is not self)
        self._most_open = descriptors.limit() // 2 - others
        named = None if pods is None else sorted(self._folder / f"{pod}.jsonl" for pod in pods)
        for path in sorted(self._folder.glob("*.jsonl")) if named is None else named:
            if path in self._ended:
                yield path.stem, []
                continue
            first: list[T] = []
            if path not in self._offsets and self._begin is not None:
                self._offsets[path], first = self._begin(path)
            offset = self._offsets.get(path, 0)
            try:
                lines, self._offsets[path] = self._read_appended(path, offset)
            except OSError:
                if first:
                    yield path.stem, [*first]
                continue  # the file system is temporarily unavailable
            if lines and _LAST.search(lines[-1]):
                self._ended.add(path)
                if file := self._open.pop(path, None):
                    file.close()
            decoded = (decode(line) for line in lines if self._mark in line and self._about in line)
            yield path.stem, [*first, *(event for event in decoded if event is not None)]

    def _read_appended(self, path: Path, offset: int) -> tuple[list[bytes], int]:
        """Returns the complete lines after ``offset``, and the offset where they end."""
        file = self._open.pop(path, None)
        if file is None:
            if offset and path.stat().st_size <= offset:
                return [], offset
            file = open_regular(path)
        lines: list[bytes] = []
        try:
            file.seek(offset)
            while data := file.read(PIECE):
                end = data.rfind(b"\n") + 1
                lines += data[:end].splitlines()
                offset += end
                if len(data) < PIECE:
                    break
                if not end:  # a hole left by a crash, or data that no pod wrote
                    offset = max(offset + PIECE, behind_hole(file, offset))
                file.seek(offset)
            if len(self._open) < self._most_open:
                self._open[path] = file
            return lines, offset
        finally:
            if path not in self._open:  # reopen it after an error, because its handle may be stale
                file.close()
