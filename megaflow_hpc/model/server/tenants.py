"""Who may ask a pool's server, and how much: requests at once and a second, by user, whatever campaign they are of.

Nobody is refused for asking much: a request beyond its user's cap waits its turn at the proxy, and those of other users
pass it by. What the caps let through shares the engine fairly (:mod:`.turns`): no more requests are with it than it
answers at once, so that none waits inside the engine, behind another user's queue.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

from megaflow_hpc.model.server.fair_queue import FairTurns
from megaflow_hpc.rundir.engine_pool import Pool, digest_of

LOOK_S = 2.0
"""An unknown key makes the members be listed anew, at most this often…"""
REFRESH_S = 30.0
"""…and all are, this often: who was taken away is refused from then on."""


AT_ONCE = 256
"""Places at an engine that does not say how many requests it answers at once; vLLM's own default on most GPUs."""


@dataclass
class _Caps:
    """What one user may."""

    weight: float
    in_flight: int | None
    interval_s: float
    next_at: float = 0.0

    @classmethod
    def of(cls, caps: Mapping[str, Any], name: str) -> _Caps:
        own = (caps.get("users") or {}).get(name) or {}
        said = {**caps, **{key: value for key, value in own.items() if value is not None}}
        rate = said.get("requests_per_s")
        return cls(float(own.get("weight") or 1.0), said.get("in_flight"), 1 / float(rate) if rate else 0.0)


class Guests:
    """
    Args:
        caps: The campaign's ``pool`` section: ``at_once``, ``in_flight``, ``requests_per_s``, and of single ``users``.
    """

    def __init__(self, pool: Pool, caps: Mapping[str, Any]) -> None:
        self._pool, self._caps = pool, caps
        self._known: dict[str, str] = {}
        self._users: dict[str, _Caps] = {}
        self._turns = FairTurns(caps.get("at_once") or AT_ONCE)
        self._listed = -REFRESH_S

    def user(self, key: str) -> str | None:
        """Whose key that is; ``None`` for a stranger's."""
        if not key:
            return None
        digest, age = digest_of(key), time.monotonic() - self._listed
        if age > REFRESH_S or (digest not in self._known and age > LOOK_S):
            self._listed = time.monotonic()
            with contextlib.suppress(OSError):  # a file system that is away for a moment
                self._known = self._pool.users()
        return self._known.get(digest)

    def engine_answers(self, at_once: int) -> None:
        """The engine answers so many requests at once; 0: nobody knows. The pool's own ``at_once`` goes before."""
        self._turns.resize(self._caps.get("at_once") or at_once or AT_ONCE)

    @property
    def waiting(self) -> int:
        """Requests that wait for their turn."""
        return self._turns.waiting

    @contextlib.asynccontextmanager
    async def room(self, name: str) -> AsyncIterator[None]:
        """A request of this user, as soon as it may be made."""
        user = self._users.setdefault(name, _Caps.of(self._caps, name))
        if user.interval_s:
            now = time.monotonic()
            user.next_at, wait_s = max(user.next_at, now) + user.interval_s, user.next_at - now
            await asyncio.sleep(max(0.0, wait_s))
        async with self._turns.turn(name, user.weight, user.in_flight):
            yield
