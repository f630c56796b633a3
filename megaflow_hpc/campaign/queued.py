"""What of a run Slurm has not started yet, or is about to: engine servers and trainers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from megaflow_hpc.ledger.leader_lease import SCALER, LeaderLease
from megaflow_hpc.monitor.training import TrainerJob
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.slurm.accounting import JobState


def trainers(states: Mapping[str, JobState] | None) -> dict[str, TrainerJob] | None:
    """Returns the trainers that run or wait, by policy; ``None`` if Slurm cannot tell now."""
    if states is None:
        return None
    return {
        policy: TrainerJob("queued", state.id, reason=state.reason)
        if state.state == "PENDING"
        else TrainerJob("running", state.id, state.node)
        for policy, state in states.items()
    }


def waiting_servers(
    run: RunDir, policies: Sequence[str], states: Mapping[int, JobState], known: Collection[str]
) -> list[dict[str, Any]]:
    """Returns engine servers that are in Slurm's queue, or on their way from there to an endpoint file.

    Args:
        policies: of each server, by its number.
        states: what Slurm says of their jobs.
        known: names of those that have such a file.
    """
    found = []
    for number, state in sorted(states.items()):
        name = f"{policies[number]}.{number}"
        if name in known or not state.live:
            continue
        shown = {"server": name, "policy": policies[number], "node": state.node, "job_id": state.id}
        if state.held:
            by = LeaderLease(run, SCALER).holder()
            remedy = f"nobody lets it go: keep megaflow-hpc watch {run} open, or use scale --servers"
            found.append({**shown, "state": "held", "cause": f"let go on demand by {by}" if by else remedy})
        else:
            found.append({**shown, "state": "queued" if state.state == "PENDING" else "starting"})
    return found
