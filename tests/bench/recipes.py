"""What a small published model scores in the recipes that need no GPU's speed, through real vLLM on two cores.

    python -m tests.bench.recipes MODEL reasoning [functions text-games …] [--samples 1] [--max-tokens 256]
        [--include PATTERN] [--max-turns TURNS] [--folder DIRECTORY]
    python -m tests.bench.recipes MODEL reasoning --train STEPS [--batch 4]

MODEL is a model directory: ``launchers/packaged_model.py`` makes SmolLM2-135M-Instruct. Run it by the interpreter that
``launchers/recipes-env.sh`` prints. Each recipe is written by ``init --recipe``, its tasks are made, and its
``campaign.yaml`` runs with this model in place of its own, for each role of a team, under the local launcher. The last
lines of a recipe are the means of its rewards with 99 % intervals, and its seconds. The intervals assume rewards of 0
and 1; for parts of 1 they are wider than needed.

``synthesis`` evaluates the model, samples and filters its answers, fine-tunes it on them, and evaluates it again.
``team`` is evaluated on its test puzzles; the reward ``right`` is the checker's. With ``--train``, ``training.yaml``
runs for so many steps instead, without evaluations.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from megaflow_hpc import Campaign, open_trajectories
from tests.bench.learning import interval
from tests.support.places import ROOT
from tests.support.recipe_environment import initialised, warm
from tests.support.requirements import required

CONTEXT = 4096
UNI = {"distributed-executor-backend": "uni"}
SMALL = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"}
SHOWN = 10
"""Right answers of each kind of puzzle that show a small model the form of an answer."""
FINE_TUNING = ("--lr", "5e-5", "--epochs", "3", "--batch", "16", "--microbatch", "4096", "--dtype", "float32")


def fields(content: dict[str, Any], model: Path, asked: argparse.Namespace) -> dict[str, Any]:
    """Returns a recipe's campaign with a small model, few samples and the local launcher."""
    content["slurm"] = {"pods": {"count": 1, "ranks_per_node": 1, "slots_per_rank": 16, "mem": "4G"}}
    for policy in content.get("models", {"": content.get("model")}).values():
        kept = {k: v for k, v in policy.get("args", {}).items() if "tool" in k}
        policy.clear()
        args = {"max-model-len": CONTEXT, "max-num-seqs": 32, "dtype": "bfloat16", **UNI, **kept}
        policy |= {"path": str(model), "gpus": 0, "args": args}
    content["agent"].setdefault("args", {})["max_tokens"] = asked.max_tokens
    content["agent"]["timeout_s"] = 1800
    if asked.max_turns and "max_turns" in content["agent"]:
        content["agent"]["max_turns"] = asked.max_turns
    content["samples"] = asked.samples or (content["samples"] if asked.train else 1)
    if not asked.train:
        content.pop("training", None)
    source = content["tasks"][0]
    content["tasks"] = [source := source if isinstance(source, dict) else {"path": source}]
    if asked.include:
        source["include"] = asked.include
    images = content.get("environment", {}).get("images", {})
    images |= {name: required("MEGAFLOW_TEST_BASE_SIF") for name in images if name in ("base", "python")}
    return content


def training(content: dict[str, Any], asked: argparse.Namespace) -> None:
    """Changes a recipe's training to a few small steps on a CPU."""
    content["training"] |= {"steps": asked.train, "batch": asked.batch}
    content["training"].pop("evaluate", None)
    for policy in content["training"]["policies"].values():
        policy |= {"dtype": "float32", "recompute": False, "microbatch": 2048}
    content["slurm"]["trainer"] = {"gpus": 0, "mem": "8G"}


def measure(name: str, folder: Path, model: Path, asked: argparse.Namespace, file: str = "campaign.yaml") -> Path:
    """Runs a recipe's campaign file, prints its figure, and returns its run."""
    os.chdir(folder)
    content = fields(yaml.safe_load(Path(file).read_text()), model, asked)
    if asked.train:
        training(content, asked)
    if name == "team":
        content["tasks"][0]["path"] = "checked:CheckedTestPuzzle"
    Path(f"small-{file}").write_text(yaml.safe_dump(content, sort_keys=False))
    began = time.monotonic()
    run = Campaign.from_yaml(f"small-{file}").plan(launcher="local")
    run.start("local")
    run.wait()
    seconds = time.monotonic() - began
    with open_trajectories(run.path) as store:
        scores = {each: store.column(f"rewards/{each}") for each in store.reward_names if each != "reward"}
        scores = {"reward": store.column("reward"), **scores}
        statuses = Counter(map(str, store.column("status")))
    for each, values in scores.items():
        stored = values[~np.isnan(values)]
        low, high = interval(stored)
        print(
            f"{name}, {file}, {model.name}: mean {each} {stored.mean():.3f} ({low:.3f} – {high:.3f}) of {len(stored)} "
            f"rollouts, above 0: {(stored > 0).sum()}, {dict(statuses)}, {seconds:.0f} s, {run.path}",
            flush=True,
        )
    return run.path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("recipes", nargs="+")
    parser.add_argument("--samples", type=int, help="rollouts of each task; 1 by default, in training as in the recipe")
    parser.add_argument("--max-tokens", type=int, default=256, help="maximum length of an answer")
    parser.add_argument("--include", action="append", help="pattern of the tasks to run; all by default")
    parser.add_argument("--max-turns", type=int, help="maximum number of turns, where the recipe sets one")
    parser.add_argument("--train", type=int, default=0, metavar="STEPS", help="run training.yaml for so many steps")
    parser.add_argument("--batch", type=int, default=4, help="groups in a step of training")
    parser.add_argument("--folder", type=Path, help="working directory, made if it is missing")
    asked = parser.parse_args()
    for name, value in SMALL.items():
        os.environ.setdefault(name, value)
    with tempfile.TemporaryDirectory() as temporary:
        folder = (asked.folder or Path(temporary)).absolute()
        for name in asked.recipes:
            at = folder / name
            at.mkdir(parents=True, exist_ok=True)
            with warm(sys.executable) as python:
                initialised(name, at, python)
            if name == "synthesis":
                _synthesis(at, asked)
            else:
                measure(name, at, asked.model.absolute(), asked, "training.yaml" if asked.train else "campaign.yaml")


def _synthesis(at: Path, asked: argparse.Namespace) -> None:
    """A small model leaves out the form of an answer: it first learns that from a few right answers of each kind."""
    os.chdir(at)
    form = runpy.run_path("puzzles.py")["FORMAT"]
    start, tuned, seen = at / "models" / "start", at / "models" / "tuned", Counter[str]()
    with Path("shown.jsonl").open("w") as file:
        for entry in map(json.loads, Path("train.jsonl").read_text().splitlines()):
            seen[entry["kind"]] += 1
            if seen[entry["kind"]] <= SHOWN:
                answer = f"<answer>{entry['answer']}</answer>"
                asks = {"role": "user", "content": entry["question"] + form}
                file.write(json.dumps({"messages": [asks, {"role": "assistant", "content": answer}]}) + "\n")
    _fine_tune(asked.model.absolute(), "shown.jsonl", start)
    measure("synthesis", at, start, asked, "evaluate.yaml")
    sampled = measure("synthesis", at, start, asked)
    where = ["--where", "status == 'completed' and reward >= 1"]
    for command in (
        [sys.executable, "-m", "megaflow_hpc", "export", sampled, "--format", "jsonl", *where, "-o", "exported"],
        [sys.executable, "sft.py", "exported", "sft.jsonl"],
    ):
        subprocess.run([str(word) for word in command], check=True)
    _fine_tune(asked.model.absolute(), "sft.jsonl", tuned)
    measure("synthesis", at, tuned, asked, "evaluate.yaml")


def _fine_tune(model: Path, lessons: str, out: Path) -> None:
    interpreter = str(Path(required("MEGAFLOW_ENGINE_VENV")) / "bin" / "python")
    command = [interpreter, "-m", "megaflow_hpc.training.trainer.warm_start", str(model), lessons, str(out)]
    with Path(f"{out.name}.log").open("w") as log:
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        subprocess.run([*command, *FINE_TUNING], env=environment, check=True, stdout=log)


if __name__ == "__main__":
    main()
