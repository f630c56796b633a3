"""Chooses the server for a call: the least busy server, or a server whose prefix cache probably holds the prompt.

A server's *load* is its requests in flight divided by its weight, so a server with twice the weight gets twice as many
requests. A rollout prefers the server that served it last. Its first call prefers its group's server, which a hash of
the group and the servers' names selects (rendezvous hashing). So all gateways of a campaign select the same server for
a group, and groups are distributed by weight. A preferred server is used while it has at most ``AFFINITY`` more
requests than the least busy server.

Health is judged by real requests. A server that refused or broke a connection, or responded with 502 to 504, enters a
backoff of half a second. The backoff doubles with each consecutive failure, up to half a minute, or lasts as long as
the server asks for (``Retry-After``). After that, a single call tries the server. If it succeeds, other calls are
admitted too. Failures of calls that were in flight at the same time count as a single failure. If every server of a
policy is in backoff, calls wait until a server is available again. So a short outage delays rollouts but does not fail
them.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import msgspec

from megaflow_hpc.errors import ModelServiceError
from megaflow_hpc.rundir.endpoints import Endpoint

BACKOFF_S, MAX_BACKOFF_S = 0.5, 30.0
MAX_RETRY_AFTER_S = 60.0
"""Maximum backoff in seconds that a server may request. A call waits at most five minutes in total."""
ALL_FAILED_S = 15.0
"""Seconds that a call waits after all servers of its policy have given up, because Slurm may requeue a server to
another node. Calls do not wait if every cause is lasting."""
AFFINITY = 2
"""Number of requests by which a preferred server may exceed the least busy server. Its prefix cache saves more time
than they cost."""


class Server(Endpoint, kw_only=True, eq=False):
    """An engine server: its endpoint file, and its health as seen by this gateway."""

    degraded: bool = False
    """True if the server lacks an endpoint of its protocol, so that a lower protocol is used."""
    expands_images: bool = True
    """False once the server has expanded an image in token ids in another way than in its own rendering."""
    outstanding: int = 0
    """Number of this gateway's requests in flight."""
    failures: int = 0
    """Number of consecutive failures."""
    failed_at: float = 0.0
    backoff_until: float = 0.0
    retry_after_until: float = 0.0
    """End of the backoff that the server asked for. Responses to calls already in flight do not end it."""

    def __post_init__(self) -> None:
        self.url = self.url.rstrip("/")
        self.weight = max(self.weight or 1.0, 1e-3)

    @property
    def name(self) -> str:
        """Server name, ``<policy>.<n>``."""
        return self.server

    @property
    def load(self) -> float:
        """Number of requests in flight, divided by the server's weight."""
        return self.outstanding / self.weight

    @property
    def available_at(self) -> float:
        """Time at which the backoff ends, by ``time.monotonic``."""
        return max(self.backoff_until, self.retry_after_until)

    def available(self, now: float) -> bool:
        """Returns whether the server can take a call. After a backoff, it gets one call at a time until a call
        succeeds."""
        return self.available_at <= now and not (self.failures and self.outstanding)

    def failed(self, began: float, now: float, wait_s: float = 0.0) -> None:
        """Records that a call failed and the server is at fault.

        Args:
            began: Time at which the call began (``time.monotonic``).
            now: Time at which it failed.
            wait_s: Backoff in seconds that the server asked for.
        """
        if wait_s:
            self.retry_after_until = max(self.retry_after_until, now + min(wait_s, MAX_RETRY_AFTER_S))
        if began < self.failed_at:
            return  # part of the same outage as an earlier failure
        self.failures += 1
        self.failed_at = now
        self.backoff_until = now + min(BACKOFF_S * 2 ** (self.failures - 1), MAX_BACKOFF_S)

    def succeeded(self) -> None:
        """Ends the backoff after a successful call."""
        self.failures = 0
        self.backoff_until = 0.0


class Router:
    """Keeps the list of servers and picks a server for each call. Use it from a single event loop.

    Args:
        clock: Monotonic clock in seconds, like ``time.monotonic``.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._servers: dict[str, Server] = {}
        self._causes: dict[str, str] = {}
        """Reason why one of a policy's servers gave up, by policy."""
        self._all_failed: dict[str, float] = {}
        """Seconds that calls of a policy wait after all of its servers have given up, by policy."""
        self._changed = asyncio.Event()

    def update(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Replaces the list of servers with the records of ``RUN/endpoints/``.

        A record without a ``url`` belongs to a server that gave up. ``all_failed`` in a record means that every server
        of its policy has given up.
        """
        servers: dict[str, Server] = {}
        self._causes, self._all_failed = {}, {}
        for record in records:
            policy = str(record.get("policy", ""))
            if record.get("all_failed"):
                wait_s = 0.0 if record.get("lasting") else ALL_FAILED_S
                self._all_failed[policy] = max(wait_s, self._all_failed.get(policy, 0.0))
            if record.get("url"):
                server = self._kept(msgspec.convert(record, Server))
                servers[server.name] = server
            elif record.get("cause"):
                log = f" (log: {record['log']})" if record.get("log") else ""
                self._causes[policy] = f"{record.get('server')}: {record['cause']}{log}"
        self._servers = servers
        self._changed.set()
        self._changed = asyncio.Event()

    def _kept(self, server: Server) -> Server:
        """Returns the existing server, with its health, if it is the same start of the server. Otherwise returns the
        new one."""
        earlier = self._servers.get(server.name)
        if earlier is None or (earlier.start, earlier.url) != (server.start, server.url):
            return server
        earlier.weight_version, earlier.weight = server.weight_version, server.weight
        return earlier

    def servers(self, policy: str) -> list[Server]:
        """Returns the servers of one policy, including those in backoff."""
        return [s for s in self._servers.values() if s.policy == policy]

    def pick(self, policy: str, previous: str = "", group: str = "", without: Collection[str] = ()) -> Server | None:
        """Returns the server for a call, or ``None`` if no server is available.

        Args:
            previous: Server that served the rollout last.
            group: The rollout's group.
            without: Names of servers to use only if no other is available.
        """
        now = self._clock()
        available = [s for s in self.servers(policy) if s.available(now)]
        if without:
            available = [s for s in available if s.name not in without] or available
        if not available:
            return None
        preferred = self._servers.get(previous)
        if preferred not in available:
            preferred = max(available, key=lambda s: _draw(group, s)) if group else None
        least_busy = min(available, key=lambda s: s.load)
        if preferred is not None and preferred.outstanding <= (least_busy.load + AFFINITY) * preferred.weight:
            return preferred
        return least_busy

    async def acquire(self, policy: str, deadline: float, previous: str = "", group: str = "") -> Server:
        """Waits for an available server until ``deadline`` (``time.monotonic``).

        Raises:
            ModelServiceError: No server became available. The message names the cause if it is known.
        """
        began = self._clock()
        while True:
            server = self.pick(policy, previous, group)
            if server is not None:
                return server
            now = self._clock()
            if policy in self._all_failed:
                deadline = min(deadline, began + self._all_failed[policy])
            if now >= deadline:
                raise ModelServiceError(self.describe(policy))
            wake_at = min([deadline, *(s.available_at for s in self.servers(policy))])
            try:
                async with asyncio.timeout(max(0.01, wake_at - now)):
                    await self._changed.wait()
            except TimeoutError:
                pass

    def describe(self, policy: str) -> str:
        """Describes in one line why no server of the policy responds."""
        servers = self.servers(policy)
        if servers:
            names = ", ".join(s.name for s in servers)
            return f"policy {policy!r}: none of {len(servers)} registered servers answers ({names})"
        cause = self._causes.get(policy)
        return f"policy {policy!r}: no server is registered" + (f"; last start failed: {cause}" if cause else "")


def _draw(group: str, server: Server) -> float:
    """Returns the server's score for a group. The server with the highest score is preferred. Over many groups, each
    server is preferred in proportion to its weight."""
    digest = hashlib.blake2b(f"{group}\0{server.name}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
    uniform = (int.from_bytes(digest, "big") + 0.5) / 2**64
    return -server.weight / math.log(uniform)
