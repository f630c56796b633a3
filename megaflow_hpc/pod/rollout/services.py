"""What the rollouts of one runner share, and what follows for each from the campaign and its task."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from megaflow_hpc.agents.remote import Zygote
from megaflow_hpc.config import CampaignConfig, Policy
from megaflow_hpc.config.quotas import gateways
from megaflow_hpc.environments import ApptainerProvider, SandboxSpec
from megaflow_hpc.model.gateway.limits import CallLimits, Quotas
from megaflow_hpc.model.gateway.server import ModelGateway
from megaflow_hpc.pod.rollout.recordings import replays_of
from megaflow_hpc.pod.rollout.suspension import Suspension
from megaflow_hpc.tasks.verifier import VerificationContext
from megaflow_hpc.types import Task


@dataclass
class Services:
    """What the rollouts of one runner share."""

    config: CampaignConfig
    policies: Mapping[str, Policy]
    images: Mapping[str, str]
    """Image name in the tasks → SIF or directory."""
    provider: ApptainerProvider
    gateway: ModelGateway
    agents: Zygote = field(default_factory=lambda: Zygote(()))
    """Where Python agents run."""
    partials: Path | None = None
    """Where rollouts that are cut short are kept; ``None``: nowhere."""

    def __post_init__(self) -> None:
        self.suspension = Suspension(self.gateway, self.partials, self.config.scheduling.partial_mb * 10**6)

    @classmethod
    async def open(
        cls, config: CampaignConfig, policies: Mapping[str, Policy], images: Mapping[str, str], partials: Path
    ) -> Services:
        gateway = ModelGateway(
            policies=[name for name, policy in policies.items() if policy.model],
            limits=CallLimits(Quotas.of(config.quotas.model_dump()).share(gateways(config.slurm.pods))),
            replays=replays_of(policies),
        )
        await gateway.start()
        agents = Zygote([policy.agent.name for policy in policies.values()])
        return cls(config, policies, images, ApptainerProvider(), gateway, agents, partials)

    async def close(self) -> None:
        self.agents.close()
        await self.provider.close()
        await self.gateway.stop()


def sandbox_spec(services: Services, task: Task) -> SandboxSpec:
    environment = services.config.environment
    limits, default = task.limits, environment.limits
    return SandboxSpec(
        image=services.images[task.image],
        env=dict(task.env),
        workdir=task.workdir,
        user=task.user,
        network=environment.network_of(task),
        memory_mb=limits.memory_mb or default.memory_mb,
        cpus=limits.cpus or default.cpus,
        disk_mb=limits.disk_mb or default.disk_mb,
        processes=default.processes or limits.processes or 512,
        mode=environment.mode_of(task),
        cpu_s=limits.cpu_s or default.cpu_s,
        wall_s=limits.wall_s or default.wall_s,
    )


def verification_context(services: Services) -> VerificationContext:
    """Where and how this campaign verifies."""
    environment = services.config.environment
    return VerificationContext(
        fresh=environment.verification == "fresh",
        network="none" if environment.network == "gateway" else environment.network,
        start=lambda other: services.provider.start(sandbox_spec(services, other)),
    )
