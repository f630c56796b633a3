"""Two policies that learn in one campaign, each with a real vLLM and a trainer of its own, over real sandboxes.

    cd FOLDER; python -m tests.bench.two_learning [--steps 10] [--staleness 1] [--lasting 10 --slots 76]

FOLDER is what ``launchers/learn`` works in: ``launchers/learning`` with ``models/base``. Without Slurm. It prints each
one's mean rewards by step, how many rollouts were trained on, twice, or by the other's trainer, and the mean seconds
from one step's commit to the next, of both. With ``--lasting`` rollouts take as long as agents that work do, in
proportion: each waits before it asks, with the mean in seconds and the heavy tail of ``tests.bench.pace``.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
from pathlib import Path
from statistics import mean

from megaflow_hpc import Campaign
from megaflow_hpc.training.plan import TrainingFiles
from tests.support.training import trained_on

NAMES = ("left", "right")
WARM = 2
"""Steps at the beginning of which no time is told: engines compile, and nothing is behind yet."""


def main() -> int:
    parser = argparse.ArgumentParser(description="two policies that learn at once")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--staleness", default="1")
    parser.add_argument("--lasting", type=float, default=0.0, metavar="SECONDS")
    parser.add_argument("--slots", type=int, default=24, help="of both together")
    parser.add_argument("--optimizer", type=json.loads, default={}, metavar="JSON", help="of launchers/learn, changed")
    asked = parser.parse_args()
    import learn  # type: ignore[import-not-found]

    words = learn.read(["--local", "--steps", str(asked.steps), "--staleness", asked.staleness])
    campaign = learn.fields(words, Path("campaign.yaml").read_text(), os.environ["MEGAFLOW_TEST_BASE_SIF"], {})
    campaign["slurm"]["pods"]["slots_per_rank"] = asked.slots
    if asked.lasting:
        campaign["agent"] |= {"name": "tests.bench.lasting:Lasting", "args": {"mean_s": asked.lasting}}
        campaign["agent"]["timeout_s"] = 60 + 20 * asked.lasting
    model, policies = campaign.pop("model"), campaign["training"]["policies"]
    policies["default"]["optimizer"] |= asked.optimizer
    campaign["models"] = {name: copy.deepcopy(model) for name in NAMES}
    campaign["training"]["policies"] = {name: copy.deepcopy(policies["default"]) for name in NAMES}
    os.environ |= learn.SMALL
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH", "")]))
    run = Campaign(**campaign).plan(launcher="local")
    print(run.path, flush=True)
    run.start("local")
    run.wait()
    taken, seconds = [], []
    for name in NAMES:
        files = TrainingFiles(run.dir, name)
        metrics = [json.loads(line) for line in files.metrics.read_text().splitlines()]
        print(name, " ".join(f"{step['reward']:.3f}" for step in metrics))
        seconds += [step["seconds"] for step in metrics[WARM:]]
        taken += [(name, rollout) for rollout in trained_on(files)]
    twice = len(taken) - len({rollout for _, rollout in taken})
    strange = sum(rollout.split("/")[1] != name for name, rollout in taken)
    print(f"{len(taken)} rollouts trained on, {twice} twice, {strange} by the other's trainer")
    print(f"{mean(seconds):.1f} s a step of either (mean of {len(seconds)})")
    return int(bool(twice or strange))


if __name__ == "__main__":
    raise SystemExit(main())
