"""Simulates a whole campaign in virtual time, to compare rules of scheduling before anything runs.

The scheduler, the group rules, the block sizes (:func:`megaflow_hpc.ledger.blocks.deal`) and the rule for claiming the
next block are those of a real pod. Durations and rewards are given. A start costs ``dispatch_s`` of its pod's only
thread.
"""

from __future__ import annotations

import heapq
import math
import random
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from megaflow_hpc.ledger.blocks import MAX_BLOCK, deal
from megaflow_hpc.pod.scheduling.groups import GroupRules, Groups
from megaflow_hpc.pod.scheduling.scheduler import Scheduler, Work
from megaflow_hpc.types import Rollout

RANK_SLOTS = 32
"""Slots of a simulated worker rank."""

NO_RULES = GroupRules()


@dataclass(frozen=True)
class Shape:
    """The campaign that is simulated.

    Args:
        durations_s: seconds of every rollout, in the order in which they were planned.
        slots: of all pods together.
        dispatch_s: seconds of rank 0 that one start takes, journalling included.
        samples: rollouts of a group; they follow one another.
        rules: what groups are closed by.
        rewards: of every rollout; empty: 0 for all.
    """

    durations_s: Sequence[float]
    pods: int
    slots: int
    dispatch_s: float = 0.0
    samples: int = 1
    rules: GroupRules = NO_RULES
    rewards: Sequence[float] = ()


@dataclass(frozen=True)
class SimulationResult:
    """What the campaign took, in seconds of virtual time, and how its slots were used."""

    makespan_s: float
    ideal_s: float
    """The longer of total work over slots and the longest rollout: no schedule could be faster."""
    busy: float
    """Share of slot time in use until the last rollout started."""
    rollouts: int
    """Those that ended; cancelled ones are not among them."""
    blocks: int
    """Those that were claimed."""

    @property
    def ratio(self) -> float:
        """Makespan over the ideal one."""
        return self.makespan_s / self.ideal_s


def pareto(count: int, alpha: float, seed: int) -> list[float]:
    """Draws durations with a Pareto tail, of a minute and more, in seconds."""
    draw = random.Random(seed)
    return [60.0 * draw.paretovariate(alpha) for _ in range(count)]


class _Pod:
    """One pod: its scheduler and rules, and when its rank 0 has time again."""

    def __init__(self, shape: Shape, slots: int) -> None:
        self.shape = shape
        self.scheduler = Scheduler()
        for rank in range(math.ceil(slots / RANK_SLOTS)):
            self.scheduler.workers.join(rank, min(RANK_SLOTS, slots - rank * RANK_SLOTS))
        self.groups = Groups(shape.rules)
        self.free_at = 0.0

    def add(self, block: list[Work]) -> None:
        """Queues a block, group by group."""
        for group, work in groupby(block, key=lambda work: work.rollout.group_id):
            samples = list(work)
            later = self.groups.admit(group, "p", [one.rollout.id for one in samples])
            self.scheduler.add(replace(one, deferred=one.rollout.id in later) if later else one for one in samples)

    def ended(self, work: Work) -> None:
        """Applies the rules of its group to a rollout that has ended."""
        if len(self.groups):
            reward = self.shape.rewards[_number(work)] if self.shape.rewards else 0.0
            step = self.groups.ended(work.rollout.group_id, work.rollout.id, reward)
            promoted = [self.scheduler.drop(rollout) for rollout in step.promote]
            self.scheduler.add(replace(one, deferred=False) for one in promoted if one is not None)
            for rollout in step.cancel:
                if self.scheduler.drop(rollout) is None:
                    self.stop(rollout)

    def stop(self, rollout: str) -> None:
        """Ends a rollout if it runs."""
        rank = self.scheduler.workers.worker_of(rollout)
        if rank is not None:
            self.scheduler.workers.finish(rank, rollout)


def _number(work: Work) -> int:
    return int(work.rollout.task_id) + work.rollout.sample_index


class _Simulation:
    """The pods of a campaign, and what ends when."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        share, rest = divmod(shape.slots, shape.pods)
        self._pods = [_Pod(shape, share + (n < rest)) for n in range(shape.pods)]
        self._blocks = _blocks(shape)
        self._ends: list[tuple[float, int, int, int, Work]] = []
        """Heap of running rollouts: end, number of the start, pod, worker rank, work."""
        self._starts = array("d")
        self._stops = array("d")
        self._last_start = 0.0
        self._claimed = 0
        self._all_claimed = False

    def run(self) -> SimulationResult:
        """Runs the campaign to its end."""
        now, ended = 0.0, 0
        for which in range(len(self._pods)):
            self._fill(which, now)
        while self._ends:
            end, _, which, rank, work = heapq.heappop(self._ends)
            pod = self._pods[which]
            if pod.scheduler.workers.finish(rank, work.rollout.id) is None:
                continue  # it was cancelled
            now = end
            pod.ended(work)
            ended += 1
            self._fill(which, now)
        return self._result(now, ended)

    def _fill(self, which: int, now: float) -> None:
        """Starts what a pod can start, claiming blocks as pods do."""
        pod = self._pods[which]
        scheduler = pod.scheduler
        while not self._all_claimed and scheduler.queued - scheduler.deferred < scheduler.workers.free:
            block = next(self._blocks, None)
            if block is None:
                self._all_claimed = True
                break
            self._claimed += 1
            pod.add(block)
        for rank, work in iter(scheduler.next, None):
            started = self._start(which, rank, work, now)
            self._last_start = max(self._last_start, started)

    def _start(self, which: int, rank: int, work: Work, now: float) -> float:
        """Starts a rollout once the pod's only thread is free; returns that time."""
        pod = self._pods[which]
        pod.free_at = started = max(now, pod.free_at) + self._shape.dispatch_s
        end = started + self._shape.durations_s[_number(work)]
        heapq.heappush(self._ends, (end, len(self._starts), which, rank, work))
        pod.groups.started(work.rollout.group_id, work.rollout.id)
        self._starts.append(started)
        self._stops.append(end)
        return started

    def _result(self, now: float, ended: int) -> SimulationResult:
        durations_s, slots, last = self._shape.durations_s, self._shape.slots, self._last_start
        used_s = sum(max(0.0, min(end, last) - start) for start, end in zip(self._starts, self._stops, strict=True))
        ideal_s = max(sum(durations_s) / slots, max(durations_s))
        return SimulationResult(now, ideal_s, used_s / (slots * last) if last else 1.0, ended, self._claimed)


def simulate(shape: Shape) -> SimulationResult:
    """Runs a campaign of this shape to its end."""
    return _Simulation(shape).run()


def _blocks(shape: Shape) -> Iterator[list[Work]]:
    """Yields blocks as they are planned. Groups stay whole."""
    each = shape.samples
    groups = len(shape.durations_s) // each
    for number, block in enumerate(deal([each] * groups, shape.pods, max(1, MAX_BLOCK // each))):
        yield [Work(Rollout(str(g * each), "p", sample, "a"), number, 0) for g in block for sample in range(each)]
