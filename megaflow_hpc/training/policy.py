"""The policy that a trainer trains, as the campaign describes it."""

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
    """One policy of a run, with all that requesting and planning its rollouts needs to know."""

    name: str
    settings: PolicyTraining
    agent: str
    """Name of the agent that rolls the policy out."""
    tasks: tuple[str, ...]
    """Ids of the tasks to train on."""
    held_out: frozenset[str]
    """Ids of the tasks that only evaluation uses."""
    owners: frozenset[str] | None
    """Policies whose rollouts hold this policy's tokens; ``None`` means every policy, as for a model that the agents
    of other policies call too."""
    samples: int
    """Rollouts of each group."""
    pods: int
    """Pods of the campaign; new blocks are cut for this number."""
    pass_threshold: float
    """Smallest reward of a passed rollout."""
    seed: int
    """Seed of every random choice."""
    temperature: float
    """Sampling temperature. A trainer divides logits by it."""


def trained_policy(run: RunDir, record: RunRecord, name: str | None, config: TrainingConfig) -> TrainedPolicy:
    """Returns the policy to train.

    Args:
        run: the run directory.
        record: what was planned.
        name: the policy; ``None`` chooses the only one that the campaign trains.
        config: the section ``training``.

    Raises:
        ConfigError: the policy is not trained, or several are and none is named.
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
    if record.campaign:  # pods close the group when it has enough rewards
        samples += record.config.scheduling.spare
    return TrainedPolicy(
        name=name,
        settings=config.policies[name],
        agent=str(planned.agent.get("name", "")) if planned else "",
        tasks=tuple(tasks),
        held_out=held_out,
        owners=frozenset({name}) if planned is None or planned.samples else None,
        samples=samples,
        pods=record.config.slurm.pods.total if record.campaign else 1,
        pass_threshold=record.config.pass_threshold if record.campaign else 1.0,
        seed=(record.config.seed if record.campaign else None) or 0,
        temperature=float(model.get("sampling", {}).get("temperature", 1.0)),
    )


def _chosen(run: RunDir, name: str | None, config: TrainingConfig) -> str:
    if name is None and len(config.policies) == 1:
        (name,) = config.policies
    if name not in config.policies:
        reason = f"policy {name!r} is not trained" if name else "several policies are trained; name one"
        raise ConfigError(f"{run}: {reason}; training.policies has: {', '.join(config.policies)}")
    return name
