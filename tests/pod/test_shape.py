"""What each rank of a pod believes it has, from the run's campaign file."""

from __future__ import annotations

from typing import Any

import pytest

from megaflow_hpc import config
from megaflow_hpc.pod.master.assembly import room_per_rank
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.record import RunRecord
from megaflow_hpc.slurm.script import pod_job


def planned(**pods: Any) -> RunRecord:
    """A run of 120 rollouts."""
    parsed = config.parse({"name": "x", "tasks": "t", "agent": "nop", "slurm": {"pods": pods}})
    return RunRecord(campaign=parsed.model_dump(mode="json"), total=120)


@pytest.mark.parametrize("said", [{}, {"ranks_per_node": None}, {"ranks_per_node": 2}])
def test_the_ranks_of_a_node_share_its_memory_also_where_their_number_is_the_default(said: dict[str, Any]) -> None:
    config = planned(mem="8G", **said).config
    ranks = int(pod_job(config, RunDir("/r")).options["ntasks-per-node"])
    _, memory_mb = room_per_rank(config.slurm)
    assert memory_mb is not None
    assert memory_mb * ranks == 8192
