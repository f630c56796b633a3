"""Fair turns at an engine: a number of places, shared by users according to what each has had.

What is shared out is place-seconds, so that a user with long requests has fewer at once than one with short ones, and
shares hold even where there are more users than places. A free place goes to the waiting user for whom

    (place-seconds had so far + places held, with this one, x the seconds that a turn takes on average) / share

is least. Who was away is not owed for it, nor is who was kept back by a cap of its own: both begin where the user stood
who was let in last (start-time fair queueing). Within a user the first to come is the first let in.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

PACE = 0.1
"""Weight of the latest turn in the average of what turns take."""


@dataclass
class _User:
    share: float
    most: int | None
    had: float = 0.0
    """Place-seconds over share."""
    held: int = 0
    at: float = 0.0
    """When ``had`` was reckoned."""
    waiting: dict[asyncio.Future[None], None] = field(default_factory=dict)

    def reckon(self, now: float) -> None:
        self.had, self.at = self.had + self.held * (now - self.at) / self.share, now


class FairTurns:
    """Places that users wait for. Lives in one event loop.

    Args:
        places: At once, of all users; may be changed.
        clock: Seconds.
    """

    def __init__(self, places: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.places = places
        self._clock = clock
        self._users: dict[str, _User] = {}
        self._held = 0
        self._level = 0.0
        """What the user had who was let in last; never falls."""
        self._usual_s = 0.0

    def held(self, user: str) -> int:
        """Places that a user has now."""
        return self._users[user].held if user in self._users else 0

    @property
    def waiting(self) -> int:
        """Turns asked for and not given yet."""
        return sum(len(user.waiting) for user in self._users.values())

    @asynccontextmanager
    async def turn(self, name: str, share: float = 1.0, most: int | None = None) -> AsyncIterator[None]:
        """Waits for a place and holds it inside.

        Args:
            share: Of this user, relative to others'.
            most: Places that this user may hold, whoever else waits; ``None``: all.
        """
        user = self._users.setdefault(name, _User(share, most))
        user.share, user.most = share, most
        user.reckon(self._clock())
        if not user.held and not user.waiting:
            user.had = max(user.had, self._level)
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        user.waiting[future] = None
        self._grant()
        try:
            await future
        except asyncio.CancelledError:
            user.waiting.pop(future, None)
            if future.done() and not future.cancelled():
                self._release(user)  # it was given in the same instant
            raise
        began = self._clock()
        try:
            yield
        finally:
            took = self._clock() - began
            self._usual_s += (took - self._usual_s) * PACE if self._usual_s else took
            self._release(user)

    def resize(self, places: int) -> None:
        """From now on there are so many; who holds one too many keeps it to its end."""
        self.places = places
        self._grant()

    def _release(self, user: _User) -> None:
        user.reckon(self._clock())
        user.held -= 1
        self._held -= 1
        self._grant()

    def _grant(self) -> None:
        now = self._clock()
        while self._held < self.places:
            able = []
            for user in self._users.values():
                if not user.waiting:
                    continue
                user.reckon(now)
                if user.most is None or user.held < user.most:
                    able.append(user)
                else:
                    user.had = max(user.had, self._level)
            if not able:
                return
            user = min(able, key=lambda u: u.had + (u.held + 1) * (self._usual_s or 1.0) / u.share)
            future = next(iter(user.waiting))
            del user.waiting[future]
            if not future.done():
                self._level = max(self._level, user.had)
                user.held += 1
                self._held += 1
                future.set_result(None)
