"""Computes the figures of policies and tasks: statuses, rewards, pass@k, tokens, turns and durations."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np

from megaflow_hpc.monitor.evaluation import evaluate
from megaflow_hpc.report.rollouts import PHASES, RolloutColumns
from megaflow_hpc.report.series import Bin, Floats, Mask, Spread, edges_of, histogram, significant, spread

MAX_KS = 64
"""Maximum number of points of a pass@k curve."""
STAGES = ("submission", "scheduling", "environment startup", "task execution")
"""Stages from planning a campaign to the end of a rollout.

Submission ends when jobs are submitted. Scheduling ends when the final attempt starts. It includes time in Slurm's
queue, the startup of pods and engines, waiting for other rollouts, and failed attempts. Environment startup ends
when the agent starts. Task execution ends with the verdict.
"""
STATES = ("completed", "truncated", "failed", "cancelled")


class RolloutPhase(msgspec.Struct, kw_only=True):
    """A phase of a policy's rollouts."""

    policy: str
    phase: str
    """An element of :data:`~megaflow_hpc.report.rollouts.PHASES`, or ``other``."""
    seconds: Spread
    share: float
    """Fraction of the total seconds, from 0 to 1."""


class LatencyStage(msgspec.Struct, kw_only=True):
    """A stage between planning a campaign and the end of a policy's rollouts.

    The names match the latency breakdown in the MegaFlow paper (arXiv 2601.07526, figure 5).
    """

    policy: str
    stage: str
    """An element of :data:`STAGES`."""
    seconds: Spread
    share: float
    """Fraction of the total seconds, from 0 to 1."""


class PassAt(msgspec.Struct, kw_only=True):
    """A point of a pass@k curve with its 95 % interval."""

    k: int
    value: float
    low: float
    high: float
    tasks: int


class PolicyFigures(msgspec.Struct, kw_only=True):
    """Figures of a policy's rollouts."""

    policy: str
    rollouts: int
    states: dict[str, int]
    evaluation: dict[str, Any] | None
    """Result of :func:`megaflow_hpc.monitor.evaluation.evaluate`."""
    pass_at: list[PassAt]
    rewards: list[Bin]
    tokens: Spread
    sampled_tokens: Spread
    sequences: Spread
    turns: Spread
    seconds: Spread
    cpu_s: Spread
    """CPU seconds of each rollout's sandboxes. ``n`` counts only the rollouts whose value is known."""
    memory_peak_mb: Spread
    disk_peak_mb: Spread
    cpu_bins: list[Bin]
    memory_bins: list[Bin]
    token_bins: list[Bin]
    turn_bins: list[Bin]
    inexact: int = 0
    """Number of model calls for which some token ids are missing."""


class TaskFigures(msgspec.Struct, kw_only=True):
    """Figures of a task under a policy."""

    task: str
    policy: str
    samples: int
    rated: int
    passed: int
    mean: float | None
    """Mean reward. ``None`` if no sample has a reward."""
    seconds: float
    """Median duration of the task's rollouts in seconds."""


class Arm(msgspec.Struct, kw_only=True):
    """Mean rewards of the rollouts with one policy and one agent, by task. With ``role``, the rewards of this role in
    them."""

    policy: str
    agent: str
    role: str = ""
    """Team role that received these rewards. Empty for the main reward."""
    rewards: dict[str, float]
    """Mean reward of each task's rated samples, by task."""


def arms_of(rows: RolloutColumns) -> list[Arm]:
    """Returns the arms of a run, sorted by policy and agent."""
    arms = []
    for policy in rows.plain_policy.names:
        of_policy = rows.plain_policy.where(policy)
        for agent in rows.agent.names:
            own = of_policy & rows.agent.where(agent)
            for role, rewards in {"": rows.reward, **rows.roles}.items():
                means = _means_by_task(rows, own, rewards)
                if means or (own.any() and not role):
                    arms.append(Arm(policy=policy, agent=agent, role=role, rewards=means))
    return arms


def _means_by_task(rows: RolloutColumns, own: Mask, rewards: Floats) -> dict[str, float]:
    rated = own & np.isfinite(rewards)
    tasks = rows.task.codes[rated]
    counts = np.bincount(tasks, minlength=len(rows.task.names))
    sums = np.bincount(tasks, rewards[rated], len(rows.task.names))
    present = np.flatnonzero(counts)
    means = (sums[present] / counts[present]).tolist()
    return {rows.task.names[task]: significant(mean) for task, mean in zip(present.tolist(), means, strict=True)}


def policy_figures(rows: RolloutColumns, policy: str, threshold: float) -> PolicyFigures:
    """Computes the figures of a policy."""
    own = rows.policy.where(policy)
    by_task: dict[str, list[float | None]] = {}
    for task, reward in zip(rows.task.codes[own].tolist(), rows.reward[own].tolist(), strict=True):
        by_task.setdefault(rows.task.names[task], []).append(None if math.isnan(reward) else reward)
    max_samples = max((len(rewards) - rewards.count(None) for rewards in by_task.values()), default=0)
    ks = _ks(max_samples)
    curve = evaluate(by_task, ks, threshold) if ks else None
    ran = own & rows.carried_out
    tokens = rows.tokens.astype(np.float64)
    turns = rows.turns.astype(np.float64)

    def bins(values: Floats) -> list[Bin]:
        return histogram(values[ran], edges_of(values[rows.carried_out]))

    return PolicyFigures(
        policy=policy,
        rollouts=int(own.sum()),
        states={state: int((own & rows.status.where(state)).sum()) for state in STATES},
        evaluation=evaluate(by_task, threshold=threshold),
        pass_at=[PassAt(k=int(k), **point) for k, point in curve["pass_at"].items()] if curve else [],
        rewards=histogram(rows.reward[own], edges_of(rows.reward, 20)),
        tokens=spread(tokens[ran]),
        sampled_tokens=spread(rows.sampled[ran]),
        sequences=spread(rows.sequences[ran]),
        turns=spread(turns[ran]),
        seconds=spread(rows.seconds[ran]),
        cpu_s=spread(rows.cpu_s[ran]),
        memory_peak_mb=spread(rows.memory_peak_mb[ran]),
        disk_peak_mb=spread(rows.disk_peak_mb[ran]),
        cpu_bins=bins(rows.cpu_s),
        memory_bins=bins(rows.memory_peak_mb),
        token_bins=bins(tokens),
        turn_bins=bins(turns),
        inexact=int(rows.inexact[own].sum()),
    )


def phases_of(rows: RolloutColumns) -> list[RolloutPhase]:
    """Returns the phases of every policy, over its completed and truncated rollouts with recorded phases."""
    phases = []
    has_phases = rows.carried_out & ~np.isnan(rows.phases["model"] + rows.phases["environment"])
    for policy in rows.policy.names:
        own = rows.policy.where(policy) & has_phases
        if not own.any():
            continue
        parts = {name: rows.phases[name][own] for name in PHASES}
        # A rollout resumed in another allocation has the phases of both allocations, but the duration of the last one.
        parts["other"] = np.maximum(0.0, rows.seconds[own] - sum(parts.values()))
        for name, seconds, share in _shares(parts):
            phases.append(RolloutPhase(policy=policy, phase=name, seconds=seconds, share=share))
    return phases


def _shares(parts: dict[str, Floats]) -> Iterator[tuple[str, Spread, float]]:
    """Yields (name, distribution of seconds, fraction of the total seconds) for each part."""
    total = sum(float(seconds.sum()) for seconds in parts.values()) or 1.0
    for name, seconds in parts.items():
        yield name, spread(seconds), significant(float(seconds.sum()) / total)


def stages_of(rows: RolloutColumns, planned_at: float, submitted_at: float) -> list[LatencyStage]:
    """Returns the stages of every policy, over its completed and truncated rollouts with a known setup time.

    Args:
        planned_at: Planning time of the campaign in Unix seconds. If it is 0 (unknown), returns no stages.
        submitted_at: Submission time of the first job in Unix seconds. If it is 0 (unknown), all time before the start
            counts as scheduling.
    """
    stages = []
    has_startup = rows.carried_out & ~np.isnan(rows.phases["environment"])
    for policy in rows.policy.names if planned_at else ():
        own = rows.policy.where(policy) & has_startup
        if not own.any():
            continue
        seconds = rows.seconds[own]
        waited = np.maximum(rows.started_at[own], planned_at) - planned_at  # node clocks may be wrong
        submission = np.minimum(max(0.0, submitted_at - planned_at), waited)
        startup = np.minimum(rows.phases["environment"][own], seconds)
        parts = dict(zip(STAGES, (submission, waited - submission, startup, seconds - startup), strict=True))
        for name, spread_of_stage, share in _shares(parts):
            stages.append(LatencyStage(policy=policy, stage=name, seconds=spread_of_stage, share=share))
    return stages


def tasks_of(rows: RolloutColumns, threshold: float) -> list[TaskFigures]:
    """Returns the figures of every task under every policy, sorted by name."""
    if not len(rows):
        return []
    seconds = rows.seconds
    key = rows.task.codes * len(rows.policy.names) + rows.policy.codes
    order = np.lexsort((seconds, key))
    starts = np.flatnonzero(np.diff(key[order], prepend=-1))  # where each task and policy starts in the sorted order
    samples = np.diff(np.append(starts, len(order)))
    rewards = rows.reward[order]
    has_reward = ~np.isnan(rewards)
    rated = np.add.reduceat(has_reward.astype(np.int64), starts)
    passed = np.add.reduceat((rewards >= threshold).astype(np.int64), starts)
    sums = np.add.reduceat(np.where(has_reward, rewards, 0.0), starts)
    seconds = seconds[order]
    medians = (seconds[starts + (samples - 1) // 2] + seconds[starts + samples // 2]) / 2
    return [
        TaskFigures(
            task=rows.task.of(row),
            policy=rows.policy.of(row),
            samples=int(samples[at]),
            rated=int(rated[at]),
            passed=int(passed[at]),
            mean=significant(float(sums[at] / rated[at])) if rated[at] else None,
            seconds=significant(float(medians[at])),
        )
        for at, row in enumerate(order[starts].tolist())
    ]


def _ks(most: int) -> tuple[int, ...]:
    """Returns the values of k for a pass@k curve up to ``most``. Above :data:`MAX_KS`, the gaps between them grow."""
    if most <= MAX_KS:
        return tuple(range(1, most + 1))
    return tuple(np.unique(np.geomspace(1, most, MAX_KS).round().astype(np.int64)).tolist())
