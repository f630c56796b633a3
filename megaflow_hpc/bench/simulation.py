"""A campaign in virtual time: the real scheduler of every pod, blocks claimed as pods claim them, and no work done.

What is real: :class:`~megaflow_hpc.pod.scheduler.Scheduler`, block sizes, the rule by which a pod claims its next
block. What is not: durations are drawn, not lived; a claim and a decision cost ``dispatch_s`` of the pod's one thread.
"""

from __future__ import annotations

import heapq
import math
import random
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from megaflow_hpc.ledger.blocks import deal
from megaflow_hpc.pod.scheduler import Order, Scheduler
from megaflow_hpc.pod.work import Work
from megaflow_hpc.types import Rollout

RANK_SLOTS = 32
"""Slots of a simulated worker rank."""


@dataclass(frozen=True)
class Shape:
    """What is simulated.

    Args:
        durations_s: of every rollout, in the order in which they were planned.
        expected_s: what the scheduler believes of each; 0: nothing.
        dispatch_s: of rank 0's time that one decision takes, journalling included.
    """

    durations_s: Sequence[float]
    expected_s: Sequence[float]
    pods: int
    slots: int
    order: Order = "fifo"
    dispatch_s: float = 0.0


@dataclass(frozen=True)
class Outcome:
    """Seconds of virtual time, and how the slots were used."""

    makespan_s: float
    ideal_s: float
    """No order could be faster: the longer of total work over slots, and the longest rollout."""
    busy: float
    """Share of slot time in use until the last rollout started."""
    rollouts: int
    blocks: int

    @property
    def ratio(self) -> float:
        return self.makespan_s / self.ideal_s


def pareto(count: int, alpha: float, seed: int, shortest_s: float = 60.0) -> list[float]:
    """Durations with a Pareto tail."""
    draw = random.Random(seed)
    return [shortest_s * draw.paretovariate(alpha) for _ in range(count)]


def believed(durations_s: Sequence[float], sigma: float, seed: int) -> list[float]:
    """Durations as estimates see them: off by a log-normal factor; exact with ``sigma`` 0."""
    draw = random.Random(seed + 1_000_003)
    return [duration * math.exp(draw.gauss(0.0, sigma)) for duration in durations_s]


def simulate(shape: Shape, progress: Callable[[int], None] | None = None) -> Outcome:
    """Runs a campaign of this shape to its end."""
    blocks = _blocks(shape)
    per_pod = [shape.slots // shape.pods + (pod < shape.slots % shape.pods) for pod in range(shape.pods)]
    schedulers = [_pod(shape.order, slots) for slots in per_pod]
    free_at = [0.0] * shape.pods
    ends: list[tuple[float, int, int, str]] = []
    now, last_start = 0.0, 0.0
    spans = (array("d"), array("d"))
    claimed = ended = 0
    exhausted = False
    pending = list(range(shape.pods))
    while True:
        for pod in pending:
            scheduler = schedulers[pod]
            while not exhausted and scheduler.queued < scheduler.slots - scheduler.running:
                block = next(blocks, None)
                if block is None:
                    exhausted = True
                    break
                claimed += 1
                scheduler.add(block)
            while (next_ := scheduler.next()) is not None:
                rank, work = next_
                free_at[pod] = started = max(now, free_at[pod]) + shape.dispatch_s
                duration = shape.durations_s[int(work.rollout.task_id)]
                heapq.heappush(ends, (started + duration, pod, rank, work.rollout.id))
                last_start = max(last_start, started)
                spans[0].append(started)
                spans[1].append(started + duration)
        if not ends:
            break
        now, pod, rank, rollout_id = heapq.heappop(ends)
        schedulers[pod].finish(rank, rollout_id)
        ended += 1
        pending = [pod]
        if progress and not ended % 100_000:
            progress(ended)
    total = sum(shape.durations_s)
    used = sum(min(end, last_start) - start for start, end in zip(*spans, strict=True))
    busy = used / (shape.slots * last_start) if last_start else 1.0
    ideal = max(total / shape.slots, max(shape.durations_s))
    return Outcome(now, ideal, busy, ended, claimed)


def _pod(order: Order, slots: int) -> Scheduler:
    scheduler = Scheduler(order)
    for rank in range(math.ceil(slots / RANK_SLOTS)):
        scheduler.join(rank, min(RANK_SLOTS, slots - rank * RANK_SLOTS))
    return scheduler


def _blocks(shape: Shape) -> Iterator[list[Work]]:
    """Blocks as they are planned: the longest expected first where the order asks for it."""
    longest = shape.order == "longest"
    work = shape.expected_s if longest else [1.0] * len(shape.durations_s)
    for number, block in enumerate(deal(work, shape.pods, longest)):
        yield [Work(Rollout(str(n), "p", 0, "a"), number, 0, expected_s=shape.expected_s[n]) for n in block]
