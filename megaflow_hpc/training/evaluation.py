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
from megaflow_hpc.types import Rollout, round_of


@dataclass(frozen=True)
class Evaluation:
    """Results on the held-out tasks after one step."""

    step: int
    rollouts: int
    """Number of rollouts with a reward."""
    reward: float
    """Mean reward."""
    passed: float
    """Share of rollouts that passed."""


def request_evaluation(run: RunDir, policy: TrainedPolicy, samples: int, step: int) -> None:
    """Requests rollouts of the held-out tasks after a step. Idempotent.

    Raises:
        OSError: the run directory is unavailable.
    """
    tasks = sorted(policy.held_out)
    rollouts = [Rollout(task, policy.name, sample, policy.agent, step) for task in tasks for sample in range(samples)]
    add_blocks(run, rollouts, token=f"{policy.name}.evaluate.{step:06d}", pods=policy.pods)


def evaluations(run: RunDir, policy: str) -> list[Evaluation]:
    """Returns the results of all evaluations so far, in step order. Reads the rows of the whole campaign.

    Raises:
        ConfigError: the run is missing.
    """
    record = read_run(run)
    held_out, threshold = set(record.held_out), record.config.pass_threshold
    rewards_by_step: dict[int, list[float]] = {}
    with open_trajectories(run.path) as store:
        names = ("task_id", "group_id", "policy", "reward")
        columns = [store.source.column(f"trajectories/{name}") for name in names]
        for task, group, whose, reward in zip(*columns, strict=True):
            if task in held_out and whose == policy and not math.isnan(reward):
                rewards_by_step.setdefault(round_of(task, group), []).append(float(reward))
    return [
        Evaluation(step, len(own), float(np.mean(own)), float(np.mean([reward >= threshold for reward in own])))
        for step, own in sorted(rewards_by_step.items())
    ]
