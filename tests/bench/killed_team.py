"""Teams whose trainers, pods and engines get SIGKILL at random instants, until they have learned all steps.

    python -m tests.bench.killed_team [--kills 200] [--seed 0]

Each campaign trains a writer and a checker with a staleness bound drawn by lot. The trainers are real, without a model
(``tests.support.hash_trainer``). Pods and engines are processes that store rollouts and publish endpoints. Each kill
releases a further share of the rollouts, so a campaign never ends before its last kill. Prints how many groups were
requested, lost and used twice, and how many rollouts broke the bound. Exit status 1: any of the last.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import tempfile
import time
from pathlib import Path

from megaflow_hpc.ledger import read_blocks
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.training.plan import StepPlan, TrainingFiles
from megaflow_hpc.trajectories.journal.winners import index, seals_of
from tests.support.hash_trainer import train
from tests.support.kills import start, status_of
from tests.support.training import Engines, Pods, training_run

POLICIES = ("author", "second")
ROLES = [("writer", "author"), ("checker", "second"), ("writer", "author")]
TEAM = {"writer": "author", "checker": {"policy": "second", "reward": "right"}}
STEPS, BATCH, SAMPLES = 8, 3, 4
LIMIT_S = 300.0


def pods(run: RunDir, number: int, released: Path) -> int:
    """Works as pods and engines do, for ever. Stores at most as many rollouts as the size of a file in bytes."""
    engines = Engines(run, [f"{policy}.0" for policy in POLICIES])
    for name in engines.endpoints:
        engines.restart(name)
    own = Pods(
        run,
        lambda rollout: float(rollout.sample_index % 2),
        pod=f"pod{number}",
        engines=engines,
        roles=ROLES,
        named=lambda rollout: {"right": float(rollout.sample_index < 2)},
    )
    before = {entry.id for entry in index(run, seals_of(run)).winners}
    own.skip(before)
    stored = len(before)
    while True:
        engines.beat()
        stored += own.work(most=max(0, min(5, released.stat().st_size - stored)))
        time.sleep(0.01)


def campaign(folder: Path, kills: int, draw: random.Random) -> dict[str, int]:
    """Runs one campaign; returns what is counted."""
    bound = draw.choice([0, 1, 2])
    training = {"policies": {name: None for name in POLICIES}, "staleness": bound, "batch": BATCH, "steps": STEPS}
    run = training_run(folder, training, tasks=5, policies=dict.fromkeys(POLICIES, 0), team=TEAM, samples=SAMPLES)
    workers = {name: 0 for name in (*POLICIES, "pods")}
    starts, rollouts = 0, STEPS * BATCH * SAMPLES
    released = folder / "released"
    released.touch()

    def begin(name: str) -> None:
        nonlocal starts
        starts += 1
        number = starts
        if name == "pods":
            workers[name] = start(lambda: pods(run, number, released))
        else:
            workers[name] = start(lambda: int(not train(run.path, every=2, policy=name)))

    for name in workers:
        begin(name)
    os.truncate(released, rollouts // (kills + 1))
    ended: set[str] = set()
    deadline, killed = time.monotonic() + LIMIT_S, 0
    next_at = time.monotonic()
    while ended != set(POLICIES):
        assert status_of(workers["pods"]) is None, f"{run}: the pods ended by themselves"
        assert time.monotonic() < deadline, f"{run}: not done after {LIMIT_S:.0f} s and {killed} kills"
        for name in set(POLICIES) - ended:
            status = status_of(workers[name])
            if status is not None:
                assert status == 0, f"{run}: the trainer of {name} ended with {status}"
                ended.add(name)
        if killed < kills and time.monotonic() >= next_at:
            name = draw.choice([name for name in workers if name not in ended])
            os.kill(workers[name], 9)
            os.waitpid(workers[name], 0)
            killed += 1
            begin(name)
            os.truncate(released, rollouts * (killed + 1) // (kills + 1))
            next_at = time.monotonic() + draw.uniform(0.05, 0.6)
        time.sleep(0.01)
    os.kill(workers["pods"], 9)
    os.waitpid(workers["pods"], 0)
    requested = {rollout.group_id for block in read_blocks(run) for rollout in block.rollouts}
    counts = {"kills": killed, "requested": len(requested), "lost": 0, "twice": 0, "beyond the bound": 0}
    for policy in POLICIES:
        files = TrainingFiles(run, policy)
        plans = [plan for number in files.numbers(StepPlan) if (plan := files.read(StepPlan, number))]
        used = [group for plan in plans for group in plan.groups]
        counts["lost"] += len(requested - set(used))
        counts["twice"] += len(used) - len(set(used))
        counts["beyond the bound"] += sum(age > bound for plan in plans for age in plan.staleness)
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    draw, total = random.Random(asked.seed), dict[str, int]()
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(KeyboardInterrupt):
        number = 0
        while total.get("kills", 0) < asked.kills:
            counts = campaign(Path(folder) / str(number), min(20, asked.kills - total.get("kills", 0)), draw)
            total = {name: total.get(name, 0) + count for name, count in counts.items()}
            number += 1
            print(f"{number} campaigns:", ", ".join(f"{count} {name}" for name, count in total.items()), flush=True)
    return int(any(total[name] for name in ("lost", "twice", "beyond the bound")))


if __name__ == "__main__":
    raise SystemExit(main())
