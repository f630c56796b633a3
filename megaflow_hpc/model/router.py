"""Which server answers a call: the least busy healthy one of the policy, the rollout's previous one where it ties.

Health is decided by real requests. A server that refused or broke a connection, or answered 5xx, rests for half a
second, doubling up to half a minute with each failure in a row; the next success clears it. Where every server of a
policy rests, the one that wakes first is awaited, so a short outage costs waiting and no rollout.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from megaflow_hpc.errors import ModelServiceError

REST_S = 0.5
REST_MAX_S = 30.0
HOPELESS_S = 15.0
"""A call waits this long when every server of its policy has given up; one may have been requeued to another node."""
AFFINITY = 2
"""Requests by which a rollout's previous server may be busier and is still taken: its prefix cache is worth that."""


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
    """What it can do; see :mod:`megaflow_hpc.model.backend`."""
    started: str = ""
    """Tells one start of a server from the next."""
    outstanding: int = 0
    failures: int = 0
    rests_until: float = 0.0

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Server:
        return cls(
            name=str(record["server"]),
            policy=str(record["policy"]),
            url=str(record["url"]).rstrip("/"),
            key=str(record.get("key", "")),
            model_name=str(record.get("model_name", "")),
            weight_version=int(record.get("weight_version", 0)),
            fingerprint=str(record.get("tls_fingerprint") or ""),
            protocol=str(record.get("protocol", "plain")),
            started=str(record.get("start", "")),
        )

    @property
    def ssl(self) -> aiohttp.Fingerprint | bool:
        """What aiohttp checks after the handshake, before it sends a byte of the request."""
        return aiohttp.Fingerprint(bytes.fromhex(self.fingerprint)) if self.fingerprint else True

    def failed(self) -> None:
        self.failures += 1
        self.rests_until = time.monotonic() + min(REST_S * 2 ** (self.failures - 1), REST_MAX_S)

    def succeeded(self) -> None:
        self.failures = 0
        self.rests_until = 0.0


class Router:
    """The servers there are now. Lives in one event loop; :meth:`update` must be called there."""

    def __init__(self) -> None:
        self._servers: dict[str, Server] = {}
        self._causes: dict[str, str] = {}
        self._hopeless: set[str] = set()
        self._changed = asyncio.Event()

    def update(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Takes over what ``RUN/endpoints/`` lists: live servers, and the causes of those that gave up.

        A record marked ``hopeless`` says that every server its policy was given has given up.
        """
        servers: dict[str, Server] = {}
        self._hopeless = {str(record.get("policy", "")) for record in records if record.get("hopeless")}
        causes: dict[str, str] = {}
        for record in records:
            if not record.get("url"):
                if record.get("cause"):
                    causes[str(record.get("policy", ""))] = f"{record.get('server')}: {record['cause']}"
                continue
            server = Server.from_record(record)
            known = self._servers.get(server.name)
            if known is not None and (known.started, known.url) == (server.started, server.url):
                known.weight_version = server.weight_version
                server = known
            servers[server.name] = server
        self._servers, self._causes = servers, causes
        self._changed.set()
        self._changed = asyncio.Event()

    def servers(self, policy: str) -> list[Server]:
        return [s for s in self._servers.values() if s.policy == policy]

    def pick(self, policy: str, previous: str = "") -> Server | None:
        """The server to ask now, or ``None`` while there is none awake."""
        now = time.monotonic()
        awake = [s for s in self.servers(policy) if s.rests_until <= now]
        if not awake:
            return None
        least = min(awake, key=lambda s: s.outstanding)
        mine = self._servers.get(previous)
        if mine is not None and mine in awake and mine.outstanding <= least.outstanding + AFFINITY:
            return mine
        return least

    async def acquire(self, policy: str, deadline: float, previous: str = "") -> Server:
        """Waits for a server until ``deadline`` (``time.monotonic``).

        Raises:
            ModelServiceError: There was none, with what is known of the cause.
        """
        began = time.monotonic()
        while True:
            server = self.pick(policy, previous)
            if server is not None:
                return server
            now = time.monotonic()
            if policy in self._hopeless:
                deadline = min(deadline, began + HOPELESS_S)
            if now >= deadline:
                raise ModelServiceError(self.describe(policy))
            wakes = [s.rests_until - now for s in self.servers(policy)]
            changed = self._changed
            try:
                await asyncio.wait_for(changed.wait(), timeout=max(0.01, min([deadline - now, *wakes])))
            except TimeoutError:
                pass

    def describe(self, policy: str) -> str:
        """Why no server answers, in one line."""
        known = self.servers(policy)
        if known:
            names = ", ".join(s.name for s in known)
            return f"policy {policy!r}: none of {len(known)} registered servers answers ({names})"
        cause = self._causes.get(policy)
        return f"policy {policy!r}: no server is registered" + (f"; last start failed: {cause}" if cause else "")
