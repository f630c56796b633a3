"""Decides how many pods to add: pods that limits held back, and replacements for pods that ended for good.

::

    RUN/ledger/pods.json    number of pods wanted, how pods ended, and how the last replacements fared

A pod is replaced if Slurm ended it (TIMEOUT, NODE_FAIL, a refused requeue) while blocks are left to run. It is not
replaced if its work was done or a limit was reached, if the user cancelled it or scaled the campaign down, or if
``slurm.requeues`` of its starts in a row stored nothing. If replacements store nothing, later rounds are smaller and
further apart, until replacing is given up.

A pod with Requeue=0 (set by the user, the site's JobRequeue=0 or its submit plugin) is not requeued. It works until
Slurm signals it, ``slurm.lead_s`` or a little more before its walltime ends. :class:`Successors` finds such pods just
before that, so their successors are in the queue when they end. Both work for half a minute at most.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence

import msgspec

from megaflow_hpc.errors import SiteError
from megaflow_hpc.rundir.json_files import try_read_json, write_record
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.record import JobRecord
from megaflow_hpc.slurm import site
from megaflow_hpc.slurm.accounting import JobState
from megaflow_hpc.slurm.ids import array_of, cluster_of, named, number

PAUSE_S = 60.0
"""Seconds between two rounds of replacements. It doubles after each round that stored nothing."""
PROBE = 10
"""After a round that stored nothing, replace only one in this many missing pods, to test whether the cause is gone."""
BARREN_ROUNDS = 3
"""Number of consecutive rounds that stored nothing after which no more pods are replaced."""
LISTED_S = 5.0
"""squeue may omit jobs that were submitted less than this many seconds before the query."""

EARLY_S = 30.0
"""Slurm checks every 30 s whether to signal a job, and signals up to this many seconds before the requested time
(PERIODIC_TIMEOUT in slurmctld)."""
START_S = 10.0
"""Seconds from the submission of a pod to its first rollouts if nodes are idle."""
TOGETHER_S = 15.0
"""Pods that are due within this many seconds get their successors in one submission."""
LARGEST_PART = 0.75
"""Share of a walltime, from its end, in which a successor may be submitted. Otherwise short walltimes would multiply
pods."""

FINAL = {
    "leaving": "left by scale",
    "vain": "stored nothing in several starts",
    "CANCELLED": "cancelled by scancel",
    "COMPLETED": "ended in order",
}
"""Ends after which a pod is not replaced → description. Any other end is a state of Slurm."""


_ELEMENT = re.compile(r"\bArrayJobId=(\d+) ArrayTaskId=(\d+) .*?\bRequeue=(\d)")


class Replacements(msgspec.Struct):
    """Content of ``pods.json``, and the rules for replacing pods."""

    wanted: int = 0
    """Number of pods that should be queued or running."""
    settled: list[str] = []
    """Ids of arrays whose elements have all ended. Their elements are no longer in :attr:`ended`."""
    ended: dict[str, str] = {}
    """Elements of other arrays that have ended → a key of :data:`FINAL` or a state of Slurm."""
    vain: list[str] = []
    """The latest 20 pods that ended because several of their starts in a row stored nothing."""
    last: list[str] = []
    """Pods of the last round of replacements. Empty once one of them has stored something."""
    barren: int = 0
    """Number of consecutive rounds of replacements that ended and stored nothing."""
    again_at: float = 0.0
    """Earliest time of the next round, in Unix seconds."""

    def missed(self, arrays: Collection[JobRecord], live: Collection[str], asked_at: float) -> list[str]:
        """Returns the elements that have ended since the last call of :meth:`take_in`.

        Args:
            arrays: Submissions of pods.
            live: Elements that Slurm lists as live.
            asked_at: When Slurm was queried, in Unix seconds.
        """
        return [
            element
            for array in arrays
            if array.id not in self.settled and array.submitted_at < asked_at - LISTED_S
            for element in elements(array)
            if element not in live and element not in self.ended
        ]

    def take_in(
        self, arrays: Collection[JobRecord], live: Collection[str], ends: Mapping[str, str], stored: Collection[str]
    ) -> None:
        """Records how elements ended.

        Args:
            arrays: Submissions of pods.
            live: Elements that Slurm lists as live and that do not leave.
            ends: Ended elements → a key of :data:`FINAL` or a state of Slurm.
            stored: Elements that have stored rollouts.
        """
        self.ended |= ends
        # scale has already subtracted leaving pods. A pod and its successor count once, whichever ends first.
        fewer = sum(end in FINAL and end != "leaving" for end in ends.values())
        self.wanted = min(self.wanted, max(self.wanted - fewer, len(live)))
        self.vain = [*self.vain, *(element for element, end in ends.items() if end == "vain")][-20:]
        failed = [element for element, end in ends.items() if end not in FINAL]
        if any(element in stored for element in self.last):
            self.last, self.barren = [], 0
        elif self.last and not any(element in live for element in self.last):
            self.last, self.barren = [], self.barren + 1
        elif not self.last and failed and not any(element in stored for element in failed):
            self.barren = max(1, self.barren)
        for array in arrays:
            if array.id not in self.settled and array.elements and all(e in self.ended for e in elements(array)):
                self.settled.append(array.id)
                for element in elements(array):
                    del self.ended[element]

    def due(self, live: int, open_blocks: int, now: float) -> int:
        """Returns the number of pods to add now.

        Args:
            live: Number of pods that are queued or running and not leaving.
            open_blocks: Number of blocks that are not done. More pods than blocks are not needed.
            now: Unix seconds.
        """
        missing = min(self.wanted, open_blocks) - live
        if missing <= 0 or self.given_up or now < self.again_at:
            return 0
        return -(-missing // PROBE) if self.barren else missing

    @property
    def given_up(self) -> bool:
        """True if :data:`BARREN_ROUNDS` rounds in a row stored nothing. No more pods are added then."""
        return self.barren >= BARREN_ROUNDS

    def added(self, elements: Collection[str], now: float) -> None:
        """Records a round of replacements."""
        self.last = list(elements)
        self.again_at = now + PAUSE_S * 2**self.barren

    def forgive(self) -> None:
        """Allows replacements again after the user has removed the cause."""
        self.last, self.vain, self.barren, self.again_at = [], [], 0, 0.0


def elements(array: JobRecord) -> list[str]:
    """Returns the elements of a pod array. Empty if their number is unknown."""
    number, at, cluster = array.id.partition("@")
    return [f"{number}_{index}{at}{cluster}" for index in range(array.elements or 0)]


def read(run: RunDir, wanted: int) -> Replacements:
    """Reads the file. ``wanted`` is the number of pods if the file is missing."""
    return try_read_json(run.ledger / "pods.json", Replacements) or Replacements(wanted)


def write(run: RunDir, replacements: Replacements) -> None:
    """Writes the file atomically."""
    write_record(run.ledger / "pods.json", replacements)


class Successors:
    """Finds the pods of one run that need a successor.

    Args:
        lead_s: Seconds before the end of its walltime at which a pod asks to be signalled.
    """

    def __init__(self, lead_s: float) -> None:
        self._lead_s = lead_s + EARLY_S + START_S
        self._requeued: dict[str, bool] = {}
        """Element → whether Slurm requeues it. Slurm is asked once, when the first element of an array is due."""

    def ending(self, pods: Sequence[JobState], now: float) -> list[str]:
        """Returns the running pods that need a successor now.

        Args:
            now: Unix seconds.
        """
        due_at = {pod.id: self._due_at(pod) for pod in pods}
        due = [pod for pod, at in due_at.items() if at < now + TOGETHER_S]
        if min(due_at.values(), default=math.inf) > now:
            return []
        for array in sorted({array_of(pod) for pod in due if pod not in self._requeued}):
            self._ask(array)
        return [pod for pod in due if not self._requeued.get(pod, True)]

    def next_at(self, pods: Sequence[JobState], now: float) -> float:
        """Returns the Unix time at which the next of these pods needs a successor, or infinity if no pod needs one."""
        due_at = [self._due_at(pod) for pod in pods]
        return min((at for at in due_at if at > now), default=math.inf)

    def _due_at(self, pod: JobState) -> float:
        if pod.starts_at is None or pod.ends_at is None or self._requeued.get(pod.id):
            return math.inf
        return pod.ends_at - min(self._lead_s, LARGEST_PART * (pod.ends_at - pod.starts_at))

    def _ask(self, array: str) -> None:
        """Asks Slurm which elements of an array it requeues, in one request. Elements without an answer count as
        requeued."""
        cluster = cluster_of(array)
        try:
            shown = site.ask("scontrol", *site.here_or_on(cluster), "-o", "show", "job", number(array))
        except SiteError:  # Slurm is away, or the array has ended; the pods are replaced later
            return
        for job, element, requeued in _ELEMENT.findall(shown):
            self._requeued[named(f"{job}_{element}", cluster)] = requeued == "1"
