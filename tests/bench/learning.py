"""Learning runs of ``launchers/learn`` with real vLLM and sandboxes, without Slurm, and a check of each.

    python -m tests.bench.learning curve [--steps 10]                    the reward rises beyond its interval
    python -m tests.bench.learning two [--lasting 10 --slots 76]         two policies, each with an engine and a trainer
    python -m tests.bench.learning team [--shuffle] [--steps 40]         a writer and a checker, both of which learn

``--folder`` keeps the working directory with ``models/tiny-1``, which takes a minute to make. Exit status 1: the check
failed.

``curve`` compares the rewards that the first and the last weights earned. ``two`` counts rollouts that were used twice
or by the other policy's trainer. With ``--lasting`` each of its rollouts waits for a heavy-tailed time with that mean
(``tests.bench.pace``). ``team`` trains a writer of commands and a checker that is rewarded for being right about them;
with ``--shuffle`` the checker is trained on the rewards of other rollouts, and must not learn.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from megaflow_hpc import Campaign, open_trajectories
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.training.plan import StepPlan, TrainingFiles
from tests.bench.shell_team import question
from tests.support.places import LAUNCHERS
from tests.support.processes import descendants_end_with_this
from tests.support.requirements import required
from tests.support.training import trained_on

SOURCES = LAUNCHERS / "learning"
POLICIES = ("left", "right")
WARM_UP_STEPS = 2
"""Steps whose time is not counted: engines still compile."""
MAX_MISMATCH = 1e-5
"""Largest mean difference between the engine's and the trainer's log-probabilities in a step."""


def prepare(folder: Path, batches: int | None = None, turns: int = 1) -> Path:
    """Makes ``folder`` what ``launchers/learn`` works in.

    Args:
        batches: Batches of demonstrations for the base model. With a few it cannot learn its tasks.
        turns: Turns of the tasks.
    """
    shutil.copytree(SOURCES, folder, dirs_exist_ok=True)
    python = Path(required("MEGAFLOW_ENGINE_VENV")) / "bin" / "python"
    command = [python, SOURCES / "demonstrations.py", folder / "models" / f"tiny-{turns}", "--turns", str(turns)]
    command += ["--batches", str(batches)] if batches else []
    subprocess.run(command, check=True, timeout=1800, stdout=sys.stderr)
    return folder


@contextmanager
def learning(folder: Path, steps: int, *more: str) -> Iterator[tuple[subprocess.Popen[str], RunDir]]:
    """Runs the campaign in a process of its own; yields it with its run directory."""
    command = [sys.executable, str(folder / "learn.py"), "--local", "--steps", str(steps), *more]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        line = next((line for line in process.stdout if line.startswith("run directory: ")), "")
        assert line, "no run directory: see the messages above"
        yield process, RunDir(line.removeprefix("run directory: ").strip())


def interval(rewards: np.ndarray) -> tuple[float, float]:
    """Returns the 99 % interval of the mean of rewards 0 and 1 (Wilson 1927)."""
    n, mean, z = len(rewards), rewards.mean(), 2.576
    middle = mean + z * z / (2 * n)
    half = z * np.sqrt(mean * (1 - mean) / n + z * z / (4 * n * n))
    return (middle - half) / (1 + z * z / n), (middle + half) / (1 + z * z / n)


def rises(rewards: np.ndarray, versions: np.ndarray, steps: int) -> bool:
    """Tells whether the last weights earn more than the first ones, by rewards of rollouts and their weights."""
    before, after = rewards[versions <= 1], rewards[versions >= steps - 2]
    print(f"mean reward {before.mean():.3f} of {len(before)} rollouts, then {after.mean():.3f} of {len(after)}")
    return bool(interval(before)[1] < interval(after)[0])


def faults(run: RunDir) -> list[str]:
    """Returns what is wrong with a finished synchronous run, apart from what it learned."""
    metrics = [json.loads(line) for line in TrainingFiles(run, "default").metrics.read_text().splitlines()]
    with open_trajectories(run.path) as store:
        ids = sorted(store.ids)
    checks = {
        "a rollout was not trained on exactly once": sorted(trained_on(TrainingFiles(run, "default"))) == ids,
        "a rollout was sampled by other weights": all(step["staleness_max"] == 0 for step in metrics),
        "engine and trainer disagree": all(step["mismatch"] <= MAX_MISMATCH for step in metrics),
    }
    return [what for what, sound in checks.items() if not sound]


def curve(asked: argparse.Namespace) -> int:
    with learning(asked.folder, asked.steps) as (process, run):
        assert process.stdout
        print(process.stdout.read())
    with open_trajectories(run.path) as store:
        learned = rises(store.column("reward"), store.column("weight_version_min"), asked.steps)
    wrong = faults(run) + ([] if learned else ["the reward does not rise beyond its interval"])
    print("\n".join(wrong) or "all is as it should be")
    return int(bool(wrong))


def _settings(folder: Path) -> Any:
    """Sets this process's variables as ``learn.py`` does, and returns that module."""
    sys.path.insert(0, str(folder))
    learn = importlib.import_module("learn")
    os.environ |= learn.SMALL
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    return learn


def _campaign(asked: argparse.Namespace, staleness: str) -> dict[str, Any]:
    """Returns the campaign of ``learn.py``. Changes to its working directory."""
    os.chdir(asked.folder)
    learn = _settings(asked.folder)
    options = ["--steps", str(asked.steps), "--staleness", asked.staleness or staleness, "--seed", str(asked.seed)]
    words = learn.read(["--local", *options])
    fields = learn.fields(words, Path("campaign.yaml").read_text(), os.environ["MEGAFLOW_TEST_BASE_SIF"], {})
    return dict(fields)


def _carried_out(campaign: dict[str, Any]) -> RunDir:
    run = Campaign(**campaign).plan(launcher="local")
    print(run.path, flush=True)
    run.start("local")
    run.wait()
    return run.dir


def two(asked: argparse.Namespace) -> int:
    campaign = _campaign(asked, "1")
    campaign["slurm"]["pods"]["slots_per_rank"] = asked.slots
    if asked.lasting:
        campaign["agent"] |= {"name": "tests.bench.lasting:Lasting", "args": {"mean_s": asked.lasting}}
        campaign["agent"]["timeout_s"] = 60 + 20 * asked.lasting
    model, policies = campaign.pop("model"), campaign["training"]["policies"]
    policies["default"]["optimizer"] |= asked.optimizer
    campaign["models"] = {name: copy.deepcopy(model) for name in POLICIES}
    campaign["training"]["policies"] = {name: copy.deepcopy(policies["default"]) for name in POLICIES}
    run = _carried_out(campaign)
    taken, seconds = [], []
    for name in POLICIES:
        files = TrainingFiles(run, name)
        metrics = [json.loads(line) for line in files.metrics.read_text().splitlines()]
        print(name, " ".join(f"{step['reward']:.3f}" for step in metrics))
        seconds += [step["seconds"] for step in metrics[WARM_UP_STEPS:]]
        taken += [(name, rollout) for rollout in trained_on(files)]
    twice = len(taken) - len({rollout for _, rollout in taken})
    strange = sum(rollout.split("/")[1] != name for name, rollout in taken)
    print(f"{len(taken)} rollouts trained on, {twice} twice, {strange} by the other's trainer")
    print(f"{mean(seconds):.1f} s a step of either (mean of {len(seconds)})")
    return int(bool(twice or strange))


def team_models(folder: Path, examples: int = 3200) -> None:
    """Makes the models ``writer``, which solves some four tasks of ten, and ``checker``, which answers at random.

    The writer is better than that of ``curve``: a checker of bad commands learns to say no before it sees good ones.
    """
    python = Path(required("MEGAFLOW_ENGINE_VENV")) / "bin" / "python"
    code = "import demonstrations as d, dataclasses, pathlib, sys\n" + (
        "d.TEACHING['tiny', 1] = dataclasses.replace(d.TEACHING['tiny', 1], spoiled=0.5)\n"
        "print(d.make(pathlib.Path(sys.argv[1]))['success'])\n"
    )
    paths = os.pathsep.join([str(SOURCES), str(LAUNCHERS), os.environ.get("PYTHONPATH", "")])
    writer, out, path = folder / "models" / "writer", folder / "models" / "checker", folder / "checker.jsonl"
    subprocess.run([python, "-c", code, writer], check=True, env={**os.environ, "PYTHONPATH": paths})
    if out.exists():
        return
    sys.path[:0] = [str(SOURCES), str(LAUNCHERS)]
    teaching, chance = importlib.import_module("demonstrations"), random.Random(0)
    lesson = teaching.Lesson(1)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(examples):
            instruction, [(command, _)] = lesson.demonstration(teaching.TEACHING["tiny", 1], chance)
            answer = {"role": "assistant", "content": chance.choice(["yes", "no"])}
            file.write(json.dumps({"messages": [question(instruction, command), answer]}) + "\n")
    command = [python, "-m", "megaflow_hpc.training.trainer.warm_start", writer, path, out]
    command += ["--lr", "1e-3", "--batch", "64", "--microbatch", "8192", "--dtype", "float32"]
    subprocess.run([str(word) for word in command], check=True, stdout=sys.stderr)


def team(asked: argparse.Namespace) -> int:
    campaign = _campaign(asked, "1")
    model, policies = campaign.pop("model"), campaign["training"]["policies"]
    team_models(asked.folder)
    paths = {"author": "models/writer", "second": "models/checker"}
    campaign["models"] = {name: {**copy.deepcopy(model), "path": path} for name, path in paths.items()}
    campaign["team"] = {"writer": "author", "checker": {"policy": "second", "reward": "right"}}
    both = {name: copy.deepcopy(policies["default"]) for name in campaign["models"]}
    both["second"]["loss"]["entropy"] = 0.01  # a checker that has given up one answer cannot return to it
    if asked.shuffle:
        both["second"]["advantage"] = {"kind": "tests.bench.shell_team:of_another"}
    campaign["training"]["policies"] = both
    campaign["tasks"] = ["tests.bench.shell_team:CheckedShellTask"]
    campaign["agent"] = {"name": "tests.bench.shell_team:ShellTeam", "max_turns": 2, "timeout_s": 60}
    run = _carried_out(campaign)
    learned = {}
    for name, role in (("author", "writer"), ("second", "checker")):
        files = TrainingFiles(run, name)
        plans = [plan for number in files.numbers(StepPlan) if (plan := files.read(StepPlan, number))]
        rewards = [np.array([rollout.roles[role] for rollout in plan.rollouts]) for plan in plans]
        print(role, " ".join(f"{step.mean():.3f}" for step in rewards))
        first, last = np.concatenate(rewards[:5]), np.concatenate(rewards[-5:])
        print(f"{role}: {first.mean():.3f} of {len(first)} rollouts, then {last.mean():.3f} of {len(last)}")
        learned[role] = bool(interval(first)[1] < interval(last)[0])
        taken = trained_on(files)
        print(f"{role}: {len(taken)} rollouts trained on, {len(taken) - len(set(taken))} twice")
        learned[f"{role} once"] = len(taken) == len(set(taken))
    expected = {name: not (asked.shuffle and name == "checker") for name in learned}
    print("all is as it should be" if learned == expected else f"expected {expected}, found {learned}")
    return int(learned != expected)


MODES = {"curve": (curve, 10), "two": (two, 10), "team": (team, 40)}
"""Functions with their default numbers of steps."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", choices=MODES)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--seed", type=int, default=0, help="of two and team")
    parser.add_argument("--staleness", help="of two (1)")
    parser.add_argument("--folder", type=Path, help="working directory, made if it is missing")
    parser.add_argument("--lasting", type=float, default=0.0, metavar="SECONDS", help="of two: mean of a rollout")
    parser.add_argument("--shuffle", action="store_true", help="of team: train the checker on rewards of others")
    parser.add_argument("--slots", type=int, default=24, help="of two: of both policies together")
    parser.add_argument("--optimizer", type=json.loads, default={}, metavar="JSON", help="of two: what is changed")
    asked = parser.parse_args()
    function, steps = MODES[asked.run]
    asked.steps = asked.steps or steps
    with tempfile.TemporaryDirectory() as temporary, descendants_end_with_this("LEARNING_BENCH"):
        asked.folder = prepare((asked.folder or Path(temporary)).absolute())
        return function(asked)


if __name__ == "__main__":
    raise SystemExit(main())
