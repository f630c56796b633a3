"""The services that the rollouts of one runner share: images, sandboxes, gateway, agent processes."""

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
from megaflow_hpc.model.gateway.replay import Replay
from megaflow_hpc.model.gateway.server import ModelGateway
from megaflow_hpc.pod.rollout.preemption import MAX_CAMPAIGN_BYTES, MAX_CHECKPOINT_BYTES, Preemption
from megaflow_hpc.trajectory import Trajectory
from megaflow_hpc.types import Sampling


@dataclass
class Services:
    """The campaign, and the services that the rollouts of one runner share."""

    config: CampaignConfig
    policies: Mapping[str, Policy]
    images: dict[str, str]
    """Image name in the tasks → SIF or directory. Each start of a rollout adds the images of its task."""
    provider: ApptainerProvider
    gateway: ModelGateway
    agents: Zygote = field(default_factory=lambda: Zygote(()))
    """Runs Python agents in processes of their own."""
    checkpoints: Path | None = None
    """Directory for checkpoints. ``None``: write none."""

    def __post_init__(self) -> None:
        max_rank_bytes = MAX_CAMPAIGN_BYTES / gateways(self.config.slurm.pods)
        self.preemption = Preemption(self.gateway, self.checkpoints, MAX_CHECKPOINT_BYTES, max_rank_bytes)

    @classmethod
    async def open(
        cls,
        config: CampaignConfig,
        policies: Mapping[str, Policy],
        checkpoints: Path,
        code_places: tuple[str, str] = ("", ""),
    ) -> Services:
        """Starts the gateway, the process from which agents are forked, and the provider of sandboxes.

        Args:
            checkpoints: directory for checkpoints.
            code_places: directories with the campaign's own agents: the copy in the run, and beside the campaign file.
        """
        code.look_in(*code_places)
        models = {name: policy.model for name, policy in policies.items() if policy.model is not None}
        gateway = ModelGateway(
            policies=list(models),
            limits=CallLimits(Quotas.of(config.quotas.model_dump()).share(gateways(config.slurm.pods))),
            replays=_replays(policies),
            media_domains={name: model.media_domains for name, model in models.items()},
            keep_thoughts=[name for name, model in models.items() if model.thoughts == "keep"],
            sampling={name: Sampling(model.sampling.model_dump()) for name, model in models.items()},
        )
        await gateway.start()
        agents = Zygote([policy.agent.name for policy in policies.values()], *code_places)
        return cls(config, policies, {}, ApptainerProvider(), gateway, agents, checkpoints)

    async def close(self) -> None:
        """Ends all services, and every sandbox."""
        self.agents.close()
        await self.provider.close()
        await self.gateway.stop()


class StoredRecordings:
    """Recorded rollouts of a run directory or a trajectories file, from which policies are replayed."""

    def __init__(self, path: str) -> None:
        self._path = path

    def trajectory(self, rollout_id: str) -> Trajectory | None:
        """Returns a recorded rollout, if there is one of this id. Raises ConfigError if they cannot be read."""
        from megaflow_hpc.trajectories import open_trajectories  # imports h5py and numpy, which other runners lack

        with open_trajectories(self._path) as store:
            return store[rollout_id].trajectory() if rollout_id in store else None


def _replays(policies: Mapping[str, Policy]) -> dict[str, Replay]:
    """Returns the replay of each policy with ``engine: replay``, by its name."""
    replays = {}
    for name, policy in policies.items():
        if policy.model is not None and policy.model.engine == "replay":
            args = policy.model.args
            recordings = StoredRecordings(str(policy.model.path))
            replays[name] = Replay(recordings, str(args.get("policy", "")), args.get("diverged") == "answer")
    return replays
