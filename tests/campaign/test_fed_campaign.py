"""Campaigns to which somebody adds rollouts while they run, and whose pods wait for them meanwhile."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from megaflow_hpc.campaign.facade import Run
from megaflow_hpc.ledger import OpenLease, add_blocks
from megaflow_hpc.rundir.marks import Marks
from megaflow_hpc.types import Rollout
from tests.support.campaigns import Make, planned, rows, stored, verb
from tests.support.waiting import until


def add(run: Run, again: int) -> list[int]:
    """Asks all tasks once more."""
    batch = [Rollout(f"task{n}", "oracle", 0, "oracle", again) for n in range(2)]
    return add_blocks(run.dir, batch, f"learner.{again}")


def waits(run: Run, results: int) -> None:
    """Until all that was asked for is there."""
    until(lambda: stored(run) == results and run.status()["state"] == "waiting", f"{results} results, and it waits", 90)


@pytest.mark.slow
def test_batches_are_added_as_results_come_though_pods_are_killed_and_drained(make_campaign: Make) -> None:
    run = planned(make_campaign(2, agent="oracle", solution="sleep 1; echo 42 > answer"))
    lease = OpenLease(run.dir, "learner")
    lease.keep()
    run.start("local")
    assert run.local is not None
    waits(run, 2)
    shown = verb("status", run.path)
    assert "small: waiting" in shown.stdout
    assert "waits for learner to add rollouts" in shown.stdout
    add(run, 1)
    assert run.status()["rollouts"]["total"] == 4
    waits(run, 4)

    claims = Path(run.path, "ledger", "claims")
    before = set(claims.glob("[0-9]*"))
    add(run, 2)
    until(lambda: set(claims.glob("[0-9]*")) - before, "a pod has claimed round 2")
    os.kill(run.local.pod.pid, signal.SIGKILL)
    run.local.pod.wait(60)
    run.local.stop()
    again = Run(run.path)
    assert add(run, 2) == add(again, 2)
    assert again.resume(launcher="local")
    waits(again, 6)
    assert again.local is not None
    again.local.stop()
    states = {pod["pod"]: pod["state"] for pod in again.status()["pods"]}
    assert list(states.values()).count("drained") == 1
    assert not again.ledger.finished
    Marks(run.dir).cancel()
    assert again.status()["state"] == "cancelled"

    last = Run(run.path)
    assert last.resume(launcher="local"), "there is no open block, but somebody who may add some"
    assert last.status()["waits_for"] == ["learner"]
    add(last, 3)
    lease.close()
    summary = last.wait(timeout_s=120)
    assert (summary["state"], summary["rollouts"]["total"]) == ("finished", 8)
    names = {f"task{n}{again}/oracle/0" for n in range(2) for again in ("", "@1", "@2", "@3")}
    assert rows(run.path) == dict.fromkeys(names, ("completed", 1))
