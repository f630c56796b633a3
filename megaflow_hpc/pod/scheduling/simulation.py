"""A campaign in virtual time: the real scheduler of every pod, blocks claimed as pods claim them, and no work done.

What is real: :class:`~megaflow_hpc.pod.scheduling.scheduler.Scheduler`, block sizes, the rule by which a pod claims its
next block. What is not: durations are drawn, not lived; a claim and a decision cost ``dispatch_s`` of the pod's one
thread.
"""

from __future__ import annotations

import heapq
import math
import random
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby

from megaflow_hpc.ledger.blocks import deal
from megaflow_hpc.pod.scheduling.estimates import Estimates
from megaflow_hpc.pod.scheduling.groups import GroupRules, Groups
from megaflow_hpc.pod.scheduling.scheduler import Order, Scheduler
from megaflow_hpc.pod.scheduling.stragglers import Stragglers
from megaflow_hpc.pod.scheduling.work import Work
from megaflow_hpc.types import Rollout

RANK_SLOTS = 32
"""Slots of a simulated worker rank."""
COPY_LOOK_S = 30.0
"""Virtual time between two looks for stragglers."""

LEARNED = 0.5
"""Standard deviation of the logarithm of estimates' error."""

NO_RULES = GroupRules()


@dataclass(frozen=True)
class Shape:
    """What is simulated.

    Args:
        durations_s: of every rollout, in the order in which they were planned.
        expected_s: what the scheduler believes of each; 0: nothing.
        dispatch_s: of rank 0's time that one decision takes, journalling included.
        samples: of a group; rollouts of one group follow one another.
        rules: of groups.
        rewards: of every rollout; empty: 0 for all.
        copies_s: of every rollout, should it be started a second time; empty: none is.
    """

    durations_s: Sequence[float]
    expected_s: Sequence[float]
    pods: int
    slots: int
    order: Order = "fifo"
    dispatch_s: float = 0.0
    samples: int = 1
    rules: GroupRules = NO_RULES
    rewards: Sequence[float] = ()
    copies_s: Sequence[float] = ()


@dataclass(frozen=True)
class Outcome:
    """Seconds of virtual time, and how the slots were used."""

    makespan_s: float
    ideal_s: float
    """No order could be faster: the longer of total work over slots, and the longest rollout."""
    busy: float
    """Share of slot time in use until the last rollout started."""
    rollouts: int
    """That ended; those that were cancelled are not among them."""
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


class _Pod:
    """One pod's scheduler and rules, and when its rank 0 has time again."""

    def __init__(self, shape: Shape, slots: int) -> None:
        self.shape = shape
        self.scheduler = Scheduler(shape.order)
        for rank in range(math.ceil(slots / RANK_SLOTS)):
            self.scheduler.join(rank, min(RANK_SLOTS, slots - rank * RANK_SLOTS))
        self.groups = Groups(shape.rules)
        self.parked: dict[str, Work] = {}
        self.estimates = Estimates()
        self.stragglers = Stragglers(self.estimates)
        self.looked = 0.0
        self.free_at = 0.0

    def add(self, block: list[Work]) -> None:
        for group, work in groupby(block, key=lambda work: work.rollout.group_id):
            samples = list(work)
            later = self.groups.admit(group, "p", [one.rollout.id for one in samples])
            self.scheduler.add(replace(one, later=one.rollout.id in later) if later else one for one in samples)

    def ended(self, work: Work, now: float, started: float) -> None:
        if self.shape.copies_s:
            self.estimates.observe(work.rollout.task_id, "p", now - started)
            self.stop(work.rollout.id)
        if len(self.groups):
            reward = self.shape.rewards[_number(work)] if self.shape.rewards else 0.0
            step = self.groups.ended(work.rollout.group_id, work.rollout.id, reward)
            for rollout in step.park:
                if (waiting := self.scheduler.drop(rollout)) is not None:
                    self.parked[rollout] = waiting
            again = [self.parked.pop(rollout, None) or self.scheduler.drop(rollout) for rollout in step.unpark]
            self.scheduler.add(replace(one, later=False) for one in again if one is not None)
            for rollout in step.cancel:
                if self.parked.pop(rollout, None) is None and self.scheduler.drop(rollout) is None:
                    self.stop(rollout)

    def stop(self, rollout: str) -> None:
        for rank in self.scheduler.running_at(rollout):
            self.scheduler.finish(rank, rollout)

    def copy_stragglers(self, now: float) -> Iterator[tuple[int, Work]]:
        if self.scheduler.free and not self.scheduler.queued and now - self.looked > COPY_LOOK_S:
            self.looked = now
            for rollout in self.stragglers.overdue(self.scheduler.running_work(), now):
                if (copy := self.scheduler.copy(rollout)) is not None:
                    yield copy


def _number(work: Work) -> int:
    return int(work.rollout.task_id) + work.rollout.sample_index


def simulate(shape: Shape, progress: Callable[[int], None] | None = None) -> Outcome:
    """Runs a campaign of this shape to its end."""
    blocks = _blocks(shape)
    pods = [_Pod(shape, shape.slots // shape.pods + (n < shape.slots % shape.pods)) for n in range(shape.pods)]
    ends: list[tuple[float, int, int, int, float, Work]] = []
    now = last_start = 0.0
    spans = (array("d"), array("d"))
    claimed = ended = number = 0
    exhausted = False
    pending = list(range(shape.pods))
    while True:
        for which in pending:
            pod = pods[which]
            scheduler = pod.scheduler
            while not exhausted and scheduler.queued - scheduler.later < scheduler.free:
                block = next(blocks, None)
                if block is None:
                    exhausted = True
                    break
                claimed += 1
                pod.add(block)
            starts = iter(scheduler.next, None)
            for copies, (rank, work) in chain(
                ((False, start) for start in starts),
                ((True, start) for start in pod.copy_stragglers(now)) if shape.copies_s and exhausted else (),
            ):
                pod.free_at = started = max(now, pod.free_at) + shape.dispatch_s
                duration = (shape.copies_s if copies else shape.durations_s)[_number(work)]
                number += 1
                heapq.heappush(ends, (started + duration, number, which, rank, started, work))
                if not copies:
                    last_start = max(last_start, started)
                    if shape.copies_s:
                        pod.stragglers.started(work.rollout.id, started)
                pod.groups.started(work.rollout.group_id, work.rollout.id)
                spans[0].append(started)
                spans[1].append(started + duration)
        if not ends:
            break
        end, _, which, rank, started, work = heapq.heappop(ends)
        pod = pods[which]
        if pod.scheduler.finish(rank, work.rollout.id) is None:
            pending = []
            continue  # it was called off
        now = end
        pod.ended(work, now, started)
        ended += 1
        pending = [which]
        if progress and not ended % 100_000:
            progress(ended)
    total = sum(shape.durations_s)
    used = sum(max(0.0, min(end, last_start) - start) for start, end in zip(*spans, strict=True))
    busy = used / (shape.slots * last_start) if last_start else 1.0
    ideal = max(total / shape.slots, max(shape.durations_s))
    return Outcome(now, ideal, busy, ended, claimed)


def _blocks(shape: Shape) -> Iterator[list[Work]]:
    """Blocks as they are planned: the longest expected first where the order asks for it; groups stay whole."""
    longest, each = shape.order == "longest", shape.samples
    expected_s = shape.expected_s
    firsts = range(0, len(shape.durations_s), each)
    work = [sum(expected_s[n : n + each]) for n in firsts] if longest else [float(each)] * len(firsts)
    for number, block in enumerate(deal(work, shape.pods, longest)):
        yield [
            Work(Rollout(str(g * each), "p", sample, "a"), number, 0, expected_s=expected_s[g * each + sample])
            for g in block
            for sample in range(each)
        ]
