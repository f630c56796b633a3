"""Limits on what is asked of the engines: requests and tokens per second, and requests in flight.

Calls wait in the order in which they came; none is refused. Tokens are charged when an answer has arrived, since their
number is not known before: an overdraft makes later calls wait until it is paid off. A burst of one second's allowance
is allowed.

A campaign's limits are divided among its gateways (:meth:`Quotas.share`), so gateways need not communicate.
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
"""Tolerance for rounding errors of a bucket's level."""


@dataclass(frozen=True)
class Quotas:
    """Limits of a campaign or of one gateway; ``None`` is unlimited."""

    requests_per_s: float | None = None
    tokens_per_s: float | None = None
    """Prompt and sampled tokens together."""
    in_flight: int | None = None

    @classmethod
    def of(cls, section: Mapping[str, Any]) -> Quotas:
        """Returns the quotas of a campaign's ``quotas:`` section."""
        return cls(*(section.get(name) for name in ("requests_per_s", "tokens_per_s", "in_flight")))

    def share(self, gateways: int) -> Quotas:
        """Returns the part of one gateway out of ``gateways``; the parts add up to no more than the whole.

        A part allows at least one request in flight: planning refuses campaigns with fewer of them than gateways.
        """
        count = max(gateways, 1)

        def part(rate: float | None) -> float | None:
            return None if rate is None else rate / count

        in_flight = None if self.in_flight is None else max(1, self.in_flight // count)
        return Quotas(part(self.requests_per_s), part(self.tokens_per_s), in_flight)


class Bucket:
    """A token bucket: ``rate`` per second, holding one second's worth but at least 1."""

    def __init__(self, rate: float, clock: Clock = time.monotonic) -> None:
        self.rate, self._clock = rate, clock
        self._size = max(rate, 1.0)
        self._level, self._at = self._size, clock()

    def take(self, amount: float) -> None:
        """Takes ``amount`` now; the level may become negative."""
        self._fill()
        self._level -= amount

    def wait_s(self, amount: float) -> float:
        """Returns the seconds until ``amount`` (at most the bucket's size) is there."""
        self._fill()
        missing = min(amount, self._size) - self._level
        return missing / self.rate if missing > _NOTHING else 0.0

    def _fill(self) -> None:
        now = self._clock()
        self._level, self._at = min(self._size, self._level + (now - self._at) * self.rate), now


class CallLimits:
    """Enforces the quotas of one gateway. Lives in one event loop."""

    def __init__(self, quotas: Quotas | None = None, clock: Clock = time.monotonic) -> None:
        quotas = quotas or Quotas()
        self._requests = Bucket(quotas.requests_per_s, clock) if quotas.requests_per_s else None
        self._tokens = Bucket(quotas.tokens_per_s, clock) if quotas.tokens_per_s else None
        self._in_flight = asyncio.Semaphore(quotas.in_flight) if quotas.in_flight else None
        self._entry = asyncio.Lock()
        self._unlimited = not (self._requests or self._tokens or self._in_flight)

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Waits until a call may be made; the context counts as one request in flight."""
        if self._unlimited:
            yield
            return
        if self._in_flight is not None:
            await self._in_flight.acquire()
        try:
            async with self._entry:  # asyncio's locks are first come, first served
                while (wait_s := self._wait_s()) > 0:
                    await _sleep(min(wait_s, 1.0))
                if self._requests is not None:
                    self._requests.take(1)
            yield
        finally:
            if self._in_flight is not None:
                self._in_flight.release()

    def charge(self, tokens: int) -> None:
        """Charges the tokens of an answer, its prompt included."""
        if self._tokens is not None:
            self._tokens.take(tokens)

    def _wait_s(self) -> float:
        requests = self._requests.wait_s(1) if self._requests is not None else 0.0
        # Half a token suffices to start: an overdraft only has to be paid off.
        tokens = self._tokens.wait_s(0.5) if self._tokens is not None else 0.0
        return max(requests, tokens)
