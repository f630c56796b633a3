"""The policy to train, and the function that reads it from a run."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass

from megaflow_hpc.config.training import PolicyTraining, TrainingConfig
from megaflow_hpc.errors import ConfigError
from megaflow_hpc.ledger.tasks import planned_tasks
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.record import RunRecord


@dataclass(frozen=True)
class TrainedPolicy:
    """A policy that a run trains, with all that is needed to request and plan its rollouts."""

    name: str
    settings: PolicyTraining
    agent: str
    """Name of the agent that runs the policy's rollouts."""
    tasks: tuple[str, ...]
    """Ids of the tasks to train on."""
    held_out: frozenset[str]
    """Ids of the tasks reserved for evaluation."""
    owners: frozenset[str] | None
    """Policies whose rollouts contain this policy's tokens. ``None`` means all, for a model that agents of other
    policies call too."""
    followed: tuple[str, ...]
    """Policies whose training steps this policy's steps follow, if it samples nothing itself (``samples: 0``);
    see :mod:`~megaflow_hpc.training.readiness`."""
    helpers: tuple[str, ...]
    """Policies that learn from this policy's groups, because they sample nothing themselves."""
    samples: int
    """Number of rollouts in a group. 0: the policy runs no tasks."""
    pods: int
    """Number of pods in the campaign. New blocks are sized for it."""
    pass_threshold: float
    """Minimum reward of a passed rollout."""
    seed: int
    """Seed of all random choices."""
    temperature: float
    """Sampling temperature, by which a trainer divides logits."""


def trained_policy(run: RunDir, record: RunRecord, name: str | None, config: TrainingConfig) -> TrainedPolicy:
    """Returns the policy to train.

    Args:
        run: the run directory.
        record: the planning record of the run.
        name: the policy; ``None`` selects the only one that the campaign trains.
        config: the section ``training``.

    Raises:
        ConfigError: the policy is not trained, or ``name`` is missing and several policies are trained.
    """
    name = _chosen(run, name, config)
    planned = record.policies.get(name)
    model = (planned.model if planned else None) or {}
    include = planned.include if planned else []
    held_out = frozenset(record.held_out)
    tasks = [task for task in planned_tasks(run, record) if task not in held_out]
    if include:
        tasks = [task for task in tasks if any(fnmatch.fnmatchcase(task, pattern) for pattern in include)]
    samples = planned.samples if planned else 1
    own = [other for other in config.policies if other not in record.policies or record.policies[other].samples]
    campaign = record.config
    if samples:  # pods close a group once it has enough rewards
        samples += campaign.scheduling.spare
    return TrainedPolicy(
        name=name,
        settings=config.policies[name],
        agent=str(planned.agent.get("name", "")) if planned else "",
        tasks=tuple(tasks),
        held_out=held_out,
        owners=frozenset({name}) if planned is None or planned.samples else None,
        followed=() if samples else tuple(own),
        helpers=tuple(other for other in config.policies if other not in own) if samples else (),
        samples=samples,
        pods=campaign.slurm.pods.total,
        pass_threshold=campaign.pass_threshold,
        seed=campaign.seed or 0,
        temperature=float(model.get("sampling", {}).get("temperature", 1.0)),
    )


def _chosen(run: RunDir, name: str | None, config: TrainingConfig) -> str:
    if name is None and len(config.policies) == 1:
        (name,) = config.policies
    if name not in config.policies:
        reason = f"policy {name!r} is not trained" if name else "several policies are trained; name one"
        raise ConfigError(f"{run}: {reason}; training.policies has: {', '.join(config.policies)}")
    return name
