"""A waiting trainer knows whether pods are left, reports it, and ends if no pod comes."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

import pytest

from megaflow_hpc.errors import StarvedError
from megaflow_hpc.ledger import Ledger, PodIdentity
from megaflow_hpc.ledger.lease import TIMES
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.marks import Marks
from megaflow_hpc.training import dataflow, readiness
from megaflow_hpc.training.dataflow import Dataflow
from megaflow_hpc.training.readiness import ASK_VARIABLE, GIVE_UP_S, POLL_INTERVAL_S, PodWatch
from tests.support.hash_trainer import START, step_through
from tests.support.training import Pods, training_run


class Clock:
    """A clock that a test advances."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return training_run(tmp_path / "run", {"batch": 2, "steps": 2}, samples=2)


def test_nothing_is_said_of_a_pod_that_renews_its_lease(run: RunDir) -> None:
    clock, asked = Clock(), [0]
    pod = Ledger(run, PodIdentity("pod", "0"))
    pod.register()
    watch = PodWatch(run, lambda: asked.append(1), clock)
    watch.begin()
    for _ in range(30):
        assert watch.look() == ""
        clock.now += 2 * POLL_INTERVAL_S
        pod.renew(force=True)
    assert asked == [0], "the site is not asked while a pod lives"


def test_pods_that_are_gone_are_told_of_and_after_a_while_nobody_is_waited_for(run: RunDir) -> None:
    clock, queued = Clock(), [1]
    Ledger(run, PodIdentity("pod", "0")).register()  # no longer renewed
    watch = PodWatch(run, lambda: queued[-1], clock)
    watch.begin()

    def later(seconds: float) -> str:
        said = ""
        end = clock.now + seconds
        while clock.now < end:
            clock.now += POLL_INTERVAL_S
            said = watch.look()
        return said

    assert watch.look() == ""
    assert later(TIMES.lease_s) == ""
    assert later(10 * GIVE_UP_S) == readiness.QUEUED
    queued.append(0)
    assert f"megaflow-hpc resume {run}; this trainer ends in 15 min" in later(POLL_INTERVAL_S)
    assert "ends in 5 min" in later(GIVE_UP_S - 300)
    queued.append(2)  # as resume does
    assert later(POLL_INTERVAL_S) == readiness.QUEUED
    queued.append(0)
    with pytest.raises(StarvedError, match=r"for 15 minutes no pod ran and none was queued.*resume"):
        later(GIVE_UP_S + 2 * POLL_INTERVAL_S)


@pytest.mark.parametrize(("prints", "found"), [("print(3)", 3), ("print(0)", 0), ("exit(1)", None)])
def test_the_site_is_asked_by_the_command_of_the_batch_script(
    monkeypatch: pytest.MonkeyPatch, prints: str, found: int | None
) -> None:
    monkeypatch.setenv(ASK_VARIABLE, shlex.join([sys.executable, "-c", prints]))
    assert readiness.ask_site() == found


def test_where_nobody_says_how_to_ask_nobody_can_tell(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ASK_VARIABLE, raising=False)
    clock = Clock()
    watch = PodWatch(run, clock=clock)
    watch.begin()
    for _ in range(200):
        clock.now += POLL_INTERVAL_S
        said = watch.look()
    assert said == "no pod runs, and the number of queued pods is unknown"


def test_a_starved_training_stays_open_and_goes_on_once_there_are_pods(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ASK_VARIABLE, "echo 0")
    monkeypatch.setattr(dataflow, "SAY_INTERVAL_S", 0.0)
    monkeypatch.setattr(readiness, "POLL_INTERVAL_S", 0.0)
    monkeypatch.setattr(readiness, "GIVE_UP_S", 0.5)
    monkeypatch.setattr(readiness, "TIMES", type(TIMES)(lease_s=0.5))
    pods, said = Pods(run, lambda rollout: float(rollout.sample_index)), list[str]()
    pods.work()
    flow = Dataflow(run, say=said.append)
    with pytest.raises(StarvedError):
        next(flow.steps())
    flow.leave()
    assert any("step 1 waits for rollouts" in line and "no pod runs and none is queued" in line for line in said)
    assert Marks(run).open == ["default"]
    pods.work()
    again = Dataflow(run, say=said.append)
    steps = again.steps()
    step_through(again, next(steps), START)
    assert again.files.committed() is not None
    again.close()
    assert os.listdir(run.ledger / "open") == []
