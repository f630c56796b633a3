"""Collects the live status of a pod's rollouts: token counts and costs for the pod's lease, and details for viewers.

Every few seconds, each rank reports its rollouts that have received a model response. A rank sends a rollout's
conversation only on request, while a viewer displays that rollout.
"""

from __future__ import annotations

import time
from collections import deque
from typing import NamedTuple

from megaflow_hpc.host.wire import Message
from megaflow_hpc.pod.comm import Comm
from megaflow_hpc.pod.master.run_io import RunIo
from megaflow_hpc.pod.scheduling.scheduler import Scheduler
from megaflow_hpc.rundir.live import Asked, LiveStatus, PodLiveStatus, Transcript

SHOW_INTERVAL_S = 3.0
"""Seconds between updates of the status for viewers."""
WINDOW_S = 30.0
"""Seconds over which the sampling rate is averaged."""


class _Reported(NamedTuple):
    calls: int
    tokens: int
    waits: bool
    at: float
    """Monotonic time of the rank's report."""


class LiveStatuses:
    """Live status of all running rollouts. Used only by rank 0's loop."""

    def __init__(self, comm: Comm, scheduler: Scheduler, io: RunIo) -> None:
        self._comm, self._scheduler, self._io = comm, scheduler, io
        self.tokens = 0
        """Number of tokens that engines have sampled for this pod. Includes the tokens of lost ranks."""
        self.usd = 0.0
        """Cost of this pod's model calls in US dollars. Includes the calls of lost ranks."""
        self._tokens_of_rank: dict[int, int] = {}
        self._usd_of_rank: dict[int, float] = {}
        self._past_tokens: deque[tuple[float, int]] = deque()
        self._rollouts: dict[str, _Reported] = {}
        self._transcripts: dict[str, Transcript] = {}
        self._showed_at = 0.0

    def report(self, rank: int, message: Message) -> None:
        """Records a rank's ``activity`` message about its rollouts."""
        self.tokens += message["tokens"] - self._tokens_of_rank.get(rank, 0)
        self._tokens_of_rank[rank] = message["tokens"]
        self.usd += message["usd"] - self._usd_of_rank.get(rank, 0.0)
        self._usd_of_rank[rank] = message["usd"]
        now = time.monotonic()
        for rollout, (calls, tokens, waits) in message["rollouts"].items():
            self._rollouts[rollout] = _Reported(calls, tokens, waits, now)

    def mirror(self, message: Message) -> None:
        """Stores the end of a conversation from a rank's message."""
        messages = [(str(role), str(text)) for role, text in message["messages"]]
        self._transcripts[message["id"]] = Transcript(message["calls"], messages, message["left_out"])

    def leave(self, rank: int) -> None:
        """Removes the status of a lost rank's rollouts."""
        self._tokens_of_rank.pop(rank, None)
        self._usd_of_rank.pop(rank, None)

    @property
    def tokens_per_s(self) -> float:
        """Tokens sampled per second, averaged over the last :data:`WINDOW_S` seconds."""
        if len(self._past_tokens) < 2:
            return 0.0
        (since, before), (until, now) = self._past_tokens[0], self._past_tokens[-1]
        return round((now - before) / max(1.0, until - since), 1)

    def tick(self) -> None:
        """Updates the sampling rate, and publishes the status for viewers if it is due. Call it once a second."""
        now = time.monotonic()
        self._past_tokens.append((now, self.tokens))
        while now - self._past_tokens[0][0] > WINDOW_S:
            self._past_tokens.popleft()
        if now - self._showed_at < SHOW_INTERVAL_S:
            return
        self._showed_at = now
        if len(self._rollouts) > 2 * self._scheduler.workers.running:
            running = {work.rollout.id for work in self._scheduler.workers.running_work()}
            self._rollouts = {rollout: status for rollout, status in self._rollouts.items() if rollout in running}
        self._io.requests.live = self._status(self._io.state.asked, now)

    def _status(self, asked: Asked, now: float) -> PodLiveStatus:
        """Returns the status of the rollouts that viewers requested. Asks the ranks for updates of their
        conversations."""
        transcripts: dict[str, Transcript] = {}
        for rollout in asked.transcripts:
            rank = self._scheduler.workers.worker_of(rollout)
            if rank is None:
                continue
            transcript = self._transcripts.get(rollout)
            self._comm.send(rank, {"op": "mirror", "id": rollout, "calls": transcript.calls if transcript else -1})
            if transcript:
                transcripts[rollout] = transcript
        self._transcripts = transcripts
        statuses: dict[str, LiveStatus] = {}
        for rollout in asked.rollouts:
            status = self._rollouts.get(rollout)
            if status is not None and self._scheduler.workers.worker_of(rollout) is not None:
                statuses[rollout] = LiveStatus(status.calls, status.tokens, status.waits, round(now - status.at, 1))
        return PodLiveStatus(statuses, transcripts)
