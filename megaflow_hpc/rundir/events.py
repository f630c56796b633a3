"""Defines, encodes and writes pod events: ``RUN/events/<pod>.<start>.jsonl``, one JSON object per line, append-only.

Only :class:`EventWriter` writes these files. :class:`~megaflow_hpc.rundir.event_reader.EventReader` reads them. Results
do not depend on the events, so they are flushed but not fsynced. A background thread writes them, so the pod's event
loop never waits for a disk. Each line has ``t`` (Unix seconds) and ``event`` (the kind). Readers ignore unknown kinds,
incomplete lines and unknown keys. Later starts of a pod condense the files of earlier ones
(:mod:`megaflow_hpc.rundir.summaries`).
"""

from __future__ import annotations

import json
import math
import os
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Annotated, get_args

import msgspec
from msgspec import Meta

from megaflow_hpc.host.atomic import file_mode
from megaflow_hpc.rundir.budget import Used
from megaflow_hpc.types import Status

ERROR_CHARS = 300
"""Maximum length of an error message in an event, in characters. The trajectory contains the full message."""


Time = Annotated[float, Meta(ge=0, le=253_402_300_799)]
"""Unix timestamp in seconds, up to the year 9999. A record with a value outside this range is damaged."""
Count = Annotated[int, Meta(ge=0, lt=1 << 53)]
Number = Annotated[float, Meta(ge=-3.4028234663852886e38, le=3.4028234663852886e38)]
"""A measurement or reward, never NaN. It is within the range of float32, so that sums cannot overflow."""


Outcome = Annotated[str, Meta(pattern=rf"\A(?:{'|'.join(get_args(Status))})\Z")]
"""Final status of a rollout (:data:`~megaflow_hpc.types.Status`)."""


class Event(msgspec.Struct, kw_only=True, omit_defaults=True, tag_field="event"):
    """Base class of all events. Each event is one line of an event file. Fields that are ``None`` are omitted.

    The most frequent kinds contain only strings and numbers, so the garbage collector need not track them
    (``gc=False``).
    """

    t: Time = 0.0
    """Unix timestamp in seconds, set by :meth:`EventWriter.write`."""


class PodEvent(Event, tag="pod"):
    """Event: the pod started, is draining or ended. ``state`` is ``started``, ``draining`` or the pod's final state."""

    state: str
    job_id: str | None = None
    node: str | None = None
    stored: Count | None = None
    """Number of rollouts that this start of the pod has stored."""
    why: str | None = None


class WorkerEvent(Event, tag="worker"):
    """Event: a worker rank is ``ready``, ``lost`` or ``excluded``. An excluded rank receives no more work."""

    rank: Count
    state: str
    slots: Count | None = None
    node: str | None = None
    why: str | None = None


class EngineEvent(Event, tag="engine"):
    """Event: an engine server in the pod's own allocation is ready to serve."""

    rank: Count
    state: str
    node: str


class StartEvent(Event, tag="start", gc=False):
    """Event: an attempt at a rollout started on a worker rank."""

    id: str
    rank: Count
    attempt: Count


class RolloutEvent(Event, tag="rollout", omit_defaults=False, gc=False):
    """Event: the result of a rollout was stored."""

    id: str
    status: Outcome
    kind: str = ""
    """Error kind. Empty if there was no error."""
    error: str = ""
    reward: Number | None = None
    seconds: Number = 0.0
    turns: Count = 0
    inexact: Count = 0
    """Number of turns whose token ids are not exactly the sampled ones."""
    constrained: Count = 0
    """Number of turns with tokens that a grammar or similar constrained."""
    cpu_s: Number | None = None
    """CPU seconds used by the rollout's sandboxes. ``None`` if unknown. The same applies to the next two fields."""
    memory_peak_mb: Number | None = None
    disk_peak_mb: Number | None = None
    models: Used = {}
    """Usage of judges and priced models, by name."""


class AttemptEvent(Event, tag="attempt", gc=False):
    """Event: an attempt failed and will be retried. ``kind`` is the error kind."""

    id: str
    attempt: Count
    kind: str
    error: str = ""
    rank: Count | None = None


AnyEvent = PodEvent | WorkerEvent | EngineEvent | StartEvent | RolloutEvent | AttemptEvent


def shown(error: str) -> str:
    """Truncates an error message to :data:`ERROR_CHARS`."""
    return error[:ERROR_CHARS]


def rounded(value: float | None, digits: int) -> float | None:
    """Rounds a measurement for an event. Returns ``None`` for an unknown value and for NaN."""
    return None if value is None or math.isnan(value) else round(value, digits)


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
    """Appends events to one file. :meth:`write` is thread-safe. Only one thread may call :meth:`flush` and
    :meth:`close`."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "ab")  # noqa: SIM115 - stays open as long as the pod runs
        os.fchmod(self._file.fileno(), file_mode(path.parent))
        self._lines: deque[bytes] = deque()

    def write(self, event: Event) -> None:
        """Timestamps an event and queues it for the next flush."""
        event.t = round(time.time(), 3)
        self._lines.append(encode(event))

    def flush(self) -> None:
        """Writes queued events to the file. Drops them silently if the disk is full."""
        if not self._lines:
            return
        lines = [self._lines.popleft() for _ in range(len(self._lines))]
        with suppress(OSError):
            self._file.write(b"".join(lines))
            self._file.flush()

    def close(self) -> None:
        """Writes queued events and closes the file. Ignores disk errors."""
        self.flush()
        with suppress(OSError):
            self._file.close()
