"""The run directory as rank 0's loop sees it: requests to the I/O thread, and what its reports say. Nothing waits here.

What is not durable yet is bounded: with :attr:`RunIo.full` the loop starts nothing more.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from queue import Empty

from megaflow_hpc.ledger.files import boot_clock
from megaflow_hpc.ledger.rules import Outlook
from megaflow_hpc.pod.master.histories import History
from megaflow_hpc.pod.master.run_io_messages import (
    ClaimBlock,
    Claimed,
    Durable,
    HandedOff,
    HandOff,
    ListEndpoints,
    LookForWorkRequests,
    PendingResult,
    Report,
    Request,
    RequestWork,
    RunState,
    ShowActivity,
    ShowProgress,
    Stop,
    Stopped,
    StoreResults,
    TurnEnded,
    WorkRequested,
)
from megaflow_hpc.pod.master.run_io_thread import LOOK_S, RunIoThread
from megaflow_hpc.pod.outcome import Outcome
from megaflow_hpc.rundir.live import PodActivity
from megaflow_hpc.types import Rollout

MOST_RECORDS = 20_000
MOST_BYTES = 512 << 20
"""What may wait for the disk before nothing more is started."""


class RunIo:
    """Belongs to rank 0's loop. No method waits but :meth:`finish`.

    Args:
        clock: the ledger's clock.
    """

    def __init__(self, thread: RunIoThread, clock: Callable[[], float] = boot_clock) -> None:
        self._thread, self._clock = thread, clock
        self._requests, self._reports = thread.requests, thread.reports
        self._state = RunState()
        self._turn_ended_at = time.monotonic()
        self._pending_records = self._pending_bytes = 0
        self._to_store: list[PendingResult] = []
        self._hand_offs_pending = 0
        self._work_requests: deque[int] = deque()
        self.claiming = False
        """A claim was asked for and is not answered."""
        self.claim_s = 0.0
        """What the last claim took, in seconds."""
        self.finished = False
        """After :meth:`finish`: every block of the campaign is done."""

    def start(self) -> None:
        """Starts the thread; the pod's lease has been written."""
        self._state, self._turn_ended_at = self._thread.state(), time.monotonic()
        self._thread.start()

    # --- requests ---

    def store(self, outcome: Outcome, epoch: int, block: int) -> None:
        """Has a result of a claimed block journalled, with the next push; it comes back in a ``Durable``."""
        record = outcome.payload(epoch, block)
        self._pending_records += 1
        self._pending_bytes += len(record)
        self._to_store.append(PendingResult(outcome, block, epoch, record))

    def push(self) -> None:
        """Hands over the results that are to be stored: the thread is woken once for all of a turn."""
        if self._to_store:
            self._requests.put(StoreResults(self._to_store))
            self._to_store = []

    def _ask(self, request: Request) -> None:
        self.push()  # in the order in which the loop decided
        self._requests.put(request)

    def claim(self) -> None:
        """Asks for a block; one at a time. The answer is a ``Claimed``."""
        self.claiming = True
        self._ask(ClaimBlock())

    def list_endpoints(self) -> None:
        """Has the engines looked at; a change comes back as ``EndpointsChanged``."""
        self._ask(ListEndpoints())

    def show_progress(self, progress: ShowProgress) -> None:
        """Has the lease say how far the pod is, the next time that it is renewed."""
        self._ask(progress)

    def show_activity(self, activity: PodActivity | None) -> None:
        """Has viewers shown what they ask for of this pod; ``None`` takes it away."""
        self._ask(ShowActivity(activity))

    def request_work(self, slots: int) -> None:
        """Asks other pods to fill so many slots; 0 withdraws that."""
        self._ask(RequestWork(slots))

    def look_for_work_requests(self) -> None:
        """Has the ledger looked at for pods that request work; see :meth:`work_requests`."""
        self._ask(LookForWorkRequests())

    def hand_off(self, rollouts: list[tuple[int, Rollout]], each: int) -> None:
        """Hands rollouts, with their blocks, to other pods; they were taken out of the queue.

        Args:
            each: most rollouts of a new block.
        """
        self._hand_offs_pending += 1
        self._ask(HandOff(rollouts, each))

    def finish(self, seconds: float, release: bool = False, histories: dict[str, History] | None = None) -> bool:
        """Ends the thread when everything asked for is done; False if that takes longer, or it had failed.

        Args:
            release: gives unfinished blocks back.
            histories: what the next pods are told of the rollouts that go back, by id.
        """
        self._ask(Stop(release, histories or {}))
        self._thread.join(seconds)
        return not self._thread.is_alive()

    # --- reports ---

    def collect(self) -> Iterator[Report]:
        """Yields what the thread has reported since the last call, which is also the loop's sign of life.

        Raises:
            BaseException: what ended the thread: the pod cannot go on.
        """
        self._thread.loop_turned_at = time.monotonic()
        while True:
            try:
                report = self._reports.get_nowait()
            except Empty:
                return
            match report:
                case Durable(results):
                    self._pending_records -= len(results)
                    self._pending_bytes -= sum(len(result.record) for result in results)
                case Claimed(_, seconds):
                    self.claiming, self.claim_s = False, seconds
                case RunState():
                    self._state = report
                case TurnEnded(at):
                    self._turn_ended_at = at
                case HandedOff(count):
                    self._hand_offs_pending -= count
                case WorkRequested(slots):
                    self._work_requests.append(slots)
                case Stopped(error, finished):
                    self.finished = finished
                    if error is not None:
                        raise error
            yield report

    def work_requests(self) -> Iterator[int]:
        """Yields the slots that other pods want filled, each request once."""
        while self._work_requests:
            yield self._work_requests.popleft()

    # --- what is known ---

    @property
    def held(self) -> int:
        """Blocks that are claimed and not done."""
        return self._state.held

    @property
    def may_commit(self) -> bool:
        """False once the lease is so old that another pod may be about to take over."""
        return self._clock() < self._state.closes_at

    @property
    def seen(self) -> Outlook:
        """What the last claim has seen of blocks, other pods and consumers."""
        return self._state.seen

    @property
    def claimed_all(self) -> bool:
        """No block was free when this pod looked last."""
        return self._state.claimed_all

    @property
    def full(self) -> bool:
        """So much waits for the disk that nothing more should be started."""
        return self._pending_records >= MOST_RECORDS or self._pending_bytes >= MOST_BYTES

    @property
    def idle(self) -> bool:
        """Nothing that was asked for is under way."""
        return not (self._pending_records or self.claiming or self._hand_offs_pending)

    @property
    def stuck(self) -> bool:
        """The run directory refuses to be written."""
        return self._state.stuck_since is not None

    @property
    def stuck_s(self) -> float:
        """For how long the run directory has refused, or not answered, in seconds."""
        now = time.monotonic()
        since = min(self._turn_ended_at + LOOK_S, now if self._state.stuck_since is None else self._state.stuck_since)
        return max(0.0, now - since)
