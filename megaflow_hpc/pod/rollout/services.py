"""What the rollouts of one runner share: campaign, images, sandboxes, gateway, processes of agents."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from megaflow_hpc.agents import code
from megaflow_hpc.agents.remote import Zygote
from megaflow_hpc.config import CampaignConfig, Policy
from megaflow_hpc.config.quotas import gateways
from megaflow_hpc.environments import ApptainerProvider
from megaflow_hpc.model.gateway.limits import CallLimits, Quotas
from megaflow_hpc.model.gateway.server import ModelGateway
from megaflow_hpc.pod.rollout.recordings import replays_of
from megaflow_hpc.pod.rollout.suspension import PARTIAL_BYTES, PARTIAL_TOTAL_BYTES, Suspension
from megaflow_hpc.types import Sampling


@dataclass
class Services:
    """What the rollouts of one runner share."""

    config: CampaignConfig
    policies: Mapping[str, Policy]
    images: dict[str, str]
    """Image name in the tasks → SIF or directory; each start of a rollout brings those of its task."""
    provider: ApptainerProvider
    gateway: ModelGateway
    agents: Zygote = field(default_factory=lambda: Zygote(()))
    """Where Python agents run."""
    partials: Path | None = None
    """Where rollouts that are cut short are kept; ``None``: nowhere."""

    def __post_init__(self) -> None:
        rank_total_bytes = PARTIAL_TOTAL_BYTES / gateways(self.config.slurm.pods)
        self.suspension = Suspension(self.gateway, self.partials, PARTIAL_BYTES, rank_total_bytes)

    @classmethod
    async def open(
        cls,
        config: CampaignConfig,
        policies: Mapping[str, Policy],
        partials: Path,
        code_places: tuple[str, str] = ("", ""),
    ) -> Services:
        """Starts the gateway, the process that agents are forked from, and the provider of sandboxes.

        Args:
            partials: directory where rollouts that are cut short are kept.
            code_places: where agents of the campaign's own are looked for: as kept with the run, and beside its file.
        """
        code.look_in(*code_places)
        gateway = ModelGateway(
            policies=[name for name, policy in policies.items() if policy.model],
            limits=CallLimits(Quotas.of(config.quotas.model_dump()).share(gateways(config.slurm.pods))),
            replays=replays_of(policies),
            media_domains={name: policy.model.media_domains for name, policy in policies.items() if policy.model},
            keep_thoughts=[name for name, p in policies.items() if p.model and p.model.thoughts == "keep"],
            sampling={
                name: Sampling(policy.model.sampling.model_dump()) for name, policy in policies.items() if policy.model
            },
        )
        await gateway.start()
        agents = Zygote([policy.agent.name for policy in policies.values()], *code_places)
        return cls(config, policies, {}, ApptainerProvider(), gateway, agents, partials)

    async def close(self) -> None:
        """Ends all of them, and with the provider every sandbox."""
        self.agents.close()
        await self.provider.close()
        await self.gateway.stop()
