"""A fair queue for an engine's slots, shared by users in proportion to their shares (start-time fair queueing).

Slot-seconds are shared, so a user with long requests has fewer at once than one with short ones, and shares hold with
more users than slots too. A free slot goes to the waiting user with the least

    (slot-seconds used so far + slots held, including this one, x the mean seconds of a turn) / share

A user who was away, or was kept back by a cap, is owed nothing: both continue from the virtual time of the user
admitted last. Requests of one user are admitted in the order in which they came.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

SMOOTHING = 0.1
"""Weight of the latest turn in the moving average of a turn's seconds."""


@dataclass
class _User:
    share: float
    max_slots: int | None
    used_s: float = 0.0
    """Slot-seconds used, divided by the share."""
    held: int = 0
    at: float = 0.0
    """Time to which ``used_s`` is accounted."""
    waiting: dict[asyncio.Future[None], None] = field(default_factory=dict)

    def account(self, now: float) -> None:
        """Adds to ``used_s`` the slot-seconds from ``at`` to ``now``, divided by the share."""
        self.used_s, self.at = self.used_s + self.held * (now - self.at) / self.share, now


class FairQueue:
    """Slots that users wait for. Lives in one event loop.

    Args:
        slots: Held at once by all users together; :meth:`resize` changes it.
        clock: Returns seconds that never decrease.
    """

    def __init__(self, slots: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.slots = slots
        self._clock = clock
        self._users: dict[str, _User] = {}
        self._held = 0
        self._virtual_s = 0.0
        """``used_s`` of the user admitted last; never decreases."""
        self._mean_turn_s = 0.0

    def held(self, user: str) -> int:
        """Slots that a user holds now."""
        return self._users[user].held if user in self._users else 0

    @property
    def waiting(self) -> int:
        """Requests that wait for a slot."""
        return sum(len(user.waiting) for user in self._users.values())

    @asynccontextmanager
    async def turn(self, name: str, share: float = 1.0, max_slots: int | None = None) -> AsyncIterator[None]:
        """Waits for a slot and holds it inside the context.

        Args:
            share: Of this user, relative to others'.
            max_slots: Slots that this user may hold even when nobody else waits; ``None`` is unlimited.
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
                self._release(user)  # it was granted in the same instant
            raise
        began = self._clock()
        try:
            yield
        finally:
            took = self._clock() - began
            self._mean_turn_s += (took - self._mean_turn_s) * SMOOTHING if self._mean_turn_s else took
            self._release(user)

    def resize(self, slots: int) -> None:
        """Sets the number of slots; those held beyond it are kept until their turns end."""
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
