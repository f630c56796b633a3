"""What a sandbox used in its whole life, over all its containers: for the record of its rollout, not for its limits."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

GROWTH = 1.05
"""A peak is measured anew where what may be held has changed by more than this."""
LITTLE = 1_000_000
"""Bytes that make no difference."""


class Consumption(NamedTuple):
    """What a sandbox has used so far. MB are 10^6 bytes."""

    cpu_s: float
    """CPU time of its processes, those that have ended too."""
    memory_peak_mb: float
    """The most that was held at a look, pages that processes share counted once. Looks are half a second apart while
    it works, two seconds while it idles; what is held between them is not seen."""
    disk_peak_mb: float | None
    """The most that was measured, every few seconds; ``None`` where no limit asks for it, or it ended before."""


class MemoryPeak:
    """The most memory of a sandbox. A cheap look counts shared pages in each process, so it bounds what is held from
    above; only what may be a new peak is measured exactly."""

    def __init__(self) -> None:
        self.bytes = 0
        self._bound = 0

    def look(self, bound: int, exact: Callable[[], int]) -> None:
        """Counts a look.

        Args:
            bound: the most that may be held, in bytes.
            exact: measures what is held.
        """
        if bound <= self.bytes * GROWTH + LITTLE or self._bound / GROWTH <= bound <= self._bound * GROWTH:
            return
        self._bound = bound
        self.bytes = max(self.bytes, exact())
