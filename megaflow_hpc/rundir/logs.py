"""Reads a run's logs. It lists them, returns their last lines, and finds all lines about one rollout.

Each process of a run writes ``RUN/logs/<role>-<job>.log``, or ``<role>-local.log`` without Slurm. An engine writes
``<policy>.<n>.engine.log``. In a pod's log, lines about a rollout start with its id. Logs contain untrusted text, can
be huge and may end in an incomplete line. Tails are read backwards in bounded chunks. Undecodable bytes are preserved
as surrogates.
"""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.host.files import behind_hole, open_regular
from megaflow_hpc.rundir.event_reader import EventReader
from megaflow_hpc.rundir.events import (
    AnyEvent,
    AttemptEvent,
    RolloutEvent,
    StartEvent,
    decode,
)
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.marks import explained
from megaflow_hpc.rundir.summaries import Condensed, Summary, WantedPods

PIECE = 1 << 20
"""Number of bytes to read at a time."""
LINE = 1 << 14
"""Maximum number of bytes to show per line."""
TAIL_BYTES = 16 << 20
"""Maximum number of bytes to search for the last lines of a log."""
SEARCHED_BYTES = 256 << 20
"""Maximum number of bytes of pod logs, newest first, to search for one rollout."""
LOST_LINES, LOST_BYTES = 400, 1 << 16
"""Maximum number of lines and bytes at the end of a lost pod's log to search for the cause."""
_REQUEUED = "DUE TO JOB REQUEUE ***"
_END = 4096
_ENGINE = ".engine"


@dataclass(frozen=True)
class Log:
    path: Path
    bytes: int
    changed_at: float
    """Modification time, as a Unix timestamp in seconds."""

    @property
    def last(self) -> str:
        """The last line, truncated if it is long. Every access reads the file again."""
        try:
            lines = tail(self.path, 1, _END).lines if self.bytes else []
        except OSError:  # removed in the meantime
            return ""
        return lines[-1] if lines else ""

    @property
    def name(self) -> str:
        """The file name without ``.log``."""
        return self.path.name.removesuffix(".log")

    @property
    def role(self) -> str:
        """Role of the process: ``pod``, ``server``, ``engine``, ``trainer``, ``gather`` and so on."""
        return "engine" if self.name.endswith(_ENGINE) else self.name.partition("-")[0]


def all_logs(run: RunDir) -> list[Log]:
    """Returns a run's logs, sorted by name. Does not open them."""
    logs = []
    try:
        names = sorted(os.listdir(run.logs))
    except FileNotFoundError:
        return []
    for name in names:
        path = run.logs / name
        try:
            status = path.lstat()
            if name.endswith(".log") and stat.S_ISREG(status.st_mode):
                logs.append(Log(path, status.st_size, status.st_mtime))
        except OSError:  # removed in the meantime, or unreadable
            continue
    return logs


def find_log(run: RunDir, wanted: str) -> Log:
    """Returns the log with the given name, role, job, array element, pod or server.

    Raises:
        ConfigError: No log matches, or several do. The message lists the candidates.
    """
    there = all_logs(run)
    name = wanted.removesuffix(".log")
    for fits in (
        lambda log: log.name == name,
        lambda log: log.name in (f"{name}{_ENGINE}", f"server-{name}", f"pod-{name}") or log.path == pod_log(run, name),
        lambda log: log.role == name,
        lambda log: re.search(rf"-{re.escape(name)}(_|@|$)", log.name) is not None,
    ):
        matching = [log for log in there if fits(log)]
        if len(matching) == 1:
            return matching[0]
        if matching:
            raise ConfigError(f"{wanted}: several logs have this name; choose one: {_names(matching)}")
    if not there:
        raise ConfigError(f"{run.logs}: there is no log, because no job of this run has started")
    raise ConfigError(f"{wanted}: no such log in {run.logs}; there are: {_names(there)}")


def pod_log(run: RunDir, pod: str) -> Path | None:
    """Returns the path of the log of a pod start (``<pod>.<start>``). Returns ``None`` if it does not exist."""
    name = pod.rpartition(".")[0]
    path = run.logs / ("pod-local.log" if name.startswith("local-") else f"pod-{name}.log")
    return path if path.exists() else None


def why_lost(run: RunDir, pod: str) -> str:
    """Returns the log line that explains why a pod start (``<pod>.<start>``) ended without reporting its final state.

    Reads only the end of the log. Returns an empty string if no line explains it, or if several pods share the log.
    """
    name, _, start = pod.rpartition(".")
    path = pod_log(run, pod)
    if path is None or name.startswith("local-"):
        return ""
    try:
        lines = tail(path, LOST_LINES, LOST_BYTES).lines
    except OSError:
        return ""
    own: list[str] = []
    for line in lines:
        ended = re.fullmatch(rf"pod {re.escape(name)} start (\d+): .*", line)
        if ended is not None and ended[1] == start:
            break
        if ended is not None:
            own = []
        elif not line.endswith(_REQUEUED):  # such a line ends the previous start
            own.append(line.strip())
    return explained(own)


def _names(logs: list[Log], most: int = 10) -> str:
    names = ", ".join(log.name for log in logs[:most])
    return names if len(logs) <= most else f"{names} and {len(logs) - most} more"


@dataclass(frozen=True)
class Tail:
    """The last lines of a log."""

    lines: list[str]
    before: int
    """Number of bytes before these lines."""
    offset: int = 0
    """Size of the log in bytes when it was read."""


def tail(path: Path, lines: int, most: int = TAIL_BYTES) -> Tail:
    """Returns the last ``lines`` lines of a log. Reads at most ``most`` bytes.

    Raises:
        OSError: The log cannot be read.
    """
    with open_regular(path) as file:
        end = start = file.seek(0, os.SEEK_END)
        pieces: list[bytes] = []
        while start > max(0, end - most) and sum(piece.count(b"\n") for piece in pieces) <= lines:
            size = min(PIECE, start - max(0, end - most))
            start -= size
            file.seek(start)
            pieces.insert(0, file.read(size))
    data = b"".join(pieces)
    split_lines = data.split(b"\n")
    if not split_lines[-1]:
        split_lines.pop()
    kept = split_lines[-lines:] if lines else []
    before = start + sum(len(line) + 1 for line in split_lines[: len(split_lines) - len(kept)])
    return Tail([_text(line) for line in kept], before, end)


def whole(path: Path) -> Iterator[str]:
    """Yields every line of a log.

    Raises:
        OSError: The log cannot be read.
    """
    growing = GrowingLog(path)
    while lines := growing.read():
        yield from lines
    yield from growing.rest()


class GrowingLog:
    """Follows a growing log. If the log is truncated, reads it again from the beginning.

    Args:
        offset: Byte offset of the first read. Each later read continues after the previous one.
    """

    def __init__(self, path: Path, offset: int = 0) -> None:
        self.path = path
        self.offset, self._rest = offset, b""

    def read(self) -> list[str]:
        """Returns the lines that were completed since the last call, at most one chunk of them."""
        try:
            with open_regular(self.path) as file:
                if file.seek(0, os.SEEK_END) < self.offset:
                    self.offset, self._rest = 0, b""
                while True:
                    file.seek(self.offset)
                    data = file.read(PIECE)
                    self.offset += len(data)
                    *lines, rest = (self._rest + data).split(b"\n")
                    self._rest = rest[: LINE + 1]  # keep only the part of an unfinished line that will be shown
                    if not lines and len(data) == PIECE:
                        self.offset = behind_hole(file, self.offset)
                    if lines or len(data) < PIECE:
                        return [_text(line) for line in lines]
        except OSError:  # the file system is temporarily unavailable
            return []

    def rest(self) -> list[str]:
        """Returns the last line as a list if it has no newline yet. Otherwise returns an empty list."""
        rest, self._rest = self._rest, b""
        return [_text(rest)] if rest else []


class RolloutLog:
    """Follows the events and pod log lines of one rollout."""

    def __init__(self, run: RunDir, rollout: str) -> None:
        self._run, self._rollout = run, rollout
        self._events = EventReader(run.events, about=rollout)
        self._logs: dict[Path, GrowingLog] = {}
        self._mentions = re.compile(rf"(?<![\w./-]){re.escape(rollout)}(?![\w./-])")
        self.ended = False
        """True once the rollout's outcome is stored."""
        self.skipped = 0
        """Number of log bytes that were not searched because they exceed :data:`SEARCHED_BYTES`."""

    def read(self) -> list[str]:
        """Returns the lines written since the last call. Event lines come first."""
        texts: list[tuple[float, str]] = []
        for _, events in self._events.read():
            for event in events:
                texts += self._texts(event)
        self.ended = self.ended or any(text.startswith("stored: ") for _, text in texts)
        lines = [f"{_clock(t)} {text}" for t, text in sorted(texts)]
        for log in self._changed_logs():
            while grown := log.read():
                lines += [f"{log.path.name}: {line}" for line in grown if self._mentions.search(line)]
        return lines

    def _texts(self, event: AnyEvent | Summary) -> Iterator[tuple[float, str]]:
        """Yields (time, line) for each event. Condensed events yield only the rollout's outcome."""
        if not isinstance(event, Summary):
            yield event.t, describe(event)
        elif not isinstance(event, Condensed) or event.seen:
            return
        elif WantedPods([self._rollout]).among(event.digests):
            yield event.t, "stored: ended well before this, in a start whose events were condensed"
        else:
            for ended in event.ended_badly:
                if ended.id == self._rollout:
                    yield ended.t, describe(ended.to_event())

    def _changed_logs(self) -> list[GrowingLog]:
        """Returns the pod logs whose size has changed since the last read."""
        pods = [log for log in all_logs(self._run) if log.role == "pod"]
        left = SEARCHED_BYTES
        for log in sorted(pods, key=lambda log: -log.changed_at):
            if log.path not in self._logs:
                size = min(log.bytes, left)
                left -= size
                self.skipped += log.bytes - size
                self._logs[log.path] = GrowingLog(log.path, log.bytes - size)
        return [self._logs[log.path] for log in pods if log.bytes != self._logs[log.path].offset]


def last_events(run: RunDir, pod: str, most: int) -> tuple[list[AnyEvent], bool]:
    """Returns the latest events of a pod start (``<pod>.<start>``), at most ``most``. Also returns whether these are
    all.

    Returns no events if the file is unreadable.
    """
    try:
        end = tail(run.events / f"{pod}.jsonl", most, _END if most == 1 else TAIL_BYTES)
    except OSError:
        return [], False
    decoded = [decode(line.encode("utf-8", "surrogateescape")) for line in end.lines]
    return [event for event in decoded if event is not None], end.before == 0


def describe(event: AnyEvent) -> str:
    """Returns a one-line description of a rollout's event."""
    match event:
        case StartEvent():
            return f"attempt {event.attempt + 1} starts on rank {event.rank}"
        case AttemptEvent():
            rank = "" if event.rank is None else f" on rank {event.rank}"
            return f"attempt {event.attempt + 1} failed{rank}, and is repeated: {event.kind}: {event.error}"
        case RolloutEvent():
            reward = "not verified" if event.reward is None else f"reward {event.reward:g}"
            why = f": {event.kind}: {event.error}" if event.kind or event.error else ""
            return f"stored: {event.status}, {reward}, {event.turns} turns, {event.seconds:g} s{why}"
    return type(event).__name__.removesuffix("Event").lower()


def _clock(t: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(t))


def _text(line: bytes) -> str:
    text = line[:LINE].rstrip(b"\r").decode("utf-8", "surrogateescape")
    return f"{text} … cut" if len(line) > LINE else text
