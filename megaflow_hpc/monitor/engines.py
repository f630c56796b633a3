"""The engine servers of a run, read from their files: serving, starting and failed ones, and pools that do not
respond."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from megaflow_hpc.rundir.endpoints import EndpointFiles
from megaflow_hpc.rundir.engine_pool import EnginePool
from megaflow_hpc.rundir.layout import RunDir


def servers(run: RunDir, over: bool) -> list[dict[str, Any]]:
    """Returns the engine servers of a run, with the cause of each failure.

    Args:
        over: True if the campaign has ended. Servers that are not serving yet are then omitted.
    """
    files = EndpointFiles(run)
    shown: list[dict[str, Any]] = []
    for server in files.serving():
        entry: dict[str, Any] = {
            "server": server.server,
            "policy": server.policy,
            "node": server.node,
            "job_id": server.job_id,
            "model_name": server.model_name,
            "weight_version": server.weight_version,
            "template": server.template,
            "waiting": server.waiting,
            "state": "down" if server.down else "serving",
        }
        if server.down:
            entry["cause"] = server.down
        if refused := server.refused:
            entry["cause"] = f"weights {refused.version} could not be loaded: {refused.cause}"
        shown.append(entry)
    others = [(failed, "failed") for failed in files.failed()]
    if not over:
        others += [(starting, "down" if starting.down else "starting") for starting in files.starting()]
    for other, state in others:
        shown.append(
            {
                "server": other.server,
                "policy": other.policy,
                "job_id": other.job_id,
                "cause": other.cause,
                "log": other.log,
                "state": state,
            }
        )
    return sorted(shown, key=lambda entry: str(entry["server"]))


def pool_warnings(run: RunDir) -> list[str]:
    """Returns a warning for each engine pool that the campaign uses and that is not responding."""
    warnings = []
    with suppress(OSError):  # memberships of another user's run are not readable
        for member in EndpointFiles(run).memberships():
            pool = EnginePool(member.pool)
            if closed := pool.closed:
                warnings.append(f"{member.policy}: {closed}; until then its rollouts fail")
            elif not pool.serving(member.theirs):
                warnings.append(
                    f"{member.policy}: no server of the engine pool {member.pool} answers now, and rollouts wait "
                    f"for one; see: megaflow-hpc status {member.pool}"
                )
    return warnings
