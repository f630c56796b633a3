"""What a viewer sees of a run at one moment: its status, and its rollouts in the order in which they matter.

First those that run, the longest at the top, then those that are stored, the last one first. How far those are that
run, and what is said in the one that is looked into, pods tell who asks (:mod:`megaflow_hpc.rundir.live`).
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
from megaflow_hpc.rundir.pods.running import Place
from megaflow_hpc.types import VERIFIED

STUCK_S = 300.0
"""A rollout that runs and of which nothing was heard for so long is called stuck."""
PRESENT = ("started", "draining", "silent")
"""States of pods in which rollouts may run."""


@dataclass(frozen=True, slots=True)
class RolloutRow:
    """One rollout, as a table shows it."""

    id: str
    state: str
    """``running``, ``silent`` where its pod is, or the status with which it is stored."""
    place: Place | None
    """Where its last attempt runs, or ran; ``None`` where no event tells."""
    seconds: float
    """Since the attempt began; of a stored one what it took."""
    live: LiveStatus | None = None
    """Of one that runs, where its pod tells."""
    stored: RolloutEvent | None = None

    @property
    def turns(self) -> int | None:
        """Model calls; ``None`` where nobody tells."""
        if self.stored is not None:
            return self.stored.turns
        return self.live.calls if self.live else None

    @property
    def stuck(self) -> bool:
        """Whether it runs, and nothing was heard of it for :data:`STUCK_S`."""
        return self.live is not None and self.live.quiet_s > STUCK_S


class Rollouts(Sequence[RolloutRow]):
    """The rollouts of a moment; a row is made when it is looked at, so ten thousands cost little.

    Args:
        running: what runs, the longest at the top.
        stored: what is stored, the last one first.
        last: rollout → its last attempt.
        silent: pods that have given no sign of life for long.
        now: seconds UTC.
    """

    def __init__(
        self,
        running: Sequence[Place],
        stored: Sequence[RolloutEvent],
        last: Mapping[str, Place],
        live: Mapping[str, LiveStatus],
        silent: Collection[str],
        now: float,
    ) -> None:
        self._running, self._stored, self._last = running, stored, last
        self._live, self._silent, self._now = live, silent, now
        self.ids = [place.id for place in running] + [event.id for event in stored]
        """By row."""

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
        """Returns the row of one rollout; ``None`` where it has not begun."""
        return self[self.ids.index(rollout)] if rollout in self.ids else None

    def matching(self, text: str = "", failed: bool = False) -> Rollouts:
        """Returns those whose id, node, state or error has ``text`` in it, and with ``failed`` those alone that did."""
        if not text and not failed:
            return self
        wanted = text.lower()

        def fits(rollout: str, *words: str) -> bool:
            place = self._last.get(rollout)
            return not wanted or wanted in " ".join((rollout, place.node if place else "", *words)).lower()

        running = [] if failed else [place for place in self._running if fits(place.id, "running")]
        stored = [
            event
            for event in self._stored
            if (not failed or event.status in ("failed", "cancelled"))
            and fits(event.id, event.status, event.kind, event.error)
        ]
        return Rollouts(running, stored, self._last, self._live, self._silent, self._now)

    @property
    def stuck(self) -> int:
        """How many of those of which pods tell are stuck."""
        return sum(live.quiet_s > STUCK_S for live in self._live.values())


@dataclass(frozen=True)
class RunSnapshot:
    """What was seen at one look."""

    status: Mapping[str, Any]
    rollouts: Rollouts
    transcript: Transcript | None = None
    """Of the rollout that is looked into, while it runs."""
    unasked: str = ""
    """Why pods cannot be asked what they do; empty where they can."""
    unlisted: int = 0
    """Rollouts that ended well and are too many to be listed."""


@dataclass
class Live:
    """Looks at a run again and again; for one thread, but :attr:`shown` and :attr:`opened` may be set by another."""

    run: RunDir
    monitor: Monitor
    clock: Callable[[], float] = time.monotonic
    shown: Sequence[str] = ()
    """Rollouts that are on the screen."""
    opened: str = ""
    """The rollout that is looked into."""
    _asked: tuple[list[str], str] = field(default_factory=lambda: ([], ""))
    _asked_at: float = 0.0
    _unasked: str = ""

    def __post_init__(self) -> None:
        self._files = LiveFiles(self.run, self.clock)

    def look(self, status: Mapping[str, Any]) -> RunSnapshot:
        """Returns what there is to see.

        Args:
            status: of the same monitor, just asked.
        """
        pods = {pod["pod"] for pod in status["pods"] if pod["state"] in PRESENT}
        running = self.monitor.running.longest(pods)
        opened = self.opened
        wanted = {*self.shown, opened} - {""}
        asked = [place for place in running if place.id in wanted]
        self._ask([place.id for place in asked], opened if any(place.id == opened for place in asked) else "")
        live: dict[str, LiveStatus] = {}
        transcripts: list[Transcript] = []
        for pod in sorted({place.pod for place in asked}):
            shown = self._files.status(pod) or PodLiveStatus()
            live |= shown.rollouts
            if opened in shown.transcripts:
                transcripts.append(shown.transcripts[opened])
        stored = list(reversed(self.monitor.rollouts.values()))
        silent = {pod["pod"] for pod in status["pods"] if pod["state"] == "silent"}
        rollouts = Rollouts(running, stored, self.monitor.running.last, live, silent, time.time())
        unlisted = sum(status["rollouts"][state] for state in VERIFIED) - sum(e.status in VERIFIED for e in stored)
        return RunSnapshot(status, rollouts, transcripts[0] if transcripts else None, self._unasked, max(0, unlisted))

    def leave(self) -> None:
        """Asks for nothing any more. Raises OSError."""
        self._files.leave()

    def _ask(self, rollouts: list[str], transcript: str) -> None:
        asked, now = (rollouts, transcript), self.clock()
        if not (rollouts or self._asked[0]) or (asked == self._asked and now - self._asked_at < RENEW_S):
            return
        self._asked, self._asked_at, self._unasked = asked, now, ""
        try:
            if rollouts:
                self._files.ask(rollouts, transcript)
            else:
                self._files.leave()
        except OSError as error:  # another's run, or a full disk
            self._unasked = str(error.strerror or error)
