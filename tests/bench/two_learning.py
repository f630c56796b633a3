"""Two policies that learn in one campaign, each with a real vLLM and a trainer of its own, over real sandboxes.

    cd FOLDER; python -m tests.bench.two_learning [--steps 10]

FOLDER is what ``launchers/learn`` works in: ``launchers/learning`` with ``models/base``. Without Slurm, ``bounded:1``.
It prints each one's mean rewards by step, and how many rollouts were trained on, twice, or by the other's trainer.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import sys
from pathlib import Path

from megaflow_hpc import Campaign
from megaflow_hpc.training.plan import Plan, TrainingFiles

NAMES = ("left", "right")


def main() -> int:
    parser = argparse.ArgumentParser(description="two policies that learn at once")
    parser.add_argument("--steps", type=int, default=10)
    steps = parser.parse_args().steps
    sys.path.insert(0, os.getcwd())
    import learn  # type: ignore[import-not-found]

    words = learn.read(["--local", "--steps", str(steps), "--mode", "bounded:1"])
    campaign = learn.fields(words, Path("campaign.yaml").read_text(), os.environ["MEGAFLOW_TEST_BASE_SIF"], {})
    model, policies = campaign.pop("model"), campaign["training"]["policies"]
    campaign["models"] = {name: copy.deepcopy(model) for name in NAMES}
    campaign["training"]["policies"] = {name: copy.deepcopy(policies["default"]) for name in NAMES}
    os.environ |= learn.SMALL
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH", "")]))
    run = Campaign(**campaign).plan(launcher="local")
    print(run.path, flush=True)
    run.start("local")
    run.wait()
    taken = []
    for name in NAMES:
        files = TrainingFiles(run.dir, name)
        metrics = [json.loads(line) for line in files.metrics.read_text().splitlines()]
        print(name, " ".join(f"{step['reward']:.3f}" for step in metrics))
        plans = [plan for number in files.numbers(Plan) if (plan := files.read(Plan, number))]
        taken += [(name, rollout.id) for plan in plans for rollout in plan.rollouts]
    twice = len(taken) - len({rollout for _, rollout in taken})
    strange = sum(rollout.split("/")[1] != name for name, rollout in taken)
    print(f"{len(taken)} rollouts trained on, {twice} twice, {strange} by the other's trainer")
    return int(bool(twice or strange))


if __name__ == "__main__":
    raise SystemExit(main())
