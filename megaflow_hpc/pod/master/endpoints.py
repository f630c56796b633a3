"""The engines there are, as rank 0 lists them for its workers, or as another pod has listed them for all."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from typing import Any

import msgspec

from megaflow_hpc.rundir.endpoints import EndpointFiles, FailedServer, Listing
from megaflow_hpc.rundir.engine_pool import EnginePool
from megaflow_hpc.rundir.layout import RunDir


class Endpoints:
    """The engine servers of one run, as they were listed last.

    Args:
        servers: engine servers that the campaign asks for, by policy.
    """

    def __init__(self, run: RunDir, servers: Mapping[str, int]) -> None:
        self._files, self._servers = EndpointFiles(run), servers
        self._pools = [(membership, EnginePool(membership.pool)) for membership in self._files.memberships()]
        self._found: dict[str, Any] = {}
        self.unanswered = set(servers)
        """Policies for which no engine serves and none has given up for good: their rollouts wait."""

    @property
    def all(self) -> list[dict[str, Any]]:
        """The decoded endpoint files."""
        return list(self._found.values())

    @property
    def names(self) -> list[str]:
        """The sorted names of the endpoint files; a pool's server is named ``<policy>@<server>``."""
        return sorted(self._found)

    @property
    def generation(self) -> str:
        """Names what was found: differs where gateways must hear of a change."""
        return hashlib.sha256(repr(sorted(_essence(self._found).items())).encode()).hexdigest()[:16]

    def publish(self) -> None:
        """Lets the other pods know what was found. Raises OSError."""
        self._files.publish_listing(Listing(generation=self.generation, found=self._found))

    def adopt(self) -> bool:
        """Takes over what another pod has listed; whether gateways must hear of a change."""
        listing = self._files.listing()
        return listing is not None and self._take(listing.found)

    def refresh(self) -> bool:
        """Lists anew; whether gateways must hear of a change."""
        found: dict[str, Any] = {}
        for server in self._files.serving():
            found[f"{server.server}.json"] = msgspec.to_builtins(server)
        for gone in self._files.failed():
            found[f"{gone.server}.failed.json"] = msgspec.to_builtins(gone)
        for membership, pool in self._pools:
            if closed := pool.closed:
                name = f"{membership.policy}@pool"
                gone = FailedServer(server=name, policy=membership.policy, cause=closed, lasting=True)
                found[f"{name}.failed"] = {**msgspec.to_builtins(gone), "all_failed": True}
                continue
            for server in pool.serving(membership.theirs):
                server.server, server.policy = f"{membership.policy}@{server.server}", membership.policy
                server.key = membership.key
                found[server.server] = msgspec.to_builtins(server)
        return self._take(found)

    def _take(self, found: dict[str, Any]) -> bool:
        failed = Counter(endpoint["policy"] for endpoint in found.values() if not endpoint.get("url"))
        for endpoint in found.values():
            if failed[endpoint["policy"]] == self._servers.get(endpoint["policy"]):
                endpoint["all_failed"] = True  # all that were asked for have given up: nobody need wait long
        answered = {e["policy"] for e in found.values() if e.get("url") or e.get("all_failed")}
        self.unanswered = {policy for policy in self._servers if policy not in answered}
        changed = _essence(found) != _essence(self._found)
        self._found = found
        return changed


def _essence(endpoints: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    """What of the endpoint files a gateway must hear of; a heartbeat is nothing new."""
    keys = ("url", "started_at", "weight_version", "cause", "all_failed")
    return {name: tuple(endpoint.get(key) for key in keys) for name, endpoint in endpoints.items()}
