"""A trainer of the user's on several ranks: they take the same steps, and end together."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.torch_ranks import run_ranks

pytestmark = pytest.mark.slow  # waits for torch

TRAINER = """
import sys
import time
from pathlib import Path

from megaflow_hpc.errors import StarvedError
from megaflow_hpc.rundir import amendments


def train(flow, how):
    amended, steps = Path("amended"), flow.steps()
    while flow.rank and not amended.exists():
        time.sleep(0.01)
    step = next(steps)
    if not flow.rank:  # after its own step has begun
        amendments.skip(flow.run, "default", 1)
        amended.touch()
    weights = [rollout.weight for rollout in step.plan.rollouts]
    Path(f"taken-{flow.rank}").write_text(f"{step.amendments} {sum(weights)} {flow.agree(flow.rank + 7)}")
    if how == "done":
        for number in range(30):
            assert flow.agree(number) == number
        while not flow.rank and not Path("kept-1").exists():  # until rank 1 has read them too
            time.sleep(0.01)
        Path(f"kept-{flow.rank}").write_text(str(flow.agree.__self__._store.num_keys()))
    if how == "stopped":  # by a signal that rank 0 gets in this step and rank 1 in the next one
        assert flow.agree(flow.rank == 0)
        time.sleep(2.5 * (not flow.rank))
        Path(f"stopped-{flow.rank}").touch()
        raise SystemExit(75)
    if how == "failed" and flow.rank == 1:
        raise ValueError("this rank alone")
    if how == "starved" and flow.rank == 0:
        raise StarvedError("no pod runs")
    if how == "ended" and flow.rank == 1:
        sys.exit("nothing more to do")
    if how != "done":
        time.sleep(300)  # in a collective operation
    flow.close()
"""

SCRIPT = r"""
import json, os, sys, time
from pathlib import Path
from megaflow_hpc.rundir.amendments import Amendments
from megaflow_hpc.training.dataflow import Dataflow
from megaflow_hpc.training.trainer import __main__ as trainer
from tests.support.kills import start, status_of
from tests.support.training import Pods, training_run


def scene(how):
    folder = Path(how).absolute()
    folder.mkdir()
    os.chdir(folder)
    (folder / "own_trainer.py").write_text(TRAINER)
    method = {"name": "own_trainer:train", "args": {"how": how}}
    training = {"trainer": method, "batch": 1, "staleness": 0, "steps": 1}
    run = training_run(folder / "run", training, tasks=1, samples=2)
    sys.path[:] = [str(folder), *(path for path in sys.path if not (Path(path) / "own_trainer.py").exists())]
    flow = Dataflow(run)
    flow.start()
    flow.try_plan(1)
    Pods(run, lambda r: float(r.sample_index)).work()
    assert flow.try_plan(1)
    flow.leave()
    sys.modules.pop("own_trainer", None)

    def rank(number):
        log = os.open(f"log-{number}", os.O_WRONLY | os.O_CREAT, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        store = f"file://{folder}/store"
        os.environ.update(RANK=str(number), WORLD_SIZE="2", MEGAFLOW_TRAINER_STORE=store)
        try:
            return trainer.main([str(run.path)])
        except SystemExit as end:  # as Python does
            if isinstance(end.code, str):
                print(end.code)
                return 1
            return end.code

    ranks = [start(lambda number=number: rank(number)) for number in (0, 1)]
    limit, found = time.monotonic() + 15, {}
    while len(found) < 2 and time.monotonic() < limit:
        for number, process in enumerate(ranks):
            if number not in found and (status := status_of(process)) is not None:
                found[number] = status
        time.sleep(0.05)
    for number, process in enumerate(ranks):
        if number not in found:
            os.kill(process, 9)
            os.waitpid(process, 0)
    read = lambda name: Path(name).read_text() if Path(name).exists() else None
    result = {
        "status": [found.get(0), found.get(1)],
        "taken": [read("taken-0"), read("taken-1")],
        "stopped": [read("stopped-0"), read("stopped-1")],
        "kept": [read("kept-0"), read("kept-1")],
        "log": [read("log-0"), read("log-1")],
    }
    os.chdir(folder.parent)
    return result


print(json.dumps({how: scene(how) for how in sys.argv[1:]}))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    script = f"TRAINER = {TRAINER!r}\n{SCRIPT}"
    scenes = ("done", "failed", "starved", "ended", "stopped")
    result: dict[str, Any] = run_ranks(script, tmp_path_factory.mktemp("own"), *scenes)
    return result


@pytest.mark.parametrize("how", ["done", "failed", "starved", "ended", "stopped"])
def test_all_ranks_take_the_step_of_rank_0_whatever_is_amended_meanwhile(found: dict[str, Any], how: str) -> None:
    assert found[how]["taken"] == ["0 2.0 7", "0 2.0 7"], found[how]["log"]


@pytest.mark.parametrize(
    ("how", "status", "rank", "said"),
    [
        ("failed", 1, 1, "ValueError: this rank alone"),
        ("starved", 69, 0, "trainer: no pod runs"),
        ("ended", 1, 1, "nothing more to do"),
    ],
)
def test_a_rank_that_cannot_continue_ends_all_others(
    found: dict[str, Any], how: str, status: int, rank: int, said: str
) -> None:
    assert found[how]["status"] == [status, status], found[how]["log"]
    assert said in found[how]["log"][rank]


def test_ranks_that_are_done_or_stopped_end_by_themselves(found: dict[str, Any]) -> None:
    assert found["done"]["status"] == [0, 0], found["done"]["log"]
    assert found["stopped"]["status"] == [75, 75], found["stopped"]["log"]
    assert found["stopped"]["stopped"] == ["", ""]


def test_agreed_values_are_deleted_once_all_ranks_have_read_them(found: dict[str, Any]) -> None:
    assert all(int(kept) <= 4 for kept in found["done"]["kept"]), found["done"]
