"""Defines the policy that a run trains, and its evaluation on held-out tasks.

Evaluation rollouts are ordinary rollouts whose round is the step number. As in any rollout, the version that sampled
each token is recorded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megaflow_hpc.config import resolved
from megaflow_hpc.config.sections import AgentConfig, scaffold
from megaflow_hpc.config.training import PolicyTraining, TrainingConfig
from megaflow_hpc.errors import ConfigError
from megaflow_hpc.ledger import add_blocks
from megaflow_hpc.ledger.tasks import planned_tasks
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.record import RunRecord, read_run
from megaflow_hpc.trajectories.reading.store import open_trajectories
from megaflow_hpc.types import Rollout, round_of


@dataclass(frozen=True)
class TrainedPolicy:
    """A policy that a run trains, with the settings for requesting and planning its rollouts."""

    name: str
    settings: PolicyTraining
    agents: tuple[AgentConfig, ...]
    """Agents that run the policy's rollouts."""
    tasks: tuple[str, ...]
    """Ids of the tasks to train on."""
    held_out: frozenset[str]
    """Ids of the tasks reserved for evaluation."""
    runs: str
    """Policy under which rollouts are requested. It is the policy itself or, in a team, the policy that owns the
    team."""
    owners: frozenset[str] | None
    """Policies whose rollouts contain this policy's tokens. ``None`` means all policies, for a model that other
    policies' agents call too."""
    roles: Mapping[str, str | None]
    """Maps each role of the policy in its team to the name of the role's reward. ``None`` means the rollout's own
    reward. Empty if there is no team."""
    followed: tuple[str, ...]
    """Policies whose training steps a helper policy follows. Empty for policies that run tasks. See
    :mod:`~megaflow_hpc.training.readiness`."""
    helpers: tuple[str, ...]
    """Helper policies, which run no tasks and learn from this policy's groups."""
    samples: int
    """Number of rollouts in a group. 0 if the policy runs no tasks."""
    pods: int
    """Number of pods in the campaign, which determines the size of new blocks."""
    pass_threshold: float
    """Minimum reward of a passed rollout."""
    seed: int
    """Seed of all random choices."""
    model: Mapping[str, Any]
    """The policy's section ``model`` of the campaign file."""

    @property
    def temperature(self) -> float:
        """Sampling temperature, by which a trainer divides logits."""
        return float(self.model.get("sampling", {}).get("temperature", 1.0))

    @property
    def max_tokens(self) -> int | None:
        """Maximum number of tokens that a rollout may sample. ``None`` without a limit."""
        limits = [agent.max_tokens for agent in self.agents]
        return max(limit for limit in limits if limit) if limits and all(limits) else None

    def rollouts(self, groups: Sequence[tuple[str, int]], samples: int, random: np.random.Generator) -> list[Rollout]:
        """Returns the rollouts of groups to train on.

        Each group is assigned to one agent, in proportion to the agents' shares. With ``mix_agents``, each rollout is
        assigned separately.

        Args:
            groups: task and round of each group.
            samples: number of rollouts in a group.
            random: random generator that assigns agents.
        """
        if self.settings.mix_agents:
            return [
                Rollout(task, self.runs, sample, agent.title, round)
                for task, round in groups
                for sample, agent in enumerate(_apportioned(self.agents, samples, random))
            ]
        return [
            Rollout(task, self.runs, sample, agent.title, round, scaffold(agent, self.agents))
            for (task, round), agent in zip(groups, _apportioned(self.agents, len(groups), random), strict=True)
            for sample in range(samples)
        ]

    def evaluation_rollouts(self, step: int, samples: int) -> list[Rollout]:
        """Returns the rollouts that evaluate a step: each held-out task with each agent. Their round is the step
        number."""
        return [
            Rollout(task, self.runs, sample, agent.title, step, scaffold(agent, self.agents))
            for task in sorted(self.held_out)
            for agent in self.agents
            for sample in range(samples)
        ]


def _apportioned(agents: Sequence[AgentConfig], count: int, random: np.random.Generator) -> list[AgentConfig]:
    """Returns ``count`` agents in random order. Each agent occurs in proportion to its share, rounded up or down."""
    if len(agents) == 1 or not count:
        return [agents[0]] * count
    bounds = np.cumsum([agent.share for agent in agents])
    points = (np.arange(count) + random.random()) * (bounds[-1] / count)
    chosen = np.searchsorted(bounds[:-1], points, side="right")
    return [agents[number] for number in random.permutation(chosen)]


def trained_policy(run: RunDir, record: RunRecord, name: str | None, config: TrainingConfig) -> TrainedPolicy:
    """Returns the policy to train.

    Args:
        run: the run directory.
        record: the planning record of the run.
        name: the policy. ``None`` selects the only policy that the campaign trains.
        config: the section ``training``.

    Raises:
        ConfigError: the policy is not trained, or ``name`` is missing and several policies are trained.
    """
    name = _chosen(run, name, config)
    campaign = record.config
    team = campaign.team
    asker, runs = name, name
    if team:  # the owner requests the rollouts of the whole team
        runs = team.owning_policy
        members = dict.fromkeys([runs, *team.policies.values()])
        if name not in members:
            raise ConfigError(f"{run}: policy {name!r} has no role in the campaign's team: {', '.join(members)}")
        asker = next(member for member in members if member in config.policies)
    own = record.policies.get(name)
    planned = record.policies.get(runs)
    held_out = frozenset(record.held_out)
    samples = planned.samples if planned else 1
    if team:
        askers = [asker]
        samples = samples if name == asker else 0
    else:
        askers = [other for other in config.policies if other not in record.policies or record.policies[other].samples]
    if samples:  # pods close a group once it has enough rewards
        samples += campaign.scheduling.spare
    return TrainedPolicy(
        name=name,
        settings=config.policies[name],
        agents=tuple(resolved(AgentConfig, agent) for agent in planned.agents) if planned else (),
        tasks=tuple(task for task in planned_tasks(run, record) if task not in held_out),
        held_out=held_out,
        runs=runs,
        owners=frozenset({runs}) if planned is None or planned.samples else None,
        roles=team.roles_of(name) if team else {},
        followed=() if samples else tuple(askers),
        helpers=tuple(other for other in config.policies if other not in askers) if samples else (),
        samples=samples,
        pods=campaign.slurm.pods.total,
        pass_threshold=campaign.pass_threshold,
        seed=campaign.seed or 0,
        model=(own.model if own else None) or {},
    )


def _chosen(run: RunDir, name: str | None, config: TrainingConfig) -> str:
    if name is None and len(config.policies) == 1:
        (name,) = config.policies
    if name not in config.policies:
        reason = f"policy {name!r} is not trained" if name else "several policies are trained; name one"
        raise ConfigError(f"{run}: {reason}; training.policies has: {', '.join(config.policies)}")
    return name


@dataclass(frozen=True)
class Evaluation:
    """One agent's results on the held-out tasks after a training step."""

    step: int
    agent: str
    """Name of the agent in the campaign."""
    rollouts: int
    """Number of rollouts with a reward."""
    reward: float
    """Mean reward."""
    passed: float
    """Fraction of rollouts that passed."""


def request_evaluation(run: RunDir, policy: TrainedPolicy, samples: int, step: int) -> None:
    """Requests rollouts of the held-out tasks after a step. Idempotent.

    Raises:
        OSError: the run directory is unavailable.
    """
    add_blocks(
        run, policy.evaluation_rollouts(step, samples), token=f"{policy.name}.evaluate.{step:06d}", pods=policy.pods
    )


def evaluations(run: RunDir, policy: str) -> list[Evaluation]:
    """Returns the results of all evaluations so far, sorted by step and agent. The policies of a team share their
    evaluations.

    Reads all rows of the campaign's trajectories.

    Raises:
        ConfigError: the run is missing.
    """
    record = read_run(run)
    held_out, threshold = set(record.held_out), record.config.pass_threshold
    team = record.config.team
    if team and policy in team.policies.values():
        policy = team.owning_policy
    results: dict[tuple[int, str], list[float]] = {}
    with open_trajectories(run.path) as store:
        names = ("task_id", "group_id", "policy", "agent", "reward")
        columns = [store.source.column(f"trajectories/{name}") for name in names]
        for task, group, whose, agent, reward in zip(*columns, strict=True):
            if task in held_out and whose == policy and not math.isnan(reward):
                results.setdefault((round_of(task, group), str(agent)), []).append(float(reward))
    return [
        Evaluation(step, agent, len(own), float(np.mean(own)), float(np.mean([reward >= threshold for reward in own])))
        for (step, agent), own in sorted(results.items())
    ]
