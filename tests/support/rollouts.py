"""Rollouts of one attempt each, by the real steps in real sandboxes, without a pod around them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megaflow_hpc.config import AgentConfig, CampaignConfig, Policy
from megaflow_hpc.environments import ApptainerProvider
from megaflow_hpc.host.files import remove_tree
from megaflow_hpc.host.wire import unpack
from megaflow_hpc.model.gateway.server import ModelGateway
from megaflow_hpc.pod.outcome import Outcome
from megaflow_hpc.pod.rollout.rollout import run_attempt
from megaflow_hpc.pod.rollout.services import Services
from megaflow_hpc.trajectories.hdf5.writer import TrajectoryWriter
from megaflow_hpc.trajectories.maintenance.validate import validate
from megaflow_hpc.trajectory import Trajectory
from megaflow_hpc.types import Rollout, Task
from tests.support.waiting import some_at_a_time


def attempts(
    tasks: Mapping[str, Task], images: dict[str, str], environment: dict[str, Any], place: Path, at_once: int = 6
) -> dict[str, Trajectory]:
    """Runs the oracle on each task, given by name, and checks the file that holds all of them.

    Args:
        environment: section of the campaign file.
        place: empty directory to work in.
    """
    config = CampaignConfig.model_validate(
        {"name": "attempts", "tasks": str(place), "agent": "oracle", "environment": {"network": "none", **environment}}
    )
    policies = {"default": Policy(agents=(AgentConfig(name="oracle"),))}

    async def main() -> dict[str, Trajectory]:
        async with ApptainerProvider(place / "scratch") as provider:
            services = Services(config, policies, images, provider, ModelGateway())

            async def one(task: Task) -> Trajectory:
                return (await run_attempt(services, Rollout(task.id, "default", 0, "oracle"), task, 0)).trajectory

            running = [one(task) for task in tasks.values()]
            try:
                return dict(zip(tasks, await asyncio.gather(*some_at_a_time(at_once, running)), strict=True))
            finally:
                services.agents.close()

    found = asyncio.run(main())
    assert os.listdir(place / "scratch" / "owners") == []
    remove_tree(place / "scratch")
    with TrajectoryWriter(place / "trajectories.h5", "attempts") as writer:
        for ended in found.values():
            writer.append(Trajectory.from_record(unpack(Outcome.of(ended).record)))
    assert validate(place / "trajectories.h5") == []
    return found
