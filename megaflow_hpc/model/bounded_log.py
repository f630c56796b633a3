"""A log that others can make say much, kept short: each kind of message at most once a minute, with its number."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

PERIOD_S = 60.0


class BoundedLog:
    """Counts events by kind and writes the first at once, then at most a line a minute and kind.

    It is also an object that aiohttp takes for a logger; of its exceptions the first of each minute has a traceback.

    Args:
        log: Where lines go.
        clock: Returns seconds.
    """

    def __init__(self, log: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._log, self._clock = log, clock
        self._kinds: dict[str, tuple[float, int]] = {}
        """Kind → when it was last written, and how many came since."""

    def refused(self, kind: str, whose: str = "") -> None:
        """Counts one event. ``kind`` is one of few fixed texts, ``whose`` goes with the one that is written."""
        if number := self._due(kind):
            self._log.warning("refused: %s: %d%s", kind, number, f", the latest of {whose}" if whose else "")

    def exception(self, message: str, *arguments: object, exc_info: object = True) -> None:
        """Logs an exception with its traceback, or counts it."""
        if number := self._due(message):
            self._log.error(message, *arguments, exc_info=exc_info)  # type: ignore[arg-type]
            if number > 1:
                self._log.error("the same: %d times more since the one before", number - 1)

    def debug(self, *_: object, **__: object) -> None:
        """What aiohttp says for its own sake is dropped."""

    def flush(self) -> None:
        """Writes the numbers that were not written."""
        for kind, (_, number) in self._kinds.items():
            if number:
                self._log.warning("%s: %d more", kind, number)
        self._kinds.clear()

    def _due(self, kind: str) -> int:
        """Returns how many to write of now, or 0."""
        said, number = self._kinds.get(kind, (-PERIOD_S, 0))
        now = self._clock()
        if now - said < PERIOD_S:
            self._kinds[kind] = said, number + 1
            return 0
        self._kinds[kind] = now, 0
        return number + 1
