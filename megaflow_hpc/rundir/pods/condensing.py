"""Condenses events: merges the event files of a pod's starts into one, to keep the number of files small.

Each start condenses the events of all earlier starts, except the previous one. Readers may not have read its last
events yet. Once a pod is over, the coordinator condenses all of its starts (:class:`EndedPods`). Condensing is safe:

1. An atomic rename publishes the new file. Its name contains the last start that it covers. From then on, readers
   ignore the covered event files and earlier condensed files.
2. Then the ignored files are removed. If the pod is killed first, its next start removes them.
3. An earlier start that Slurm wrongly considered lost may still append events. Readers ignore its file.

If a file vanishes while it is being read, a later start has already condensed it, so nothing is published.
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
    """Condenses the events of all starts before ``start``. Leaves out the most recent of them.

    Lists the directory once, and reads each file that it condenses.

    Args:
        folder: ``RUN/events``.

    Raises:
        OSError: A file cannot be read or written. Nothing is lost.
    """
    _condense(folder, pod, lambda starts: [one for one in starts if one < start_number(start)][:-1])


def condense_all(folder: Path, pod: str) -> None:
    """Condenses the events of all starts of a pod that is over. If it starts again, new events are added later.

    Args:
        folder: ``RUN/events``.

    Raises:
        OSError: A file cannot be read or written, or a new start of the pod is condensing it. Nothing is lost.
    """
    _condense(folder, pod, lambda starts: starts)


class EndedPods:
    """Finds pods that are over and condenses their events, so that replaced job arrays leave few files behind.

    A job array is over once none of its pods has a lease. The lease of an ended or lost pod is pruned once it holds no
    blocks. Pods of an array that is still running keep the events of their last start.

    Args:
        folder: ``RUN/events``.
        lease_s: Number of seconds for which a pod must be seen as over before its events are condensed. After that
            time, no cached directory listing can hide its lease.
        clock: A monotonic clock, in seconds.
    """

    def __init__(self, folder: Path, lease_s: float, clock: Callable[[], float]) -> None:
        self._folder, self._lease_s, self._clock = folder, lease_s, clock
        self._since: dict[str, float] = {}
        """Time at which each ended pod that still has event files was first seen as over, by pod."""
        self._due: list[str] = []
        """Pods whose events can be condensed now."""

    def look(self, leases: Iterable[str]) -> None:
        """Finds pods that are over. Lists the directory once. Raises OSError.

        Args:
            leases: Names of the pods that hold a lease.
        """
        now, arrays = self._clock(), {array_of(pod) or pod for pod in leases}
        pods = [pod for pod, files in sorted(list_pods(self._folder).items()) if files.starts]
        self._since = {pod: self._since.get(pod, now) for pod in pods if (array_of(pod) or pod) not in arrays}
        self._due = [pod for pod, since in self._since.items() if now - since > self._lease_s]

    def advance(self) -> None:
        """Condenses the events of one pod if any pod is due."""
        if self._due:
            with suppress(OSError):  # a later check retries
                condense_all(self._folder, self._due.pop())


def _condense(folder: Path, pod: str, choose: Callable[[list[int]], list[int]]) -> None:
    """Condenses the events of selected starts of a pod.

    Args:
        choose: Selects the starts to condense from all starts that are not condensed yet.
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
    """Removes the files replaced by a pod's condensed file, and temporary files of killed writers.

    Event files are removed last, because the coordinator retries as long as any remain.
    """
    kinds = "|".join(map(re.escape, (EVENTS, SUFFIX, CONDENSED)))
    own = re.compile(rf"(\.?){re.escape(pod)}\.([0-9]+)({kinds})(\..*)?")
    names = [name for name in os.listdir(folder) if name.startswith((f"{pod}.", f".{pod}."))]
    for name in sorted(names, key=lambda name: name.endswith(EVENTS)):
        match = own.fullmatch(name)
        if match is None:
            continue
        hidden, number, kind, rest = match[1], start_number(match[2]), match[3], match[4]
        if bool(hidden) != bool(rest):  # not a temporary file of a writer
            continue
        if 0 <= number < covered or (number == covered and (rest or kind != CONDENSED)):
            with suppress(FileNotFoundError):
                (folder / name).unlink()
