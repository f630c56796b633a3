"""Condensing of events: one file replaces those of a pod's starts, so that the number of files stays small.

Each start condenses the events of all earlier starts except the latest of them. Readers that follow the run need some
time to read the last events of that start, and can still list its rollouts. Once the pod is over, the coordinator
condenses all its starts (:class:`EndedPods`). This is safe:

1. An atomic rename publishes the new file. Its name contains the last start that it covers. From then on, readers
   ignore the event files of the covered starts and earlier condensed files.
2. Then the ignored files are removed. If the pod is killed before that, its next start removes them.
3. An earlier start that Slurm wrongly considered lost may still append events. It writes to files that readers ignore.

If a file vanishes while it is read, a later start has already condensed it. Then nothing is published.
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
    """Condenses the events of the starts before ``start``, except the latest of them.

    Costs one directory listing, and reads each file that it condenses.

    Args:
        folder: ``RUN/events``.

    Raises:
        OSError: A file cannot be read or written. Nothing is lost.
    """
    _condense(folder, pod, lambda starts: [one for one in starts if one < start_number(start)][:-1])


def condense_all(folder: Path, pod: str) -> None:
    """Condenses the events of all starts of a pod that is over. If the pod starts again, it continues from there.

    Args:
        folder: ``RUN/events``.

    Raises:
        OSError: A file cannot be read or written, or a new start of the pod condenses it. Nothing is lost.
    """
    _condense(folder, pod, lambda starts: starts)


class EndedPods:
    """Finds pods that are over and condenses their events, so that replaced job arrays leave few files.

    A job array is over once none of its pods has a lease. Pruning removes the lease of a pod that has ended or is gone
    and that holds no block. Pods of an array that still runs keep the events of their last start.

    Args:
        folder: ``RUN/events``.
        lease_s: Condense a pod's events after every check for this many seconds has found that the pod is over. By
            then, no cache hides its lease.
        clock: A monotonic clock, in seconds.
    """

    def __init__(self, folder: Path, lease_s: float, clock: Callable[[], float]) -> None:
        self._folder, self._lease_s, self._clock = folder, lease_s, clock
        self._since: dict[str, float] = {}
        """Pod with event files → time since which every check has found that it is over."""
        self._due: list[str] = []
        """Pods with events to condense."""

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
            with suppress(OSError):  # a later check retries
                condense_all(self._folder, self._due.pop())


def _condense(folder: Path, pod: str, choose: Callable[[list[int]], list[int]]) -> None:
    """Condenses the events of some starts of a pod.

    Args:
        choose: Returns the starts to condense, given all that are not condensed yet.
    """
    files = list_pods(folder, pod).get(pod)
    if files is None:
        return
    covered, earlier = -1, None
    for number in files.condensed:
        earlier = summaries.read_condensed(folder / f"{pod}.{number}{CONDENSED}")
        if earlier is not None:  # only a disk error can damage the file
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

    Removes event files last. While any is left, the coordinator retries.
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
