"""Evaluation while training: tasks that are not trained on, asked for every few steps.

The rollouts are ordinary ones, of the round that is the step's number; their tokens say which version answered.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megaflow_hpc.ledger import add_blocks
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.record import read_run
from megaflow_hpc.trajectories.reading.store import open_trajectories
from megaflow_hpc.types import Rollout, round_of


@dataclass(frozen=True)
class Evaluation:
    """What the held-out tasks gave after one step."""

    step: int
    rollouts: int
    """Those that have a reward."""
    reward: float
    """Their mean."""
    passed: float
    """Share of them that passed."""


def ask(run: RunDir, policy: str, agent: str, tasks: Sequence[str], samples: int, step: int, pods: int) -> None:
    """Asks for the held-out tasks as the policy is after a step; done twice it is done once. Raises OSError."""
    rollouts = [Rollout(task, policy, sample, agent, step) for task in tasks for sample in range(samples)]
    add_blocks(run, rollouts, token=f"{policy}.evaluate.{step:06d}", pods=pods)


def evaluations(run: RunDir, policy: str) -> list[Evaluation]:
    """Returns what is there of each evaluation, in the order of steps. Reads the rows of the whole campaign.

    Raises:
        ConfigError: no such run.
    """
    record = read_run(run)
    held_out, threshold = set(record.held_out), record.config.evaluation.threshold
    found: dict[int, list[float]] = {}
    with open_trajectories(run.path) as store:
        names = ("task_id", "group_id", "policy", "reward")
        columns = [store.source.column(f"trajectories/{name}") for name in names]
        for task, group, whose, reward in zip(*columns, strict=True):
            if task in held_out and whose == policy and not math.isnan(reward):
                found.setdefault(round_of(task, group), []).append(float(reward))
    return [
        Evaluation(step, len(own), float(np.mean(own)), float(np.mean([reward >= threshold for reward in own])))
        for step, own in sorted(found.items())
    ]
