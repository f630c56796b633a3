"""Defines, writes and reads summaries of event files: ``RUN/events/<pod>.<start>.summary`` and ``.condensed``.

Event files grow with every rollout, to gigabytes within a day. To spare readers, each pod periodically writes a summary
of its own file. A summary contains the number of bytes that it covers, and the events that still matter: events of the
pod itself, of its workers and of unfinished rollouts. The remaining events are reduced to counts and 8 bytes per
successful rollout. Readers continue after the covered bytes. Summaries are only an optimisation. Readers fall back to
the events if a summary is missing, damaged, of another version, or covers more bytes than the file has.

``<pod>.<start>.condensed`` replaces the event files of this start and of all earlier starts of the pod, which are then
removed (:mod:`megaflow_hpc.rundir.pods.condensing`). A pod therefore has only a few files however often it starts, and
one file once it is over. If a pod has several condensed files, the one with the highest start is used, and readers
ignore the event files of the starts that it covers.

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
from megaflow_hpc.rundir.budget import Used
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

VERSION = 1
SUFFIX = ".summary"
CONDENSED = ".condensed"
EVENTS = ".jsonl"
DIGEST = 8
"""Size of a rollout id's digest in bytes. With ten million ids, one in 400,000 campaigns has a collision."""
RECENT_S = 300.0
"""Stored rollouts are counted per second for this many seconds before the last event."""


class EndedBadly(msgspec.Struct, array_like=True, gc=False):
    """A rollout that was stored as failed or cancelled and may run again."""

    id: str
    status: Outcome
    kind: str
    error: str
    """Error message. Empty unless this is the first error of its kind in the pod."""
    t: Time
    seconds: Number
    turns: Count
    inexact: Count
    began: tuple[Count, Count, Time] | None
    """Rank, attempt number and start time of the last attempt. ``None`` if unknown."""
    start: str = ""
    """Pod start that ran this attempt. Empty if the summary covers only one start."""
    node: str = ""
    """Node that ran this attempt. Empty if the summary covers only one start."""

    def to_event(self) -> RolloutEvent:
        """Reconstructs the event from the stored fields."""
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
    """Summary of a pod's earlier events. Readers apply the later events on top of it."""

    covers: Count
    """Number of bytes of the event file that this summary covers."""
    events: list[AnyEvent]
    """Events that are still needed individually, in order."""
    ended_well: dict[str, dict[Outcome, Count]]
    """Number of successful rollouts, by policy and status."""
    digests: bytes
    """Digests of the ids of successful rollouts in arbitrary order, :data:`DIGEST` bytes each."""
    inexact: dict[str, Count]
    """Number of turns with inexact token ids in successful rollouts, by policy."""
    ended_badly: list[EndedBadly]
    retries: dict[str, Count]
    """Number of retried attempts by cause. Includes those in :attr:`events`."""
    failures: dict[str, dict[str, Count]]
    """Number of failed attempts, by cause and node. Includes those in :attr:`events`."""
    recent: dict[Count, Count]
    """Number of rollouts stored in each second, by Unix time. Covers :data:`RECENT_S` seconds before :attr:`t`."""
    constrained: dict[str, Count] = msgspec.field(default_factory=dict)
    """Number of turns with constrained tokens in successful rollouts, by policy."""
    models: Used = msgspec.field(default_factory=dict)
    """Usage of judges and priced models in all rollouts, by name."""
    busy_at: Time = 0.0
    """Time when the pod last started or ended a rollout."""
    stored: Count = 0
    """Number of stored results. A rollout that was stored twice counts twice."""
    version: int = VERSION


class Condensed(Summary, tag="condensed", kw_only=True):
    """Summary of several starts of a pod. :attr:`events` contains the failed attempts of unsuccessful rollouts."""

    starts: Count
    """Number of starts that the summary covers."""
    after: int
    """Last start covered by the previous condensed file. -1 if there was none."""
    sizes: dict[str, Count]
    """Size in bytes of the event file of each start after :attr:`after`."""
    slots: list[tuple[Time, Time, Number]]
    """Begin, end and mean number of slots of successive periods."""
    last: list[AnyEvent] | None = None
    """Events of the pod itself and of its workers during the last start, in order."""
    seen: bool = False
    """True if the reader has already yielded every event that this record replaces. Set by the reader."""


T = TypeVar("T", bound=Summary)


def digest(rollout: str) -> bytes:
    """Returns the digest of a rollout id, :data:`DIGEST` bytes."""
    return hashlib.blake2b(rollout.encode("utf-8", "surrogatepass"), digest_size=DIGEST).digest()


class WantedPods:
    """Searches many pods' digests for given rollouts. Takes about 0.05 s per million digests."""

    def __init__(self, rollouts: Iterable[str]) -> None:
        self._ids = {int.from_bytes(digest(rollout), sys.byteorder): rollout for rollout in rollouts}
        self._wanted = set(self._ids)

    def among(self, digests: bytes) -> list[str]:
        """Returns the wanted rollouts whose digests occur in ``digests``, which holds 64-bit numbers."""
        return [self._ids[number] for number in self._wanted.intersection(memoryview(digests).cast("Q"))]


def busy_at(before: float, event: AnyEvent) -> float:
    """Returns the time when a pod last started or ended a rollout. Before the first one, returns the time of its first
    event.

    Args:
        before: Result for the preceding events. 0 if there are none.
        event: The latest event.
    """
    return event.t if isinstance(event, (StartEvent, RolloutEvent, AttemptEvent)) or not before else before


def path_of(events: Path) -> Path:
    """Returns the path of the summary of an event file."""
    return events.with_suffix(SUFFIX)


def start_number(start: str) -> int:
    """Parses the number of a pod's start. Returns -1 if the start has no number, so that it is never condensed."""
    return int(start) if start.isascii() and start.isdecimal() and len(start) < 18 else -1


def write(events: Path, summary: Summary) -> int:
    """Replaces the summary of an event file, and returns the summary's size in bytes. Raises OSError."""
    return write_record(path_of(events), summary)


def write_record(path: Path, summary: Summary) -> int:
    """Writes a summary to ``path``, and returns its size in bytes. Raises OSError."""
    try:
        body = _encoder.encode(summary)
    except UnicodeEncodeError:  # lone surrogates, from program output that is not valid text
        body = _encoder.encode(_as_text(msgspec.to_builtins(summary, builtin_types=(bytes,))))
    write_atomic(path, zlib.crc32(body).to_bytes(4, "little") + body)
    return len(body)


def read(events: Path) -> Summary | None:
    """Reads the summary of an event file. Returns ``None`` if it is missing or unusable."""
    try:
        summary = _read_record(path_of(events), _decoder)
        return summary if summary is not None and events.stat().st_size >= summary.covers else None
    except OSError:
        return None


def read_condensed(path: Path) -> Condensed | None:
    """Reads a condensed file. Returns ``None`` if it is damaged. Raises OSError."""
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
