"""The end of a pod: draining, and the word that the pod leaves for its supervisor."""

from __future__ import annotations

import time
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from megaflow_hpc.pod.master.pod import Pod
from megaflow_hpc.pod.master.ranks import Ranks
from megaflow_hpc.pod.scheduling.scheduler import Scheduler
from megaflow_hpc.rundir.events import PodEvent
from megaflow_hpc.rundir.marks import WHY_DRAIN

DRAIN_S = 25.0
"""Time that running rollouts have left once draining began. The time that workers take to stop comes on top. Both
together are less than the warning time of the batch script."""
DRAIN_NOW_S = 4.0
"""The same when Slurm is about to kill the step (preempted or cancelled)."""
PATIENCE_S = 12.0
"""Time that agents may wait for the model's answer of their last turn before they are suspended."""
HURRIED = ("now", "cancelled")
"""Words of the drain file after which Slurm kills the step soon."""
STUCK_S = 120.0
"""Time that the run directory may refuse or not answer before the pod gives up and is restarted."""

TOO_LONG = "what is left is not expected to end before the walltime"
NOT_AWAITED = "nothing to do, and no consumer that may add blocks has renewed its lease for long"


class DrainPhase(Enum):
    """Phase of a pod. It only moves down this table.

    ======== ========================================================== =================
    phase    entered when                                               rollouts may run
    ======== ========================================================== =================
    RUNNING  the pod starts                                             without limit
    DRAINING the supervisor asks, a limit is exceeded, nothing is left  :data:`DRAIN_S`
    HURRYING Slurm kills the step soon (:data:`HURRIED`)                :data:`DRAIN_NOW_S`
    ======== ========================================================== =================
    """

    RUNNING = "running"
    DRAINING = "draining"
    HURRYING = "hurrying"


class Drain:
    """The phase of a pod, and the reasons for it. Belongs to rank 0's loop."""

    def __init__(self, pod: Pod, scheduler: Scheduler, ranks: Ranks) -> None:
        self._pod, self._scheduler, self._ranks = pod, scheduler, ranks
        self.phase = DrainPhase.RUNNING
        self._began_at = 0.0
        self.word = ""
        """The supervisor's first word, one of :data:`WHY_DRAIN`. Empty until the supervisor asks."""
        self.paused = ""
        """The limit that ended the pod. A restarted pod would exceed it again. Empty if none did."""

    @property
    def active(self) -> bool:
        """The pod starts nothing more."""
        return self.phase is not DrainPhase.RUNNING

    @property
    def over(self) -> bool:
        """The time that running rollouts had is over."""
        grace_s = DRAIN_NOW_S if self.phase is DrainPhase.HURRYING else DRAIN_S
        return self.active and time.monotonic() - self._began_at >= grace_s

    def read_word(self, wait_s: float = 0.0) -> str | None:
        """Reads the supervisor's current word. ``None`` while the supervisor does not ask.

        Args:
            wait_s: how long to wait for a word.
        """
        word = self._pod.why_drain(wait_s)
        self.word = self.word or word or ""
        return word

    def obey(self) -> None:
        """Drains if the supervisor asks for it."""
        word = self.read_word()
        if word is not None:
            self.begin(WHY_DRAIN.get(word, "asked to by the batch script"), hurry=word in HURRIED)

    def pause(self, why: str) -> None:
        """Drains for a reason that a restart would not mend. Does nothing without a reason."""
        if why and not self.active:
            self.paused = why
            self.begin(why)

    def begin(self, why: str, hurry: bool = False) -> None:
        """Starts nothing more, and suspends agents that may continue in another allocation."""
        if self.phase is DrainPhase.HURRYING or (self.active and not hurry):
            return
        if not self.active:
            self._began_at = time.monotonic()
            self._scheduler.clear()
            self._pod.events.write(PodEvent(state="draining", why=why))
        self.phase = DrainPhase.HURRYING if hurry else DrainPhase.DRAINING
        self._ranks.tell({"op": "suspend", "patience_s": 0.0 if hurry else PATIENCE_S})


@dataclass(frozen=True)
class Situation:
    """The facts that decide whether a pod ends."""

    ranks_left: bool
    """Some worker rank has slots, or is awaited."""
    may_commit: bool
    stuck_s: float
    """For how many seconds the run directory has refused or not answered."""
    draining: bool
    drain_over: bool
    paused: bool
    working: bool
    """Rollouts run, or the run directory has something to do."""
    queued: bool
    too_long: bool
    """Nothing that is queued is expected to end before the walltime."""
    nothing_free: bool
    """The last claim found no block."""
    holds_blocks: bool
    may_get_work: bool
    """Other pods may hand off rollouts, or some block may become free."""
    opened: bool
    """A consumer may add blocks."""
    awaited: bool
    """Such a consumer renewed its lease not long ago."""


class End(NamedTuple):
    """The end of a pod."""

    word: str
    """One of :data:`megaflow_hpc.rundir.marks.LAST_WORDS`."""
    why: str = ""
    """Why the pod drains now, empty if it need not."""


def end_of(now: Situation) -> End | None:
    """Decides how the pod ends. ``None`` while it continues."""
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
    if now.may_get_work:
        return None
    if now.opened:
        return None if now.awaited else End("drained", NOT_AWAITED)
    return End("done", why)
