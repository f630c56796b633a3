"""``prove`` on a lab: a sound site passes, and each planted fault is named with its remedy."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megaflow_hpc.slurm import site
from tests.support.campaigns import cli
from tests.support.waiting import until

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.usefixtures("slurm")]

PATCHED = {
    "no-links": "import errno, os\ndef link(*a, **k): raise OSError(errno.EOPNOTSUPP, 'Operation not supported')\n"
    "os.link = link\n",
    "clock": "import os, time\nreal = time.time\n"
    "if os.environ.get('SLURM_PROCID') == '1': time.time = lambda: real() + 100\n",
}
"""Name → a ``sitecustomize`` that plants a fault into every interpreter of a job."""


Proved = tuple[int, dict[str, dict[str, str]], Path]
"""Exit status, worst finding of each check, and directory of the report."""


def write(folder: Path, image: Path, *setup: str, **slurm: Any) -> Path:
    """Writes a campaign file."""
    path = folder / "campaign.yaml"
    pods = {"partition": "cpu", "mem": "1G"}
    content = {
        "name": "mine",
        "tasks": ["tasks/*"],
        "agent": "nop",
        "environment": {"images": {"base": str(image)}},
        "slurm": {"setup": list(setup), "pods": pods, "servers": {"partition": "gpu", "mem": "1G"}, **slurm},
    }
    path.write_text(json.dumps(content))  # JSON is YAML
    return path


@pytest.fixture
def campaign(tmp_path: Path, base_sif: Path) -> Any:
    return partial(write, tmp_path, base_sif)


def prove(path: Path, *options: str, **environment: str) -> Proved:
    """Runs ``prove``."""
    done = cli("prove", path, "--json", "--wait", "4", *options, timeout=900, **environment)
    assert done.stdout, done.stderr
    report = json.loads(done.stdout)
    findings: dict[str, dict[str, str]] = {}
    for finding in sorted(report["findings"], key=lambda f: ("ok", "skip", "warn", "FAIL").index(f["level"])):
        findings[finding["check"]] = finding
    (folder,) = path.parent.glob("runs/prove-*")
    assert json.loads((folder / "report.json").read_text())["findings"] == report["findings"]
    return done.returncode, findings, folder


PREEMPT = ("--only", "preemption")
LEAD_S = 45
"""With it, a pod of the walltime trial gets two minutes, and Slurm signals it after 15 to 45 seconds."""


@pytest.fixture(scope="module")
def proved(slurm: Any, base_sif: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[Proved]]]:
    """The proofs that wait for the end of a walltime. They run beside the tests of this module."""

    def start(name: str, *options: str, **slurm: Any) -> Future[Proved]:
        pods = {"partition": "cpu", "mem": "1G", "signal": f"B:USR2@{LEAD_S}"}
        path = write(tmp_path_factory.mktemp(name), base_sif, pods=pods, **slurm)
        return threads.submit(prove, path, *options)

    with ThreadPoolExecutor() as threads:
        refused = {"requeue": False, "no-requeue": True}
        yield {
            "sound": start("sound"),
            "no requeue": start("refused", "--only", "walltime", **refused),
        }


pytestmark.append(pytest.mark.usefixtures("proved"))  # so that they start before the first test


FAULTS = {
    "export MEGAFLOW_ADDRESS=192.0.2.7": ("network", "FAIL", ["192.0.2.7", "MEGAFLOW_ADDRESS"]),
    "export MEGAFLOW_SCRATCH=/proc/none": ("scratch", "warn", ["/proc/none", "MEGAFLOW_SCRATCH"]),
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
        (
            "export MEGAFLOW_ADDRESS=192.0.2.7",
            "mpi4py.py: raise ImportError",
            "sitecustomize.py: no-links",
            "export MEGAFLOW_APPTAINER=/none/apptainer",
        ),
        ("export MEGAFLOW_SCRATCH=/proc/none", "sitecustomize.py: clock", "squeue: exit 1"),
    ],
    ids=["address, package, links, apptainer", "scratch, clock, squeue"],
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
    assert status == (3 if "FAIL" in {FAULTS[fault][1] for fault in faults} else 0)


def test_an_mpi_that_does_not_fit_is_named(campaign: Any) -> None:
    status, findings, _ = prove(campaign(), "--only", "worker", MEGAFLOW_MPI="none")
    assert (status, findings["worker"]["level"]) == (3, "FAIL")
    assert "MPI sees 1 ranks" in findings["worker"]["found"]


def test_a_sound_site_passes(proved: dict[str, Future[Proved]]) -> None:
    status, findings, folder = proved["sound"].result()
    assert status == 0, findings
    levels = {check: finding["level"] for check, finding in findings.items()}
    passed = ("nodes", "sandbox", "visibility", "links", "renames", "network", "worker", "engine", "walltime", "clean")
    assert levels == {**dict.fromkeys(passed, "ok"), "model": "skip", "preemption": "skip"}
    assert "a rank was killed" in findings["worker"]["found"]
    assert re.match(r"6 rollouts in [2-6] starts of a pod, each stored once", findings["walltime"]["found"])
    text = (folder / "report.md").read_text()
    assert str(Path.home()) not in text
    assert str(folder) not in text


def test_a_site_that_does_not_requeue_is_named(proved: dict[str, Future[Proved]]) -> None:
    status, findings, _ = proved["no requeue"].result()
    assert (status, findings["walltime"]["level"]) == (3, "FAIL")
    assert "Requested operation is presently disabled" in findings["walltime"]["found"]
    assert "JobRequeue" in findings["walltime"]["remedy"]


def test_a_pod_that_is_preempted_comes_back(proved: dict[str, Future[Proved]], campaign: Any) -> None:
    for other in proved.values():  # whose jobs the preempting job would wait for, because it needs a whole node
        other.result()
    path = campaign(pods={"partition": "preempt", "mem": "1G"})
    status, findings, _ = prove(path, *PREEMPT, "--preempt=--partition=cpu")
    assert status == 0, findings
    assert {check: finding["level"] for check, finding in findings.items()} == {"preemption": "ok", "clean": "ok"}
    assert re.match(r"6 rollouts in [2-6] starts of a pod, each stored once", findings["preemption"]["found"])


def test_a_preempting_job_that_slurm_refuses_is_named_and_its_pod_is_cancelled(campaign: Any) -> None:
    status, findings, _ = prove(campaign(), *PREEMPT, "--preempt=--partition=none")
    assert (status, findings["preemption"]["level"]) == (3, "FAIL")
    assert "invalid partition" in findings["preemption"]["found"]
    assert "--preempt" in findings["preemption"]["remedy"]
    until(lambda: not site.ask("squeue", "-h", "--me", "--name=prove-preemption"), "its pod has left")
