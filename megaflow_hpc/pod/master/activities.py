"""What worker ranks say of the rollouts that run there: tokens for the lease, and details for whoever looks.

A rank says every few seconds which of its rollouts have got an answer since. Of a conversation it says something only
when it is asked, which happens while a viewer shows that rollout.
"""

from __future__ import annotations

import time
from collections import deque

from megaflow_hpc.host.wire import Message
from megaflow_hpc.pod.comm import Comm
from megaflow_hpc.pod.master.run_io import RunIo
from megaflow_hpc.pod.scheduling.scheduler import Scheduler
from megaflow_hpc.rundir.live import Asked, PodActivity, RolloutActivity, Transcript

SHOW_S = 3.0
"""How often viewers are told."""
WINDOW_S = 30.0
"""Seconds over which the pace of sampling is taken."""


class Activities:
    """Belongs to rank 0's loop."""

    def __init__(self, comm: Comm, scheduler: Scheduler, io: RunIo) -> None:
        self._comm, self._scheduler, self._io = comm, scheduler, io
        self.asked = Asked()
        """What viewers want to know."""
        self.tokens = 0
        """Tokens that engines have sampled for this pod, those of ranks that are gone included."""
        self._of_rank: dict[int, int] = {}
        self._past: deque[tuple[float, int]] = deque()
        self._known: dict[str, tuple[int, int, bool, float]] = {}
        """Rollout → answered calls, tokens, whether a call waits, and when that was heard."""
        self._transcripts: dict[str, Transcript] = {}
        self._showed_at = 0.0
        self._showing = False

    def heard(self, rank: int, message: Message) -> None:
        """Takes in what a rank says of its rollouts."""
        self.tokens += message["tokens"] - self._of_rank.get(rank, 0)
        self._of_rank[rank] = message["tokens"]
        now = time.monotonic()
        for rollout, (calls, tokens, waits) in message["rollouts"].items():
            self._known[rollout] = (calls, tokens, waits, now)

    def mirrored(self, message: Message) -> None:
        """Takes in the end of a conversation."""
        messages = [(str(role), str(text)) for role, text in message["messages"]]
        self._transcripts[message["id"]] = Transcript(message["calls"], messages, message["left_out"])

    def leave(self, rank: int) -> None:
        """Notes that a rank is gone."""
        self._of_rank.pop(rank, None)

    @property
    def tokens_per_s(self) -> float:
        """Tokens sampled in a second, over the last half minute."""
        if len(self._past) < 2:
            return 0.0
        (since, before), (until, now) = self._past[0], self._past[-1]
        return round((now - before) / max(1.0, until - since), 1)

    def tick(self) -> None:
        """Takes the pace, and tells viewers when that is due; once a second."""
        now = time.monotonic()
        self._past.append((now, self.tokens))
        while now - self._past[0][0] > WINDOW_S:
            self._past.popleft()
        if now - self._showed_at < SHOW_S:
            return
        self._showed_at = now
        if len(self._known) > 2 * self._scheduler.workers.running:
            running = {work.rollout.id for work in self._scheduler.workers.running_work()}
            self._known = {rollout: known for rollout, known in self._known.items() if rollout in running}
        if self.asked or self._showing:
            self._showing = bool(self.asked)
            self._io.show_activity(self._activity(now) if self.asked else None)

    def _activity(self, now: float) -> PodActivity:
        """Returns what viewers ask for, and asks ranks for the conversations among it."""
        mirrored: dict[str, Transcript] = {}
        for rollout in self.asked.transcripts:
            known = self._transcripts.get(rollout)
            rank = self._scheduler.workers.worker_of(rollout)
            if rank is not None:
                self._comm.send(rank, {"op": "mirror", "id": rollout, "calls": known.calls if known else -1})
                mirrored |= {rollout: known} if known else {}
        self._transcripts = mirrored
        shown = {}
        for rollout in self.asked.rollouts:
            if rollout in self._known and self._scheduler.workers.worker_of(rollout) is not None:
                calls, tokens, waits, heard_at = self._known[rollout]
                shown[rollout] = RolloutActivity(calls, tokens, waits, round(now - heard_at, 1))
        return PodActivity(shown, mirrored)
