"""Summaries of event files: ``RUN/events/<pod>.<start>.summary`` and ``<pod>.<start>.condensed``.

Event files grow with every rollout. After a day, readers would have to read gigabytes. So each pod periodically writes
a summary of its own file. A summary contains the number of bytes that it covers, and the events that still matter:
those of the pod, its workers and unfinished rollouts. It also contains counts of the other events, and 8 bytes for each
successful rollout. Readers continue after the covered bytes. A summary is only an optimisation. Readers read all events
if it is missing, damaged, of another version, or covers more bytes than the file has.

``<pod>.<start>.condensed`` replaces the event files of this start of a pod and of all earlier starts. They are then
removed (:mod:`megaflow_hpc.rundir.pods.condensing`). So a pod has a few files no matter how often it started, and one
file once it is over. If a pod has several such files, the one with the highest start counts. Readers ignore the event
files of the starts that it covers.

::

    CRC-32 of the following bytes, 4 bytes
    Summary in msgpack
"""

from __future__ import annotations

import hashlib
import sys
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from megaflow_hpc.host.atomic import write_atomic
from megaflow_hpc.host.files import read_regular
from megaflow_hpc.rundir.events import (
    AnyEvent,
    AttemptEvent,
    Count,
    Event,
    Number,
    Outcome,
    RolloutEvent,
    StartEvent,
    Time,
)
from megaflow_hpc.rundir.model_use import Used

VERSION = 1
SUFFIX = ".summary"
CONDENSED = ".condensed"
EVENTS = ".jsonl"
DIGEST = 8
"""Bytes per digest of a rollout id. With ten million ids, one in 400,000 campaigns has a collision."""
RECENT_S = 300.0
"""Count stored rollouts by the second for this many seconds before the last event."""


class EndedBadly(msgspec.Struct, array_like=True, gc=False):
    """A rollout that was stored as failed or cancelled and may run again."""

    id: str
    status: Outcome
    kind: str
    error: str
    """Error message. Empty except for the first error of its kind in this pod."""
    t: Time
    seconds: Number
    turns: Count
    inexact: Count
    began: tuple[Count, Count, Time] | None
    """(rank, attempt number, start time) of the last attempt, if known."""
    start: str = ""
    """Start of the pod that ran this attempt. Empty if the summary covers only one start."""
    node: str = ""
    """Node that ran this attempt. Empty if the summary covers only one start."""

    def to_event(self) -> RolloutEvent:
        """Returns the event, with the fields that were kept."""
        return RolloutEvent(
            t=self.t,
            id=self.id,
            status=self.status,
            kind=self.kind,
            error=self.error,
            seconds=self.seconds,
            turns=self.turns,
            inexact=self.inexact,
        )


class Summary(Event, tag="summary"):
    """Aggregate of a pod's first events. Readers apply the later events after it."""

    covers: Count
    """Number of bytes of the event file that this summary covers."""
    events: list[AnyEvent]
    """The events that still matter, in order."""
    ended_well: dict[str, dict[Outcome, Count]]
    """Policy → status → number of successful rollouts."""
    digests: bytes
    """Digests of the ids of successful rollouts, unordered, :data:`DIGEST` bytes each."""
    inexact: dict[str, Count]
    """Policy → number of turns with inexact token ids in successful rollouts."""
    ended_badly: list[EndedBadly]
    retries: dict[str, Count]
    """Cause → number of failed attempts that were retried. Includes the attempts in :attr:`events`, as do the next two
    fields."""
    failures: dict[str, dict[str, Count]]
    """Cause → node → number of failed attempts."""
    recent: dict[Count, Count]
    """Second → number of rollouts stored in that second, for the last minutes before :attr:`t`."""
    constrained: dict[str, Count] = msgspec.field(default_factory=dict)
    """Policy → number of turns with constrained tokens in successful rollouts."""
    models: Used = msgspec.field(default_factory=dict)
    """Judges and models with a price → their calls in all rollouts."""
    busy_at: Time = 0.0
    """Time at which the pod last started or ended a rollout."""
    stored: Count = 0
    """Number of stored results. Counts a rollout again if it was stored again."""
    version: int = VERSION


class Condensed(Summary, tag="condensed", kw_only=True):
    """Aggregate of several starts of a pod. :attr:`events` contains failed attempts of unsuccessful rollouts."""

    starts: Count
    """Number of starts that left events."""
    after: int
    """Last start that the previous condensed file covers, or -1."""
    sizes: dict[str, Count]
    """Start → bytes of its event file, for the starts after :attr:`after`."""
    slots: list[tuple[Time, Time, Number]]
    """(begin, end, mean number of slots) of successive periods."""
    last: list[AnyEvent] | None = None
    """Events of the pod itself and of its workers in the last start, in order."""
    seen: bool = False
    """True if the reader has already yielded all events that this replaces. Set by the reader."""


T = TypeVar("T", bound=Summary)


def digest(rollout: str) -> bytes:
    """Returns the digest of a rollout id."""
    return hashlib.blake2b(rollout.encode("utf-8", "surrogatepass"), digest_size=DIGEST).digest()


class WantedPods:
    """Finds given rollouts in the digests of many pods. Takes about 0.05 s for each million digests."""

    def __init__(self, rollouts: Iterable[str]) -> None:
        self._ids = {int.from_bytes(digest(rollout), sys.byteorder): rollout for rollout in rollouts}
        self._wanted = set(self._ids)

    def among(self, digests: bytes) -> list[str]:
        """Returns the wanted rollouts whose digests are present."""
        return [self._ids[number] for number in self._wanted.intersection(memoryview(digests).cast("Q"))]


def busy_at(before: float, event: AnyEvent) -> float:
    """Returns the time at which a pod last started or ended a rollout, or else wrote its first event.

    Args:
        before: Result for the preceding event, or 0 for the first event.
        event: The latest event.
    """
    return event.t if isinstance(event, (StartEvent, RolloutEvent, AttemptEvent)) or not before else before


def path_of(events: Path) -> Path:
    """Returns the path of an event file's summary."""
    return events.with_suffix(SUFFIX)


def start_number(start: str) -> int:
    """Returns the number of a pod's start. -1 if the start has no number. Such starts are never condensed."""
    return int(start) if start.isascii() and start.isdecimal() and len(start) < 18 else -1


def write(events: Path, summary: Summary) -> int:
    """Replaces the summary of an event file and returns its size in bytes. Raises OSError."""
    return write_record(path_of(events), summary)


def write_record(path: Path, summary: Summary) -> int:
    """Writes a summary to ``path`` and returns its size in bytes. Raises OSError."""
    try:
        body = _encoder.encode(summary)
    except UnicodeEncodeError:  # lone surrogates, from program output that is not valid text
        body = _encoder.encode(_as_text(msgspec.to_builtins(summary, builtin_types=(bytes,))))
    write_atomic(path, zlib.crc32(body).to_bytes(4, "little") + body)
    return len(body)


def read(events: Path) -> Summary | None:
    """Returns the summary of an event file. ``None`` if it is missing or unusable."""
    try:
        summary = _read_record(path_of(events), _decoder)
        return summary if summary is not None and events.stat().st_size >= summary.covers else None
    except OSError:
        return None


def read_condensed(path: Path) -> Condensed | None:
    """Returns the content of a condensed file. ``None`` if the file is damaged. Raises OSError."""
    return _read_record(path, _condensed_decoder)


def _read_record(path: Path, decoder: msgspec.msgpack.Decoder[T]) -> T | None:
    data = read_regular(path)
    if zlib.crc32(memoryview(data)[4:]) != int.from_bytes(data[:4], "little"):
        return None
    try:
        summary = decoder.decode(memoryview(data)[4:])
    except (ValueError, RecursionError):
        return None
    return summary if summary.version == VERSION and not len(summary.digests) % DIGEST else None


def _as_text(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {_as_text(key): _as_text(one) for key, one in value.items()}
    return [_as_text(one) for one in value] if isinstance(value, list | tuple) else value


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Summary)
_condensed_decoder = msgspec.msgpack.Decoder(Condensed)
