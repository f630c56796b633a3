"""``RUN/events/<pod>.<start>.summary``: summarises the first bytes of an event file, so that readers can skip them.

An event file grows with every rollout, so reading the events of a day-old run would take gigabytes. Each pod therefore
replaces a summary of its own file from time to time. A summary has the number of bytes that it covers, the events that
still matter (of the pod, its workers and unfinished rollouts), counts of the other events, and 8 bytes for each
successful rollout. A reader continues after the covered bytes. A summary is only an optimisation. If it is missing,
damaged, of another version or covers more than the event file has, all events are read.

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
from typing import Any

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

VERSION = 1
SUFFIX = ".summary"
DIGEST = 8
"""Bytes of the digest of a rollout's id. Among ten million ids, a collision occurs in one of 400,000 campaigns."""
RECENT_S = 300.0
"""Seconds before the last event within which stored rollouts are counted per second."""


class EndedBadly(msgspec.Struct, array_like=True, gc=False):
    """A rollout stored as failed or cancelled, which may be run again."""

    id: str
    status: Outcome
    kind: str
    error: str
    """The error. Empty except for the first of its kind in this pod; the event has it."""
    t: Time
    seconds: Number
    turns: Count
    inexact: Count
    began: tuple[Count, Count, Time] | None
    """Rank, number and start time of its last attempt, if known."""

    def to_event(self) -> RolloutEvent:
        """Returns its event with the fields that were kept."""
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
    """Aggregated events of one pod. It precedes the events that follow it."""

    covers: Count
    """Number of covered bytes of the event file."""
    events: list[AnyEvent]
    """The events that still matter, in order."""
    ended_well: dict[str, dict[Outcome, Count]]
    """Policy → status → number of successful rollouts."""
    digests: bytes
    """Unordered digests of their ids, :data:`DIGEST` bytes each."""
    inexact: dict[str, Count]
    """Policy → number of their turns whose sampled token ids are inexact."""
    ended_badly: list[EndedBadly]
    retries: dict[str, Count]
    """Cause → number of failed and repeated attempts, including those in :attr:`events`. The next fields count them
    too."""
    failures: dict[str, dict[str, Count]]
    """Cause → node → number of failed attempts."""
    recent: dict[Count, Count]
    """Second → number of rollouts stored in it, for the last minutes before :attr:`t`."""
    constrained: dict[str, Count] = msgspec.field(default_factory=dict)
    """Policy → number of turns of :attr:`ended_well` with constrained tokens."""
    busy_at: Time = 0.0
    """Time at which the pod last started or ended a rollout."""
    version: int = VERSION


def digest(rollout: str) -> bytes:
    """Returns the digest of a rollout's id."""
    return hashlib.blake2b(rollout.encode("utf-8", "surrogatepass"), digest_size=DIGEST).digest()


class WantedPods:
    """Searches for rollouts among the digests of many pods.

    A filter on the low bits rejects nearly all of millions of digests before any becomes a Python number.
    """

    def __init__(self, rollouts: Iterable[str]) -> None:
        import numpy as np  # imported here because most searches find no digests

        self._ids = {_number(digest(rollout)): rollout for rollout in rollouts}
        self._sieve = np.zeros(32 << len(self._ids).bit_length(), dtype=bool)
        self._low_bits = np.uint64(len(self._sieve) - 1)
        self._sieve[np.fromiter(self._ids, np.uint64, len(self._ids)) & self._low_bits] = True

    def among(self, digests: bytes) -> list[str]:
        """Returns the rollouts whose digests are present."""
        import numpy as np

        numbers = np.frombuffer(digests, np.uint64)
        left = numbers[self._sieve[numbers & self._low_bits]].tolist()
        return [self._ids[number] for number in self._ids.keys() & left]


def _number(one: bytes) -> int:
    return int.from_bytes(one, sys.byteorder)


def busy_at(before: float, event: AnyEvent) -> float:
    """Returns when a pod last started or ended a rollout, or wrote its first event, after the given event.

    Args:
        before: The time before this event. 0 for the first event.
    """
    return event.t if isinstance(event, (StartEvent, RolloutEvent, AttemptEvent)) or not before else before


def policy_of(rollout: str) -> str:
    """Returns the policy in a rollout's id, ``<task>/<policy>/<sample>``. Empty if the id is invalid."""
    parts = rollout.rsplit("/", 2)
    return parts[1] if len(parts) == 3 else ""


def path_of(events: Path) -> Path:
    """Returns the path of an event file's summary."""
    return events.with_suffix(SUFFIX)


def write(events: Path, summary: Summary) -> int:
    """Replaces the summary of an event file and returns its size in bytes. Raises OSError."""
    try:
        body = _encoder.encode(summary)
    except UnicodeEncodeError:  # lone surrogates, from program output that is not text
        body = _encoder.encode(_as_text(msgspec.to_builtins(summary, builtin_types=(bytes,))))
    write_atomic(path_of(events), zlib.crc32(body).to_bytes(4, "little") + body)
    return len(body)


def read(events: Path) -> Summary | None:
    """Returns the summary of an event file. ``None`` if there is no usable summary."""
    try:
        data = read_regular(path_of(events))
        if zlib.crc32(memoryview(data)[4:]) != int.from_bytes(data[:4], "little"):
            return None
        summary = _decoder.decode(memoryview(data)[4:])
        whole = summary.version == VERSION and not len(summary.digests) % DIGEST
        return summary if whole and events.stat().st_size >= summary.covers else None
    except (OSError, ValueError, RecursionError):
        return None


def begin(events: Path) -> tuple[int, list[Summary]]:
    """Returns the summary of an event file's first bytes, and their number; see :class:`~.events.EventReader`."""
    summary = read(events)
    return (summary.covers, [summary]) if summary is not None else (0, [])


def _as_text(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {_as_text(key): _as_text(one) for key, one in value.items()}
    return [_as_text(one) for one in value] if isinstance(value, list | tuple) else value


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Summary)
