"""The users of a pool's server, and the limit on the concurrent requests of each, over all campaigns of the user.

A request above the limit waits at the proxy, and those of other users pass it. Requests within it share the engine
fairly (:mod:`.fair_queue`). The engine has no more requests than it answers at once, so that
none waits inside it behind another user's queue.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

from megaflow_hpc.model.server.fair_queue import FairQueue
from megaflow_hpc.rundir.engine_pool import EnginePool, digest_of

LOOK_S = 2.0
"""Seconds between two listings of the members because of unknown keys."""
REFRESH_S = 30.0
"""Seconds after which the members are listed anew in any case: removed ones are refused from then on."""
AT_ONCE = 256
"""Requests at once at an engine that does not say how many it answers; vLLM's own default on most GPUs."""


class Tenants:
    """Knows a pool's users by their keys and admits their requests.

    Args:
        pool: Lists the members' keys.
        settings: The campaign's ``pool`` section: ``in_flight``, and the users' ``weights``.
    """

    def __init__(self, pool: EnginePool, settings: Mapping[str, Any]) -> None:
        self._pool = pool
        self._max_in_flight: int | None = settings.get("in_flight")
        self._weights: Mapping[str, float] = settings.get("weights") or {}
        self._user_of: dict[str, str] = {}
        self._queue = FairQueue(AT_ONCE)
        self._listed = -REFRESH_S

    def user(self, key: str) -> str | None:
        """Returns whose key that is; ``None`` for a stranger's."""
        if not key:
            return None
        digest, age = digest_of(key), time.monotonic() - self._listed
        if age > REFRESH_S or (digest not in self._user_of and age > LOOK_S):
            self._listed = time.monotonic()
            with contextlib.suppress(OSError):  # a file system that is away for a moment
                self._user_of = self._pool.users()
        return self._user_of.get(digest)

    def set_capacity(self, at_once: int) -> None:
        """Sets how many requests the engine answers at once; 0 if unknown."""
        self._queue.resize(at_once or AT_ONCE)

    @property
    def waiting(self) -> int:
        """Requests that wait to be admitted."""
        return self._queue.waiting

    @contextlib.asynccontextmanager
    async def admit(self, name: str) -> AsyncIterator[None]:
        """A context in which a request of this user is made; entered as soon as the limit and the queue allow."""
        async with self._queue.turn(name, self._weights.get(name, 1.0), self._max_in_flight):
            yield
