"""Which server answers a call: the least busy healthy one of the policy, unless another's prefix cache is worth more.

*Busy* is requests in flight over the server's weight, so that a server of twice the weight takes twice as many. A
rollout goes back to the server that answered it last, and the first call of a rollout to its group's: the one that a
hash of the group and the servers' names says, which is the same at every gateway of the campaign and spreads groups by
weight (rendezvous hashing). Either holds while that server is at most ``AFFINITY`` requests busier than the least busy.

Health is decided by real requests. A server that refused or broke a connection, or answered 502 to 504, rests for half
a second, doubling up to half a minute with each failure in a row, and longer where it asks for that (``Retry-After``).
After that one call tries it; its success lets the others in. Failures of calls that were under way at once count as
one. Where every server of a policy rests, the one whose rest ends first is awaited, so a short outage costs waiting and
no rollout.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megaflow_hpc.errors import ModelServiceError

REST_S = 0.5
REST_MAX_S = 30.0
ASKED_MAX_S = 60.0
"""Longest rest in seconds that a server may ask for (``Retry-After``): a call waits five minutes in all."""
ALL_FAILED_S = 15.0
"""Seconds for which a call waits when every server of its policy has given up: one may have been requeued to another
node. If each gave up for a cause that lasts, calls do not wait."""
AFFINITY = 2
"""Requests by which the preferred server may be busier than the least busy one: its prefix cache is worth that."""


@dataclass(eq=False)
class Server:
    """One engine server as its endpoint file describes it, and how it has done here."""

    name: str
    policy: str
    url: str
    key: str
    model_name: str
    weight_version: int = 0
    fingerprint: str = ""
    """SHA-256 of the certificate in hexadecimal; empty without TLS."""
    protocol: str = "plain"
    """One of :data:`megaflow_hpc.model.gateway.protocols.PROTOCOLS`."""
    degraded: bool = False
    """It lacked what its protocol needs, and is asked in a lower one."""
    weight: float = 1.0
    """Requests it should get for each one of a server of weight 1."""
    started: str = ""
    """Identifies one start of a server."""
    outstanding: int = 0
    failures: int = 0
    failed_at: float = 0.0
    rests_until: float = 0.0
    asked_until: float = 0.0
    """Until when it asked to be left alone, whatever it answers to calls that were under way."""
    answered_at: float = 0.0
    """When it last answered a call (``time.monotonic``)."""

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Server:
        """Makes a server of its decoded endpoint file."""
        return cls(
            name=str(record["server"]),
            policy=str(record["policy"]),
            url=str(record["url"]).rstrip("/"),
            key=str(record.get("key", "")),
            model_name=str(record.get("model_name", "")),
            weight_version=int(record.get("weight_version", 0)),
            fingerprint=str(record.get("tls_fingerprint") or ""),
            protocol=str(record.get("protocol", "plain")),
            weight=max(float(record.get("weight") or 1.0), 1e-3),
            started=str(record.get("start", "")),
        )

    @property
    def busy(self) -> float:
        """Requests in flight over the weight."""
        return self.outstanding / self.weight

    def available(self, now: float) -> bool:
        """Returns whether a call may be sent there: after a rest, one at a time until one succeeds."""
        return max(self.rests_until, self.asked_until) <= now and not (self.failures and self.outstanding)

    def failed(self, began: float, now: float, wait_s: float = 0.0) -> None:
        """Notes that a call which began at ``began`` failed by the server's fault at ``now`` (``time.monotonic``).

        Args:
            wait_s: Seconds for which the server asked to be left alone; at most :data:`ASKED_MAX_S` are.
        """
        self.asked_until = max(self.asked_until, now + min(wait_s, ASKED_MAX_S)) if wait_s else self.asked_until
        if began < self.failed_at:
            return  # one outage, seen by all that were under way
        self.failures += 1
        self.failed_at = now
        self.rests_until = now + min(REST_S * 2 ** (self.failures - 1), REST_MAX_S)

    def succeeded(self) -> None:
        """Notes that a call was answered: the server rests no more."""
        self.failures = 0
        self.rests_until = 0.0


class Router:
    """Knows the servers there are now and picks one per call. Lives in one event loop, :meth:`update` included.

    Args:
        clock: Returns seconds, as ``time.monotonic`` does.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._servers: dict[str, Server] = {}
        self._causes: dict[str, str] = {}
        self._all_failed: dict[str, float] = {}
        """Policy whose servers have all given up → seconds for which a call still waits."""
        self._changed = asyncio.Event()

    def update(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Takes the records of ``RUN/endpoints/``: live servers, and the causes of those that gave up.

        A record marked ``all_failed`` says that every server of its policy has given up.
        """
        servers: dict[str, Server] = {}
        self._all_failed = {}
        for record in records:
            if record.get("all_failed"):
                policy, wait_s = str(record.get("policy", "")), 0.0 if record.get("lasting") else ALL_FAILED_S
                self._all_failed[policy] = max(wait_s, self._all_failed.get(policy, 0.0))
        causes: dict[str, str] = {}
        for record in records:
            if not record.get("url"):
                if record.get("cause"):
                    log = f" (log: {record['log']})" if record.get("log") else ""
                    causes[str(record.get("policy", ""))] = f"{record.get('server')}: {record['cause']}{log}"
                continue
            server = Server.from_record(record)
            known = self._servers.get(server.name)
            if known is not None and (known.started, known.url) == (server.started, server.url):
                known.weight_version, known.weight = server.weight_version, server.weight
                server = known
            servers[server.name] = server
        self._servers, self._causes = servers, causes
        self._changed.set()
        self._changed = asyncio.Event()

    def all(self) -> list[Server]:
        """Returns the servers of all policies."""
        return list(self._servers.values())

    def servers(self, policy: str) -> list[Server]:
        """Returns the servers of one policy, those that rest included."""
        return [s for s in self._servers.values() if s.policy == policy]

    def pick(self, policy: str, previous: str = "", group: str = "", without: Collection[str] = ()) -> Server | None:
        """Returns the server to ask now, or ``None`` while all rest; one of ``without`` only if there is no other."""
        now = self._clock()
        available = [s for s in self.servers(policy) if s.available(now)]
        if without:
            available = [s for s in available if s.name not in without] or available
        if len(available) < 2:
            return available[0] if available else None
        preferred = self._servers.get(previous)
        if preferred is None or preferred not in available:
            preferred = max(available, key=lambda s: _draw(group, s)) if group else None
        least = min(available, key=lambda s: s.busy)
        if preferred is not None and preferred.outstanding <= (least.busy + AFFINITY) * preferred.weight:
            return preferred
        return least

    async def acquire(self, policy: str, deadline: float, previous: str = "", group: str = "") -> Server:
        """Waits for a server until ``deadline`` (``time.monotonic``).

        Raises:
            ModelServiceError: There was none, with what is known of the cause.
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
            wakes = [max(s.rests_until, s.asked_until) - now for s in self.servers(policy)]
            changed = self._changed
            try:
                await asyncio.wait_for(changed.wait(), timeout=max(0.01, min([deadline - now, *wakes])))
            except TimeoutError:
                pass

    def describe(self, policy: str) -> str:
        """Returns in one line why no server answers."""
        known = self.servers(policy)
        if known:
            names = ", ".join(s.name for s in known)
            return f"policy {policy!r}: none of {len(known)} registered servers answers ({names})"
        cause = self._causes.get(policy)
        return f"policy {policy!r}: no server is registered" + (f"; last start failed: {cause}" if cause else "")


def _uniform(group: str, server: str) -> float:
    """Returns a number in (0, 1) that is the same at every gateway."""
    digest = hashlib.blake2b(f"{group}\0{server}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return (int.from_bytes(digest, "big") + 0.5) / 2**64


def _draw(group: str, server: Server) -> float:
    """Returns the server's draw for a group; the highest wins, in the long run in proportion to the weights."""
    return -server.weight / math.log(_uniform(group, server.name))
