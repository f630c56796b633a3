"""Two steps of launchers/learn by real vLLM, sandboxes and trainer, and the check of the long curve.

``python -m tests.bench.learning curve`` runs the curve itself, which takes minutes.
"""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from megaflow_hpc import open_trajectories
from megaflow_hpc.host import process
from megaflow_hpc.rundir.layout import RunDir
from tests.bench.learning import faults, learning, prepare, rises
from tests.support.waiting import until

STEPS, TURNS = 2, 2
BATCH, SAMPLES = 4, 2
RECORDED = Path(__file__).with_name("learning_curve.json")
"""Rewards that each weight version earned in ten steps: version → rollouts and solved ones."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory as launchers/learn makes it, with a hardly taught model and fewer rollouts a step."""
    folder = prepare(tmp_path_factory.mktemp("learn"), batches=2, turns=TURNS)
    campaign = folder / "campaign.yaml"
    text = campaign.read_text().replace("samples: 8", f"samples: {SAMPLES}")
    campaign.write_text(text.replace("batch: 10\n", f"batch: {BATCH}\n"))
    return folder


def processes_of(run: RunDir) -> list[int]:
    return [pid for pid in process.processes() if any(str(run).encode() in word for word in process.argv(pid))]


@pytest.mark.engine
@pytest.mark.slow
def test_a_model_is_trained_by_the_rollouts_of_its_own_weights(folder: Path, base_sif: Path) -> None:
    with learning(folder, STEPS, "--turns", str(TURNS)) as (learn, run):
        assert learn.stdout
        printed = learn.stdout.read()
    assert learn.returncode == 0, printed
    assert faults(run) == []
    with open_trajectories(run.path) as store:
        assert len(store) == STEPS * BATCH * SAMPLES
        assert set(store.column("reward")) <= {0.0, 1.0}
        assert set(store.column("weight_version_min")) == set(range(STEPS))
    rewards = [json.loads(line)["reward"] for line in _metrics(run).read_text().splitlines()]
    last = printed.rstrip().rpartition("\n")[2]
    told = re.fullmatch(r"reward: (0\.\d{3}) -> (0\.\d{3}) seed 0 steps 2 seconds \d+ results (/.*)", last)
    assert told, last
    assert float(told[1]) == float(told[2]) == pytest.approx(np.mean(rewards), abs=6e-4)
    assert json.loads((run.path / "curve.json").read_text())["rewards"] == rewards
    picture = ElementTree.parse(run.path / "curve.svg")
    assert len(picture.findall(".//{http://www.w3.org/2000/svg}circle")) == STEPS
    assert json.loads((run.path / "taught.json").read_text())["success"]["mean"] < 0.2


def _metrics(run: RunDir) -> Path:
    return run.path / "training" / "default" / "metrics.jsonl"


@pytest.mark.engine
@pytest.mark.slow
def test_an_interruption_leaves_nothing_running(folder: Path, base_sif: Path) -> None:
    with learning(folder, STEPS, "--turns", str(TURNS)) as (learn, run):
        until(lambda: len(processes_of(run)) >= 3, "pod, engine and trainer run")
        learn.send_signal(signal.SIGINT)
        assert learn.wait(120) == 130
    until(lambda: processes_of(run) == [], "every process has ended", 20)


def test_the_recorded_curve_rises_beyond_its_interval_and_chance_does_not() -> None:
    versions, rewards = [], []
    for version, (rollouts, solved) in json.loads(RECORDED.read_text()).items():
        versions += [int(version)] * rollouts
        rewards += [1.0] * solved + [0.0] * (rollouts - solved)
    assert rises(np.array(rewards), np.array(versions), 10)
    np.random.default_rng(0).shuffle(rewards)
    assert not rises(np.array(rewards), np.array(versions), 10)
