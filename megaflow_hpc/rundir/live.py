"""``RUN/live``: what is known of rollouts while they run, for whoever looks, and only while somebody does.

::

    <host>.<process>.ask    :class:`Ask`: rollouts that a viewer shows; it writes this anew every few seconds
    <pod>.<start>.json      :class:`PodActivity`: what that pod knows of those which run there

Pods look for viewers every few seconds, or one pod for all where they are many. A viewer whose counter stands still is
taken for gone, by the pod's own clock. Nothing depends on these files; the last pod removes them.
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
"""How often a viewer writes its ask anew."""
LOOK_S = 3.0
"""How often pods look for viewers; a person waits for the answer."""
STALE_S = 45.0
"""A viewer whose counter stood still for so long is gone."""
LITTER_S = 600.0
"""Then what it left is removed."""
MOST_ROLLOUTS = 128
"""Rollouts that all viewers together are told of."""
MOST_TRANSCRIPTS = 4
MAX_BYTES = 8 << 20
"""Largest file that is read."""


class Ask(msgspec.Struct, kw_only=True):
    """What one viewer wants to know."""

    counter: Count
    rollouts: list[str] = []
    """Those on its screen."""
    transcript: str = ""
    """The one that it looks into."""


class Asked(msgspec.Struct, frozen=True):
    """What all viewers together want to know; bounded."""

    rollouts: tuple[str, ...] = ()
    transcripts: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.rollouts or self.transcripts)


class RolloutActivity(msgspec.Struct):
    """How far a rollout is."""

    calls: Count
    """Model calls that were answered."""
    tokens: Count
    """Tokens that were sampled for it."""
    waits: bool
    """Whether a call waits for its answer."""
    quiet_s: Number
    """Seconds since that changed."""


class Transcript(msgspec.Struct):
    """The end of a conversation, as it is now."""

    calls: Count
    """Model calls that were answered."""
    messages: list[tuple[str, str]]
    """Role and text."""
    left_out: Count = 0
    """Messages before these."""


class PodActivity(msgspec.Struct):
    """What a pod knows of the rollouts that viewers ask for and that run there."""

    rollouts: dict[str, RolloutActivity] = {}
    transcripts: dict[str, Transcript] = {}


class LiveFiles:
    """The files of one run.

    Args:
        clock: seconds of a clock that never jumps.
    """

    def __init__(self, run: RunDir, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder, self._clock = run.live, clock
        self._viewers: dict[str, tuple[int, float]] = {}
        """Viewer → its counter, and when that was seen first."""
        self._own = re.sub(r"[^\w.-]", "_", f"{os.uname().nodename}.{os.getpid()}.ask")
        self._counter = 0

    # --- a viewer's ---

    def ask(self, rollouts: list[str], transcript: str = "") -> None:
        """Asks for what is known of some rollouts, and goes on asking: to be called every :data:`RENEW_S`.

        Raises:
            OSError: this user may not write to the run directory, or nobody can now.
        """
        if self._folder.parent.stat().st_uid != os.getuid():  # root may write, and its files would be in the way
            raise PermissionError(errno.EPERM, "pods are asked by the run's owner alone")
        self._counter += 1
        said = Ask(counter=self._counter, rollouts=rollouts[:MOST_ROLLOUTS], transcript=transcript)
        with without_links(self._folder) as folder:
            write_atomic(folder / self._own, msgspec.json.encode(said))

    def leave(self) -> None:
        """Asks for nothing any more. Raises OSError."""
        if self._counter:
            (self._folder / self._own).unlink(missing_ok=True)

    def activity(self, pod: str) -> PodActivity | None:
        """Returns what a pod (``<pod>.<start>``) shows; ``None`` while it shows nothing."""
        return try_read_json(self._folder / f"{pod}.json", PodActivity, MAX_BYTES)

    # --- a pod's ---

    def asked(self) -> Asked:
        """Returns what viewers want to know now: one listing, and one read for each viewer. Raises OSError."""
        try:
            names = {name for name in os.listdir(self._folder) if name.endswith(".ask") and not name.startswith(".")}
        except FileNotFoundError:
            names = set()
        self._viewers = {name: known for name, known in self._viewers.items() if name in names}
        rollouts: list[str] = []
        transcripts: list[str] = []
        for name in sorted(names):
            ask = try_read_json(self._folder / name, Ask, MAX_BYTES)
            counter, since = self._viewers.setdefault(name, (-1, self._clock()))
            if ask is not None and ask.counter != counter:
                counter, since = self._viewers[name] = ask.counter, self._clock()
            still_s = self._clock() - since
            if ask is not None and still_s < STALE_S:
                rollouts += ask.rollouts
                transcripts += [ask.transcript] if ask.transcript else []
            elif still_s > LITTER_S:
                (self._folder / name).unlink(missing_ok=True)
        return Asked(tuple(sorted({*rollouts}))[:MOST_ROLLOUTS], tuple(sorted({*transcripts}))[:MOST_TRANSCRIPTS])

    def publish(self, pod: str, activity: PodActivity | None) -> None:
        """Shows what a pod knows; ``None`` takes it away. Raises OSError."""
        path = self._folder / f"{pod}.json"
        if activity is None:
            path.unlink(missing_ok=True)
        else:
            write_atomic(path, _encode(activity))


class Viewers:
    """Who looks at the run now, and what they are shown of one pod. A disk that refuses these files stops nothing.

    Args:
        pod: ``<pod>.<start>``.
    """

    def __init__(self, run: RunDir, pod: str) -> None:
        self._run, self._pod, self._files = run, pod, LiveFiles(run)
        self._asked, self._shown = Asked(), False
        self._looked_at = 0.0

    def look(self, find: Callable[[], Asked]) -> Asked | None:
        """Calls ``find`` when that is due; returns what viewers want to know where that has changed."""
        if time.monotonic() - self._looked_at < LOOK_S:
            return None
        self._looked_at = time.monotonic()
        with suppress(OSError):
            if (asked := find()) != self._asked:
                self._asked = asked
                return asked
        return None

    def show(self, activity: PodActivity | None) -> None:
        """Publishes what this pod knows; ``None`` takes it away."""
        if activity is None and not self._shown:
            return
        self._shown = activity is not None
        with suppress(OSError):
            self._files.publish(self._pod, activity)

    def leave(self) -> None:
        """Takes away what this pod has shown."""
        self.show(None)

    def clear(self) -> None:
        """Removes what everybody has shown and asked for: nothing runs any more."""
        remove_tree(self._run.live, ignore_errors=True)


def _encode(activity: PodActivity) -> bytes:
    try:
        return msgspec.json.encode(activity)
    except UnicodeEncodeError:  # lone surrogates, of a program's output that is no text
        for transcript in activity.transcripts.values():
            transcript.messages = [(_text(role), _text(text)) for role, text in transcript.messages]
        return msgspec.json.encode(activity)


def _text(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()
