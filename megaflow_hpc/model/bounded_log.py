"""A log for events that clients cause: each kind is written at most once a minute, with its count."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

PERIOD_S = 60.0


class BoundedLog:
    """Counts events by kind and writes the first at once, then at most a line a minute and kind.

    It also serves aiohttp as a logger. The first exception of each minute has a traceback.

    Args:
        log: Gets the lines.
        clock: Returns seconds.
    """

    def __init__(self, log: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._log, self._clock = log, clock
        self._kinds: dict[str, tuple[float, int]] = {}
        """Kind → time of its latest line, and events since."""

    def refused(self, kind: str, whose: str = "") -> None:
        """Counts one event. ``kind`` is one of few fixed texts; ``whose`` names the event's cause."""
        if number := self._due(kind):
            self._log.warning("refused: %s: %d%s", kind, number, f", the latest of {whose}" if whose else "")

    def exception(self, message: str, *arguments: object, exc_info: object = True) -> None:
        """Logs an exception with its traceback, or counts it."""
        if number := self._due(message):
            self._log.error(message, *arguments, exc_info=exc_info)  # type: ignore[arg-type]
            if number > 1:
                self._log.error("the same: %d times more since the one before", number - 1)

    def debug(self, *_: object, **__: object) -> None:
        """Drops the debug messages of aiohttp."""

    def flush(self) -> None:
        """Writes the counts that are not written yet."""
        for kind, (_, number) in self._kinds.items():
            if number:
                self._log.warning("%s: %d more", kind, number)
        self._kinds.clear()

    def _due(self, kind: str) -> int:
        """Returns the count to write now, 0 if this kind was written less than a minute ago."""
        said, number = self._kinds.get(kind, (-PERIOD_S, 0))
        now = self._clock()
        if now - said < PERIOD_S:
            self._kinds[kind] = said, number + 1
            return 0
        self._kinds[kind] = now, 0
        return number + 1
