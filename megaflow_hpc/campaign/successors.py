"""Finds pods that end soon and are not requeued, so that their successors are queued before they end.

Slurm refuses to requeue a job with Requeue=0, as set by the user, the site's JobRequeue=0 or its submit plugin. Such a
pod works until Slurm signals it, ``slurm.lead_s`` or a little more before its walltime ends. Its successor is submitted
just before that, so that both work for half a minute at most if the successor starts at once.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from megaflow_hpc.errors import SiteError
from megaflow_hpc.slurm import site
from megaflow_hpc.slurm.accounting import JobState
from megaflow_hpc.slurm.ids import array_of, cluster_of, named, number

EARLY_S = 30.0
"""Slurm checks every 30 s whether to signal a job, and signals up to this many seconds before the requested time
(PERIODIC_TIMEOUT in slurmctld)."""
START_S = 10.0
"""Seconds from the submission of a pod to its first rollouts if nodes are idle."""
TOGETHER_S = 15.0
"""Pods that are due within this many seconds get their successors in one submission."""
LARGEST_PART = 0.75
"""A successor is not submitted in the first quarter of a walltime, so that short walltimes do not multiply pods."""

_ELEMENT = re.compile(r"\bArrayJobId=(\d+) ArrayTaskId=(\d+) .*?\bRequeue=(\d)")


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
        due = {pod.id: at for pod in pods if (at := self._due_at(pod)) < now + TOGETHER_S}
        if min(due.values(), default=math.inf) > now:
            return []
        for array in sorted({array_of(pod) for pod in due if pod not in self._requeued}):
            self._ask(array)
        return [pod for pod in due if not self._requeued.get(pod, True)]

    def next_at(self, pods: Sequence[JobState], now: float) -> float:
        """Returns when the next of these pods needs a successor, in Unix seconds. Infinity if none is known to."""
        return min((at for pod in pods if (at := self._due_at(pod)) > now), default=math.inf)

    def _due_at(self, pod: JobState) -> float:
        if pod.starts_at is None or pod.ends_at is None or self._requeued.get(pod.id):
            return math.inf
        return pod.ends_at - min(self._lead_s, LARGEST_PART * (pod.ends_at - pod.starts_at))

    def _ask(self, array: str) -> None:
        """Asks Slurm which elements of an array it requeues, with one request. Unknown ones count as requeued."""
        cluster = cluster_of(array)
        try:
            shown = site.ask("scontrol", *site.here_or_on(cluster), "-o", "show", "job", number(array))
        except SiteError:  # Slurm is away, or the array has ended; the pods are replaced later
            return
        for job, element, requeued in _ELEMENT.findall(shown):
            self._requeued[named(f"{job}_{element}", cluster)] = requeued == "1"
