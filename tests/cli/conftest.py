"""A host without Slurm, and a campaign that needs neither Apptainer nor a real image."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from megaflow_hpc import Campaign
from megaflow_hpc.campaign import facade
from megaflow_hpc.campaign.planning import draft
from megaflow_hpc.campaign.run import Run
from megaflow_hpc.cli import main
from megaflow_hpc.cli.progress import PlanProgress
from megaflow_hpc.environments.sandbox import probe
from tests.support.harbor_tasks import write_solved_task

Megaflow = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(autouse=True)
def bare_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty PATH, own scratch and home directories, and no variables of a lab or job."""
    for name in ("SLURM_CONF", "SLURM_JOB_ID", "MEGAFLOW_SITE_FILE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("scratch", "home", "bin"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("MEGAFLOW_SCRATCH", str(tmp_path / "scratch"))
    monkeypatch.setenv("MEGAFLOW_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(draft, "check_models", lambda *_: [])  # there are no engines
    monkeypatch.setattr(facade, "check_packages", lambda *_: None)
    monkeypatch.setattr(probe, "require", lambda *_, **__: None)  # there is no Apptainer
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(PlanProgress, "EVERY_S", 3600.0)  # the speed of the machine does not change the output


@pytest.fixture
def campaign(tmp_path: Path) -> Path:
    """Write a campaign file with two tasks, the agents oracle and nop, and an unpacked image."""
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
    """Plan a run of the campaign without starting it."""
    return Campaign.from_yaml(campaign).plan(launcher="local")


@pytest.fixture
def megaflow(capsys: pytest.CaptureFixture[str]) -> Megaflow:
    """Return a function that runs one verb in this process and returns its output and exit status."""

    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        capsys.readouterr()
        command = [*map(str, arguments)]
        status = main(command)
        printed = capsys.readouterr()
        return subprocess.CompletedProcess(command, status, printed.out, printed.err)

    return run


@pytest.fixture
def refused(megaflow: Megaflow) -> Callable[..., str]:
    """Return a function that runs a verb, checks that it is refused without output, and returns its stderr."""

    def run(*arguments: object) -> str:
        result = megaflow(*arguments)
        assert (result.returncode, result.stdout) == (2, ""), result.stderr
        return result.stderr

    return run
