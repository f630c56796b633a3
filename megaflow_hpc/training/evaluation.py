"""Evaluates a policy on held-out tasks every few training steps.

Evaluation rollouts are ordinary rollouts whose round is the step number. Their tokens record the version that sampled
them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from megaflow_hpc.ledger import add_blocks
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.record import read_run
from megaflow_hpc.training.policy import TrainedPolicy
from megaflow_hpc.trajectories.reading.store import open_trajectories
from megaflow_hpc.types import round_of


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
    """Requests rollouts of the held-out tasks after a step. Repeating the call requests nothing new.

    Raises:
        OSError: the run directory is unavailable.
    """
    add_blocks(
        run, policy.evaluation_rollouts(step, samples), token=f"{policy.name}.evaluate.{step:06d}", pods=policy.pods
    )


def evaluations(run: RunDir, policy: str) -> list[Evaluation]:
    """Returns the results of all evaluations so far, sorted by step and agent. Reads all rows of the campaign's
    trajectories. All policies of a team have the same evaluations.

    Raises:
        ConfigError: the run is missing.
    """
    record = read_run(run)
    held_out, threshold = set(record.held_out), record.config.pass_threshold
    if (team := record.config.team) and policy in team.policies.values():
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
