"""Condenses the events of a pod's earlier starts into one file, so that a pod has few files however often it started.

Each start condenses the events of all earlier starts except the latest one: readers that follow the run need some time
to read its last events, and its individual rollouts can still be listed. Three steps make this safe:

1. The new file is published by an atomic rename. Its name contains the last start that it covers. From then on,
   readers ignore the event files of the covered starts and earlier condensed files.
2. The ignored files are removed. If the pod is killed before that, its next start removes them.
3. An earlier start that Slurm wrongly considered lost may still append events. It writes to files that nobody reads.

If a file vanishes while it is read, a later start has already condensed it, and nothing is published.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

from megaflow_hpc.rundir import summaries
from megaflow_hpc.rundir.event_reader import list_pods
from megaflow_hpc.rundir.pods.aggregator import EventAggregator, EventFileScan
from megaflow_hpc.rundir.summaries import CONDENSED, EVENTS, SUFFIX, Condensed, start_number


def condense(folder: Path, pod: str, start: str) -> None:
    """Condenses the events of the starts before ``start``, except for the latest of them.

    Costs one directory listing, plus reading each file that is condensed.

    Args:
        folder: ``RUN/events``.

    Raises:
        OSError: A file cannot be read or written. Nothing is lost.
    """
    files, current = list_pods(folder).get(pod), start_number(start)
    if files is None or current < 0:
        return
    covered, earlier = -1, None
    for number in files.condensed:
        earlier = summaries.read_condensed(folder / f"{pod}.{number}{CONDENSED}")
        if earlier is not None:  # a partial file is possible only if the disk has damaged it
            covered = number
            break
    numbered = {start_number(other): name for other, name in files.starts.items()}
    old = sorted(number for number in numbered if covered < number < current)[:-1]
    if old:
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
    """Removes the files that a pod's condensed file replaces, and temporary files of killed writers."""
    kinds = "|".join(map(re.escape, (EVENTS, SUFFIX, CONDENSED)))
    own = re.compile(rf"(\.?){re.escape(pod)}\.([0-9]+)({kinds})(\..*)?")
    for name in os.listdir(folder):
        if (match := own.fullmatch(name)) is None or bool(match[1]) != bool(match[4]):
            continue
        number = start_number(match[2])
        if 0 <= number < covered or (number == covered and (match[4] or match[3] != CONDENSED)):
            with suppress(FileNotFoundError):
                (folder / name).unlink()
