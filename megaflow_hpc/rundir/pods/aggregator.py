"""Aggregates one pod's events. The result is the summary of a growing event file, or one record for several starts."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path

import msgspec

from megaflow_hpc.rundir import summaries
from megaflow_hpc.rundir.budget import Used, total_use
from megaflow_hpc.rundir.events import (
    AnyEvent,
    AttemptEvent,
    PodEvent,
    RolloutEvent,
    StartEvent,
    WorkerEvent,
    decode,
)
from megaflow_hpc.rundir.pods.running import RunningRollouts
from megaflow_hpc.rundir.summaries import (
    RECENT_S,
    Condensed,
    EndedBadly,
    Summary,
    busy_at,
    digest,
)
from megaflow_hpc.types import VERIFIED, RolloutName

READ_INTERVAL_S = 5.0
"""Minimum time in seconds between two reads of appended events."""
SUMMARY_INTERVAL_S = 60.0
"""Minimum time in seconds between two summaries."""
TAIL = 32 << 10
"""Minimum number of bytes of new events before a new summary is written. Half the summary's size applies if it is
larger."""
LAST_TAIL = 4 << 10
"""Minimum number of bytes of new events before the summary is written when the pod ends."""
PIECE = 256 << 10
"""Number of bytes of events to read at a time. Small, because the thread also does other work."""
LAST_PIECES = 16
"""Maximum number of chunks to read when the pod ends, because other processes are waiting for it to exit."""
MAX_UNFINISHED = 1000
"""Maximum number of unfinished rollouts of ended starts whose failed attempts are kept. Other rollouts get all their
retries again."""
MAX_PERIODS = 64
"""Maximum number of past periods for which slot counts are kept. Further periods are merged with their neighbours."""
PAUSE_FACTOR = 50
"""Pause after each chunk, as a multiple of the chunk's CPU time. The pod's other work takes priority."""


class EventAggregator:
    """Aggregates the events of one pod, in order, from one start or several successive starts.

    Memory use grows with the number of running and unsuccessful rollouts. Each successful rollout takes 8 bytes.

    Args:
        pod: Name of the pod. Required only for several starts.
    """

    def __init__(self, pod: str = "") -> None:
        self._name = pod
        self._start = ""
        self._pod: tuple[int, PodEvent] | None = None
        self._workers: list[tuple[int, WorkerEvent]] = []
        self._open: dict[str, list[tuple[int, AnyEvent]]] = {}
        """Events of each unfinished rollout, by rollout id."""
        self._attempts: dict[str, list[tuple[int, AnyEvent]]] = {}
        """Failed attempts of each unsuccessful rollout, by rollout id. They count as retries if the rollout runs
        again."""
        self._running = RunningRollouts()
        self._bad: dict[str, RolloutEvent] = {}
        self._well: dict[str, Counter[str]] = {}
        self._digests = bytearray()
        self._inexact: Counter[str] = Counter()
        self._constrained: Counter[str] = Counter()
        self._models: Used = {}
        self._recent: Counter[int] = Counter()
        self._number = self._stored = 0
        self._seen_at = self._busy_at = 0.0
        # State of the ended starts; see Condensed.
        self._ended_starts = self._ended_stored = 0
        self._after = -1
        self._sizes: dict[str, int] = {}
        self._slots: list[tuple[float, float, float]] = []
        self._last: list[AnyEvent] = []

    def apply(self, event: AnyEvent) -> None:
        """Adds an event to the aggregate."""
        self._seen_at = event.t
        self._busy_at = busy_at(self._busy_at, event)
        self._running.apply(self._where, event)
        if isinstance(event, RolloutEvent):
            self._end(event)
        else:
            self._keep(event)

    @property
    def _where(self) -> str:
        return f"{self._name}.{self._start}"

    def _keep(self, event: AnyEvent) -> None:
        self._number += 1
        match event:
            case PodEvent():
                self._pod = self._number, _merge_events(self._pod[1], event) if self._pod else event
            case WorkerEvent():
                self._workers.append((self._number, event))
            case StartEvent(id=rollout) | AttemptEvent(id=rollout):
                self._open.setdefault(rollout, []).append((self._number, event))

    def adopt(self, summary: Summary) -> None:
        """Adds a summary to the aggregate, instead of the events that it covers."""
        self._running.adopt(self._where, summary)
        self._seen_at, self._busy_at = summary.t, summary.busy_at
        for event in summary.events:
            self._keep(event)
        for ended in summary.ended_badly:
            self._bad[ended.id] = ended.to_event()
            if not any(isinstance(event, StartEvent) for _, event in self._open.get(ended.id, ())):
                self._attempts.setdefault(ended.id, []).extend(self._open.pop(ended.id, ()))
        for policy, statuses in summary.ended_well.items():
            self._well.setdefault(policy, Counter()).update(statuses)
        self._digests += summary.digests
        self._inexact.update(summary.inexact)
        self._constrained.update(summary.constrained)
        self._models = total_use([self._models, summary.models])
        self._recent.update(summary.recent)
        self._stored += summary.stored

    def begin_start(self, start: str) -> None:
        """Begins the pod's next start. All following events belong to it."""
        self._start = start

    def end_start(self, size: int) -> None:
        """Ends the current start.

        Args:
            size: Size of the start's event file in bytes.
        """
        self._ended_starts += 1
        self._sizes[self._start] = size
        self._ended_stored += max(self._stored, (self._pod[1].stored or 0) if self._pod else 0)
        kept: list[tuple[int, AnyEvent]] = [*self._workers]
        kept += [self._pod] if self._pod is not None else []
        self._last = [event for _, event in sorted(kept, key=lambda pair: pair[0])]
        if period := self._period():
            self._slots.append(period)
        while len(self._slots) > MAX_PERIODS:
            self._slots = [_merge_periods(*self._slots[n : n + 2]) for n in range(0, len(self._slots), 2)]
        for rollout, events in self._open.items():
            attempts = [one for one in events if isinstance(one[1], AttemptEvent)]
            if attempts:
                self._attempts.setdefault(rollout, []).extend(attempts)
        unfinished = [rollout for rollout in self._attempts if rollout not in self._bad]
        unfinished.sort(key=lambda rollout: self._attempts[rollout][-1][1].t)
        for rollout in unfinished[:-MAX_UNFINISHED]:
            del self._attempts[rollout]
        self._running.drop(self._where)
        self._open, self._workers, self._pod, self._stored = {}, [], None, 0

    def _period(self) -> tuple[float, float, float] | None:
        """Returns begin, end and mean number of slots of the current start. Returns ``None`` if it has no worker
        events."""
        if not self._workers:
            return None
        began = min(event.t for _, event in self._workers)
        end = max(self._seen_at, began)
        slot_s = 0.0
        slots: dict[int, int] = {}
        for _, event in self._workers:
            before = slots.get(event.rank, 0)
            slots[event.rank] = event.slots or 0 if event.state == "ready" else 0
            slot_s += (slots[event.rank] - before) * (end - event.t)
        return (began, end, slot_s / (end - began)) if end > began else None

    def adopt_earlier(self, condensed: Condensed, number: int) -> None:
        """Adds the condensed events of all starts up to ``number``. No other event may have been added before."""
        self.adopt(condensed)
        self._ended_starts, self._slots = condensed.starts, list(condensed.slots)
        self._ended_stored, self._after, self._stored = condensed.stored, number, 0
        self._attempts.update(self._open)
        self._open = {}

    def condensed(self) -> Condensed:
        """Returns the aggregate of all ended starts."""
        fields = msgspec.structs.asdict(self.summary(0))
        fields["stored"] = self._ended_stored
        return Condensed(
            **fields,
            starts=self._ended_starts,
            after=self._after,
            sizes=self._sizes,
            slots=self._slots,
            last=self._last,
        )

    def _end(self, event: RolloutEvent) -> None:
        events = self._open.pop(event.id, [])
        self._stored += 1
        self._recent[int(event.t)] += 1
        if event.models:
            self._models = total_use([self._models, event.models])
        if event.status not in VERIFIED:
            self._bad[event.id] = event
            if attempts := [one for one in events if isinstance(one[1], AttemptEvent)]:
                self._attempts.setdefault(event.id, []).extend(attempts)
            return
        self._bad.pop(event.id, None)
        self._attempts.pop(event.id, None)
        self._running.forget(event.id)
        policy = RolloutName.parse(event.id).arm
        self._well.setdefault(policy, Counter())[event.status] += 1
        self._digests += digest(event.id)
        if event.inexact:
            self._inexact[policy] += event.inexact
        if event.constrained:
            self._constrained[policy] += event.constrained

    def summary(self, covers: int) -> Summary:
        """Returns a summary of all events added so far.

        Args:
            covers: Size of these events in their file, in bytes.
        """
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
            models=self._models,
            ended_badly=list(self._ended_badly()),
            retries=dict(self._running.retries),
            failures=self._running.by_cause(),
            recent=dict(self._recent),
            busy_at=self._busy_at,
            stored=self._stored,
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
                attempt.pod.rpartition(".")[2] if attempt else "",
                attempt.node if attempt and self._ended_starts else "",
            )


def _merge_periods(*periods: tuple[float, float, float]) -> tuple[float, float, float]:
    """Merges neighbouring periods into one period with the same number of slot-seconds."""
    begin, end = periods[0][0], max(period[1] for period in periods)
    return begin, end, sum((until - since) * slots for since, until, slots in periods) / (end - begin)


def _merge_events(before: PodEvent, event: PodEvent) -> PodEvent:
    """Returns the later event. Its missing fields are filled in from the earlier one."""
    fields = {name: getattr(event, name) for name in event.__struct_fields__}
    return PodEvent(**{name: getattr(before, name) if value is None else value for name, value in fields.items()})


class EventFileScan:
    """Feeds the events of one file into an aggregator, chunk by chunk.

    Args:
        covered: Number of bytes of the file that the aggregator already includes.
    """

    def __init__(self, path: Path, aggregator: EventAggregator, covered: int = 0) -> None:
        self._path, self._aggregator = path, aggregator
        self.covered = covered
        """Number of bytes aggregated so far."""
        self._descriptor = -1

    def advance(self) -> bool:
        """Reads and aggregates one chunk. Returns false if the file has no further complete line. Raises OSError."""
        if self._descriptor < 0:
            self._descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        data = os.pread(self._descriptor, PIECE, self.covered)
        end = data.rfind(b"\n") + 1
        if not end and len(data) == PIECE:  # pods never write a line this long: a crash left a hole
            end = PIECE
        for line in data[:end].splitlines():
            event = decode(line)
            if event is not None:
                self._aggregator.apply(event)
        self.covered += end
        return end > 0

    def close(self) -> None:
        """Closes the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class SummaryWriter:
    """Keeps the summary of one event file up to date. Ignores disk errors.

    Args:
        events: The event file.
        clock: A monotonic clock, in seconds.
    """

    def __init__(self, events: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path, self._clock = events, clock
        self._aggregator = EventAggregator()
        self._scan = EventFileScan(events, self._aggregator)
        self._written = 0
        """Number of bytes of events covered by the summary on disk."""
        self._size = 0
        """Size of the summary on disk, in bytes."""
        self._look_at = clock() + READ_INTERVAL_S
        self._write_at = clock() + SUMMARY_INTERVAL_S

    def tick(self) -> None:
        """Reads new events and rewrites the summary, each only if it is due."""
        if self._clock() < self._look_at:
            return
        began = time.thread_time()
        with suppress(OSError):
            self._scan.advance()
            if self._clock() >= self._write_at and self._scan.covered - self._written >= max(TAIL, self._size // 2):
                self._write()
        self._look_at = self._clock() + max(READ_INTERVAL_S, PAUSE_FACTOR * (time.thread_time() - began))

    def finish(self) -> None:
        """Writes a final summary if there are enough new events. Call it last."""
        with suppress(OSError):
            for _ in range(LAST_PIECES):
                if not self._scan.advance():
                    break
            if self._scan.covered - self._written >= LAST_TAIL:
                self._write()
        self._scan.close()

    def _write(self) -> None:
        self._size = summaries.write(self._path, self._aggregator.summary(self._scan.covered))
        self._written, self._write_at = self._scan.covered, self._clock() + SUMMARY_INTERVAL_S
