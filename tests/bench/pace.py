"""What the bound on staleness does to a trainer's waiting and to the time of a step, in virtual time.

    python -m tests.bench.pace

64 tasks × 16 samples a step. Rollouts last log-normally (σ 0.8, mean 120 s) and one in a hundred runs into a limit of
600 s: a heavy tail. There are 15 % more slots than keep the trainer busy on average. Batches are requested and steps
are made as ``megaflow_hpc.training.staleness`` does. With two policies each has a trainer and half of the slots. *In
turn* means that one of them at a time uses all slots: all rollouts of one policy, its update, then those of the other,
as if engines and trainers shared their GPUs.
"""

from __future__ import annotations

import heapq
import math
import random
from dataclasses import dataclass

TASKS, SAMPLES, STEPS = 64, 16, 60
MEAN_S, SIGMA, LIMIT_S, HANGING = 120.0, 0.8, 600.0, 0.01
TRAIN_S = (75.0, 300.0)
"""One update of a step."""
SPARE = 1.15
WARM = 10
"""Steps at the beginning that are left out."""


@dataclass(frozen=True)
class Paced:
    """What became of one simulated training."""

    step_s: float
    waited: float
    """Share of the time in which the trainer waited for rollouts."""
    staleness: float
    staleness_max: int


def duration(draw: random.Random) -> float:
    """Seconds of one rollout."""
    if draw.random() < HANGING:
        return LIMIT_S
    return min(LIMIT_S, MEAN_S * math.exp(draw.gauss(-(SIGMA**2) / 2, SIGMA)))


def expected_s(draws: int = 20_000) -> float:
    """Mean duration of a rollout."""
    draw = random.Random(0)
    return sum(duration(draw) for _ in range(draws)) / draws


def paced(bound: int, slots: int, seed: int, train_s: float) -> Paced:
    """Simulates training with a bound on staleness."""
    draw = random.Random(seed)
    free = [0.0] * slots  # when each slot is free
    heapq.heapify(free)
    groups: list[tuple[float, int, int]] = []  # when complete, versions when it was asked for and when it began
    committed_at = [0.0]  # of step 0: the base model
    waited, stale = 0.0, []

    def ask(at: float) -> None:
        for _ in range(TASKS):
            begins, ends = [], []
            for _ in range(SAMPLES):
                begin = max(at, heapq.heappop(free))
                end = begin + duration(draw)
                heapq.heappush(free, end)
                begins.append(begin)
                ends.append(end)
            version = sum(moment <= min(begins) for moment in committed_at) - 1
            heapq.heappush(groups, (max(ends), len(committed_at) - 1, version))

    for _ in range(bound + 1):
        ask(0.0)
    now = 0.0
    for step in range(1, STEPS + 1):
        ready = max(now, heapq.nsmallest(TASKS, groups)[-1][0])
        due = [complete for complete, asked, _ in groups if step - 1 - asked >= bound]
        ready = max(ready, *due) if due else ready
        there = sorted((group for group in groups if group[0] <= ready), key=lambda group: (group[2], group[0]))
        taken = there[:TASKS]
        groups = [group for group in groups if group not in taken]
        heapq.heapify(groups)
        if step > WARM:
            waited += ready - now
            stale += [step - 1 - version for _, _, version in taken]
        now = ready + train_s
        committed_at.append(now)
        ask(now)
    spent = now - committed_at[WARM]
    return Paced(spent / (STEPS - WARM), waited / spent, sum(stale) / len(stale), max(stale))


def main() -> None:
    for train_s in TRAIN_S:
        slots = math.ceil(SPARE * TASKS * SAMPLES * expected_s() / train_s)
        print(
            f"{slots} slots, {expected_s():.0f} s a rollout, {train_s:.0f} s an update, {STEPS - WARM} steps, 3 seeds"
        )
        print("| staleness bound | s a step | trainer waits | mean staleness | largest |")
        print("| --- | --- | --- | --- | --- |")
        step_s = {}
        for bound in (0, 1, 2, 4, 8):
            found = [paced(bound, slots, seed, train_s) for seed in range(3)]
            step_s[bound], waited, stale = (
                sum(values) / 3 for values in zip(*((p.step_s, p.waited, p.staleness) for p in found), strict=True)
            )
            most = max(p.staleness_max for p in found)
            print(f"| {bound} | {step_s[bound]:.0f} | {waited:.1%} | {stale:.2f} | {most} |")
        # In turn: both policies' updates follow on each other, on all slots of both.
        in_turn = sum(paced(0, 2 * slots, seed, train_s).step_s for seed in range(3)) / 3 * 2
        for bound in (0, 2, 4):
            times = in_turn / step_s[bound]
            print(f"two policies, a step of both: in turn {in_turn:.0f} s, bound {bound}: {times:.2f} times as fast")
        print()


if __name__ == "__main__":
    main()
