"""Random events of an invented campaign: pods run, repeat, fail, are killed, drained and taken over."""

from __future__ import annotations

import random
from pathlib import Path

from megaflow_hpc.rundir.events import (
    AnyEvent,
    AttemptEvent,
    EngineEvent,
    PodEvent,
    RolloutEvent,
    StartEvent,
    WorkerEvent,
    encode,
)

CAUSES = ("model", "sandbox-start", "node", "preemption", "cancelled")


class History:
    """The events of several pods over ``steps`` steps. The last event is at ``now``.

    Args:
        now: seconds UTC.
    """

    def __init__(self, seed: int, pods: int, steps: int, now: float) -> None:
        self._random = random.Random(seed)
        self.files: dict[str, list[AnyEvent]] = {}
        """``<pod>.<start>`` → its events."""
        self._now = now - steps * 0.7
        self._running: dict[str, dict[str, tuple[int, int]]] = {}
        """Pod → rollout → rank and number of its attempt."""
        self._queue = [f"täsk{n // 4}/{'ab'[n % 2]}/{n % 4}" for n in range(2 * steps)]
        self._failed: list[str] = []
        for _ in range(pods):
            self._begin()
        for _ in range(steps):
            self._now += 0.7
            self._step()

    def write(self, folder: Path) -> None:
        """Writes every event file."""
        for pod, events in self.files.items():
            (folder / f"{pod}.jsonl").write_bytes(b"".join(encode(event) for event in events))

    def _begin(self) -> None:
        pod = f"7_{len(self.files)}.0"
        self.files[pod], self._running[pod] = [], {}
        self._say(pod, PodEvent(state="started", job_id=pod, node=f"n{len(self.files)}"))
        for rank in (1, 2):
            self._say(pod, WorkerEvent(rank=rank, state="ready", slots=4, node=f"n{len(self.files)}-{rank}"))

    def _say(self, pod: str, event: AnyEvent) -> None:
        event.t = round(self._now, 3)
        self.files[pod].append(event)

    def _step(self) -> None:
        draw = self._random
        if not self._running:
            self._begin()
        pod = draw.choice(sorted(self._running))
        running, what = self._running[pod], draw.random()
        if what < 0.4 or not running:
            if len(running) < 8 and self._queue:
                rollout, rank = self._queue.pop(0), draw.choice((1, 2))
                running[rollout] = rank, 0
                self._say(pod, StartEvent(id=rollout, rank=rank, attempt=0))
            return
        rollout = draw.choice(sorted(running))
        rank, attempt = running[rollout]
        if what < 0.7:
            status = draw.choice(("completed", "completed", "truncated"))
            self._say(
                pod,
                RolloutEvent(
                    id=rollout,
                    status=status,
                    reward=1.0,
                    turns=3,
                    inexact=draw.choice((0, 2)),
                    constrained=draw.choice((0, 3)),
                ),
            )
            del running[rollout]
        elif what < 0.8:
            self._say(pod, AttemptEvent(id=rollout, attempt=attempt, kind=draw.choice(CAUSES), error="é", rank=rank))
            running[rollout] = draw.choice((1, 2)), attempt + 1
            self._say(pod, StartEvent(id=rollout, rank=running[rollout][0], attempt=attempt + 1))
        elif what < 0.87:
            kind, status = draw.choice(CAUSES), draw.choice(("failed", "failed", "cancelled"))
            error = f"{kind} of {rollout}"
            self._say(pod, RolloutEvent(id=rollout, status=status, kind=kind, error=error, seconds=2.5, turns=1))
            self._failed.append(rollout)
            del running[rollout]
        elif what < 0.91 and self._failed:  # resume --failed
            self._queue.insert(0, self._failed.pop(draw.randrange(len(self._failed))))
        elif what < 0.93:
            self._say(pod, EngineEvent(rank=draw.randrange(9), state="ready", node="n1"))
        elif what < 0.95:
            self._say(pod, WorkerEvent(rank=rank, state="excluded", node=f"n{rank}", why="sandboxes do not start"))
        elif what < 0.98:
            self._queue = [*self._running.pop(pod), *self._queue]  # killed: writes no event
            if draw.random() < 0.5:
                self._begin()
        else:
            for cut, (_, number) in running.items():
                self._say(pod, AttemptEvent(id=cut, attempt=number, kind="preemption", error="cut short"))
            self._say(pod, PodEvent(state="drained", stored=3))
            self._queue = [*self._running.pop(pod), *self._queue]
