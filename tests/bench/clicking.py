"""A tiny vision-language model learns to click, from screenshots, through real vLLM: a check of all that images pass.

    python -m tests.bench.clicking click [--steps 60] [--seed 0]     click the button with this label
    python -m tests.bench.clicking two [--steps 50]                  click a button, then another in the next window
    python -m tests.bench.clicking click --shuffle                   the same with shuffled rewards, which must not rise

The model has random weights at first. Captions teach it to read the labels of buttons. Then sloppy demonstrations, most
of whose clicks miss their button by some pixels, teach it to click: it earns a reward in some of its tries
(``tests.bench.windows``). For two clicks it learns demonstrations of one click before those of two. Each group of
rollouts has a window of its own, which no other shows. Local launcher, no sandbox, two cores.

``--folder`` keeps the working directory with the taught model. Exit status 1: the reward did not rise beyond its 99 %
interval, or rose although rewards were shuffled, or engine and trainer disagree about log-probabilities.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from megaflow_hpc import Campaign, open_trajectories
from megaflow_hpc.training.plan import TrainingFiles
from tests.bench.learning import interval
from tests.bench.windows import caption, demonstration
from tests.support.places import LAUNCHERS, ROOT
from tests.support.requirements import required
from tests.support.training import trained_on

SMALL = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
"""Variables of engine and trainer; see ``launchers/learning/learn.py``."""
STEPS = {"click": 60, "two": 50}
"""Task → number of steps."""
SCREENSHOTS = {"click": 1, "two": 2}
CAPTIONS, LESSONS = 9_600, 16_000
"""Number of captions that the model learns first, and of captions and demonstrations in turn that it learns then."""
CAPTION_EPOCHS, EPOCHS = 2, {"click": 4, "two": 2}
"""Passes over the captions, and over the lessons of a task."""
RIGHT, SPOILED = 0.9, {"click": 0.75, "two": 0.6}
COMPARED = 5
"""Steps at the beginning and at the end whose rewards are compared."""
MAX_MISMATCH = 1e-5
"""Largest mean difference between the engine's and the trainer's log-probabilities in a step."""


def teach(folder: Path, task: str, seed: int) -> Path:
    """Makes the model that training starts from, unless it exists. Returns its directory."""
    out = folder / "models" / f"{task}-{seed}"
    if out.exists():
        return out
    out.parent.mkdir(exist_ok=True)
    chance, steps = random.Random(seed), SCREENSHOTS[task]
    if task == "two":
        before = teach(folder, "click", seed)
    else:
        base, before = folder / f"base-{seed}", folder / f"seeing-{seed}"
        words = [LAUNCHERS / "tiny_model.py", base, "--vision", "--seed", seed, "--context", 512]
        subprocess.run([_python(), *map(str, words)], check=True, stdout=sys.stderr)
        _warm_start(base, [caption(chance, steps) for _ in range(CAPTIONS)], before, CAPTION_EPOCHS)
    mixed = [
        demonstration(chance, steps, RIGHT, SPOILED[task]) if number % 2 else caption(chance, steps)
        for number in range(LESSONS)
    ]
    _warm_start(before, mixed, out, EPOCHS[task])
    return out


def _python() -> str:
    return str(Path(required("MEGAFLOW_ENGINE_VENV")) / "bin" / "python")


def _warm_start(model: Path, conversations: list[Any], out: Path, epochs: int) -> None:
    path = out.with_suffix(".jsonl")
    path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in conversations))
    command = [_python(), "-m", "megaflow_hpc.training.trainer.warm_start", model, path, out, "--lr", "1e-3"]
    command += ["--batch", "64", "--microbatch", "2048", "--dtype", "float32", "--epochs", epochs]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with out.with_suffix(".log").open("w") as log:
        subprocess.run([str(word) for word in command], env=environment, check=True, stdout=log)


def fields(task: str, model: Path, steps: int, seed: int, shuffle: bool) -> dict[str, Any]:
    """Returns the campaign."""
    turns = SCREENSHOTS[task]
    return {
        "name": task,
        "seed": seed,
        "tasks": [f"tests.bench.windows:{'ClickTask' if turns == 1 else 'TwoClicks'}"],
        "agent": {
            "name": "tests.bench.windows:Clicker",
            "args": {"steps": turns},
            "max_turns": turns,
            "timeout_s": 120,
        },
        "samples": 8,
        "model": {
            "path": str(model),
            "args": {
                "max-model-len": 256,
                "max-num-seqs": 80,
                "dtype": "float32",
                "distributed-executor-backend": "uni",
                "no-enable-chunked-prefill": True,  # on a CPU, vLLM dies of a seed and a prompt in parts
                "max-num-batched-tokens": 2048,
                "limit-mm-per-prompt": json.dumps({"image": turns}),
            },
        },
        "training": {
            "policies": {
                "default": {
                    "loss": {"kind": "dapo", "entropy": 0.003, "epochs": 2},
                    "advantage": {"kind": "dr_grpo"},
                    "optimizer": {"lr": 1.0e-4, "schedule": "linear", "warmup": min(10, steps // 2)},
                    "dtype": "float32",
                    "recompute": False,
                    "microbatch": 2048,
                }
            },
            "batch": 10,
            "steps": steps,
            "staleness": 0,
            "checkpoint_every": 20,
            **({"data": ["megaflow_hpc.training.recipes:shuffled"]} if shuffle else {}),
        },
        "slurm": {
            "pods": {"count": 1, "ranks_per_node": 2, "slots_per_rank": 80, "mem": "3G", "time": 60},
            "servers": {"time": 60},
            "trainer": {"gpus": 0, "mem": "3G", "time": 60, "cpus-per-task": 2},
        },
    }


def learn(asked: argparse.Namespace) -> int:
    model = teach(asked.folder, asked.task, asked.seed)
    for name, value in SMALL.items():
        os.environ.setdefault(name, value)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    os.chdir(asked.folder)
    run = Campaign(**fields(asked.task, model, asked.steps, asked.seed, asked.shuffle)).plan(launcher="local")
    print(run.path, flush=True)
    began = time.monotonic()
    run.start("local")
    run.wait()
    files = TrainingFiles(run.dir, "default")
    metrics = [json.loads(line) for line in files.metrics.read_text().splitlines()]
    with open_trajectories(run.path) as store:
        ids, rewards, versions = sorted(store.ids), store.column("reward"), store.column("weight_version_min")
    before, after = (np.asarray(rewards[versions < COMPARED]), np.asarray(rewards[versions >= asked.steps - COMPARED]))
    rose = bool(interval(before)[1] < interval(after)[0])
    print(" ".join(f"{step['reward']:.2f}" for step in metrics))
    print(
        f"{asked.task}, seed {asked.seed}{', rewards shuffled' * asked.shuffle}: {before.mean():.3f} of {len(before)} "
        f"rollouts, then {after.mean():.3f} of {len(after)}; mismatch {max(s['mismatch'] for s in metrics):.1e}; "
        f"{mean(s['seconds'] for s in metrics):.1f} s a step, {time.monotonic() - began:.0f} s in all"
    )
    checks = {
        "the reward did not rise beyond its interval": rose or asked.shuffle,
        "the reward rose by shuffled rewards": not (rose and asked.shuffle),
        "steps are missing": len(metrics) == asked.steps,
        "a rollout was not trained on exactly once": sorted(trained_on(files)) == ids,
        "engine and trainer disagree": all(step["mismatch"] <= MAX_MISMATCH for step in metrics),
    }
    wrong = [what for what, sound in checks.items() if not sound]
    print("\n".join(wrong) or "all is as it should be")
    return int(bool(wrong))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=STEPS)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shuffle", action="store_true", help="train on the rewards of other rollouts")
    parser.add_argument("--folder", type=Path, help="working directory, made if it is missing")
    asked = parser.parse_args()
    asked.steps = asked.steps or STEPS[asked.task]
    with tempfile.TemporaryDirectory() as temporary:
        asked.folder = (asked.folder or Path(temporary)).absolute()
        asked.folder.mkdir(parents=True, exist_ok=True)
        return learn(asked)


if __name__ == "__main__":
    raise SystemExit(main())
