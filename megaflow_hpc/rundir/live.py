"""``RUN/live``: live status of running rollouts, written only while a viewer requests it.

::

    <host>.<process>.ask    :class:`Ask`: rollouts that a viewer shows; renewed every few seconds
    <pod>.<start>.json      :class:`PodLiveStatus`: status of the requested rollouts that are running in that pod

Pods poll for viewers every few seconds. In large runs, one pod polls for all. A pod assumes that a viewer is gone once
its counter has not changed for some time, measured by the pod's own clock. Nothing else depends on these files, and the
last pod removes them.
"""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Callable
from contextlib import suppress

import msgspec

from megaflow_hpc.host.atomic import without_links, write_atomic
from megaflow_hpc.host.files import remove_tree
from megaflow_hpc.rundir.endpoints import Heartbeats
from megaflow_hpc.rundir.events import Count, Number
from megaflow_hpc.rundir.layout import RunDir, try_read_json
from megaflow_hpc.rundir.summaries import start_number

RENEW_S = 10.0
"""Seconds between two renewals of a viewer's request."""
POLL_INTERVAL_S = 3.0
"""Seconds between two polls for viewers. Short, because a person is waiting."""
STALE_S = 45.0
"""Ignore a viewer whose counter has not changed for this many seconds."""
STALE_VIEWER_CLEANUP_S = 600.0
"""Delete a vanished viewer's file after this many seconds."""
MAX_ROLLOUTS = 128
"""Maximum number of rollouts that all viewers together may request."""
MAX_TRANSCRIPTS = 4
MAX_BYTES = 8 << 20
"""Maximum file size in bytes. Larger files are ignored."""


class Ask(msgspec.Struct, kw_only=True):
    """A viewer's request."""

    counter: Count
    rollouts: list[str] = []
    """Ids of the rollouts on the viewer's screen."""
    transcript: str = ""
    """Id of the rollout whose conversation is on the screen. Empty if there is none."""


class Asked(msgspec.Struct, frozen=True):
    """Combined requests of all viewers, up to a maximum size."""

    rollouts: tuple[str, ...] = ()
    transcripts: tuple[str, ...] = ()


class LiveStatus(msgspec.Struct):
    """Live status of one rollout."""

    calls: Count
    """Number of completed model calls."""
    tokens: Count
    """Number of sampled tokens."""
    waits: bool
    """True while a model call is pending."""
    quiet_s: Number
    """Seconds since these values last changed."""


class Transcript(msgspec.Struct):
    """The most recent messages of a conversation."""

    calls: Count
    """Number of completed model calls."""
    messages: list[tuple[str, str]]
    """Role and text of each message."""
    left_out: Count = 0
    """Number of earlier messages that are omitted."""


class PodLiveStatus(msgspec.Struct):
    """Live status of the rollouts in one pod that viewers have requested."""

    rollouts: dict[str, LiveStatus] = {}
    transcripts: dict[str, Transcript] = {}

    def __bool__(self) -> bool:
        return bool(self.rollouts or self.transcripts)


class LiveFiles:
    """Reads and writes the live-status files of one run.

    Args:
        clock: A monotonic clock, in seconds.
    """

    def __init__(self, run: RunDir, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder = run.live
        self._heartbeats = Heartbeats(clock)
        self._own = re.sub(r"[^\w.-]", "_", f"{os.uname().nodename}.{os.getpid()}.ask")
        self._counter = 0

    # --- for viewers ---

    def ask(self, rollouts: list[str], transcript: str = "") -> None:
        """Requests the live status of rollouts. The caller must repeat the call every :data:`RENEW_S` seconds.

        Raises:
            OSError: The run directory is not writable.
        """
        if self._folder.parent.stat().st_uid != os.getuid():  # refuse root, too: the owner could not remove its files
            raise PermissionError(errno.EPERM, "only the run's owner may query pods")
        self._counter += 1
        ask = Ask(counter=self._counter, rollouts=rollouts[:MAX_ROLLOUTS], transcript=transcript)
        with without_links(self._folder) as folder:
            write_atomic(folder / self._own, msgspec.json.encode(ask))

    def leave(self) -> None:
        """Stops requesting live status for this viewer. Raises OSError."""
        if self._counter:
            (self._folder / self._own).unlink(missing_ok=True)

    def status(self, pod: str) -> PodLiveStatus | None:
        """Returns the live status that a pod start (``<pod>.<start>``) has published. Returns ``None`` if there is
        none."""
        return try_read_json(self._folder / f"{pod}.json", PodLiveStatus, MAX_BYTES)

    # --- for pods ---

    def asked(self) -> Asked:
        """Returns the combined requests of all viewers. Needs one listing, and one read for each viewer. Raises
        OSError."""
        try:
            names = [name for name in os.listdir(self._folder) if name.endswith(".ask") and not name.startswith(".")]
        except FileNotFoundError:
            names = []
        rollouts: list[str] = []
        transcripts: list[str] = []
        for name in sorted(names):
            ask = try_read_json(self._folder / name, Ask, MAX_BYTES)
            unchanged_s = self._heartbeats.unchanged_s(name, ask.counter if ask else None)
            if ask is not None and unchanged_s < STALE_S:
                rollouts += ask.rollouts
                if ask.transcript:
                    transcripts.append(ask.transcript)
            elif unchanged_s > STALE_VIEWER_CLEANUP_S:
                (self._folder / name).unlink(missing_ok=True)
        return Asked(tuple(sorted({*rollouts}))[:MAX_ROLLOUTS], tuple(sorted({*transcripts}))[:MAX_TRANSCRIPTS])

    def publish(self, pod: str, status: PodLiveStatus) -> None:
        """Publishes a pod's live status. An empty status withdraws the previous one. Raises OSError."""
        path = self._folder / f"{pod}.json"
        if status:
            write_atomic(path, _encode(status))
        else:
            path.unlink(missing_ok=True)


class Viewers:
    """Answers the viewers' requests on behalf of one pod. Ignores disk errors.

    Args:
        pod: ``<pod>.<start>``.
    """

    def __init__(self, run: RunDir, pod: str) -> None:
        self._run, self._pod, self._files = run, pod, LiveFiles(run)
        self.asked = Asked()
        """Rollouts that viewers requested at the last poll."""
        self._shows = False
        self._polled_at = 0.0

    def poll(self, find: Callable[[], Asked]) -> None:
        """Calls ``find`` to update :attr:`asked` if a poll is due."""
        if time.monotonic() - self._polled_at >= POLL_INTERVAL_S:
            self._polled_at = time.monotonic()
            with suppress(OSError):
                self.asked = find()

    def show(self, status: PodLiveStatus) -> None:
        """Publishes this pod's live status. An empty status withdraws the previous one."""
        if status or self._shows:
            self._shows = bool(status)
            with suppress(OSError):
                self._files.publish(self._pod, status)

    def leave(self) -> None:
        """Stops publishing this pod's live status."""
        self.show(PodLiveStatus())

    def clear_earlier(self) -> None:
        """Removes the status files of this pod's earlier starts. A start that was killed leaves its file."""
        pod, _, start = self._pod.rpartition(".")
        with suppress(OSError):
            for name in os.listdir(self._run.live):
                earlier, _, number = name.removesuffix(".json").rpartition(".")
                if name.endswith(".json") and earlier == pod and -1 < start_number(number) < start_number(start):
                    (self._run.live / name).unlink(missing_ok=True)

    def clear(self) -> None:
        """Removes the files of all pods and viewers. Call it only when nothing is running any more."""
        remove_tree(self._run.live, ignore_errors=True)


def _encode(status: PodLiveStatus) -> bytes:
    try:
        return msgspec.json.encode(status)
    except UnicodeEncodeError:  # lone surrogates in program output
        for transcript in status.transcripts.values():
            transcript.messages = [(_text(role), _text(text)) for role, text in transcript.messages]
        return msgspec.json.encode(status)


def _text(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()
