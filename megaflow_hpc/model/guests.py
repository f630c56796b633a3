"""Who may ask a pool's server, and how much: requests at once and a second, by user, whatever campaign they are of.

Nobody is refused for asking much: a request beyond its user's cap waits its turn at the proxy, and those of other users
pass it by.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

from megaflow_hpc.pool import Pool, digest_of

LOOK_S = 2.0
"""An unknown key makes the members be listed anew, at most this often…"""
REFRESH_S = 30.0
"""…and all are, this often: who was taken away is refused from then on."""


class _User:
    def __init__(self, caps: Mapping[str, Any]) -> None:
        in_flight = caps.get("in_flight")
        self.slots: Any = asyncio.Semaphore(int(in_flight)) if in_flight else contextlib.nullcontext()
        self.interval = 1 / float(caps["requests_per_s"]) if caps.get("requests_per_s") else 0.0
        self.next_at = 0.0


class Guests:
    """
    Args:
        caps: The campaign's ``pool`` section: ``in_flight``, ``requests_per_s``, and of single ``users``.
    """

    def __init__(self, pool: Pool, caps: Mapping[str, Any]) -> None:
        self._pool, self._caps = pool, caps
        self._known: dict[str, str] = {}
        self._users: dict[str, _User] = {}
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

    @contextlib.asynccontextmanager
    async def room(self, name: str) -> AsyncIterator[None]:
        """A request of this user, as soon as it may be made."""
        user = self._users.setdefault(name, _User({**self._caps, **(self._caps.get("users") or {}).get(name, {})}))
        async with user.slots:
            if user.interval:
                now = time.monotonic()
                user.next_at, wait_s = max(user.next_at, now) + user.interval, user.next_at - now
                await asyncio.sleep(max(0.0, wait_s))
            yield
