"""The engines there are, as rank 0 lists them for its workers: one listing of ``RUN/endpoints`` at a time."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

from megaflow_hpc.rundir.engine_pool import EnginePool
from megaflow_hpc.rundir.layout import RunDir


class Endpoints:
    """
    Args:
        servers: engine servers that the campaign asks for, by policy.
    """

    def __init__(self, run: RunDir, servers: Mapping[str, int]) -> None:
        self._run, self._servers = run, servers
        self._pools = pools_of(run)
        self._found: dict[str, Any] = {}
        self.unanswered = set(servers)
        """Policies for which no engine serves and none has given up for good: their rollouts wait."""

    @property
    def all(self) -> list[dict[str, Any]]:
        """The decoded endpoint files."""
        return list(self._found.values())

    @property
    def names(self) -> list[str]:
        return sorted(self._found)

    def refresh(self) -> bool:
        """Lists anew; whether gateways must hear of a change."""
        found: dict[str, Any] = {}
        for path in sorted(self._run.endpoints.glob("*.json")):
            try:
                found[path.name] = json.loads(path.read_text())
            except (OSError, ValueError):
                continue  # just withdrawn, or being replaced
        for policy, (pool, theirs, key) in self._pools.items():
            for record in pool.records(theirs):
                name = f"{policy}@{record['server']}"
                found[name] = {**record, "server": name, "policy": policy, "key": key}
        failed = Counter(endpoint["policy"] for endpoint in found.values() if not endpoint.get("url"))
        for endpoint in found.values():
            if failed[endpoint["policy"]] == self._servers.get(endpoint["policy"]):
                endpoint["all_failed"] = True  # all that were asked for have given up: nobody need wait long
        answered = {e["policy"] for e in found.values() if e.get("url") or e.get("all_failed")}
        self.unanswered = {policy for policy in self._servers if policy not in answered}
        changed = _essence(found) != _essence(self._found)
        self._found = found
        return changed


def pools_of(run: RunDir) -> dict[str, tuple[EnginePool, str, str]]:
    """Policies whose model is an engine pool: the pool, the policy's name there, and our key to it."""
    found = {}
    for file in run.endpoints.glob(".pool.*.key"):
        said = json.loads(file.read_text())
        found[str(said["policy"])] = (EnginePool(said["pool"]), str(said["theirs"]), str(said["key"]))
    return found


def _essence(endpoints: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    """What of the endpoint files a gateway must hear of; a heartbeat is nothing new."""
    keys = ("url", "started_at", "weight_version", "cause", "all_failed")
    return {name: tuple(endpoint.get(key) for key in keys) for name, endpoint in endpoints.items()}
