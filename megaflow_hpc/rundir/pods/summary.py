"""``RUN/events/<pod>.<start>.summary``: what the first bytes of an event file amount to, so that they need no reading.

An event file grows with every rollout; who looks at a run that is a day old would read gigabytes. So each pod now and
then replaces a summary of its own file: how many bytes it covers, the events that still matter (of the pod, its workers
and the rollouts that have not ended), counts of the others, and 8 bytes for each rollout that has ended well. A reader
goes on behind the bytes that are covered. A summary is a help and no more: where it is missing, damaged, of another
version or covers more than the event file has, the events are read from the first one on.

::

    CRC-32 of what follows, 4 bytes
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
"""Bytes that stand for the id of a rollout: of ten million, two are alike once in 400,000 campaigns."""
RECENT_S = 300.0
"""Rollouts that were stored within so many seconds before the last event are told by the second."""


class EndedBadly(msgspec.Struct, array_like=True, gc=False):
    """A rollout that is stored as failed or cancelled, which may be run again."""

    id: str
    status: Outcome
    kind: str
    error: str
    """Empty but for the first of its kind in this pod; the event has it."""
    t: Time
    seconds: Number
    turns: Count
    inexact: Count
    began: tuple[Count, Count, Time] | None
    """Rank, number and begin of its last attempt, where it is known."""

    def to_event(self) -> RolloutEvent:
        """Returns its event as far as it was kept."""
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
    """Events of one pod, condensed. It stands before those that follow it."""

    covers: Count
    """Bytes of the event file."""
    events: list[AnyEvent]
    """Those that still matter, in their order."""
    ended_well: dict[str, dict[Outcome, Count]]
    """Policy → status → rollouts."""
    digests: bytes
    """Of the ids of these, :data:`DIGEST` bytes each, in no order."""
    inexact: dict[str, Count]
    """Policy → turns of these whose sampled token ids are not exact."""
    ended_badly: list[EndedBadly]
    retries: dict[str, Count]
    """Attempts that failed and were repeated, by cause, those in :attr:`events` included; as those that follow."""
    failures: dict[str, dict[str, Count]]
    """Cause → node → failed attempts."""
    recent: dict[Count, Count]
    """Second → rollouts that were stored then, of the last minutes before :attr:`t`."""
    constrained: dict[str, Count] = msgspec.field(default_factory=dict)
    """Policy → number of turns of :attr:`ended_well` with constrained tokens."""
    busy_at: Time = 0.0
    """When the pod last started a rollout or ended one."""
    version: int = VERSION


def digest(rollout: str) -> bytes:
    """Returns what stands for a rollout's id."""
    return hashlib.blake2b(rollout.encode("utf-8", "surrogatepass"), digest_size=DIGEST).digest()


class WantedPods:
    """Rollouts that are looked for among the digests of many pods.

    Of millions nearly all fall through a sieve, by their low bits, before any becomes a number of Python's.
    """

    def __init__(self, rollouts: Iterable[str]) -> None:
        import numpy as np  # here, as most looks find no digests

        self._ids = {_number(digest(rollout)): rollout for rollout in rollouts}
        self._sieve = np.zeros(32 << len(self._ids).bit_length(), dtype=bool)
        self._low_bits = np.uint64(len(self._sieve) - 1)
        self._sieve[np.fromiter(self._ids, np.uint64, len(self._ids)) & self._low_bits] = True

    def among(self, digests: bytes) -> list[str]:
        """Returns those whose digests are there."""
        import numpy as np

        numbers = np.frombuffer(digests, np.uint64)
        left = numbers[self._sieve[numbers & self._low_bits]].tolist()
        return [self._ids[number] for number in self._ids.keys() & left]


def _number(one: bytes) -> int:
    return int.from_bytes(one, sys.byteorder)


def busy_at(before: float, event: AnyEvent) -> float:
    """Returns when a pod last started a rollout or ended one, or wrote its first event, once it has written this one.

    Args:
        before: the same until then; 0 before the first.
    """
    return event.t if isinstance(event, (StartEvent, RolloutEvent, AttemptEvent)) or not before else before


def policy_of(rollout: str) -> str:
    """Returns the policy of a rollout's id, ``<task>/<policy>/<sample>``; empty where it is none."""
    parts = rollout.rsplit("/", 2)
    return parts[1] if len(parts) == 3 else ""


def path_of(events: Path) -> Path:
    """Returns where the summary of an event file lies."""
    return events.with_suffix(SUFFIX)


def write(events: Path, summary: Summary) -> int:
    """Replaces the summary of an event file; returns its bytes. Raises OSError."""
    try:
        body = _encoder.encode(summary)
    except UnicodeEncodeError:  # lone surrogates, of a program's output that is no text
        body = _encoder.encode(_as_text(msgspec.to_builtins(summary, builtin_types=(bytes,))))
    write_atomic(path_of(events), zlib.crc32(body).to_bytes(4, "little") + body)
    return len(body)


def read(events: Path) -> Summary | None:
    """Returns the summary of an event file; ``None`` where none can be used."""
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
    """Returns what stands for the first bytes of an event file, and how many; see :class:`~.events.EventReader`."""
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
