"""Aggregate the events of one pod into the summary of its event file while the file grows."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path

from megaflow_hpc.rundir.events import (
    AnyEvent,
    AttemptEvent,
    PodEvent,
    RolloutEvent,
    StartEvent,
    WorkerEvent,
    decode,
)
from megaflow_hpc.rundir.pods import summary as files
from megaflow_hpc.rundir.pods.running import RunningRollouts
from megaflow_hpc.rundir.pods.summary import RECENT_S, EndedBadly, Summary, busy_at, digest, policy_of
from megaflow_hpc.types import VERIFIED

LOOK_S = 5.0
SUMMARY_INTERVAL_S = 60.0
"""Minimum number of seconds between summaries."""
TAIL = 32 << 10
"""Bytes of new events that justify a new summary, or half the summary's size if that is larger."""
LAST_TAIL = 4 << 10
"""The same threshold when the pod ends."""
PIECE = 256 << 10
"""Bytes of events read at a time. Kept small because the thread also does other work."""
MAX_LINE_BYTES = 2 << 20
"""Maximum length of a line. Longer lines are not rollout events and are skipped."""
LAST_PIECES = 16
"""Maximum number of chunks read when the pod ends, since other processes wait for it."""
PAUSE_FACTOR = 50
"""After each chunk, pause for this many times the chunk's duration, so that the pod's other work has priority."""


class EventAggregator:
    """Aggregates all events of one pod, in order.

    Memory grows with the number of running and failed rollouts, plus 8 bytes for each successful rollout.
    """

    def __init__(self) -> None:
        self._pod: tuple[int, PodEvent] | None = None
        self._workers: list[tuple[int, AnyEvent]] = []
        self._open: dict[str, list[tuple[int, AnyEvent]]] = {}
        """Unfinished rollout → its events."""
        self._attempts: dict[str, list[tuple[int, AnyEvent]]] = {}
        """Unsuccessful rollout → its failed attempts, which are needed if it runs again."""
        self._running = RunningRollouts()
        self._bad: dict[str, RolloutEvent] = {}
        self._well: dict[str, Counter[str]] = {}
        self._digests = bytearray()
        self._inexact: Counter[str] = Counter()
        self._constrained: Counter[str] = Counter()
        self._recent: Counter[int] = Counter()
        self._number = 0
        self._seen_at = self._busy_at = 0.0

    def apply(self, event: AnyEvent) -> None:
        """Adds one event."""
        self._number += 1
        self._seen_at = event.t
        self._busy_at = busy_at(self._busy_at, event)
        self._running.apply("", event)
        match event:
            case PodEvent():
                self._pod = self._number, _merged(self._pod[1], event) if self._pod else event
            case WorkerEvent():
                self._workers.append((self._number, event))
            case StartEvent(id=rollout) | AttemptEvent(id=rollout):
                self._open.setdefault(rollout, []).append((self._number, event))
            case RolloutEvent():
                self._end(event)

    def _end(self, event: RolloutEvent) -> None:
        events = self._open.pop(event.id, [])
        self._recent[int(event.t)] += 1
        if event.status not in VERIFIED:
            self._bad[event.id] = event
            if attempts := [one for one in events if isinstance(one[1], AttemptEvent)]:
                self._attempts.setdefault(event.id, []).extend(attempts)
            return
        self._bad.pop(event.id, None)
        self._attempts.pop(event.id, None)
        self._running.forget(event.id)
        policy = policy_of(event.id)
        self._well.setdefault(policy, Counter())[event.status] += 1
        self._digests += digest(event.id)
        if event.inexact:
            self._inexact[policy] += event.inexact
        if event.constrained:
            self._constrained[policy] += event.constrained

    def summary(self, covers: int) -> Summary:
        """Returns the summary of all applied events, which are the first ``covers`` bytes of their file."""
        kept = [*self._workers, *chain(*self._open.values(), *self._attempts.values())]
        kept += [self._pod] if self._pod is not None else []
        self._recent = Counter({at: n for at, n in self._recent.items() if at >= int(self._seen_at - RECENT_S)})
        return Summary(
            t=self._seen_at,
            covers=covers,
            events=[event for _, event in sorted(kept, key=lambda pair: pair[0])],
            ended_well={policy: dict(statuses) for policy, statuses in self._well.items()},
            digests=bytes(self._digests),
            inexact=dict(self._inexact),
            constrained=dict(self._constrained),
            ended_badly=list(self._ended_badly()),
            retries=dict(self._running.retries),
            failures=self._running.by_cause(),
            recent=dict(self._recent),
            busy_at=self._busy_at,
        )

    def _ended_badly(self) -> Iterator[EndedBadly]:
        first: dict[str, RolloutEvent] = {}
        for event in self._bad.values():
            if event.kind not in first or event.t < first[event.kind].t:
                first[event.kind] = event
        for event in self._bad.values():
            attempt = self._running.last.get(event.id)
            yield EndedBadly(
                event.id,
                event.status,
                event.kind,
                event.error if first[event.kind] is event else "",
                event.t,
                event.seconds,
                event.turns,
                event.inexact,
                (attempt.rank, attempt.attempt, attempt.began_at) if attempt else None,
            )


def _merged(before: PodEvent, event: PodEvent) -> PodEvent:
    """Return the later event, with missing fields filled in from the earlier one."""
    fields = {name: getattr(event, name) for name in event.__struct_fields__}
    return PodEvent(**{name: getattr(before, name) if value is None else value for name, value in fields.items()})


class SummaryWriter:
    """Keeps the summary of one event file up to date by reading appended events. A full disk does no harm.

    Args:
        events: The event file.
        clock: A monotonic clock, in seconds.
    """

    def __init__(self, events: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path, self._clock = events, clock
        self._aggregator = EventAggregator()
        self._covered = self._written = 0
        """Bytes of events that were aggregated, and bytes covered by the summary on disk."""
        self._unended = 0
        """Bytes read beyond the aggregated ones that do not yet contain a complete line."""
        self._size = 0
        """Size of the summary on disk, in bytes."""
        self._look_at = clock() + LOOK_S
        self._write_at = clock() + SUMMARY_INTERVAL_S
        self._descriptor = -1

    def tick(self) -> None:
        """Reads appended events and replaces the summary, each only if it is due."""
        if self._clock() < self._look_at:
            return
        began = time.thread_time()
        with suppress(OSError):
            self._take_in()
            if self._clock() >= self._write_at and self._covered - self._written >= max(TAIL, self._size // 2):
                self._write()
        self._look_at = self._clock() + max(LOOK_S, PAUSE_FACTOR * (time.thread_time() - began))

    def finish(self) -> None:
        """Writes a final summary if it saves readers much. Nothing is written afterwards."""
        with suppress(OSError):
            for _ in range(LAST_PIECES):
                if not self._take_in():
                    break
            if self._covered - self._written >= LAST_TAIL:
                self._write()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _take_in(self) -> bool:
        """Read and aggregate one chunk. Returns whether there was progress."""
        if self._descriptor < 0:
            self._descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        data = os.pread(self._descriptor, PIECE, self._covered + self._unended)
        end = data.rfind(b"\n") + 1
        if not end:
            long = len(data) == PIECE  # an overlong line, or a hole left by a crash
            self._unended += PIECE * long
            return long
        end += self._unended
        if self._unended > MAX_LINE_BYTES:
            data = data[data.index(b"\n") + 1 :]
        elif self._unended:
            data = os.pread(self._descriptor, end, self._covered)
        for line in data[: data.rfind(b"\n") + 1].splitlines():
            if (event := decode(line)) is not None:
                self._aggregator.apply(event)
        self._covered, self._unended = self._covered + end, 0
        return True

    def _write(self) -> None:
        self._size = files.write(self._path, self._aggregator.summary(self._covered))
        self._written, self._write_at = self._covered, self._clock() + SUMMARY_INTERVAL_S
