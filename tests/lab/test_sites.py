"""A campaign on each variant of the lab (launchers/lab sites), one after the other in one directory."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from megaflow_hpc import Campaign
from megaflow_hpc.errors import SiteError
from tests.support.campaigns import Make, cli, rows, small_rows, started, stored
from tests.support.labs import Lab, own_lab, pods
from tests.support.waiting import until

pytestmark = [
    pytest.mark.lab,
    pytest.mark.slow,
    pytest.mark.skipif(os.getuid() == 0, reason="a lab belongs to an ordinary user"),
    pytest.mark.skipif(os.environ.get("MEGAFLOW_SITE") == "1", reason="the site's own Slurm is used, no lab"),
]


@dataclass(frozen=True)
class Variant:
    """What Slurm says of a variant, and what is special about the campaign that runs there."""

    ask: str
    """A command that Slurm answers."""
    answer: str
    slurm: str = pods(count=1)
    model: str = ""
    where: dict[str, str] | None = None
    """Role of a job → a field of accounting, and its value."""


SERVERS = "{{engine: scripted, script: answers.yaml, gpus: {}}}"
VARIANTS = {
    "norequeue": Variant("scontrol show config", "JobRequeue              = 0"),
    "hidden": Variant(
        "scontrol show partition gpu",
        "Hidden=YES",
        pods(count=1).replace("partition: cpu, ", "")
        + "  check: false\n  servers: {constraint: gpu, time: 10, mem: 1G}\n",
        SERVERS.format(1),
        {"pods": "partition=cpu", "servers": "partition=gpu", "gather": "partition=cpu"},
    ),
    "gputypes": Variant(
        "scontrol show node gpu2",
        "Gres=gpu:a100:4",
        pods(count=1) + "  servers: {partition: gpu, time: 10, mem: 1G}\n",
        SERVERS.format("1, gpu_type: a100"),
        {"servers": "nodelist=gpu2"},
    ),
    "ratelimit": Variant("scontrol show config", "rl_enable"),
}
OTHERS = {"plain", "waittime", "exclusive", "grace", "lua", "psslurm", "array"}
"""Variants on which other tests run campaigns: below, in test_refusals.py and in test_differing_nodes.py."""
PGID = "ProctrackType=proctrack/pgid\n"
"""Slurm signals the tasks of a step and not what they have started, as with proctrack/cgroup."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of the labs: the next one takes over the accounting database of the last."""
    return tmp_path_factory.mktemp("sites")


def test_every_variant_is_tried(tmp_path: Path) -> None:
    assert json.loads(Lab(tmp_path).call("sites", "--json").stdout).keys() == {*OTHERS, *VARIANTS}
    done = Lab(tmp_path).call("start", "--site", "psslrum")
    assert (done.returncode, "did you mean psslurm?" in done.stderr) == (1, True)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_campaign_runs_on_a_lab_with_a_trait_of_real_sites(name: str, place: Path, make_campaign: Make) -> None:
    variant = VARIANTS[name]
    done = Lab(place).call("start", "--site", name)
    if done.returncode:
        assert "needs Slurm" in done.stderr, done.stderr
        pytest.skip(done.stderr.strip())
    with own_lab(place) as lab:
        assert variant.answer in lab.slurm(*shlex.split(variant.ask))
        assert "stop it first" in lab.call("start", "--site", "plain").stderr
        policies = ("default",) if variant.model else ("oracle", "nop")
        if variant.model:
            campaign = make_campaign(2, f"{variant.slurm}model: {variant.model}\n", agent="oracle", answers=["done"])
        else:
            campaign = make_campaign(2, variant.slurm)
        run = Campaign.from_yaml(campaign).submit()
        assert run.wait(timeout_s=900)["state"] == "finished"
        rewards = {"default": 1, "oracle": 1, "nop": 0}
        assert rows(run.path) == {
            f"task{n}/{policy}/0": ("completed", rewards[policy]) for n in range(2) for policy in policies
        }
        for role, expected in (variant.where or {}).items():
            field, _, value = expected.partition("=")
            shown = lab.slurm("sacct", "-nXP", "-j", ",".join(run.job_ids(role)), "-o", field)
            assert set(shown.split()) == {value}, role
        [job] = run.job_ids("pods")
        assert "Requeue=1" in lab.slurm("scontrol", "-o", "show", "job", job), "what the script asks for wins"


def test_the_words_of_a_submit_plugin_are_in_the_error(place: Path, make_campaign: Make) -> None:
    with own_lab(place, site_name="lua"):
        without_time = pods(count=1).replace(", time: 10", "")
        assert "time" not in without_time
        campaign = make_campaign(2, without_time)
        with pytest.raises(SiteError) as refused:
            Campaign.from_yaml(campaign).submit()
        words = "sbatch refused the pods job (slurm.pods of the campaign): this site: state a walltime (--time)"
        assert words in str(refused.value)
        assert str(refused.value).endswith("; see slurm.pods.time")
        done = cli("run", campaign)
        assert done.returncode == 3
        assert "this site: state a walltime" in done.stderr.splitlines()[-1]
        campaign.write_text(campaign.read_text().replace("mem: 1G", "mem: 1G, time: 10"))
        with pytest.raises(SiteError, match=r"this site: state a project.*; see slurm.account"):
            Campaign.from_yaml(campaign).submit()
        campaign.write_text(f"{campaign.read_text()}  account: lab\n")
        run = Campaign.from_yaml(campaign).submit()
        assert run.wait(timeout_s=900)["state"] == "finished"
        assert rows(run.path) == small_rows(2)


def test_a_preempted_pod_uses_its_grace_time_and_gives_its_blocks_back(place: Path, make_campaign: Make) -> None:
    with own_lab(place, PGID, "grace") as lab:
        assert "GraceTime=40" in lab.slurm("scontrol", "show", "partition", "preempt")
        solution = "sleep 12; echo 42 > answer"
        run, pod = started(make_campaign(6, pods("preempt", count=1), agent="oracle", solution=solution))
        before = stored(run)
        time.sleep(3)  # the next rollouts run
        node = lab.slurm("squeue", "-h", "-j", pod, "-o", "%N")
        lab.slurm("sbatch", "-p", "cpu", "-w", node, "--exclusive", "-o", "/dev/null", "--mem=0", "--wrap", "sleep 3")
        began = time.monotonic()
        until(lambda: "preempts the allocation" in str(run.status()["pods"]), "the pod knows", 30)
        until(lambda: run.status()["pods"][0]["state"] == "drained", "the pod has drained", 60)
        assert time.monotonic() - began < 40, "it leaves as soon as nothing runs any more"
        assert stored(run) >= before + 2, "what ran was stored within the grace time"
        until(lambda: run.status()["state"] == "finished", "the jobs alone finish the campaign", 240)
        until(lambda: run.live_jobs(0) == set(), "every job has left", 60)
        assert {each["pod"] for each in run.status()["pods"]} == {f"{pod}.1"}
        assert rows(run.path) == {f"task{n}/oracle/0": ("completed", 1) for n in range(6)}
        assert run.dir.event_file(pod, "1").exists()
        assert pod in lab.slurm("sacct", "-nX", "-j", pod, "-o", "JobID")


def test_a_pod_drains_and_starts_again_where_psslurm_starts_batch_scripts(place: Path, make_campaign: Make) -> None:
    with own_lab(place, site_name="psslurm") as lab:
        assert "psid" in lab.slurm("srun", "--mpi=none", "--mem=100", "sh", "-c", "cat /proc/$PPID/comm")
        campaign = make_campaign(6, pods(count=1), agent="oracle", solution="sleep 3; echo 42 > answer")
        run, pod = started(campaign)
        lab.slurm("scancel", "--signal=USR2", "--batch", pod)
        assert run.wait(timeout_s=900)["state"] == "finished"
        assert rows(run.path) == {f"task{n}/oracle/0": ("completed", 1) for n in range(6)}
        assert "Restarts=1 " in lab.slurm("scontrol", "show", "job", pod)


def names_and_comments(ids: list[str]) -> set[tuple[str, str]]:
    """Of elements, from accounting."""
    output = subprocess.check_output(["sacct", "-nXP", "-j", ",".join(ids), "-o", "JobName,Comment"], text=True)
    return {(name, comment) for name, _, comment in (line.partition("|") for line in output.splitlines())}


def test_seven_pods_are_one_campaign_where_arrays_have_five_elements(place: Path, make_campaign: Make) -> None:
    with own_lab(place, site_name="array") as lab:
        assert "MaxArraySize            = 5" in lab.slurm("scontrol", "show", "config")
        run = Campaign.from_yaml(make_campaign(8, pods(count=7, ranks=1))).submit()
        assert [record.elements for record in run.slurm_jobs.arrays.records() if record.role == "pods"] == [3, 4]
        summary = run.wait(timeout_s=900)
        assert summary["state"] == "finished"
        assert rows(run.path) == small_rows(8)
        assert len({pod["pod"] for pod in summary["pods"]}) <= 7
        nodes = [pod["node"] for pod in summary["pods"]]
        assert len(set(nodes)) < len(nodes), "pods of less than a node share one"
        until(lambda: names_and_comments(run.job_ids("pods")) == {("small", run.path.name)}, "accounting has them")
