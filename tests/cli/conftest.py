"""A host without Slurm, and a campaign that needs neither Apptainer nor an image of any size."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from megaflow_hpc import Campaign
from megaflow_hpc.campaign.run import Run
from megaflow_hpc.cli import main
from megaflow_hpc.cli.progress import PlanProgress
from tests.support.harbor_tasks import write_solved_task

Megaflow = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(autouse=True)
def bare_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No program on PATH, scratch and home of the test's own, and no variable of a lab or job."""
    for name in ("SLURM_CONF", "SLURM_JOB_ID", "MEGAFLOW_SITE_FILE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("scratch", "home", "bin"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("MEGAFLOW_SCRATCH", str(tmp_path / "scratch"))
    monkeypatch.setenv("MEGAFLOW_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("MEGAFLOW_SITE_CHECK", "0")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(PlanProgress, "EVERY_S", 3600.0)  # how slow the machine is changes nothing of what is printed


@pytest.fixture
def campaign(tmp_path: Path) -> Path:
    """A campaign file of two tasks, with the agents oracle and nop, on an unpacked image."""
    for number in range(2):
        write_solved_task(tmp_path / "tasks", f"task{number}")
    (tmp_path / "image" / "bin").mkdir(parents=True)
    path = tmp_path / "campaign.yaml"
    path.write_text(
        "name: small\ntasks: tasks/*\nagent: [oracle, nop]\n"
        f"environment: {{network: none, images: {{base: {tmp_path / 'image'}}}}}\n"
    )
    return path


@pytest.fixture
def planned(campaign: Path) -> Run:
    """A run of the campaign, planned and not started."""
    return Campaign.from_yaml(campaign).plan(launcher="local")


@pytest.fixture
def megaflow(capsys: pytest.CaptureFixture[str]) -> Megaflow:
    """Runs one verb within the test, without a start of Python; returns what it printed and its exit status."""

    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        capsys.readouterr()
        command = [*map(str, arguments)]
        status = main(command)
        printed = capsys.readouterr()
        return subprocess.CompletedProcess(command, status, printed.out, printed.err)

    return run
