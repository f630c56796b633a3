"""Decides how many pods to add: pods that limits held back, and replacements for pods that will not be requeued.
State::

    RUN/ledger/pods.json     number of pods wanted, how pods ended, and the outcome of recent replacements

A pod is replaced if Slurm ended it (TIMEOUT, NODE_FAIL, a refused requeue) while blocks remain. It is not replaced
if its work was done, a limit was reached, the user cancelled it or scaled down, or more than ``slurm.requeues``
consecutive starts stored nothing. If replacements store nothing, later rounds are smaller and further apart, until
replacing is given up.

Slurm does not requeue a pod with Requeue=0 (set by the user, the site's JobRequeue=0 or a submit plugin). Such a pod
works until Slurm signals it, ``slurm.pods.signal`` or slightly more before the end of its walltime. :class:`Successors`
finds such pods shortly before, so that their successors are queued when they end. Pod and successor overlap for at
most half a minute. A successor that finds no free block ends in order, perhaps just before its predecessor releases its
blocks. Its end therefore does not reduce the number of pods wanted: if blocks remain, another pod is added.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence

import msgspec

from megaflow_hpc.errors import SiteError
from megaflow_hpc.rundir.layout import RunDir, try_read_json, write_record
from megaflow_hpc.rundir.record import JobRecord
from megaflow_hpc.slurm import site
from megaflow_hpc.slurm.accounting import JobState
from megaflow_hpc.slurm.ids import array_of, cluster_of, named, number

PAUSE_S = 60.0
"""Seconds between two rounds of replacements. Doubles after each round that stored nothing."""
PROBE = 10
"""After a round that stored nothing, only one of this many missing pods is replaced, to test whether the cause is
gone."""
BARREN_ROUNDS = 3
"""Replacing stops after this many consecutive rounds that stored nothing."""
LISTED_S = 5.0
"""Seconds after a submission during which squeue may omit the job."""

EARLY_S = 30.0
"""Seconds by which Slurm's signal may arrive before the requested time. Slurm checks every 30 s whether to signal a job
(PERIODIC_TIMEOUT in slurmctld)."""
START_S = 10.0
"""Seconds from the submission of a pod to its first rollouts if nodes are idle."""
TOGETHER_S = 15.0
"""Pods that are due within this many seconds get their successors in a single submission."""
LARGEST_PART = 0.75
"""A successor is submitted at most this fraction of the walltime before its predecessor ends. Otherwise short walltimes
would double the number of pods."""

FINAL = {
    "leaving": "left by scale",
    "vain": "stored nothing in several starts",
    "CANCELLED": "cancelled by scancel",
    "COMPLETED": "ended in order",
}
"""Reasons for which an ended pod is not replaced, each with its description. All other reasons are Slurm states."""


_ELEMENT = re.compile(r"\bArrayJobId=(\d+) ArrayTaskId=(\d+) .*?\bRequeue=(\d)")


class Replacements(msgspec.Struct):
    """Content of ``pods.json``, and the rules for replacing pods."""

    wanted: int = 0
    """Number of pods that should be queued or running."""
    settled: list[str] = []
    """Ids of arrays whose elements have all ended and were removed from :attr:`ended`."""
    ended: dict[str, str] = {}
    """Key of :data:`FINAL` or Slurm state of each ended element of other arrays, by element."""
    vain: list[str] = []
    """The last 20 pods that were given up because several consecutive starts stored nothing."""
    last: list[str] = []
    """Pods of the last round of replacements. Empty once any of them has stored a rollout."""
    barren: int = 0
    """Number of consecutive rounds of replacements that have ended without storing a rollout."""
    successors: list[str] = []
    """Pods that have not ended and were added while their predecessors were running."""
    again_at: float = 0.0
    """Earliest time of the next round, in Unix seconds."""

    def missed(self, arrays: Collection[JobRecord], live: Collection[str], asked_at: float) -> list[str]:
        """Returns the elements that have ended since the last call of :meth:`take_in`.

        Args:
            arrays: Submitted pod arrays.
            live: Elements that Slurm lists as live.
            asked_at: Time of the Slurm query, in Unix seconds.
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
            arrays: Submitted pod arrays.
            live: Elements that Slurm lists as live and that are not leaving.
            ends: Maps each ended element to a key of :data:`FINAL` or a Slurm state.
            stored: Elements that have stored rollouts.
        """
        self.ended |= ends
        # scale has already subtracted leaving pods. A pod and its successor count once, whichever ends first.
        in_order = {element for element in self.successors if ends.get(element) == "COMPLETED"}
        fewer = sum(end in FINAL and end != "leaving" for element, end in ends.items() if element not in in_order)
        self.successors = [element for element in self.successors if element not in ends]
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
            open_blocks: Number of unfinished blocks. The campaign needs no more pods than blocks.
            now: Unix seconds.
        """
        missing = min(self.wanted, open_blocks) - live
        if missing <= 0 or self.given_up or now < self.again_at:
            return 0
        return -(-missing // PROBE) if self.barren else missing

    @property
    def given_up(self) -> bool:
        """True if :data:`BARREN_ROUNDS` consecutive rounds stored nothing. No more pods are added then."""
        return self.barren >= BARREN_ROUNDS

    def added(self, elements: Sequence[str], now: float, successors: int = 0) -> None:
        """Records a round of replacements.

        Args:
            elements: Ids of the added pods.
            now: Unix seconds.
            successors: Number of them whose predecessors are still running.
        """
        self.last = list(elements)
        self.successors += elements[:successors]
        self.again_at = now + PAUSE_S * 2**self.barren

    def forgive(self) -> None:
        """Allows replacements again, after the user has removed the cause of failures."""
        self.last, self.vain, self.barren, self.again_at = [], [], 0, 0.0


def elements(array: JobRecord) -> list[str]:
    """Returns the element ids of a pod array. Empty if their number is unknown."""
    number, at, cluster = array.id.partition("@")
    return [f"{number}_{index}{at}{cluster}" for index in range(array.elements or 0)]


def read(run: RunDir, wanted: int) -> Replacements:
    """Reads ``pods.json``. If the file is missing, ``wanted`` becomes the number of pods."""
    return try_read_json(run.ledger / "pods.json", Replacements) or Replacements(wanted)


def write(run: RunDir, replacements: Replacements) -> None:
    """Writes ``pods.json`` atomically."""
    write_record(run.ledger / "pods.json", replacements)


class Successors:
    """Finds running pods that Slurm will not requeue and that are about to end, so they need a successor.

    Args:
        lead_s: Seconds before the end of the walltime at which Slurm signals a pod.
    """

    def __init__(self, lead_s: float) -> None:
        self._lead_s = lead_s + EARLY_S + START_S
        self._requeued: dict[str, bool] = {}
        """True for each element that Slurm requeues, by element. Slurm is queried once per array, when the first
        element of the array is due."""

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
            self._query_requeue(array)
        return [pod for pod in due if not self._requeued.get(pod, True)]

    def next_at(self, pods: Sequence[JobState], now: float) -> float:
        """Returns the Unix time at which the next of these pods needs a successor. Infinity if no pod needs one."""
        due_at = [self._due_at(pod) for pod in pods]
        return min((at for at in due_at if at > now), default=math.inf)

    def _due_at(self, pod: JobState) -> float:
        if pod.starts_at is None or pod.ends_at is None or self._requeued.get(pod.id):
            return math.inf
        return pod.ends_at - min(self._lead_s, LARGEST_PART * (pod.ends_at - pod.starts_at))

    def _query_requeue(self, array: str) -> None:
        """Queries which elements of an array Slurm requeues, in a single request. Elements missing from the answer
        count as requeued."""
        cluster = cluster_of(array)
        try:
            shown = site.ask("scontrol", *site.here_or_on(cluster), "-o", "show", "job", number(array))
        except SiteError:  # Slurm does not respond, or the array has ended; the pods are replaced later
            return
        for job, element, requeued in _ELEMENT.findall(shown):
            self._requeued[named(f"{job}_{element}", cluster)] = requeued == "1"
