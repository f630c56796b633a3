"""What the policies do to the makespan of one campaign in virtual time, each beside the same campaign without it.

1,250 tasks with eight samples each on 1,000 slots in eight pods. A task has a typical duration (log-normal, σ 0.6,
around ten minutes) and its samples vary around it as much; two in a hundred hang until a limit of two hours. A third of
the tasks is never solved, a third always, a third every other time.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import random
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

from megaflow_hpc.pod.scheduling.groups import GroupRules
from tests.bench.dispatch import simulated_figure
from tests.bench.figures import Figure
from tests.bench.simulation import Shape, SimulationResult, simulate

TASKS, SAMPLES, SLOTS, PODS = 1250, 8, 1000, 8
TYPICAL_S, LIMIT_S, HANGING = 600.0, 7200.0, 0.02


def _campaign(seed: int, samples: int) -> Shape:
    draw = random.Random(seed)
    durations: list[float] = []
    rewards: list[float] = []
    for _ in range(TASKS):
        typical_s = TYPICAL_S * math.exp(draw.gauss(0.0, 0.6))
        solved = draw.choice((0.0, 0.5, 1.0))
        for _ in range(samples):
            lasts_s = min(LIMIT_S, typical_s * math.exp(draw.gauss(0.0, 0.6)))
            durations.append(LIMIT_S if draw.random() < HANGING else lasts_s)
            rewards.append(float(draw.random() < solved))
    return Shape(durations, PODS, SLOTS, samples=samples, rewards=rewards)


def compare(seed: int) -> dict[str, float]:
    """Policy → its makespan over that without any."""
    plain = _campaign(seed, SAMPLES)
    base = simulate(plain)

    def over(outcome: SimulationResult) -> float:
        return outcome.makespan_s / base.makespan_s

    spare = replace(_campaign(seed, SAMPLES + 2), rules=GroupRules(wanted={"p": SAMPLES}))
    dropped = replace(plain, rules=GroupRules(signal_after=4))
    return {
        "spare: 2": over(simulate(spare)),
        "signal_after: 4": over(simulate(dropped)),
    }


def figures(seeds: int, note: Callable[[str], None]) -> list[Figure]:
    """One figure a policy, the median over ``seeds`` campaigns."""
    note(f"policies: {seeds} campaigns of {TASKS * SAMPLES} rollouts, each with every policy")
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(seeds, len(os.sched_getaffinity(0))), mp_context=context) as pool:
        compared = list(pool.map(compare, range(seeds)))
    return [
        simulated_figure(f"makespan over that without policies, {policy}", "ratio", [one[policy] for one in compared])
        for policy in compared[0]
    ]
