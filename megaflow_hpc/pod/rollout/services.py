"""Services shared by the rollouts of one runner: images, sandboxes, gateway and agent processes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from megaflow_hpc.agents import code
from megaflow_hpc.agents.pool import AgentPool
from megaflow_hpc.agents.remote import Zygote
from megaflow_hpc.config import CampaignConfig, Policy
from megaflow_hpc.config.model import TokenPrice
from megaflow_hpc.config.quotas import gateways
from megaflow_hpc.environments import ApptainerProvider
from megaflow_hpc.environments.services.node import NodeServices
from megaflow_hpc.environments.services.remote import RemoteServices
from megaflow_hpc.model.gateway.limits import CallLimits, Quotas
from megaflow_hpc.model.gateway.replay import Replay
from megaflow_hpc.model.gateway.server import ModelGateway
from megaflow_hpc.pod.rollout.judges import Judges
from megaflow_hpc.pod.rollout.preemption import MAX_CAMPAIGN_BYTES, MAX_CHECKPOINT_BYTES, Preemption
from megaflow_hpc.trajectory import Trajectory
from megaflow_hpc.types import Sampling


@dataclass
class Services:
    """The campaign of a runner, and the services that its rollouts share."""

    config: CampaignConfig
    policies: Mapping[str, Policy]
    images: dict[str, str]
    """SIF files or directories by the image names that tasks use. Each rollout adds its task's images when it
    starts."""
    provider: ApptainerProvider | None
    """Starts sandboxes. ``None`` if no task needs a sandbox, in which case this node needs no Apptainer."""
    gateway: ModelGateway
    agents: Zygote = field(default_factory=lambda: Zygote(()))
    """Runs Python agents in separate processes."""
    checkpoints: Path | None = None
    """Directory for checkpoints. ``None`` disables checkpoints."""

    def __post_init__(self) -> None:
        campaign = hashlib.sha256(str(self.checkpoints or id(self)).encode()).hexdigest()[:16]
        self.remote, self.node = RemoteServices(), NodeServices(self.provider, campaign)
        max_rank_bytes = MAX_CAMPAIGN_BYTES / gateways(self.config.slurm.pods)
        self.conversing = AgentPool(self.agents)
        """Runs Python agents of tasks without a sandbox, with many agents in one process."""
        self.preemption = Preemption(self.gateway, self.checkpoints, MAX_CHECKPOINT_BYTES, max_rank_bytes)

    @property
    def shared(self) -> Mapping[str, RemoteServices]:
        """Services that rollouts share, by the scope in which they share them."""
        return {"campaign": self.remote, "node": self.node}

    @classmethod
    async def open(
        cls,
        config: CampaignConfig,
        policies: Mapping[str, Policy],
        checkpoints: Path,
        code_places: tuple[str, str] = ("", ""),
        sandboxes: bool = True,
    ) -> Services:
        """Starts the gateway, the process that forks agents, and the sandbox provider.

        Args:
            checkpoints: Directory for checkpoints.
            code_places: The directories with the campaign's own agents: the run's copy, then the campaign file's
                directory.
            sandboxes: False if no task has a sandbox.
        """
        code.look_in(*code_places)
        models = {name: policy.model for name, policy in policies.items() if policy.model is not None}
        gateway = ModelGateway(
            policies=[name for name, model in models.items() if not model.judge],
            roles=config.team.policies if config.team else {},
            owner=config.team.owner if config.team else "",
            learners=[name for name in config.requested if name in policies and policies[name].samples],
            judges=[name for name, model in models.items() if model.judge],
            limits=CallLimits(Quotas.of(config.quotas.model_dump()).share(gateways(config.slurm.pods))),
            replays=_replays(policies),
            keep_thoughts=[name for name, model in models.items() if model.thoughts == "keep"],
            sampling={name: Sampling(model.sampling.model_dump()) for name, model in models.items()},
            prices={name: (price.of(1, 0), price.of(0, 1)) for name, model in models.items() if (price := model.price)},
        )
        await gateway.start()
        agents = Zygote([agent.name for policy in policies.values() for agent in policy.agents], *code_places)
        provider = ApptainerProvider() if sandboxes else None
        return cls(config, policies, {}, provider, gateway, agents, checkpoints)

    @property
    def prices(self) -> dict[str, TokenPrice]:
        """Token price of each policy's model that has a price, by policy."""
        models = {name: policy.model for name, policy in self.policies.items()}
        return {name: model.price for name, model in models.items() if model and model.price}

    @property
    def metered(self) -> dict[str, TokenPrice | None]:
        """Token price of each policy's model, or ``None``, by policy. Includes only models with a price and external
        endpoints."""
        models = {name: policy.model for name, policy in self.policies.items() if policy.model}
        return {name: model.price for name, model in models.items() if model.price or model.is_external}

    def judges(self, rollout_id: str) -> Judges:
        """Returns access to the campaign's judges for one rollout."""
        names = self.config.judges()
        reward_models = [name for name in names if self.config.models[name].judge == "reward"]
        return Judges(self.gateway, rollout_id, names, self.prices, reward_models)

    async def close(self) -> None:
        """Stops all services and all sandboxes."""
        self.conversing.close()
        self.agents.close()
        await self.node.close()
        if self.provider is not None:
            await self.provider.close()
        await self.gateway.stop()


class StoredRecordings:
    """Recorded rollouts in a run directory or trajectories file. Policies with ``engine: replay`` use them."""

    def __init__(self, path: str) -> None:
        self._path = path

    def trajectory(self, rollout_id: str) -> Trajectory | None:
        """Returns the recorded rollout with this id, or ``None`` if there is none. Raises ConfigError if the recordings
        cannot be read."""
        from megaflow_hpc.trajectories import open_trajectories  # imports h5py and numpy; needed only for replay

        with open_trajectories(self._path) as store:
            return store[rollout_id].trajectory() if rollout_id in store else None


def _replays(policies: Mapping[str, Policy]) -> dict[str, Replay]:
    """Returns the replay of each policy with ``engine: replay``, by policy."""
    replays = {}
    for name, policy in policies.items():
        if policy.model is not None and policy.model.engine == "replay":
            args = policy.model.args
            recordings = StoredRecordings(str(policy.model.path))
            replays[name] = Replay(recordings, str(args.get("policy", "")), args.get("diverged") == "answer")
    return replays
