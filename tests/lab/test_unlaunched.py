"""Pods that a node cannot launch, and that Slurm then holds: what ``status`` says of them, and ``resume`` does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from megaflow_hpc.campaign.facade import Run
from tests.support.campaigns import Make, cli, rows, small_rows, verb
from tests.support.labs import Lab, own_lab, pods
from tests.support.waiting import until

pytestmark = [pytest.mark.lab, pytest.mark.usefixtures("slurm")]


@pytest.fixture
def prolog(tmp_path: Path) -> Path:
    """A program that each node runs before a job's first step there; it ends well."""
    script = tmp_path / "prolog"
    script.write_text("#!/bin/sh\nexit 0\n")
    script.chmod(0o755)
    return script


@pytest.fixture
def lab(tmp_path_factory: pytest.TempPathFactory, prolog: Path) -> Iterator[Lab]:
    with own_lab(tmp_path_factory.mktemp("lab"), f"Prolog={prolog}\n") as lab:
        yield lab


def test_resume_releases_what_a_broken_node_could_not_launch(lab: Lab, prolog: Path, make_campaign: Make) -> None:
    sound = prolog.read_text()
    prolog.write_text("#!/bin/sh\nexit 1\n")
    section = pods(count=1).replace("time: 10", "time: 10, pools: [{hold: true}]")
    said = cli("submit", make_campaign(2, section), "--json")
    run = Run(json.loads(said.stdout)["run"])
    array, held_by_its_user = run.job_ids("pods")

    def unlaunched() -> list[str]:
        return sorted(job for job, state in (run.slurm_jobs.live(0) or {}).items() if state.unlaunched)

    until(lambda: unlaunched() == [f"{array}_0"], "Slurm holds the pod", 60)
    [line] = [line for line in verb("status", run.path).stdout.splitlines() if "launch failed" in line]
    assert f"pods in the queue: {array}_0: launch failed requeued held (its node could not launch it" in line
    assert "resume RUN, which releases it" in line

    prolog.write_text(sound)
    drained = set(lab.slurm("sinfo", "-h", "-N", "-t", "drain", "-o", "%N").split())  # each once a partition
    assert drained, "Slurm takes nodes whose prolog fails out of service"
    for node in drained:
        lab.slurm("scontrol", "update", f"nodename={node}", "state=resume")
    done = cli("resume", run.path, "--no-wait")
    assert done.returncode == 0, done.stderr
    assert f"released a job that its node could not launch: {array}_0" in done.stderr
    assert run.job_ids("pods") == [array, held_by_its_user], "none was queued anew"
    until(lambda: run.ledger.finished, "the campaign ends", 180)
    other = {pod.id: pod for pod in run.slurm_jobs.live_pods(0) or []}[f"{held_by_its_user}_0"]
    assert other.held, "its user knows why"
    lab.slurm("scancel", other.id)
    run.gather()
    assert rows(run.path) == small_rows(2)
