"""Work stealing: idle pods request work, and other pods hand off rollouts that they have not started.

A pod requests work through the ledger if it has free slots, finds no block to claim, and other pods hold blocks. It
waits for work before it leaves. A pod with waiting rollouts polls for such requests, and polls more often once no block
is free. It hands off enough rollouts to spread the waiting ones evenly over the slots of both pods. The rollouts become
new blocks, which any pod may claim.

A pod hands off only whole groups, starting from the end of its queue, and never hands off retries. If the group rules
may close groups early, a pod keeps every group of which it has started a rollout. These groups depend on rewards that
only this pod knows.

Rank 0's loop makes these decisions. The I/O thread accesses the run directory.
"""

from __future__ import annotations

import math
import time

from megaflow_hpc.ledger.blocks import MAX_BLOCK
from megaflow_hpc.pod.master.run_io import RunIo
from megaflow_hpc.pod.scheduling.groups import Groups
from megaflow_hpc.pod.scheduling.scheduler import Scheduler, Work

POLL_INTERVAL_S = 5.0
"""Interval in seconds at which a pod with waiting rollouts polls for work requests, once no block is free."""
SELDOM_S = 120.0
"""Interval in seconds at which a pod with waiting rollouts polls for work requests while blocks are free."""
REQUEST_S = 20.0
"""An idle pod waits this many seconds for work after its first request, before it may leave. It repeats the request at
the same interval."""


def rollouts_for(waiting: int, slots: int, wanted: int) -> int:
    """Returns the number of waiting rollouts to hand off, so that both pods have about the same number per slot.

    Args:
        waiting: Number of rollouts that this pod cannot start now.
        slots: Number of this pod's slots.
        wanted: Number of the other pod's free slots.
    """
    return math.ceil(waiting * wanted / (slots + wanted)) if waiting and wanted else 0


class WorkStealing:
    """Requests work for idle slots, and hands off rollouts to pods that request work."""

    def __init__(self, io: RunIo, scheduler: Scheduler, groups: Groups) -> None:
        self._io, self._scheduler, self._groups = io, scheduler, groups
        self._idle_since: float | None = None
        """Monotonic time of the first request for work in the current idle period. ``None`` while the pod is busy."""
        self._requested_at = self._looked_at = -SELDOM_S
        self.requests: list[int] = []
        """Number of free slots in each unanswered request of another pod."""

    @property
    def may_get_work(self) -> bool:
        """True if this pod has recently requested work."""
        return self._idle_since is not None and time.monotonic() - self._idle_since < REQUEST_S

    def claimed(self) -> None:
        """Records that this pod has claimed a block."""
        self._idle_since = None

    def tick(self, nothing_free: bool, leaving: bool) -> None:
        """Requests work or hands off rollouts, if due. Call it about once a second.

        Args:
            nothing_free: True if the last claim found no free block.
            leaving: True if the pod drains, so that it neither requests nor hands off work.
        """
        now, scheduler, state = time.monotonic(), self._scheduler, self._io.state
        idle = nothing_free and scheduler.workers.free and not scheduler.queued
        if leaving or not (idle and state.seen.others):
            self._idle_since = None
            self._io.requests.request_work = 0
        elif self._idle_since is None or now - self._requested_at >= REQUEST_S:
            self._idle_since = now if self._idle_since is None else self._idle_since
            self._requested_at = now
            self._io.requests.request_work = scheduler.workers.free
        if leaving or not scheduler.queued:
            return
        if now - self._looked_at >= (POLL_INTERVAL_S if state.claimed_all else SELDOM_S):
            self._looked_at = now
            self._io.requests.find_work_requests = True
        requests, self.requests = self.requests, []
        for wanted in requests:
            self._hand_off(wanted)

    def _hand_off(self, wanted: int) -> None:
        scheduler = self._scheduler
        waiting: dict[str, list[Work]] = {}
        for work in reversed(scheduler.waiting_work()):
            waiting.setdefault(work.rollout.group_id, []).append(work)
        count = rollouts_for(max(0, scheduler.queued - scheduler.workers.free), scheduler.workers.slots, wanted)
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
