"""Condenses the events of a pod's starts into one file, so that a pod has few files however often it started.

Each start condenses the events of all earlier starts except the latest one: readers that follow the run need some time
to read its last events, and its individual rollouts can still be listed. Once the pod is over, the coordinator
condenses all its starts (:class:`EndedPods`). Three steps make this safe:

1. The new file is published by an atomic rename. Its name contains the last start that it covers. From then on,
   readers ignore the event files of the covered starts and earlier condensed files.
2. The ignored files are removed. If the pod is killed before that, its next start removes them.
3. An earlier start that Slurm wrongly considered lost may still append events. It writes to files that nobody reads.

If a file vanishes while it is read, a later start has already condensed it, and nothing is published.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from megaflow_hpc.rundir import summaries
from megaflow_hpc.rundir.event_reader import list_pods
from megaflow_hpc.rundir.pods.aggregator import EventAggregator, EventFileScan
from megaflow_hpc.rundir.record import array_of
from megaflow_hpc.rundir.summaries import CONDENSED, EVENTS, SUFFIX, Condensed, start_number


def condense(folder: Path, pod: str, start: str) -> None:
    """Condenses the events of the starts before ``start``, except for the latest of them.

    Costs one directory listing, plus reading each file that is condensed.

    Args:
        folder: ``RUN/events``.

    Raises:
        OSError: A file cannot be read or written. Nothing is lost.
    """
    _condense(folder, pod, lambda starts: [one for one in starts if one < start_number(start)][:-1])


def condense_all(folder: Path, pod: str) -> None:
    """Condenses the events of all starts of a pod that is over. If the pod starts again, its new start continues.

    Args:
        folder: ``RUN/events``.

    Raises:
        OSError: A file cannot be read or written, or a new start of the pod condenses it. Nothing is lost.
    """
    _condense(folder, pod, lambda starts: starts)


class EndedPods:
    """Finds pods that are over and condenses their events, so that replaced job arrays leave few files.

    A job array is over once none of its pods has a lease: pruning removes the leases of pods that have ended or are
    gone and that hold no block. Pods of an array that still runs keep the events of their last start.

    Args:
        folder: ``RUN/events``.
        lease_s: Seconds for which every check must find that a pod is over. By then, no cache hides its lease.
        clock: A monotonic clock, in seconds.
    """

    def __init__(self, folder: Path, lease_s: float, clock: Callable[[], float]) -> None:
        self._folder, self._lease_s, self._clock = folder, lease_s, clock
        self._since: dict[str, float] = {}
        """Pod that has event files and appears to be over → time of the first of the consecutive checks that found
        so."""
        self._due: list[str] = []
        """Pods whose events can be condensed."""

    def look(self, leases: Iterable[str]) -> None:
        """Finds pods that are over. Costs one directory listing. Raises OSError.

        Args:
            leases: Pods that have a lease.
        """
        now, arrays = self._clock(), {array_of(pod) or pod for pod in leases}
        pods = [pod for pod, files in sorted(list_pods(self._folder).items()) if files.starts]
        self._since = {pod: self._since.get(pod, now) for pod in pods if (array_of(pod) or pod) not in arrays}
        self._due = [pod for pod, since in self._since.items() if now - since > self._lease_s]

    def advance(self) -> None:
        """Condenses the events of one pod, if any is due."""
        if self._due:
            with suppress(OSError):  # a later check finds the pod again
                condense_all(self._folder, self._due.pop())


def _condense(folder: Path, pod: str, choose: Callable[[list[int]], list[int]]) -> None:
    """Condenses the events of some starts of a pod: those that ``choose`` returns, given all that are not condensed."""
    files = list_pods(folder, pod).get(pod)
    if files is None:
        return
    covered, earlier = -1, None
    for number in files.condensed:
        earlier = summaries.read_condensed(folder / f"{pod}.{number}{CONDENSED}")
        if earlier is not None:  # a partial file is possible only if the disk has damaged it
            covered = number
            break
    numbered = {start_number(other): name for other, name in files.starts.items()}
    if old := choose(sorted(number for number in numbered if number > covered)):
        _publish(folder, pod, covered, earlier, {number: numbered[number] for number in old})
        covered = old[-1]
    _remove(folder, pod, covered)


def _publish(folder: Path, pod: str, covered: int, earlier: Condensed | None, files: dict[int, str]) -> None:
    aggregator = EventAggregator(pod)
    if earlier is not None:
        aggregator.adopt_earlier(earlier, covered)
    for name in files.values():
        path = folder / name
        aggregator.begin_start(name.removesuffix(EVENTS).rpartition(".")[2])
        summary = summaries.read(path)
        if summary is not None:
            aggregator.adopt(summary)
        scan = EventFileScan(path, aggregator, summary.covers if summary is not None else 0)
        try:
            while scan.advance():
                pass
        finally:
            scan.close()
        aggregator.end_start(scan.covered)
    summaries.write_record(folder / f"{pod}.{max(files)}{CONDENSED}", aggregator.condensed())


def _remove(folder: Path, pod: str, covered: int) -> None:
    """Removes the files that a pod's condensed file replaces, and temporary files of killed writers.

    Removes event files last: while any is left, the coordinator tries again.
    """
    kinds = "|".join(map(re.escape, (EVENTS, SUFFIX, CONDENSED)))
    own = re.compile(rf"(\.?){re.escape(pod)}\.([0-9]+)({kinds})(\..*)?")
    names = [name for name in os.listdir(folder) if name.startswith((f"{pod}.", f".{pod}."))]
    for name in sorted(names, key=lambda name: name.endswith(EVENTS)):
        if (match := own.fullmatch(name)) is None or bool(match[1]) != bool(match[4]):
            continue
        number = start_number(match[2])
        if 0 <= number < covered or (number == covered and (match[4] or match[3] != CONDENSED)):
            with suppress(FileNotFoundError):
                (folder / name).unlink()
