"""Work stealing: a pod without work says so, and a pod with rollouts that it has not started hands some over.

A pod whose free slots find nothing to claim is *hungry* for as long as other pods hold blocks: it says so in the ledger
and does not leave at once. A pod that has rollouts waiting looks whether others are hungry, often once no block is free
any more, and gives each a share such that the waiting rollouts are spread over its own slots and the free ones. What is
given becomes new blocks (:meth:`Holdings.give`); the hungry claim them like any other. Whole groups are given, never
retries, and the last in the queue first. Where rules may close groups early, only those are given of which nothing has
started: what becomes of the others hangs on rewards that this pod sees.

The loop of rank 0 decides here; the clerk's thread carries out what touches the run directory.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from megaflow_hpc.ledger.blocks import MAX_BLOCK
from megaflow_hpc.pod.master.claimed_blocks import Holdings
from megaflow_hpc.pod.scheduling.groups import Groups
from megaflow_hpc.pod.scheduling.scheduler import Scheduler
from megaflow_hpc.pod.scheduling.work import Work

LOOK_S = 5.0
"""How often a pod with waiting rollouts looks for hungry ones when no block was free any more,"""
SELDOM_S = 120.0
"""and before that."""
HUNGRY_S = 20.0
"""A hungry pod stays this long without being given anything; it asks again as often."""


def share_of(waiting: int, slots: int, wanted: int) -> int:
    """How many of the waiting rollouts go to others that have so many free slots: an even spread."""
    return math.ceil(waiting * wanted / (slots + wanted)) if waiting and wanted else 0


class Sharing:
    def __init__(
        self, holdings: Holdings, scheduler: Scheduler, groups: Groups, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._holdings, self._scheduler, self._groups, self._clock = holdings, scheduler, groups, clock
        self._hungry_since: float | None = None
        self._asked_at = self._looked_at = -SELDOM_S

    @property
    def stays(self) -> bool:
        """The pod is hungry, and may yet be given something."""
        since = self._hungry_since
        return since is not None and self._clock() - since < HUNGRY_S

    def fed(self) -> None:
        """Something was claimed."""
        self._hungry_since = None

    def tick(self, dry: bool, leaving: bool) -> None:
        """
        Args:
            dry: the last claim found nothing.
            leaving: the pod drains: it neither asks nor gives.
        """
        now, holdings, scheduler = self._clock(), self._holdings, self._scheduler
        if leaving or not (dry and scheduler.free and not scheduler.queued and holdings.others):
            self._hungry_since = None
            holdings.want(0)
        elif self._hungry_since is None or now - self._asked_at >= HUNGRY_S:
            self._hungry_since = now if self._hungry_since is None else self._hungry_since
            self._asked_at = now
            holdings.want(scheduler.free)
        if leaving or not scheduler.queued:
            return
        if now - self._looked_at >= (LOOK_S if holdings.claimed_all else SELDOM_S):
            self._looked_at = now
            holdings.look()
        for wanted in holdings.asked():
            self._give(wanted)

    def _give(self, wanted: int) -> None:
        scheduler = self._scheduler
        waiting: dict[str, list[Work]] = {}
        for work in reversed(scheduler.waiting_work()):
            waiting.setdefault(work.rollout.group_id, []).append(work)
        count = share_of(max(0, scheduler.queued - scheduler.free), scheduler.slots, wanted)
        given: list[Work] = []
        for name, samples in waiting.items():
            group = [work for work in samples if not work.attempt]
            if len(given) + len(group) > count:
                break
            if group and self._groups.give(name, [work.rollout.id for work in group]):
                given += group
        for work in given:
            scheduler.drop(work.rollout.id)
        if given:
            self._holdings.offer([(work.block, work.rollout) for work in given], min(MAX_BLOCK, wanted))
