"""Engine and trainer of the learning curve take turns on one GPU (``slurm.trainer.share: sleep``), with real sandboxes.

    cd FOLDER; python -m tests.bench.shared_gpu [--steps 20] [--dtype bfloat16] [--model DIRECTORY]

FOLDER is what ``launchers/learn`` works in: ``launchers/learning`` with ``models/tiny-1``. Without Slurm. It prints the
mean rewards by step, what a turn costs, how far the engine's log-probabilities lie from the trainer's, and how much of
the GPU's memory is in use while engine or trainer has it. With ``--gpus 0`` both are on the CPU, where an engine frees
nothing. ``--model`` takes another model than the one that was taught, for its size.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import threading
from pathlib import Path
from statistics import mean, median

from megaflow_hpc import Campaign
from megaflow_hpc.training.plan import TrainingFiles
from tests.support.training import trained_on

WARM = 2
"""Steps at the beginning of which no time is told."""


class Memory(threading.Thread):
    """Bytes in use on the first GPU, five times a second, as its driver tells."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.seen: list[float] = []
        self.over = threading.Event()

    def run(self) -> None:
        query = ["nvidia-smi", "-i", "0", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        while shutil.which(query[0]) and not self.over.wait(0.2):
            told = subprocess.run(query, capture_output=True, text=True).stdout.strip()
            if told.isdecimal():
                self.seen.append(int(told) * 2**20 / 1e9)


def main() -> int:
    parser = argparse.ArgumentParser(description="engine and trainer on one GPU")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--gpus", type=int, default=1, choices=(0, 1))
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help="of engine and trainer")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--samples", type=int, help="rollouts of each of the ten tasks in a step")
    parser.add_argument("--args", type=json.loads, default={}, metavar="JSON", help="more of the engine's arguments")
    asked = parser.parse_args()
    import learn  # type: ignore[import-not-found]

    words = learn.read(["--local", "--steps", str(asked.steps), "--seed", str(asked.seed)])
    campaign = learn.fields(words, Path("campaign.yaml").read_text(), os.environ["MEGAFLOW_TEST_BASE_SIF"], {})
    campaign["slurm"]["trainer"] |= {"share": "sleep", "gpus": asked.gpus}
    campaign["slurm"]["pods"]["ranks_per_node"] = 1 if asked.gpus else 2
    campaign["samples"] = asked.samples or campaign["samples"]
    model = campaign["model"] | {"gpus": asked.gpus, "servers": 1}
    model["args"]["dtype"] = campaign["training"]["policies"]["default"]["dtype"] = asked.dtype
    if asked.gpus:
        del model["args"]["distributed-executor-backend"]
    else:
        os.environ |= learn.SMALL
    model["args"] |= asked.args
    if asked.model:
        model["path"] = str(asked.model.absolute())
    campaign["model"] = model
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH", "")]))
    run = Campaign(**campaign).plan(launcher="local")
    print(run.path, flush=True)
    memory = Memory()
    memory.start()
    run.start("local")
    run.wait()
    memory.over.set()
    files = TrainingFiles(run.dir, "default")
    steps = [json.loads(line) for line in files.metrics.read_text().splitlines()]
    print("reward", " ".join(f"{step['reward']:.3f}" for step in steps))
    for name in ("mismatch", "seconds", "seconds/wait", "seconds/sleep", "seconds/move", "seconds/wake"):
        told = [step[name] for step in steps[WARM:] if name in step]
        print(f"{name}: median {median(told):.3g}, mean {mean(told):.3g}, at most {max(told):.3g}")
    print(f"seconds/publish: median {median(step.get('seconds/publish', 0.0) for step in steps[WARM:]):.3g}")
    busy = [sum(step.get(f"seconds/{n}", 0.0) for n in ("forward", "backward", "optimizer")) for step in steps[WARM:]]
    print(f"seconds of computing: median {median(busy):.3g}")
    if memory.seen:
        seen = sorted(memory.seen)
        places = {"least": 0.0, "10 %": 0.1, "half": 0.5, "90 %": 0.9}
        parts = [f"{name} {seen[int(q * len(seen))]:.1f}" for name, q in places.items()]
        print(f"GB in use on the GPU over {len(seen)} looks: {', '.join(parts)}, most {seen[-1]:.1f}")
    log = (run.path / "logs" / "server-0-local.log").read_text()
    print("\n".join(line for line in log.splitlines()[-400:] if "asleep after" in line or "awake after" in line)[-600:])
    taken = trained_on(files)
    print(f"{len(steps)} steps, {len(taken)} rollouts trained on, {len(taken) - len({*taken})} twice")
    return int(len(steps) != asked.steps or len(taken) != len({*taken}))


if __name__ == "__main__":
    raise SystemExit(main())
