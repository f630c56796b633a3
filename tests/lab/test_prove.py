"""``prove`` on a lab: a sound site passes, and each planted fault is named with its remedy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.campaigns import cli

pytestmark = [pytest.mark.lab, pytest.mark.usefixtures("slurm")]

PATCHED = {
    "no-links": "import errno, os\ndef link(*a, **k): raise OSError(errno.EOPNOTSUPP, 'Operation not supported')\n"
    "os.link = link\n",
    "clock": "import os, time\nreal = time.time\n"
    "if os.environ.get('SLURM_PROCID') == '1': time.time = lambda: real() + 100\n",
}
"""Name → a ``sitecustomize`` that plants a fault into every interpreter of a job."""


@pytest.fixture
def campaign(tmp_path: Path, base_sif: Path) -> Any:
    def write(*setup: str, **slurm: Any) -> Path:
        path = tmp_path / "campaign.yaml"
        pods = {"partition": "cpu", "mem_gb": 1}
        content = {
            "name": "mine",
            "tasks": ["tasks/*"],
            "agent": "nop",
            "environment": {"images": {"base": str(base_sif)}},
            "slurm": {"setup": list(setup), "pods": pods, "servers": {"partition": "gpu", "mem_gb": 1}, **slurm},
        }
        path.write_text(json.dumps(content))  # JSON is YAML
        return path

    return write


def prove(path: Path, *options: str, **environment: str) -> tuple[int, dict[str, dict[str, str]], Path]:
    """Runs ``prove``; returns its exit status, its worst finding of each check, and the directory of the report."""
    done = cli("prove", path, "--json", "--wait", "4", *options, timeout=400, **environment)
    assert done.stdout, done.stderr
    report = json.loads(done.stdout)
    findings: dict[str, dict[str, str]] = {}
    for finding in sorted(report["findings"], key=lambda f: ("ok", "skip", "warn", "FAIL").index(f["level"])):
        findings[finding["check"]] = finding
    (folder,) = path.parent.glob("runs/prove-*")
    assert json.loads((folder / "report.json").read_text())["findings"] == report["findings"]
    return done.returncode, findings, folder


@pytest.mark.slow
def test_a_sound_site_passes(campaign: Any) -> None:
    status, findings, folder = prove(campaign())
    assert status == 0, findings
    levels = {check: finding["level"] for check, finding in findings.items()}
    passed = ("nodes", "sandbox", "visibility", "links", "renames", "network", "worker", "engine", "walltime", "clean")
    assert levels == {**dict.fromkeys(passed, "ok"), "model": "skip", "preemption": "skip"}
    assert "a rank was killed" in findings["worker"]["found"]
    assert findings["walltime"]["found"].startswith("2 rollouts in ")
    text = (folder / "report.md").read_text()
    assert str(Path.home()) not in text
    assert str(folder) not in text


FAULTS = {
    "export MEGAFLOW_ADDRESS=192.0.2.7": ("network", "FAIL", ["192.0.2.7", "MEGAFLOW_ADDRESS"]),
    "export MEGAFLOW_SCRATCH=/proc/none": ("sandbox", "FAIL", ["/proc/none", "MEGAFLOW_SCRATCH"]),
    "export MEGAFLOW_APPTAINER=/none/apptainer": ("sandbox", "FAIL", ["/none/apptainer", "slurm.setup"]),
    "mpi4py.py: raise ImportError": ("packages", "FAIL", ["mpi4py", "pip install"]),
    "sitecustomize.py: no-links": ("links", "FAIL", ["not supported", "run_dir"]),
    "sitecustomize.py: clock": ("clocks", "warn", ["100", "synchronise"]),
    "squeue: exit 1": ("Slurm in jobs", "warn", ["squeue does not answer", "watch"]),
}
"""A line of set-up, or a file on the search paths of every job → check, level, and words of the finding."""


@pytest.mark.parametrize(
    "faults",
    [
        ("export MEGAFLOW_ADDRESS=192.0.2.7", "mpi4py.py: raise ImportError", "sitecustomize.py: no-links"),
        ("export MEGAFLOW_SCRATCH=/proc/none", "sitecustomize.py: clock", "squeue: exit 1"),
        ("export MEGAFLOW_APPTAINER=/none/apptainer",),
    ],
    ids=["address, package, links", "scratch, clock, squeue", "apptainer"],
)
def test_faults_of_nodes_are_named(tmp_path: Path, campaign: Any, faults: tuple[str, ...]) -> None:
    planted = tmp_path / "planted"
    planted.mkdir()
    setup = [f'export PYTHONPATH="{planted}:$PYTHONPATH" PATH="{planted}:$PATH"']
    for fault in faults:
        name, colon, content = fault.partition(": ")
        if colon:
            program = f"#!/bin/sh\n{content}\n"
            (planted / name).write_text(program if name == "squeue" else PATCHED.get(content, content))
            (planted / name).chmod(0o755)
        else:
            setup.append(fault)
    status, findings, _ = prove(campaign(*setup), "--only", "nodes")
    for check, level, words in map(FAULTS.get, faults):
        assert findings[check]["level"] == level, findings
        said = findings[check]["found"] + findings[check]["remedy"]
        assert [word for word in words if word not in said] == []
    assert status == 3


def test_an_mpi_that_does_not_fit_is_named(campaign: Any) -> None:
    status, findings, _ = prove(campaign(), "--only", "worker", MEGAFLOW_MPI="none")
    assert (status, findings["worker"]["level"]) == (3, "FAIL")
    assert "MPI sees 1 ranks" in findings["worker"]["found"]


@pytest.mark.slow
def test_a_site_that_does_not_requeue_is_named(campaign: Any) -> None:
    status, findings, _ = prove(campaign(extra={"requeue": False, "no-requeue": True}), "--only", "walltime")
    assert (status, findings["walltime"]["level"]) == (3, "FAIL")
    assert "JobRequeue" in findings["walltime"]["remedy"]


def test_bad_arguments_are_refused_before_anything_is_queued(campaign: Any, tmp_path: Path) -> None:
    done = cli("prove", campaign(), "--wait", "0")
    assert done.returncode == 2
    assert "more than 0" in done.stderr
    assert not (tmp_path / "runs").exists()
