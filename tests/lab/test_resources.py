"""A QOS that limits resources: what fits is throttled, what never could start is refused before anything is queued."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest

from megaflow_hpc import Campaign
from megaflow_hpc.errors import SiteError
from megaflow_hpc.slurm import accounting
from tests.support.campaigns import Make
from tests.support.labs import pods
from tests.support.waiting import until

pytestmark = [pytest.mark.lab, pytest.mark.usefixtures("slurm")]


def slurm(*words: str) -> str:
    return subprocess.check_output(words, text=True).strip()


@pytest.fixture
def qos() -> Iterator[str]:
    """Twelve cpus for all jobs of a user, eight for one."""
    user, name = slurm("id", "-un"), "twelvecpus"
    slurm("sacctmgr", "-i", "add", "qos", name, "MaxTRESPerUser=cpu=12", "MaxTRESPerJob=cpu=8")
    slurm("sacctmgr", "-i", "modify", "user", user, "set", f"qos+={name}")
    yield name
    slurm("sacctmgr", "-i", "modify", "user", user, "set", f"qos-={name}")
    slurm("sacctmgr", "-i", "delete", "qos", name)


def test_pods_fit_the_cpus_of_a_qos_or_are_refused(make_campaign: Make, qos: str) -> None:
    path = make_campaign(1, f"{pods(count=9, ranks=2)}  qos: {qos}\n  hold: true\n")
    scripts = Campaign.from_yaml(path).estimate()[0]
    assert [job.indices for job in scripts if job.role == "pods"] == ["0-8%3"]
    path.write_text(path.read_text().replace("ranks_per_node: 2", "nodes: 2, ranks_per_node: 3"))
    with pytest.raises(
        SiteError, match=r"campaign\.yaml:\d+: one pod asks for cpu=12, and QOS twelvecpus allows cpu=8"
    ):
        Campaign.from_yaml(path).plan()
    # Slurm is of the same opinion.
    job = slurm("sbatch", "--parsable", f"--qos={qos}", "--ntasks=9", "--nodes=2", "--wrap=true")
    try:
        until(lambda: accounting.live_jobs([job])[job].reason == "QOSMaxCpuPerJobLimit", "Slurm holds such a job back")
    finally:
        slurm("scancel", job)
