"""Pods that wait in the queue, held by real causes: what is said of each, and what ``resume`` changes for them."""

from __future__ import annotations

import getpass
import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megaflow_hpc.campaign.facade import Run
from megaflow_hpc.slurm import site
from megaflow_hpc.slurm.fits import walltime_s
from tests.support.campaigns import Make, cli, rows, small_rows, verb
from tests.support.labs import REASONS, pods
from tests.support.waiting import eventually, until

pytestmark = [pytest.mark.lab, pytest.mark.usefixtures("slurm")]

USER = getpass.getuser()
SLOW = "sleep 3; echo 42 > answer"


def slurm(*words: str) -> str:
    return subprocess.check_output(words, text=True, stderr=subprocess.STDOUT).strip()


def job(number: str) -> dict[str, str]:
    """What Slurm has of a job."""
    return dict(re.findall(r"(\S+?)=(\S*)", slurm("scontrol", "-o", "show", "job", number).splitlines()[0]))


@pytest.fixture
def crowded() -> Iterator[str]:
    """Partitions, QOS and an account of which none has room: yields a job on which others can depend."""
    for name, state in (("closed", "DOWN"), ("shrinking", "DOWN"), ("opening", "DOWN"), ("worn", "UP")):
        node = "gpu2" if name == "worn" else "gpu1"
        slurm("scontrol", "create", f"PartitionName={name}", f"Nodes={node}", "MaxTime=60", f"State={state}")
    for name, limit in (("few", "MaxTRESPerUser=cpu=5"), ("one", "MaxJobsPerUser=1"), ("brief", "MaxWall=30")):
        slurm("sacctmgr", "-i", "add", "qos", name, limit)
    slurm("sacctmgr", "-i", "add", "account", "tight", "GrpTRES=cpu=3")
    slurm("sacctmgr", "-i", "add", "user", USER, "account=tight")
    slurm("sacctmgr", "-i", "modify", "user", USER, "set", "qos+=few,one,brief")
    slurm("scontrol", "update", "NodeName=gpu2", "State=DRAIN", "Reason=fan")
    sleep = ("sbatch", "--parsable", "--mem=100", "--time=60", "-o", "/dev/null", "--wrap=sleep 600")
    blockers = [
        slurm(*sleep, "-p", "cpu", "-N4", "--ntasks-per-node=8"),
        slurm(*sleep, "-p", "gpu", "-n2", "--qos=few"),
        slurm(*sleep, "-p", "gpu", "-n1", "--qos=one"),
    ]
    running = "squeue", "-h", "-t", "R", "-o", "%A", "-j", ",".join(blockers)
    until(lambda: len(slurm(*running).split()) == len(blockers), "the jobs that hold everything run")
    site.partitions.cache_clear()
    yield blockers[0]
    slurm("scancel", "-u", USER)
    slurm("scontrol", "update", "NodeName=gpu2", "State=RESUME")
    until(lambda: not slurm("squeue", "-h", "-o", "%A"), "the queue is empty")
    slurm("sacctmgr", "-i", "modify", "user", USER, "set", "qos-=few,one,brief")
    slurm("sacctmgr", "-i", "delete", "user", USER, "account=tight")
    for words in (("account", "tight"), ("qos", "few,one,brief")):
        slurm("sacctmgr", "-i", "delete", *words)
    for name in ("closed", "shrinking", "opening", "worn"):
        slurm("scontrol", "delete", f"PartitionName={name}")


def test_run_status_and_watch_say_why_each_pod_waits(make_campaign: Make, crowded: str, tmp_path: Path) -> None:
    pools = [
        {"partition": "cpu"},
        {"partition": "closed"},
        {"partition": "shrinking"},
        {"partition": "worn"},
        {"dependency": f"afterany:{crowded}"},
        {"qos": "few"},
        {"qos": "one"},
        {"partition": "opening", "qos": "brief"},
        {"account": "tight"},
        {"hold": True},
        {"begin": "now+1hour"},
    ]
    given = [{"partition": "gpu", **pool} for pool in pools]
    section = pods(count=1).replace("time: 10", f"time: 10, pools: {json.dumps(given)}")
    mail = {"mail-user": "ada@site.example", "mail-type": "END,FAIL"}
    campaign = make_campaign(16, f"{section}  gather: {json.dumps(mail)}\n")
    words = [sys.executable, "-m", "megaflow_hpc", "run", str(campaign), "--run-dir", str(tmp_path / "run")]
    with (tmp_path / "said").open("w") as said:
        following = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=said, stderr=said)
    try:
        until(
            lambda: (tmp_path / "run" / "run.json").exists() and Run(tmp_path / "run").job_ids("gather"),
            "all are queued",
        )
        run = Run(tmp_path / "run")
        slurm("scontrol", "update", "PartitionName=shrinking", "MaxTime=5", "State=UP")
        slurm("sacctmgr", "-i", "modify", "qos", "brief", "set", "MaxWall=5")
        slurm("scontrol", "update", "PartitionName=opening", "State=UP")
        found: list[str] = []

        def all_seen() -> bool:
            found[:] = [group["reason"] for group in run.slurm_jobs.waiting(0)]
            return all(any(re.fullmatch(code, reason) for reason in found) for code in REASONS)

        assert eventually(all_seen, 90, every_s=1.0), f"each cause shows, and not only {found}"
        lines = [line for line in verb("status", run.path).stdout.splitlines() if " in the queue: " in line]
        assert len(lines) == len(REASONS), lines
        for code, words_of_it in REASONS.items():
            [line] = [line for line in lines if re.search(f": ({code}) ", line)]
            assert re.search(words_of_it, line), line

        watching = subprocess.Popen(
            [sys.executable, "-m", "megaflow_hpc", "watch", str(run.path)], stdout=subprocess.PIPE, text=True
        )
        assert watching.stdout is not None
        line = watching.stdout.readline()
        watching.send_signal(signal.SIGINT)
        assert watching.wait(30) == 130
        assert re.match(r"\S+ small: queued, 0/32 done, 0 running, pods 0, pods in the queue: ", line)
        until(lambda: " in the queue: " in (tmp_path / "said").read_text(), "run says it too")

        # To whom Slurm writes, as Slurm itself has it.
        [gather] = run.job_ids("gather")
        text = slurm("scontrol", "show", "job", gather)
        assert re.search(r"MailUser=ada@site\.example MailType=\S*END,FAIL", text), text
        assert "MailUser" not in slurm("scontrol", "show", "job", run.job_ids("pods")[0])
    finally:
        following.send_signal(signal.SIGINT)
        status = following.wait(60)
        print((tmp_path / "said").read_text())
    assert status == 130
    assert run.live_jobs(0) == set()


@pytest.fixture
def away() -> Iterator[str]:
    """A partition that takes no jobs now, and gives a quarter of an hour."""
    slurm("scontrol", "create", "PartitionName=away", "Nodes=cpu1", "MaxTime=15", "State=DOWN")
    site.partitions.cache_clear()
    yield "away"
    until(lambda: not slurm("squeue", "-h", "-p", "away", "-o", "%A"), "nothing waits there")
    slurm("scontrol", "delete", "PartitionName=away")


def test_waiting_pods_get_another_walltime_memory_and_partition(make_campaign: Make, away: str) -> None:
    said = cli("submit", make_campaign(2, pods(partition=away, count=2)), "--json")
    run = Run(json.loads(said.stdout)["run"])
    [first] = run.job_ids("pods")

    refused = cli("resume", run.path, "--time", "30", "--no-wait")
    assert refused.returncode == 2
    assert "slurm.pods.time: 30 is longer than partition away allows (15:00); ask for less" in refused.stderr
    assert run.live_jobs(0) == {f"{first}_0", f"{first}_1", *run.job_ids("gather")}, "nothing was changed"
    assert not run.dir.changed_requests.exists(), "and nothing of it is left for the next time"

    asked = ("--time", "12", "--mem", "800M", "--time", "gather=7", "--no-wait")
    changed = cli("resume", run.path, *asked)
    assert changed.returncode == 0, changed.stderr
    second, gather = Run(run.path).job_ids("pods")[-1], Run(run.path).job_ids("gather")[-1]
    assert Run(run.path).live_jobs(0) == {f"{second}_0", f"{second}_1", gather}, "the former ones left the queue"
    waits = job(second)
    assert (waits["TimeLimit"], waits["MinMemoryNode"], waits["Partition"]) == ("00:12:00", "800M", "away")
    assert job(gather)["TimeLimit"] == "00:07:00"

    done = cli("resume", run.path, "--partition", "cpu")
    assert done.returncode == 0, done.stderr
    assert rows(run.path) == small_rows(2)
    third = Run(run.path).job_ids("pods")[-1]
    told: list[list[str]] = []

    def counted() -> bool:
        """Accounting has all of both, which it learns of in pieces."""
        words = ("sacct", "-nXP", "-j", f"{second},{third}", "-o", "JobID,Partition,Timelimit,Elapsed")
        told[:] = [split(line) for line in slurm(*words).splitlines()]
        return {(partition, time, elapsed != "00:00:00") for _, partition, time, elapsed in told} == {
            ("away", "00:12:00", False),
            ("cpu", "00:12:00", True),
        }

    assert eventually(counted, 60, every_s=1.0), told


def split(line: str) -> list[str]:
    return line.split("|")


def test_jobs_without_a_time_ask_for_what_a_qos_allows(make_campaign: Make, tmp_path: Path) -> None:
    """Ten minutes of the QOS ``brief``, which refuses more: less than the partitions' hour, and than gather's."""
    slurm("sacctmgr", "-i", "add", "qos", "brief", "MaxWall=10", "Flags=DenyOnLimit")
    slurm("sacctmgr", "-i", "modify", "user", USER, "set", "qos+=brief")
    (tmp_path / "answers.yaml").write_text('default: ["42"]\n')
    model = "model: {engine: scripted, script: answers.yaml, gpus: 0}\n"
    section = pods(count=1).replace(", time: 10", "") + "  servers: {partition: gpu, mem: 400M}\n"
    brief = "  qos: brief\n"
    try:
        campaign = make_campaign(1, section + brief, agent="oracle")
        right = campaign.read_text()
        assert walltime_s({"partition": "cpu", "qos": "brief"}) == 600.0
        campaign.write_text(right.replace(brief, brief.replace("}", ", hold: true}")))
        run = Run(json.loads(cli("submit", campaign, "--json").stdout)["run"])
        limits = slurm("squeue", "-h", "-j", ",".join(run.job_ids()), "-o", "%l").split()
        run.cancel()
        assert limits == ["10:00"] * 2, "the pod and the gather job"

        held = "  together: true\n" + brief.replace("}", ", hold: true}") + model
        campaign.write_text(right.replace(brief, held))
        run = Run(json.loads(cli("submit", campaign, "--json").stdout)["run"])
        try:
            [one] = run.job_ids("pods")
            assert slurm("squeue", "-h", "-j", one, "-o", "%i %l").split() == [f"{one}+0", "10:00", f"{one}+1", "10:00"]
        finally:
            run.cancel()
        assert run.job_ids("pods") == [one]  # its second component is no job by itself
        campaign.write_text(right.replace(brief, f"  gather: {{time: 60}}\n{brief}"))
        refused = cli("check", campaign)
        assert refused.returncode == 3
        assert "slurm.gather.time: 60 is longer than QOS brief allows (MaxWall 00:10:00)" in refused.stderr
        until(lambda: run.live_jobs(0) == set(), "all jobs are gone")
    finally:
        slurm("sacctmgr", "-i", "modify", "user", USER, "set", "qos-=brief")
        slurm("sacctmgr", "-i", "delete", "qos", "brief")
