"""Work stealing: a pod without work requests some, and a pod with rollouts that it has not started hands some off.

A pod whose free slots find nothing to claim requests work in the ledger for as long as other pods hold blocks, and does
not leave at once. A pod that has rollouts waiting looks for requests, often once no block is free any more, and hands
off to each such a share that the waiting rollouts are spread over its own slots and the free ones. What is handed off
becomes new blocks, which are claimed like any other. Whole groups are handed off, never retries, and the last in the
queue first. Where rules may close groups early, only those are handed off of which nothing has started: what becomes of
the others hangs on rewards that this pod sees.

The loop of rank 0 decides here; the I/O thread carries out what touches the run directory.
"""

from __future__ import annotations

import math
import time

from megaflow_hpc.ledger.blocks import MAX_BLOCK
from megaflow_hpc.pod.master.run_io import RunIo
from megaflow_hpc.pod.scheduling.groups import Groups
from megaflow_hpc.pod.scheduling.scheduler import Scheduler
from megaflow_hpc.pod.scheduling.work import Work

LOOK_S = 5.0
"""How often a pod with waiting rollouts looks for requests when no block was free any more."""
SELDOM_S = 120.0
"""How often it looks while blocks are free."""
REQUEST_S = 20.0
"""A pod without work stays this long after its request; it repeats the request as often."""


def share_of(waiting: int, slots: int, wanted: int) -> int:
    """Returns how many of the waiting rollouts go to others that have so many free slots, for an even spread.

    Args:
        waiting: rollouts that cannot start here now.
        slots: of this pod.
        wanted: free slots of the other one.
    """
    return math.ceil(waiting * wanted / (slots + wanted)) if waiting and wanted else 0


class WorkStealing:
    """Requests work for idle slots, and answers the requests of others."""

    def __init__(self, io: RunIo, scheduler: Scheduler, groups: Groups) -> None:
        self._io, self._scheduler, self._groups = io, scheduler, groups
        self._without_work_since: float | None = None
        self._requested = False
        self._requested_at = self._looked_at = -SELDOM_S

    @property
    def may_get_work(self) -> bool:
        """The pod has requested work, and may yet get some."""
        since = self._without_work_since
        return since is not None and time.monotonic() - since < REQUEST_S

    def claimed(self) -> None:
        """Notes that a block was claimed."""
        self._without_work_since = None

    def tick(self, nothing_free: bool, leaving: bool) -> None:
        """Requests work, or hands some off, where that is due; to be called every second or so.

        Args:
            nothing_free: the last claim found no block.
            leaving: the pod drains: it neither requests nor hands off.
        """
        now, io, scheduler = time.monotonic(), self._io, self._scheduler
        if leaving or not (nothing_free and scheduler.workers.free and not scheduler.queued and io.seen.others):
            self._without_work_since = None
            self._request(0)
        elif self._without_work_since is None or now - self._requested_at >= REQUEST_S:
            self._without_work_since = now if self._without_work_since is None else self._without_work_since
            self._requested_at = now
            self._request(scheduler.workers.free)
        if leaving or not scheduler.queued:
            return
        if now - self._looked_at >= (LOOK_S if io.claimed_all else SELDOM_S):
            self._looked_at = now
            io.look_for_work_requests()
        for wanted in io.work_requests():
            self._hand_off(wanted)

    def _request(self, slots: int) -> None:
        if slots or self._requested:
            self._requested = slots > 0
            self._io.request_work(slots)

    def _hand_off(self, wanted: int) -> None:
        scheduler = self._scheduler
        waiting: dict[str, list[Work]] = {}
        for work in reversed(scheduler.waiting_work()):
            waiting.setdefault(work.rollout.group_id, []).append(work)
        count = share_of(max(0, scheduler.queued - scheduler.workers.free), scheduler.workers.slots, wanted)
        going: list[Work] = []
        for name, samples in waiting.items():
            group = [work for work in samples if not work.attempt]
            if len(going) + len(group) > count:
                break
            if group and self._groups.hand_off(name, [work.rollout.id for work in group]):
                going += group
        for work in going:
            scheduler.drop(work.rollout.id)
        if going:
            self._io.hand_off([(work.block, work.rollout) for work in going], min(MAX_BLOCK, wanted))
