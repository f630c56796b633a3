"""Snapshot of a run for viewers: its status, and its rollouts in order of interest.

Running rollouts come first, with the longest-running at the top. Stored rollouts follow, with the latest first.
Viewers request the progress of running rollouts, and the conversation of the rollout they show, from pods
(:mod:`megaflow_hpc.rundir.live`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megaflow_hpc.monitor.status import Monitor
from megaflow_hpc.rundir.events import RolloutEvent
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.live import RENEW_S, LiveFiles, LiveStatus, PodLiveStatus, Transcript
from megaflow_hpc.rundir.pods.running import AttemptPlace
from megaflow_hpc.types import VERIFIED

STUCK_S = 300.0
"""A running rollout counts as stuck after this many seconds without a model response."""
PRESENT = ("started", "draining", "silent")
"""Pod states in which rollouts may be running."""


@dataclass(frozen=True, slots=True)
class RolloutRow:
    """A rollout, as shown in a table."""

    id: str
    state: str
    """``running``, ``silent`` if its pod is silent, or the status of a stored rollout."""
    place: AttemptPlace | None
    """Pod, rank and node of the latest attempt. ``None`` if unknown."""
    seconds: float
    """Seconds since the start of the attempt, or the duration of a stored rollout."""
    live: LiveStatus | None = None
    """Progress of a running rollout. ``None`` if its pod does not report it."""
    stored: RolloutEvent | None = None

    @property
    def turns(self) -> int | None:
        """Number of model calls. ``None`` if unknown."""
        if self.stored is not None:
            return self.stored.turns
        return self.live.calls if self.live else None

    @property
    def stuck(self) -> bool:
        """True if the rollout is running and has received no model response for :data:`STUCK_S` seconds."""
        return self.live is not None and self.live.quiet_s > STUCK_S


class Rollouts(Sequence[RolloutRow]):
    """Snapshot of all rollouts. Rows are created on access, so tens of thousands of rollouts are cheap.

    Args:
        running: Running rollouts, longest-running first.
        stored: Stored rollouts, latest first.
        last: Latest attempt of each rollout, by id.
        silent: Names of pods without a recent sign of life.
        now: Current time in Unix seconds.
    """

    def __init__(
        self,
        running: Sequence[AttemptPlace],
        stored: Sequence[RolloutEvent],
        last: Mapping[str, AttemptPlace],
        live: Mapping[str, LiveStatus],
        silent: Collection[str],
        now: float,
    ) -> None:
        self._running, self._stored, self._last = running, stored, last
        self._live, self._silent, self._now = live, silent, now
        self.ids = [place.id for place in running] + [event.id for event in stored]
        """Rollout id of each row."""

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, row: Any) -> Any:
        if isinstance(row, slice):
            return [self[number] for number in range(*row.indices(len(self)))]
        if row < len(self._running):
            place = self._running[row]
            elapsed_s = max(0.0, self._now - place.began_at)
            state = "silent" if place.pod in self._silent else "running"
            return RolloutRow(place.id, state, place, elapsed_s, self._live.get(place.id))
        event = self._stored[row - len(self._running)]
        return RolloutRow(event.id, event.status, self._last.get(event.id), event.seconds, stored=event)

    def of(self, rollout: str) -> RolloutRow | None:
        """Returns the row of a rollout. ``None`` if it has not started."""
        return self[self.ids.index(rollout)] if rollout in self.ids else None

    def matching(self, text: str = "", failed: bool = False) -> Rollouts:
        """Returns the rollouts whose id, node, state or error contains ``text``. ``failed`` selects only failed
        rollouts."""
        if not text and not failed:
            return self
        wanted = text.lower()

        def matches(rollout: str, *words: str) -> bool:
            place = self._last.get(rollout)
            node = place.node if place else ""
            return wanted in " ".join((rollout, node, *words)).lower()

        running = [] if failed else [place for place in self._running if matches(place.id, "running")]
        stored = [event for event in self._stored if matches(event.id, event.status, event.kind, event.error)]
        if failed:
            stored = [event for event in stored if event.status in ("failed", "cancelled")]
        return Rollouts(running, stored, self._last, self._live, self._silent, self._now)

    @property
    def stuck(self) -> int:
        """Number of stuck rollouts, among rollouts whose progress is known."""
        return sum(live.quiet_s > STUCK_S for live in self._live.values())


@dataclass(frozen=True)
class RunSnapshot:
    """State of a run at the time of a poll."""

    status: Mapping[str, Any]
    rollouts: Rollouts
    transcript: Transcript | None = None
    """Conversation of the opened rollout while it is running, otherwise ``None``."""
    unasked: str = ""
    """Reason why progress could not be requested from pods. Empty if it could."""
    unlisted: int = 0
    """Number of successful rollouts that are omitted because there are too many."""


@dataclass
class Live:
    """Builds snapshots of a run. Not thread-safe, except that another thread may set :attr:`shown` and
    :attr:`opened`."""

    run: RunDir
    monitor: Monitor
    clock: Callable[[], float] = time.monotonic
    shown: Sequence[str] = ()
    """Ids of the rollouts on the screen."""
    opened: str = ""
    """Id of the rollout whose conversation is shown. Empty if none is shown."""
    _asked: tuple[list[str], str] = field(default_factory=lambda: ([], ""))
    _asked_at: float = 0.0
    _unasked: str = ""

    def __post_init__(self) -> None:
        self._files = LiveFiles(self.run, self.clock)

    def look(self, status: Mapping[str, Any]) -> RunSnapshot:
        """Returns a snapshot of the run.

        Args:
            status: Latest status returned by :attr:`monitor`.
        """
        pods = {pod["pod"] for pod in status["pods"] if pod["state"] in PRESENT}
        running = self.monitor.running.longest(pods)
        opened = self.opened
        wanted = {*self.shown, opened} - {""}
        asked = {place.id: place.pod for place in running if place.id in wanted}
        self._ask(list(asked), opened if opened in asked else "")
        live: dict[str, LiveStatus] = {}
        transcript: Transcript | None = None
        for pod in sorted(set(asked.values())):
            reported = self._files.status(pod) or PodLiveStatus()
            live |= reported.rollouts
            transcript = transcript or reported.transcripts.get(opened)
        stored = list(reversed(self.monitor.rollouts.values()))
        silent = {pod["pod"] for pod in status["pods"] if pod["state"] == "silent"}
        rollouts = Rollouts(running, stored, self.monitor.running.last, live, silent, time.time())
        ended_well = sum(status["rollouts"][state] for state in VERIFIED)
        listed = sum(event.status in VERIFIED for event in stored)
        return RunSnapshot(status, rollouts, transcript, self._unasked, max(0, ended_well - listed))

    def leave(self) -> None:
        """Withdraws this viewer's requests to pods.

        Raises:
            OSError: The file system refused the change.
        """
        self._files.leave()

    def _ask(self, rollouts: list[str], transcript: str) -> None:
        asked, now = (rollouts, transcript), self.clock()
        nothing_to_ask = not rollouts and not self._asked[0]
        if nothing_to_ask or (asked == self._asked and now - self._asked_at < RENEW_S):
            return
        self._asked, self._asked_at, self._unasked = asked, now, ""
        try:
            if rollouts:
                self._files.ask(rollouts, transcript)
            else:
                self._files.leave()
        except OSError as error:  # another user's run, or a full disk
            self._unasked = str(error.strerror or error)
