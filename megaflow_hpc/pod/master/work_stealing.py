"""Work stealing: idle pods request work, and other pods hand off rollouts that they have not started.

A pod requests work in the ledger while it has free slots, finds no block to claim, and other pods hold blocks. It waits
for work before it leaves. A pod with waiting rollouts polls for requests, more often once no block is free. It hands
off so many rollouts that the waiting ones are spread evenly over the slots of both pods. Handed-off rollouts become new
blocks. Any pod may claim them.

A pod hands off only whole groups, starting from the end of the queue. It never hands off retries. If the group rules
may close groups early, it hands off only groups without a started rollout. The other groups depend on rewards that only
this pod sees.

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
"""Seconds between two polls for work requests by a pod with waiting rollouts, once no block is free."""
SELDOM_S = 120.0
"""The same while blocks are free."""
REQUEST_S = 20.0
"""Seconds that an idle pod waits for a response to its request before it may leave. It then repeats the request."""


def rollouts_for(waiting: int, slots: int, wanted: int) -> int:
    """Returns the number of waiting rollouts to hand off, so that both pods have the same number per slot.

    Args:
        waiting: Number of rollouts that cannot start here now.
        slots: Number of this pod's slots.
        wanted: Number of the other pod's free slots.
    """
    return math.ceil(waiting * wanted / (slots + wanted)) if waiting and wanted else 0


class WorkStealing:
    """Requests work for idle slots, and hands off rollouts to pods that request work."""

    def __init__(self, io: RunIo, scheduler: Scheduler, groups: Groups) -> None:
        self._io, self._scheduler, self._groups = io, scheduler, groups
        self._idle_since: float | None = None
        """Monotonic time when this pod first requested work in the current idle period. ``None`` while it is busy."""
        self._requested_at = self._looked_at = -SELDOM_S
        self.requests: list[int] = []
        """Number of slots in each unanswered request of another pod."""

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
            nothing_free: The last claim found no free block.
            leaving: The pod drains, so it neither requests nor hands off work.
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
