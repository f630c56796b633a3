"""The users of a pool's server, and the fair queue in which their requests wait for the engine's slots.

A user's cap on concurrent requests applies to all campaigns of that user together. A request over the cap is not
refused but waits at the proxy, where other users' requests overtake it. The engine never gets more requests than it can
process concurrently, so no request waits inside the engine behind another user's queue.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megaflow_hpc.rundir.engine_pool import EnginePool, digest_of

MIN_REFRESH_S = 2.0
"""Minimum seconds between listings of the members that unknown keys trigger."""
REFRESH_S = 30.0
"""Seconds between listings of the members. Removed members are refused after the next listing."""
DEFAULT_SLOTS = 256
"""Concurrent requests assumed for an engine that does not report its limit. This is vLLM's default on most GPUs."""
SMOOTHING = 0.1
"""Weight of the latest turn in the exponential moving average of turn durations."""


@dataclass
class _User:
    share: float
    max_slots: int | None
    used_s: float = 0.0
    """Slot-seconds used, divided by the user's share."""
    held: int = 0
    accounted_until: float = 0.0
    """Time up to which ``used_s`` has been computed."""
    waiting: dict[asyncio.Future[None], None] = field(default_factory=dict)

    def account(self, now: float) -> None:
        """Adds the slot-seconds up to ``now`` to ``used_s``."""
        self.used_s += self.held * (now - self.accounted_until) / self.share
        self.accounted_until = now


class FairQueue:
    """Admits users to an engine's slots in proportion to their shares (start-time fair queueing).

    The queue divides slot-seconds, so a user with long requests gets fewer requests admitted than a user with short
    requests. This also works if there are more users than slots. A free slot goes to the waiting user with the lowest
    value of::

        (slot-seconds used so far + slots held, including this one, x mean seconds of a turn) / share

    A user who was idle or blocked by a cap gains no credit for that time, but continues from the virtual time of the
    user admitted last. Requests of one user are admitted in order of arrival. Use it from a single event loop.

    Args:
        slots: Total number of slots for all users. :meth:`resize` changes it.
        clock: Monotonic clock in seconds.
    """

    def __init__(self, slots: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.slots = slots
        self._clock = clock
        self._users: dict[str, _User] = {}
        self._held = 0
        self._virtual_s = 0.0
        """``used_s`` of the user admitted last. Never decreases."""
        self._mean_turn_s = 0.0

    @property
    def waiting(self) -> int:
        """Number of requests waiting for a slot."""
        return sum(len(user.waiting) for user in self._users.values())

    @contextlib.asynccontextmanager
    async def turn(self, name: str, share: float = 1.0, max_slots: int | None = None) -> AsyncIterator[None]:
        """Waits for a slot and holds it for the duration of the context.

        Args:
            share: This user's share, relative to other users' shares.
            max_slots: Maximum number of slots for this user, even if no other user is waiting. ``None`` means
                unlimited.
        """
        user = self._users.setdefault(name, _User(share, max_slots))
        user.share, user.max_slots = share, max_slots
        user.account(self._clock())
        if not user.held and not user.waiting:
            user.used_s = max(user.used_s, self._virtual_s)
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        user.waiting[future] = None
        self._grant()
        try:
            await future
        except asyncio.CancelledError:
            user.waiting.pop(future, None)
            if future.done() and not future.cancelled():
                self._release(user)  # the slot was granted just before the cancellation
            raise
        began = self._clock()
        try:
            yield
        finally:
            took = self._clock() - began
            self._mean_turn_s += (took - self._mean_turn_s) * SMOOTHING if self._mean_turn_s else took
            self._release(user)

    def resize(self, slots: int) -> None:
        """Sets the number of slots. Turns that hold excess slots are not interrupted."""
        self.slots = slots
        self._grant()

    def _release(self, user: _User) -> None:
        user.account(self._clock())
        user.held -= 1
        self._held -= 1
        self._grant()

    def _grant(self) -> None:
        now = self._clock()
        while self._held < self.slots:
            eligible = []
            for user in self._users.values():
                if not user.waiting:
                    continue
                user.account(now)
                if user.max_slots is None or user.held < user.max_slots:
                    eligible.append(user)
                else:
                    user.used_s = max(user.used_s, self._virtual_s)
            if not eligible:
                return
            user = min(eligible, key=lambda u: u.used_s + (u.held + 1) * (self._mean_turn_s or 1.0) / u.share)
            future = next(iter(user.waiting))
            del user.waiting[future]
            if not future.done():
                self._virtual_s = max(self._virtual_s, user.used_s)
                user.held += 1
                self._held += 1
                future.set_result(None)


class Tenants:
    """Identifies a pool's users by their keys and admits their requests.

    Args:
        pool: Lists the members' keys.
        settings: Maximum number of a user's concurrent requests, ``in_flight``, and the users' ``weights``.
    """

    def __init__(self, pool: EnginePool, settings: Mapping[str, Any]) -> None:
        self._pool = pool
        self._max_in_flight: int | None = settings.get("in_flight")
        self._weights: Mapping[str, float] = settings.get("weights") or {}
        self._user_of: dict[str, str] = {}
        """Maps the digest of each key to its user."""
        self._queue = FairQueue(DEFAULT_SLOTS)
        self._listed_at = -REFRESH_S

    def user(self, key: str) -> str | None:
        """Returns the user to whom a key belongs, or ``None`` if the key is unknown."""
        if not key:
            return None
        digest, age = digest_of(key), time.monotonic() - self._listed_at
        if age > REFRESH_S or (digest not in self._user_of and age > MIN_REFRESH_S):
            self._listed_at = time.monotonic()
            with contextlib.suppress(OSError):  # the file system may be temporarily unreachable
                self._user_of = self._pool.users()
        return self._user_of.get(digest)

    def set_capacity(self, slots: int) -> None:
        """Sets the number of requests that the engine can process concurrently. 0 means unknown."""
        self._queue.resize(slots or DEFAULT_SLOTS)

    @property
    def waiting(self) -> int:
        """Number of requests waiting to be admitted."""
        return self._queue.waiting

    @contextlib.asynccontextmanager
    async def admit(self, name: str) -> AsyncIterator[None]:
        """Waits until the user's cap and the queue admit a request. Make the request inside the context."""
        async with self._queue.turn(name, self._weights.get(name, 1.0), self._max_in_flight):
            yield
