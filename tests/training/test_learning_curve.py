"""The short form of launchers/learn: ten steps in which a tiny model learns, by real vLLM, sandboxes and trainer."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from megaflow_hpc import open_trajectories
from megaflow_hpc.host import process
from tests.support.places import LAUNCHERS
from tests.support.requirements import required
from tests.support.waiting import until

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1200)]

FOLDER = LAUNCHERS / "learning"
STEPS = 10
END = re.compile(r"reward: (0\.\d{3}) -> (0\.\d{3}) seed 0 steps 10 seconds \d+ results (/.*)")


def words(folder: Path, *more: str) -> list[str]:
    return [sys.executable, str(folder / "learn.py"), "--local", "--steps", str(STEPS), *more]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory as launchers/learn makes it."""
    folder = tmp_path_factory.mktemp("learn")
    shutil.copytree(FOLDER, folder, dirs_exist_ok=True)
    python = Path(required("MEGAFLOW_ENGINE_VENV")) / "bin" / "python"
    subprocess.run([python, FOLDER / "demonstrations.py", folder / "models" / "base"], check=True, timeout=500)
    return folder


@pytest.fixture(scope="module")
def learned(folder: Path, base_sif: Path) -> dict[str, Any]:
    done = subprocess.run(words(folder), cwd=folder, capture_output=True, text=True, timeout=550, check=False)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    last = done.stdout.rstrip().rpartition("\n")[2]
    found = END.fullmatch(last)
    assert found, last
    run = Path(found[3])
    lines = (run / "training" / "default" / "metrics.jsonl").read_text().splitlines()
    return {"run": run, "said": [float(found[1]), float(found[2])], "metrics": [json.loads(line) for line in lines]}


def interval(rewards: np.ndarray) -> tuple[float, float]:
    """Of a mean of rewards 0 and 1, at 99 % (Wilson 1927)."""
    n, mean, z = len(rewards), rewards.mean(), 2.576
    middle, half = mean + z * z / (2 * n), z * np.sqrt(mean * (1 - mean) / n + z * z / (4 * n * n))
    return (middle - half) / (1 + z * z / n), (middle + half) / (1 + z * z / n)


def test_reward_of_real_sandboxes_rises_beyond_its_interval(learned: Mapping[str, Any]) -> None:
    with open_trajectories(learned["run"]) as store:
        rewards, versions = store.column("reward"), store.column("weight_version_min")
    assert set(rewards) <= {0.0, 1.0}
    assert len(rewards) == STEPS * 80
    before, after = rewards[versions <= 1], rewards[versions >= STEPS - 2]
    told = f"{before.mean()} of {len(before)}, then {after.mean()} of {len(after)}"
    assert interval(before)[1] < interval(after)[0], told


def test_each_rollout_is_trained_on_once_and_by_the_weights_that_sampled_it(learned: Mapping[str, Any]) -> None:
    plans = sorted((learned["run"] / "training" / "default" / "steps").glob("*.json"))
    taken = [rollout["id"] for plan in plans for rollout in json.loads(plan.read_text())["rollouts"]]
    with open_trajectories(learned["run"]) as store:
        assert sorted(taken) == sorted(store.ids)
    assert [found["staleness_max"] for found in learned["metrics"]] == [0] * STEPS


def test_trainer_and_engine_agree_about_log_probabilities(learned: Mapping[str, Any]) -> None:
    assert max(found["mismatch"] for found in learned["metrics"]) <= 1e-5


def test_what_is_printed_and_drawn_is_what_was_measured(learned: Mapping[str, Any]) -> None:
    rewards = [found["reward"] for found in learned["metrics"]]
    assert learned["said"] == pytest.approx([np.mean(rewards[:5]), np.mean(rewards[-5:])], abs=6e-4)
    assert json.loads((learned["run"] / "curve.json").read_text())["rewards"] == rewards
    picture = ElementTree.parse(learned["run"] / "curve.svg")
    assert len(picture.findall(".//{http://www.w3.org/2000/svg}circle")) == STEPS
    assert json.loads((learned["run"] / "taught.json").read_text())["success"]["mean"] < 0.2


def below(folder: Path) -> list[int]:
    """Pids of processes that work for a run in ``folder``."""
    inside = str(folder / "runs").encode()
    return [pid for pid in process.processes() if any(inside in word for word in process.argv(pid))]


def test_an_interruption_leaves_nothing_running(folder: Path, base_sif: Path) -> None:
    with subprocess.Popen(words(folder), cwd=folder, stdout=subprocess.PIPE, text=True) as learning:
        assert learning.stdout
        said = next(line for line in learning.stdout if line.startswith("run directory: "))
        run = Path(said.removeprefix("run directory: ").strip())
        until(lambda: list((run / "training" / "default" / "batches").glob("*.json")), "rollouts are asked for")
        assert len(below(folder)) >= 3, "pod, engine and trainer"
        learning.send_signal(signal.SIGINT)
        assert learning.wait(120) == 130
    deadline = time.monotonic() + 20
    while below(folder) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert below(folder) == []
