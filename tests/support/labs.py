"""A lab of the test's own, to be broken; and what tests of labs ask."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megaflow_hpc.slurm import site
from tests.support.places import LAUNCHERS
from tests.support.waiting import eventually, until

LAB = LAUNCHERS / "lab.py"
REASONS = {
    "Resources": "next in the queue",
    "Priority": "of higher priority",
    "PartitionDown": "accepts no jobs now.*resume RUN --partition",
    "PartitionTimeLimit": "more time than the partition.*resume RUN --time",
    "ReqNodeNotAvail.*|Nodes.required.*": "down, drained or reserved",
    "Dependency": "waits for other jobs",
    "QOSMaxCpuPerUserLimit": "limit of resources",
    "QOSMaxJobsPerUserLimit": "limit of jobs",
    "QOSMaxWallDurationPerJobLimit": "more time than the account or QOS.*resume RUN --time",
    "AssocGrpCpuLimit": "limit of resources",
    "JobHeldUser": "scontrol release JOB",
    "BeginTime": "starts in a moment|delayed",
}
"""Slurm's codes for pods that wait in tests/lab/test_queue.py, and a pattern of what is said of each."""


class Lab:
    """A Slurm lab in a directory, as ``launchers/lab.py`` makes it."""

    def __init__(self, directory: Path) -> None:
        self.dir, self.conf = directory, directory / "slurm.conf"
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin"
        self.env = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "SBATCH"))} | {"PATH": path}

    def call(self, *words: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
        """Runs a verb of the launcher."""
        return subprocess.run(
            [sys.executable, str(LAB), *words, "--dir", str(self.dir)],
            env=self.env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout,
        )  # fmt: skip

    def start(self, site: str = "") -> str:
        """Starts what does not run, of this variant (launchers/lab sites); returns what the launcher said."""
        done = self.call("start", *(["--site", site] if site else []))
        assert done.returncode == 0, done.stderr
        return done.stderr

    def status(self) -> dict[str, Any]:
        """The lab's status: daemons by name, with pid and start."""
        return json.loads(self.call("status", "--json").stdout)

    def slurm(self, *words: str, timeout: float = 60) -> str:
        """The output of a Slurm command that is asked of this lab."""
        env = self.env | {"SLURM_CONF": str(self.dir / "slurm.conf")}
        done = subprocess.run(words, env=env, cwd=self.dir, capture_output=True, text=True, timeout=timeout)
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def kill(self, *names: str) -> None:
        """Kills daemons by SIGKILL and waits until they are gone."""
        daemons = self.status()["daemons"]
        for name in names:
            assert alive(daemons[name])
            os.kill(daemons[name]["pid"], signal.SIGKILL)
        assert eventually(lambda: not any(alive(daemons[name]) for name in names))

    def batch(self, script: str, *options: str) -> str:
        """Submits a job whose output goes to LAB/JOB.out (array: JOB_ELEMENT.out); its id."""
        file = self.dir / "job.sh"
        file.write_text(f"#!/bin/bash\n{script}\n")
        return self.slurm("sbatch", "--parsable", *options, str(file)).split(";")[0]


@contextmanager
def cluster_beside(other: Path, directory: Path) -> Iterator[str]:
    """Starts a second cluster at the accounting of the lab in ``other``; its name."""
    lab = Lab(directory)
    done = lab.call("start", "--beside", str(other))
    assert done.returncode == 0, done.stderr
    try:
        yield "lab" + json.loads((directory / "lab.json").read_text())["id"]
    finally:
        lab.call("stop")


@contextmanager
def own_lab(directory: Path, conf: str = "", site_name: str = "") -> Iterator[Lab]:
    """Starts a lab of a variant, with ``conf`` at the end of its slurm.conf, that commands of this process speak to."""
    import pytest  # the benchmarks use this module without it

    lab = Lab(directory)
    directory.joinpath("site.conf").write_text(conf)
    lab.start(site_name)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SLURM_CONF", str(directory / "slurm.conf"))
            site.configuration.cache_clear()
            yield lab
    finally:
        site.configuration.cache_clear()
        lab.call("stop")


@contextmanager
def lab_to_oneself(directory: Path) -> Iterator[None]:
    """The Slurm that ``SLURM_CONF`` names, or, where another worker of the suite has that, a lab in ``directory``."""
    home = Path(os.environ["SLURM_CONF"]).parent
    if not (home / "lab.json").exists():  # the site's own
        yield
        return
    with open(home / "tests.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with own_lab(directory):
                yield
        else:
            yield


def alive(daemon: dict[str, Any]) -> bool:
    """Whether the process with this pid started at this tick; judged apart from the code under test."""
    try:
        fields = Path(f"/proc/{daemon['pid']}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    return fields[0] not in "ZX" and daemon["start"].endswith(f"/{fields[19]}")


def of_lab(directory: Path) -> list[str]:
    """Command lines of processes that mention the lab's directory in their arguments or environment."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                text = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
            except OSError:
                continue
            if str(directory).encode() in text:
                found.append((entry / "cmdline").read_text(errors="replace"))
    return found


def sbatch(*words: object, timeout_s: float = 180.0) -> str:
    """Queues a batch job and waits until it has ended; its state. (``sbatch --wait`` asks less and less often.)"""
    command = ["sbatch", "--parsable", *map(str, words)]
    job = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    def state() -> str:
        shown = subprocess.check_output(["scontrol", "-o", "show", "job", job], text=True)
        return shown.partition("JobState=")[2].split()[0]

    until(lambda: state() not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING"), f"job {job} ends", timeout_s, 0.3)
    return state()


PODS = """\
slurm:
  pods: {{partition: {partition}, count: {count}, ranks_per_node: {ranks}, slots_per_rank: 2, mem: 1G, time: {time}}}
"""


def pods(partition: str = "cpu", count: int = 2, time: int = 10, ranks: int = 2) -> str:
    """A campaign's section ``slurm``: ``count`` pods of ``ranks`` ranks; ``time`` in minutes."""
    return PODS.format(partition=partition, count=count, time=time, ranks=ranks)
