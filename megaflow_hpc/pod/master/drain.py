"""Decides when a pod drains, and which final state it reports to its supervisor."""

from __future__ import annotations

import time
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from megaflow_hpc.pod.master.pod import Pod
from megaflow_hpc.pod.master.ranks import Ranks
from megaflow_hpc.pod.scheduling.scheduler import Scheduler
from megaflow_hpc.rundir.events import PodEvent
from megaflow_hpc.rundir.marks import PREEMPTED, WHY_DRAIN

STOP_S = 35.0
"""Seconds reserved for stopping the workers after a drain. Running rollouts may use the time before that."""
DRAIN_NOW_S = 4.0
"""Seconds left for running rollouts when Slurm is about to kill the step."""
SIGNAL_S = 1.0
"""Seconds to wait for the supervisor's drain file if Slurm's signal reaches the step first."""
PATIENCE_S = 12.0
"""Seconds that agents may wait for a pending model response before the pod suspends them."""
HURRIED = ("now", "cancelled")
"""Words in the drain file which mean that Slurm is about to kill the step."""
STUCK_S = 120.0
"""The pod ends and is restarted if the run directory fails or hangs for this many seconds."""

TOO_LONG = "the queued rollouts would probably not end before the walltime"
NOT_AWAITED = "nothing to do, and no consumer that may add blocks has renewed its lease for long"


class DrainPhase(Enum):
    """Phase of a pod. Phases only change downwards in this table.

    ========= ========================================================== =================
    phase     entered when                                               rollouts may run
    ========= ========================================================== =================
    RUNNING   the pod starts                                             without limit
    DRAINING  on request, when a limit is exceeded, or without work left ``pod.drain_s``
    PREEMPTED Slurm signals only the step, as the GraceTime begins       until it ends
    HURRYING  Slurm will soon kill the step (:data:`HURRIED`)            :data:`DRAIN_NOW_S`
    ========= ========================================================== =================
    """

    RUNNING = "running"
    DRAINING = "draining"
    PREEMPTED = "preempted"
    HURRYING = "hurrying"


class Drain:
    """The drain phase of a pod and the reason for draining. Used only by rank 0's loop."""

    def __init__(self, pod: Pod, scheduler: Scheduler, ranks: Ranks) -> None:
        self._pod, self._scheduler, self._ranks = pod, scheduler, ranks
        self.phase = DrainPhase.RUNNING
        self._began_at = 0.0
        self.word = ""
        """Reason to drain, normally a key of :data:`WHY_DRAIN`. Empty until the supervisor or Slurm requests a
        drain."""
        self.paused = ""
        """Reason for pausing the pod, such as a problem that a restart would not solve. Empty unless the pod pauses."""

    @property
    def active(self) -> bool:
        """True once the pod no longer starts rollouts."""
        return self.phase is not DrainPhase.RUNNING

    @property
    def over(self) -> bool:
        """True once the running rollouts have used up their remaining time."""
        match self.phase:
            case DrainPhase.HURRYING:
                grace_s = DRAIN_NOW_S
            case DrainPhase.DRAINING:
                grace_s = self._pod.drain_s
            case _:
                return False
        return time.monotonic() - self._began_at >= grace_s

    @property
    def preempted(self) -> bool:
        """True if Slurm takes back the allocation before the walltime ends."""
        return self.phase in (DrainPhase.PREEMPTED, DrainPhase.HURRYING)

    def read_word(self, wait_s: float = 0.0) -> str | None:
        """Reads the word in the drain file. Returns ``None`` if the supervisor has not requested a drain.

        Args:
            wait_s: Seconds to wait for the drain file.
        """
        word = self._pod.why_drain(wait_s)
        self.word = self.word or word or ""
        return word

    def obey(self) -> None:
        """Begins to drain if the supervisor has requested it, or if Slurm has signalled only the step.

        When a preemption's GraceTime begins, Slurm signals the tasks of a step but not the batch shell. In all other
        cases, Slurm signals both.
        """
        word = self.read_word()
        if word is None and time.monotonic() - self._pod.signalled_at >= SIGNAL_S:
            word = self.word = self.word or PREEMPTED
        if word is not None:
            hurried = DrainPhase.HURRYING if word in HURRIED else DrainPhase.DRAINING
            phase = DrainPhase.PREEMPTED if word == PREEMPTED else hurried
            self.begin(WHY_DRAIN.get(word, "requested by the batch script"), phase)

    def pause(self, why: str) -> None:
        """Begins to drain because of a problem that a restart would not solve. Does nothing if the reason ``why`` is
        empty."""
        if why and not self.active:
            self.paused = why
            self.begin(why)

    def begin(self, why: str, phase: DrainPhase = DrainPhase.DRAINING) -> None:
        """Stops starting rollouts, and suspends agents that can resume in another allocation. Has no effect if the pod
        is already in this phase or a later one."""
        phases = list(DrainPhase)
        if phases.index(phase) <= phases.index(self.phase):
            return
        if not self.active:
            self._began_at = time.monotonic()
            self._scheduler.clear()
            self._pod.events.write(PodEvent(state="draining", why=why))
        self.phase = phase
        if phase is DrainPhase.PREEMPTED and self._pod.drain_file is not None:
            self._pod.drain_file.with_name(PREEMPTED).touch()  # this start does not count as one without progress
        self._ranks.tell({"op": "suspend", "patience_s": PATIENCE_S if phase is DrainPhase.DRAINING else 0.0})


@dataclass(frozen=True)
class Situation:
    """State of a pod from which :func:`end_of` decides whether the pod ends."""

    ranks_left: bool
    """True if any worker rank has slots or is expected to join."""
    may_commit: bool
    stuck_s: float
    """Seconds since the run directory last responded without an error."""
    draining: bool
    drain_over: bool
    paused: bool
    working: bool
    """True if rollouts are running or I/O requests are pending."""
    queued: bool
    too_long: bool
    """True if queued rollouts were set aside because they would probably not end before the walltime."""
    nothing_free: bool
    """True if the last claim found no free block."""
    holds_blocks: bool
    unsettled: bool
    """True if a block may become free soon."""
    opened: bool
    """True if a consumer, such as a trainer, may add blocks."""
    awaited: bool
    """True if a consumer that may add blocks has a lease that has not expired."""


class End(NamedTuple):
    """Decision to end the pod: its final state, and the reason if it must drain first."""

    word: str
    """Final state, one of :data:`megaflow_hpc.rundir.marks.LAST_WORDS`."""
    why: str = ""
    """Reason to drain the pod first. Empty if draining is unnecessary."""


def end_of(now: Situation) -> End | None:
    """Decides whether and how the pod ends. Returns ``None`` while it continues."""
    if not now.ranks_left or not now.may_commit or now.stuck_s > STUCK_S:
        return End("lost")
    if now.draining:
        if now.working and not now.drain_over:
            return None
        return End("paused" if now.paused else "drained")
    may_claim = not (now.nothing_free or now.too_long)
    if now.working or now.queued or may_claim:
        return None
    why = TOO_LONG if now.too_long else ""
    if now.holds_blocks:
        return End("drained", why)
    if now.unsettled:
        return None
    if now.opened:
        return None if now.awaited else End("drained", NOT_AWAITED)
    return End("done", why)
