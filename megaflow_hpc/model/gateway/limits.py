"""How much may be asked of the engines: requests and tokens a second, and requests in flight.

Calls wait their turn in the order in which they came; none is refused. Tokens are counted when an answer is there,
since nobody knows before how many they will be: whoever overdrew makes those behind it wait until the debt is paid off.
A burst of one second's allowance may go at once.

A campaign's limits are shared out: each gateway has its part (:meth:`Quotas.share`), so nobody need talk to anybody.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

Clock = Callable[[], float]
_sleep = asyncio.sleep
_NOTHING = 1e-6
"""Less than this is missing only because numbers are rounded."""


@dataclass(frozen=True)
class Quotas:
    """What a campaign may ask of its models; ``None`` is unlimited."""

    requests_per_s: float | None = None
    tokens_per_s: float | None = None
    """Prompt and sampled ones together."""
    in_flight: int | None = None

    @classmethod
    def of(cls, section: Mapping[str, Any]) -> Quotas:
        """From the ``quotas:`` section of a campaign."""
        return cls(*(section.get(name) for name in ("requests_per_s", "tokens_per_s", "in_flight")))

    def share(self, gateways: int) -> Quotas:
        """The part of one of so many gateways; the parts of all are no more than the whole.

        A gateway has one request in flight at least: planning refuses campaigns with fewer of them than gateways.
        """
        count = max(gateways, 1)

        def part(rate: float | None) -> float | None:
            return None if rate is None else rate / count

        flying = None if self.in_flight is None else max(1, self.in_flight // count)
        return Quotas(part(self.requests_per_s), part(self.tokens_per_s), flying)


class Bucket:
    """An allowance of ``rate`` a second that fills up to one second's worth, or to one where that is less."""

    def __init__(self, rate: float, clock: Clock = time.monotonic) -> None:
        self.rate, self._clock = rate, clock
        self._size = max(rate, 1.0)
        self._level, self._at = self._size, clock()

    def take(self, amount: float) -> None:
        """Takes it now, into debt if need be."""
        self._fill()
        self._level -= amount

    def wait_s(self, amount: float) -> float:
        """Seconds until so much may be taken; more than the bucket holds is as much as it holds."""
        self._fill()
        missing = min(amount, self._size) - self._level
        return missing / self.rate if missing > _NOTHING else 0.0

    def _fill(self) -> None:
        now = self._clock()
        self._level, self._at = min(self._size, self._level + (now - self._at) * self.rate), now


class CallLimits:
    """What one gateway holds its calls to. Lives in one event loop."""

    def __init__(self, quotas: Quotas | None = None, clock: Clock = time.monotonic) -> None:
        quotas = quotas or Quotas()
        self._requests = Bucket(quotas.requests_per_s, clock) if quotas.requests_per_s else None
        self._tokens = Bucket(quotas.tokens_per_s, clock) if quotas.tokens_per_s else None
        self._flying = asyncio.Semaphore(quotas.in_flight) if quotas.in_flight else None
        self._door = asyncio.Lock()
        self._free = not (self._requests or self._tokens or self._flying)

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Waits for this call's turn, and holds its place among those in flight inside."""
        if self._free:
            yield
            return
        if self._flying is not None:
            await self._flying.acquire()
        try:
            async with self._door:  # asyncio's locks let in who came first
                while (wait_s := self._wait_s()) > 0:
                    await _sleep(min(wait_s, 1.0))
                if self._requests is not None:
                    self._requests.take(1)
            yield
        finally:
            if self._flying is not None:
                self._flying.release()

    def charge(self, tokens: int) -> None:
        """An answer had so many, its prompt included."""
        if self._tokens is not None:
            self._tokens.take(tokens)

    def _wait_s(self) -> float:
        requests = self._requests.wait_s(1) if self._requests is not None else 0.0
        # Half a token is enough to begin with: what matters is that the debt is paid.
        tokens = self._tokens.wait_s(0.5) if self._tokens is not None else 0.0
        return max(requests, tokens)
