"""Lists the engine servers of a run. A pod either reads their files or adopts the leader's list."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from megaflow_hpc.rundir.endpoints import EndpointFiles, EndpointListing, FailedServer
from megaflow_hpc.rundir.engine_pool import EnginePool, pool_servers
from megaflow_hpc.rundir.layout import RunDir


@dataclass(frozen=True)
class Engines:
    """Snapshot of the run's engine servers."""

    files: Mapping[str, Any] = field(default_factory=dict)
    """Content of each endpoint file, by file name. A server of an engine pool is named ``<policy>@<server>``."""
    unanswered: frozenset[str] = frozenset()
    """Policies that have no ready engine yet but may get one. Their rollouts wait."""

    @property
    def all(self) -> list[dict[str, Any]]:
        """Contents of all endpoint files."""
        return list(self.files.values())

    @property
    def essence(self) -> dict[str, tuple[Any, ...]]:
        """Fields that gateways need, by file name. Heartbeats are excluded, so that they do not count as changes."""
        keys = ("url", "started_at", "weight_version", "cause", "all_failed")
        return {name: tuple(file.get(key) for key in keys) for name, file in self.files.items()}

    @property
    def generation(self) -> str:
        """Digest of :attr:`essence`, to detect changes."""
        return hashlib.sha256(repr(sorted(self.essence.items())).encode()).hexdigest()[:16]


class Endpoints:
    """Lists the engine servers of one run.

    Args:
        servers: number of engine servers that the campaign requests, by policy.
    """

    def __init__(self, run: RunDir, servers: Mapping[str, int]) -> None:
        self._files, self._servers = EndpointFiles(run), servers
        self._pools = [(membership, EnginePool(membership.pool)) for membership in self._files.memberships()]
        self.engines = Engines(unanswered=frozenset(servers))
        """The latest list. Replaced only after a change that gateways must know about."""

    def publish(self) -> None:
        """Publishes the list of engine servers for the other pods. Raises OSError."""
        self._files.publish_listing(EndpointListing(generation=self.engines.generation, found=dict(self.engines.files)))

    def adopt(self) -> bool:
        """Adopts another pod's list of engine servers. Returns true if it has changed and gateways must be informed."""
        listing = self._files.listing()
        return listing is not None and self._replace(listing.found)

    def refresh(self) -> bool:
        """Lists the engine servers from their files. Returns true if the list has changed and gateways must be
        informed."""
        files: dict[str, Any] = {}
        for server in self._files.serving():
            files[f"{server.server}.json"] = msgspec.to_builtins(server)
        for failed in self._files.failed():
            files[f"{failed.server}.failed.json"] = msgspec.to_builtins(failed)
        for membership, pool in self._pools:
            if closed := pool.closed:
                name = f"{membership.policy}@pool"
                failed = FailedServer(server=name, policy=membership.policy, cause=closed, lasting=True)
                files[f"{name}.failed"] = {**msgspec.to_builtins(failed), "all_failed": True}
                continue
            for server in pool_servers(membership):
                files[server.server] = msgspec.to_builtins(server)
        return self._replace(files)

    def _replace(self, files: dict[str, Any]) -> bool:
        failed = Counter(file["policy"] for file in files.values() if not file.get("url"))
        for file in files.values():
            if failed[file["policy"]] == self._servers.get(file["policy"]):
                file["all_failed"] = True  # so that gateways do not wait long
        answered = {file["policy"] for file in files.values() if file.get("url") or file.get("all_failed")}
        engines = Engines(files, frozenset(self._servers) - answered)
        if engines.essence == self.engines.essence:
            return False
        self.engines = engines
        return True
