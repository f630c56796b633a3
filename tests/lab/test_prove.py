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


@pytest.mark.parametrize(
    ("fault", "check", "level", "words"),
    [
        ("export MEGAFLOW_ADDRESS=192.0.2.7", "network", "FAIL", ["192.0.2.7", "MEGAFLOW_ADDRESS"]),
        ("export MEGAFLOW_SCRATCH=/proc/none", "sandbox", "FAIL", ["/proc/none", "MEGAFLOW_SCRATCH"]),
        ("export MEGAFLOW_APPTAINER=/none/apptainer", "sandbox", "FAIL", ["/none/apptainer", "slurm.setup"]),
        ("mpi4py.py: raise ImportError", "packages", "FAIL", ["mpi4py", "pip install"]),
        ("sitecustomize.py: no-links", "links", "FAIL", ["not supported", "run_dir"]),
        ("sitecustomize.py: clock", "clocks", "warn", ["100", "synchronise"]),
        ("squeue: exit 1", "Slurm in jobs", "warn", ["squeue does not answer", "watch"]),
    ],
)
def test_a_fault_of_the_nodes_is_named(
    tmp_path: Path, campaign: Any, fault: str, check: str, level: str, words: list[str]
) -> None:
    name, colon, content = fault.partition(": ")
    if colon:
        planted = tmp_path / "planted"
        planted.mkdir()
        (planted / name).write_text(PATCHED.get(content, f"#!/bin/sh\n{content}\n" if name == "squeue" else content))
        (planted / name).chmod(0o755)
        fault = f'export PYTHONPATH="{planted}:$PYTHONPATH" PATH="{planted}:$PATH"'
    status, findings, _ = prove(campaign(fault), "--only", "nodes")
    assert findings[check]["level"] == level, findings
    said = findings[check]["found"] + findings[check]["remedy"]
    assert [word for word in words if word not in said] == []
    assert status == (3 if level == "FAIL" else 0)


def test_an_mpi_that_does_not_fit_is_named(campaign: Any) -> None:
    status, findings, _ = prove(campaign(), "--only", "worker", MEGAFLOW_MPI="none")
    assert (status, findings["worker"]["level"]) == (3, "FAIL")
    assert "world" in findings["worker"]["found"]


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
