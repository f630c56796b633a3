"""Limits a gateway's requests to the engines: requests and tokens per second, and requests in flight.

Calls wait in order of arrival and are never refused. The number of tokens is known only once the response has arrived.
It is charged then, and later calls wait until any overdraft is paid off. Bursts of up to one second's allowance are
permitted.

A campaign's limits are divided among its gateways (:meth:`Quotas.share`), so gateways need not communicate.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

Clock = Callable[[], float]
_sleep = asyncio.sleep
_ROUNDING = 1e-6
"""Tolerance for rounding errors in a bucket's level."""


@dataclass(frozen=True)
class Quotas:
    """Limits of a campaign or of one gateway. ``None`` means unlimited."""

    requests_per_s: float | None = None
    tokens_per_s: float | None = None
    """Limit on prompt tokens and sampled tokens combined."""
    in_flight: int | None = None

    @classmethod
    def of(cls, section: Mapping[str, Any]) -> Quotas:
        """Parses a campaign's ``quotas:`` section."""
        return cls(section.get("requests_per_s"), section.get("tokens_per_s"), section.get("in_flight"))

    def share(self, gateways: int) -> Quotas:
        """Returns one gateway's share of the limits if there are ``gateways`` gateways. The shares never add up to more
        than the total.

        Each share allows at least one request in flight. Planning ensures that a campaign's limit is high enough for
        this.
        """
        count = max(gateways, 1)
        return Quotas(
            requests_per_s=self.requests_per_s / count if self.requests_per_s else None,
            tokens_per_s=self.tokens_per_s / count if self.tokens_per_s else None,
            in_flight=max(1, self.in_flight // count) if self.in_flight else None,
        )


class Bucket:
    """A token bucket. It refills at ``rate`` per second and holds one second's worth, but at least 1."""

    def __init__(self, rate: float, clock: Clock = time.monotonic) -> None:
        self.rate, self._clock = rate, clock
        self._size = max(rate, 1.0)
        self._level, self._at = self._size, clock()

    def take(self, amount: float) -> None:
        """Takes ``amount`` immediately. The level may become negative."""
        self._fill()
        self._level -= amount

    def wait_s(self, amount: float) -> float:
        """Returns the seconds until the bucket holds ``amount``. If the bucket cannot hold that much, returns the
        seconds until it is full."""
        self._fill()
        missing = min(amount, self._size) - self._level
        return missing / self.rate if missing > _ROUNDING else 0.0

    def _fill(self) -> None:
        now = self._clock()
        self._level, self._at = min(self._size, self._level + (now - self._at) * self.rate), now


class CallLimits:
    """Enforces the quotas of one gateway. Use it from a single event loop."""

    def __init__(self, quotas: Quotas | None = None, clock: Clock = time.monotonic) -> None:
        quotas = quotas or Quotas()
        self._requests = Bucket(quotas.requests_per_s, clock) if quotas.requests_per_s else None
        self._tokens = Bucket(quotas.tokens_per_s, clock) if quotas.tokens_per_s else None
        self._in_flight = asyncio.Semaphore(quotas.in_flight) if quotas.in_flight else None
        self._entry = asyncio.Lock()
        self._unlimited = not (self._requests or self._tokens or self._in_flight)

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Waits until a call may be made. The call counts as in flight until the context ends."""
        if self._unlimited:
            yield
            return
        async with self._in_flight or nullcontext():
            async with self._entry:  # asyncio locks are FIFO
                while (wait_s := self._wait_s()) > 0:
                    await _sleep(min(wait_s, 1.0))
                if self._requests is not None:
                    self._requests.take(1)
            yield

    def charge(self, tokens: int) -> None:
        """Charges the tokens of a response and its prompt."""
        if self._tokens is not None:
            self._tokens.take(tokens)

    def _wait_s(self) -> float:
        requests = self._requests.wait_s(1) if self._requests is not None else 0.0
        # Half a token is enough for a call to start, because only an overdraft has to be paid off.
        tokens = self._tokens.wait_s(0.5) if self._tokens is not None else 0.0
        return max(requests, tokens)
