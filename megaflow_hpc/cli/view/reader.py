"""Polls a run in a thread, so that a hanging file system does not block the keyboard."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from megaflow_hpc.campaign.run import Run
from megaflow_hpc.errors import ConfigError, MegaflowError
from megaflow_hpc.monitor.live import Live, RunSnapshot
from megaflow_hpc.rundir.logs import RolloutLog, find_log, pod_log, tail
from megaflow_hpc.texts import end_of

LOG_LINES = 2000
"""Maximum number of log lines to show."""
PAUSE_FACTOR = 4.0
"""Pause after a poll, as a multiple of the poll's duration. Limits the load of large runs and slow file systems."""
LISTED_BYTES = 64 << 20
"""List successful rollouts too if the event files have at most this many bytes (about 200,000 rollouts). Reading that
much takes seconds."""
STOP_TIMEOUT_S = 2.0
"""Seconds to wait for the file system after the user closes the view."""


@dataclass(frozen=True)
class Detail:
    """Details of the selected rollout, pod or engine."""

    key: str
    messages: Sequence[tuple[str, str]] = ()
    left_out: int = 0
    """Number of older messages that are not shown."""
    note: str = ""
    """Explains why there are no messages. Empty if there are messages."""
    log: Sequence[str] = ()


@dataclass(frozen=True)
class RunView:
    """Result of a poll."""

    snapshot: RunSnapshot | None = None
    detail: Detail | None = None
    problem: str = ""
    """Reason why the poll failed. Empty if it succeeded."""
    over: bool = False
    """True if the run can no longer change."""


class RunReader(threading.Thread):
    """Polls a run every few seconds, and immediately after :meth:`wake`.

    Args:
        deliver: Called in the reader's thread with the result of each poll.
    """

    def __init__(self, run: Run, every_s: float, deliver: Callable[[RunView], object]) -> None:
        # A daemon thread does not keep the process alive if it hangs in the file system.
        super().__init__(name="reader", daemon=True)
        self._run, self._every_s, self._deliver = run, every_s, deliver
        self.live = Live(run.dir, run.monitor)
        self.wants_log = False
        """True if polls also read the log of the selected item."""
        self._stored: Detail | None = None
        self._read = ("", 0.0)
        """(Id, storage time) of the last rollout read. A failed rollout may be stored again."""
        self._log: _Log | None = None
        self._wake, self._stopped = threading.Event(), False

    def open(self, key: str) -> None:
        """Selects a rollout, pod or engine for the next polls. An empty key selects none."""
        self.live.opened = key
        self._wake.set()

    def wake(self) -> None:
        """Starts the next poll immediately."""
        self._wake.set()

    def stop(self) -> None:
        """Stops the thread. Waits at most :data:`STOP_TIMEOUT_S`, because the file system may hang."""
        self._stopped = True
        self._wake.set()
        self.join(STOP_TIMEOUT_S)

    def run(self) -> None:
        """Polls until :meth:`stop` is called."""
        try:
            self._run.monitor.list_rollouts(LISTED_BYTES)
            with self._run.tended() as tend:
                while not self._stopped:
                    began = time.monotonic()
                    self._deliver(self._look(tend))
                    self._wake.wait(max(self._every_s, PAUSE_FACTOR * (time.monotonic() - began)))
                    self._wake.clear()
        except OSError as error:
            self._deliver(RunView(problem=str(error)))
        finally:
            with suppress(OSError):
                self.live.leave()

    def _look(self, tend: Callable[[], object]) -> RunView:
        try:
            if not self._run.dir.run_json.exists():
                return RunView(problem="the run directory no longer exists")
            status = self._run.status()
            snapshot, over = self.live.look(status), self._run.over(status)
        except Exception as error:  # whatever the error, the next poll may succeed
            return RunView(problem=f"cannot be read now: {_error_text(error)}")
        detail, problem = None, ""
        if key := self.live.opened:
            try:
                detail = self._detail(key, snapshot)
            except Exception as error:  # one rollout's damaged file must not hide the others
                detail = Detail(key, note=f"cannot be read: {_error_text(error)}")
        try:
            tend()
        except Exception as error:
            problem = f"pods and servers cannot be added from here: {_error_text(error)}"
        return RunView(snapshot, detail, problem, over)

    def _detail(self, key: str, snapshot: RunSnapshot) -> Detail:
        log = self._log_of(key) if self.wants_log else ()
        if key not in snapshot.rollouts.ids:
            return Detail(key, log=log)
        row = snapshot.rollouts.of(key)
        if row is not None and row.stored is not None:
            if self._read != (key, row.stored.t) or self._stored is None:
                self._stored = self._read_stored(key)
                self._read = (self._stored.key, row.stored.t)
            return replace(self._stored, key=key, log=log)
        transcript = snapshot.transcript
        if transcript is None:
            note = (
                snapshot.unasked or "asking its pod; a rollout without model calls has no transcript until it is stored"
            )
            return Detail(key, note=note, log=log)
        note = "" if transcript.messages else "its model has not answered yet"
        return Detail(key, transcript.messages, transcript.left_out, note, log)

    def _read_stored(self, rollout: str) -> Detail:
        from megaflow_hpc.trajectories import open_trajectories

        with open_trajectories(self._run.path) as store:
            if rollout not in store:  # events are written before records, so the record is not there yet
                return Detail("", note="it is stored, but cannot be read yet")
            row = store[rollout]
            messages, left_out = end_of(row.messages, row.image_labels)
            artifacts = [
                (f"artifact {artifact.name}", artifact.data[-8192:].decode("utf-8", "backslashreplace"))
                for artifact in row.artifacts
                if artifact.name == "verifier.log"
            ]
            others = len(row.conversations) - 1
            more = [("conversations", f"{others} more: megaflow-hpc show RUN {rollout}")] if others > 0 else []
            shown = [*messages, *more, *artifacts]
            return Detail(rollout, shown, left_out, "" if messages else "no message was recorded")

    def _log_of(self, key: str) -> Sequence[str]:
        if "/" not in key:
            try:
                path = pod_log(self._run.dir, key) or find_log(self._run.dir, key).path
                return tail(path, LOG_LINES).lines
            except ConfigError as error:
                return [str(error)]
        if self._log is None or self._log.key != key:
            self._log = _Log(key, RolloutLog(self._run.dir, key))
        return self._log.read()


def _error_text(error: Exception) -> str:
    return str(error) if isinstance(error, (MegaflowError, OSError)) else repr(error)


@dataclass
class _Log:
    """Log lines about a rollout. Searches less often if there are many pod logs."""

    key: str
    source: RolloutLog
    lines: list[str] = field(default_factory=list)
    next_at: float = 0.0

    def read(self) -> Sequence[str]:
        began = time.monotonic()
        if began >= self.next_at:
            self.lines = [*self.lines, *self.source.read()][-LOG_LINES:]
            self.next_at = time.monotonic() + 5 * PAUSE_FACTOR * (time.monotonic() - began)
        return self.lines
