"""``RUN/live``: live status of running rollouts, written only while a viewer asks for it.

::

    <host>.<process>.ask    :class:`Ask`: rollouts that a viewer shows; the viewer renews it every few seconds
    <pod>.<start>.json      :class:`PodLiveStatus`: status of those rollouts that run in that pod

Pods poll for viewers every few seconds; of many pods, one polls for all. A viewer whose counter does not change is
assumed gone, by the pod's own clock. Nothing depends on these files, and the last pod removes them.
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
from megaflow_hpc.rundir.events import Count, Number
from megaflow_hpc.rundir.json_files import try_read_json
from megaflow_hpc.rundir.layout import RunDir

RENEW_S = 10.0
"""Interval at which a viewer renews its ask."""
POLL_INTERVAL_S = 3.0
"""Interval at which pods poll for viewers. A person waits for the answer."""
STALE_S = 45.0
"""A viewer whose counter did not change for this long is gone."""
STALE_VIEWER_CLEANUP_S = 600.0
"""Delete a vanished viewer's file after this many seconds."""
MAX_ROLLOUTS = 128
"""Rollouts that all viewers together may ask about."""
MAX_TRANSCRIPTS = 4
MAX_BYTES = 8 << 20
"""Largest file that is read."""


class Ask(msgspec.Struct, kw_only=True):
    """The question of one viewer."""

    counter: Count
    rollouts: list[str] = []
    """Rollouts on its screen."""
    transcript: str = ""
    """The rollout whose conversation it shows."""


class Asked(msgspec.Struct, frozen=True):
    """The questions of all viewers together, bounded."""

    rollouts: tuple[str, ...] = ()
    transcripts: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.rollouts or self.transcripts)


class LiveStatus(msgspec.Struct):
    """Live status of one rollout."""

    calls: Count
    """Answered model calls."""
    tokens: Count
    """Sampled tokens."""
    waits: bool
    """A model call waits for its answer."""
    quiet_s: Number
    """Seconds since these values changed."""


class Transcript(msgspec.Struct):
    """The current end of a conversation."""

    calls: Count
    """Answered model calls."""
    messages: list[tuple[str, str]]
    """Role and text of each message."""
    left_out: Count = 0
    """Number of earlier messages."""


class PodLiveStatus(msgspec.Struct):
    """Live status of the rollouts that viewers ask about and that run in one pod."""

    rollouts: dict[str, LiveStatus] = {}
    transcripts: dict[str, Transcript] = {}

    def __bool__(self) -> bool:
        return bool(self.rollouts or self.transcripts)


class LiveFiles:
    """The files of one run.

    Args:
        clock: seconds of a clock that never jumps.
    """

    def __init__(self, run: RunDir, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder, self._clock = run.live, clock
        self._viewers: dict[str, tuple[int, float]] = {}
        """Viewer → its counter, and when the counter was first seen."""
        self._own = re.sub(r"[^\w.-]", "_", f"{os.uname().nodename}.{os.getpid()}.ask")
        self._counter = 0

    # --- for viewers ---

    def ask(self, rollouts: list[str], transcript: str = "") -> None:
        """Asks for the live status of some rollouts. Call it every :data:`RENEW_S` to keep asking.

        Raises:
            OSError: the run directory cannot be written, at all or by this user.
        """
        if self._folder.parent.stat().st_uid != os.getuid():  # also for root, whose files the owner could not remove
            raise PermissionError(errno.EPERM, "pods are asked by the run's owner alone")
        self._counter += 1
        ask = Ask(counter=self._counter, rollouts=rollouts[:MAX_ROLLOUTS], transcript=transcript)
        with without_links(self._folder) as folder:
            write_atomic(folder / self._own, msgspec.json.encode(ask))

    def leave(self) -> None:
        """Stops asking. Raises OSError."""
        if self._counter:
            (self._folder / self._own).unlink(missing_ok=True)

    def status(self, pod: str) -> PodLiveStatus | None:
        """Returns the live status that a pod (``<pod>.<start>``) shows, ``None`` while it shows none."""
        return try_read_json(self._folder / f"{pod}.json", PodLiveStatus, MAX_BYTES)

    # --- for pods ---

    def asked(self) -> Asked:
        """Returns what viewers ask for. Costs one listing, and one read for each viewer. Raises OSError."""
        try:
            names = {name for name in os.listdir(self._folder) if name.endswith(".ask") and not name.startswith(".")}
        except FileNotFoundError:
            names = set()
        self._viewers = {name: viewer for name, viewer in self._viewers.items() if name in names}
        rollouts: list[str] = []
        transcripts: list[str] = []
        for name in sorted(names):
            ask = try_read_json(self._folder / name, Ask, MAX_BYTES)
            counter, since = self._viewers.setdefault(name, (-1, self._clock()))
            if ask is not None and ask.counter != counter:
                counter, since = self._viewers[name] = ask.counter, self._clock()
            unchanged_s = self._clock() - since
            if ask is not None and unchanged_s < STALE_S:
                rollouts += ask.rollouts
                transcripts += [ask.transcript] if ask.transcript else []
            elif unchanged_s > STALE_VIEWER_CLEANUP_S:
                (self._folder / name).unlink(missing_ok=True)
        return Asked(tuple(sorted({*rollouts}))[:MAX_ROLLOUTS], tuple(sorted({*transcripts}))[:MAX_TRANSCRIPTS])

    def publish(self, pod: str, status: PodLiveStatus) -> None:
        """Shows the live status of a pod. An empty status withdraws the last one. Raises OSError."""
        path = self._folder / f"{pod}.json"
        if status:
            write_atomic(path, _encode(status))
        else:
            path.unlink(missing_ok=True)


class Viewers:
    """The viewers of a run, as one pod serves them. A disk that refuses these files stops nothing.

    Args:
        pod: ``<pod>.<start>``.
    """

    def __init__(self, run: RunDir, pod: str) -> None:
        self._run, self._pod, self._files = run, pod, LiveFiles(run)
        self.asked = Asked()
        """The rollouts that viewers asked for at the last poll."""
        self._shows = False
        self._polled_at = 0.0

    def poll(self, find: Callable[[], Asked]) -> None:
        """Updates :attr:`asked` by ``find`` when that is due."""
        if time.monotonic() - self._polled_at >= POLL_INTERVAL_S:
            self._polled_at = time.monotonic()
            with suppress(OSError):
                self.asked = find()

    def show(self, status: PodLiveStatus) -> None:
        """Shows the live status of this pod. An empty status withdraws the last one."""
        if status or self._shows:
            self._shows = bool(status)
            with suppress(OSError):
                self._files.publish(self._pod, status)

    def leave(self) -> None:
        """Withdraws the live status of this pod."""
        self.show(PodLiveStatus())

    def clear(self) -> None:
        """Removes the files of all pods and viewers, because nothing runs any more."""
        remove_tree(self._run.live, ignore_errors=True)


def _encode(status: PodLiveStatus) -> bytes:
    try:
        return msgspec.json.encode(status)
    except UnicodeEncodeError:  # a program wrote lone surrogates
        for transcript in status.transcripts.values():
            transcript.messages = [(_text(role), _text(text)) for role, text in transcript.messages]
        return msgspec.json.encode(status)


def _text(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()
