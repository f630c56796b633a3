"""The engine servers of a run, as their files tell: which answer, which could not be started, which pools are away."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from megaflow_hpc.rundir.endpoints import EndpointFiles
from megaflow_hpc.rundir.engine_pool import EnginePool
from megaflow_hpc.rundir.layout import RunDir


def servers(run: RunDir, over: bool) -> list[dict[str, Any]]:
    """Returns the registered engines, and those that could not be started with their cause.

    Args:
        over: the campaign has ended, and nothing starts any more.
    """
    files, found = EndpointFiles(run), []
    for server in files.serving():
        shown = {
            "server": server.server,
            "policy": server.policy,
            "node": server.node,
            "job_id": server.job_id,
            "model_name": server.model_name,
            "weight_version": server.weight_version,
            "template": server.template,
            "waiting": server.waiting,
            "state": "serving",
        }
        if refused := server.refused:
            shown["cause"] = f"weights {refused.version} could not be loaded: {refused.cause}"
        found.append(shown)
    for state, servers in (("starting", [] if over else files.starting()), ("failed", files.failed())):
        for gone in servers:
            shown = {"server": gone.server, "policy": gone.policy, "job_id": gone.job_id, "cause": gone.cause}
            found.append({**shown, "log": gone.log, "state": state})
    return sorted(found, key=lambda shown: str(shown["server"]))


def pool_warnings(run: RunDir) -> list[str]:
    """Returns a sentence on each engine pool that the campaign asks, and that does not answer now."""
    warnings = []
    with suppress(OSError):  # another user's run: its memberships are secret
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
