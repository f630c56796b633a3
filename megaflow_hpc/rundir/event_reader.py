"""Reads a run's event files incrementally, although pods condense the files of their earlier starts."""

from __future__ import annotations

import os
import re
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, ClassVar

from megaflow_hpc.host.files import behind_hole, open_regular
from megaflow_hpc.host.process import descriptor_limit
from megaflow_hpc.rundir import summaries
from megaflow_hpc.rundir.events import AnyEvent, decode
from megaflow_hpc.rundir.summaries import CONDENSED, EVENTS, Condensed, Summary, start_number

PIECE = 16 << 20
"""Number of bytes to read from an event file at a time. Pods write no longer lines."""
PASSES = 5
"""Maximum number of directory listings for each read. More than one is needed only while a pod condenses events."""
_FINAL_EVENT = re.compile(rb'"event": "pod".*"state": "(done|drained|paused)"')
"""Matches the final event of a pod. Nothing is appended to its file afterwards."""


@dataclass
class PodFiles:
    """Names of the event files of one pod."""

    starts: dict[str, str] = field(default_factory=dict)
    """Name of the event file of each start."""
    condensed: list[int] = field(default_factory=list)
    """The last start that each condensed file covers, highest first. Usually there is at most one such file."""


def list_pods(folder: Path, only: str = "") -> dict[str, PodFiles]:
    """Returns the event files of all pods, or of one pod, by pod. Lists the directory once. Raises OSError."""
    pods: dict[str, PodFiles] = {}
    try:
        names = sorted(name for name in os.listdir(folder) if not only or name.startswith(f"{only}."))
    except FileNotFoundError:
        return pods
    for name in names:
        stem, suffix = os.path.splitext(name)
        pod, _, start = stem.rpartition(".")
        if name.startswith("."):
            continue
        if suffix == EVENTS:
            pods.setdefault(pod, PodFiles()).starts[start] = name
        elif suffix == CONDENSED and start_number(start) >= 0:
            pods.setdefault(pod, PodFiles()).condensed.append(start_number(start))
    for files in pods.values():
        files.condensed.sort(reverse=True)
    return pods


class EventReader:
    """Reads the events of a run incrementally. Keeps files open between reads, within the descriptor limit.

    A pod may condense events of which this reader has read only a part. The reader then calls ``restart`` and begins
    again. Without ``restart``, it yields the :class:`~.summaries.Condensed` record in addition to the events already
    read. The record's ``seen`` is true if the reader has already yielded everything that it replaces.

    Args:
        folder: ``RUN/events``.
        only: Kind of event to decode. Empty means every kind.
        about: Id of the rollout whose events to decode. Empty means all rollouts.
        use_summaries: Yield a file's summary instead of the events that it covers.
        restart: Called when the caller must discard everything yielded so far.
    """

    _readers: ClassVar[weakref.WeakSet[EventReader]] = weakref.WeakSet()

    def __init__(
        self,
        folder: Path,
        only: str = "",
        about: str = "",
        use_summaries: bool = False,
        restart: Callable[[], None] | None = None,
    ) -> None:
        self._folder, self._use_summaries, self._restart = folder, use_summaries, restart
        self._mark = f'"event": "{only}"'.encode() if only else b""
        self._about = f'"id": "{about}"'.encode("utf-8", "replace") if about else b""
        self._offsets: dict[str, dict[str, int]] = {}
        """Number of bytes read, by pod and start."""
        self._covered: dict[str, int] = {}
        """The last start that the condensed events yielded so far cover, by pod."""
        self._ended: set[Path] = set()
        """Event files to which nothing will be appended any more."""
        self._open: dict[Path, BinaryIO] = {}
        self._most_open = 0
        self._readers.add(self)

    def read(self, starts: Iterable[str] | None = None) -> Iterator[tuple[str, list[AnyEvent | Summary]]]:
        """Yields ``<pod>.<start>`` and its new events for each file. The list of events may be empty.

        Args:
            starts: Read only the files of these starts (``<pod>.<start>``). Default: all files.
        """
        others = sum(len(reader._open) for reader in list(self._readers) if reader is not self)
        self._most_open = descriptor_limit() // 2 - others
        if starts is not None:
            yield from self._read_named(sorted(starts))
            return
        for _ in range(PASSES):
            if (yield from self._read_all()):
                return

    def _read_all(self) -> Generator[tuple[str, list[AnyEvent | Summary]], None, bool]:
        """Reads every file once. Returns false if a file vanished because a pod condensed its events."""
        complete = True
        for pod, files in list_pods(self._folder).items():
            for number in files.condensed:
                if number <= self._covered.get(pod, -1):
                    break
                try:
                    condensed = summaries.read_condensed(self._folder / f"{pod}.{number}{CONDENSED}")
                except FileNotFoundError:  # a later condensed file has replaced it
                    complete = False
                    break
                except OSError:  # the file system is temporarily unavailable
                    break
                if condensed is None:
                    continue
                if not self._may_continue(pod, number, condensed):
                    return False
                yield f"{pod}.{number}", [condensed]
                break
            for start, name in files.starts.items():
                if 0 <= start_number(start) <= self._covered.get(pod, -1):
                    continue
                try:
                    events = self._read_file(pod, start, self._folder / name)
                except FileNotFoundError:
                    complete = False
                    continue
                except OSError:
                    continue
                yield name.removesuffix(EVENTS), events
        return complete

    def _may_continue(self, pod: str, number: int, condensed: Condensed) -> bool:
        """Replaces a pod's earlier events with ``condensed``. Returns false if the caller must read the events again
        from the start."""
        read = {start: size for start, size in self._offsets.get(pod, {}).items() if start_number(start) <= number}
        before = self._covered.get(pod, -1)
        has_read = before >= 0 or any(read.values())
        if has_read:
            sizes = {start: size for start, size in condensed.sizes.items() if size}
            condensed.seen = condensed.after == before and sizes == {s: size for s, size in read.items() if size}
            if not condensed.seen and self._restart is not None:
                self._forget()
                self._restart()
                return False
        self._covered[pod] = number
        for start in read:
            self._offsets[pod].pop(start)
            self._close(self._folder / f"{pod}.{start}{EVENTS}")
        return True

    def _forget(self) -> None:
        for path in list(self._open):
            self._close(path)
        self._offsets, self._covered, self._ended = {}, {}, set()

    def _close(self, path: Path) -> None:
        self._ended.discard(path)
        if file := self._open.pop(path, None):
            file.close()

    def _read_named(self, names: Iterable[str]) -> Iterator[tuple[str, list[AnyEvent | Summary]]]:
        pods: dict[str, PodFiles] | None = None
        for name in names:
            pod, _, start = name.rpartition(".")
            try:
                yield name, self._read_file(pod, start, self._folder / f"{name}{EVENTS}")
            except FileNotFoundError:  # a later start of the pod has condensed it
                try:
                    pods = list_pods(self._folder) if pods is None else pods
                    numbers = pods.get(pod, PodFiles()).condensed
                    if not numbers or numbers[0] <= self._covered.get(pod, -1):
                        continue
                    condensed = summaries.read_condensed(self._folder / f"{pod}.{numbers[0]}{CONDENSED}")
                except OSError:
                    continue
                if condensed is not None:
                    self._covered[pod] = numbers[0]
                    yield f"{pod}.{numbers[0]}", [condensed]
            except OSError:
                continue

    def _read_file(self, pod: str, start: str, path: Path) -> list[AnyEvent | Summary]:
        """Returns the new events of a file. Raises OSError."""
        if path in self._ended:
            return []
        events: list[AnyEvent | Summary] = []
        offsets = self._offsets.setdefault(pod, {})
        if start not in offsets and self._use_summaries:
            summary = summaries.read(path)
            if summary is not None:
                offsets[start] = summary.covers
                events.append(summary)
        try:
            lines, offsets[start] = self._read_appended(path, offsets.get(start, 0))
        except OSError:
            if events:
                offsets.pop(start)  # use a summary only together with the events after it
            raise
        if lines and _FINAL_EVENT.search(lines[-1]):
            self._close(path)
            self._ended.add(path)
        for line in lines:
            if self._mark in line and self._about in line:
                event = decode(line)
                if event is not None:
                    events.append(event)
        return events

    def _read_appended(self, path: Path, offset: int) -> tuple[list[bytes], int]:
        """Returns the complete lines after ``offset``, and the offset at which they end."""
        file = self._open.pop(path, None)
        if file is None:
            if offset and path.stat().st_size <= offset:
                return [], offset
            file = open_regular(path)
        lines: list[bytes] = []
        try:
            file.seek(offset)
            while data := file.read(PIECE):
                end = data.rfind(b"\n") + 1
                lines += data[:end].splitlines()
                offset += end
                if len(data) < PIECE:
                    break
                if not end:  # a crash left a hole, or another program wrote the file
                    offset = max(offset + PIECE, behind_hole(file, offset))
                file.seek(offset)
            if len(self._open) < self._most_open:
                self._open[path] = file
            return lines, offset
        finally:
            if path not in self._open:  # also after an error, because the handle may be stale
                file.close()
