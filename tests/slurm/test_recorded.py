"""What lab tests assert in minutes about Slurm's answers, asserted on recordings of them in milliseconds.

======================== ==================================================================================
file of ``tests/lab``    contract tests here
======================== ==================================================================================
test_administration      test_states_of_jobs, test_what_a_finished_run_used_is_read_from_accounting, test_doctor
test_arrays              test_arrays_fit_the_site, test_a_qos_of_twelve_jobs, test_a_lost_submission_is_adopted
test_clusters            test_each_cluster_is_asked_for_its_own_jobs, test_a_partition_that_another_cluster_lacks
test_doctor_states       test_doctor
test_elastic             test_states_of_jobs
test_faults              test_states_of_jobs, test_ends_of_jobs, test_a_site_whose_daemons_are_gone
test_queue               test_states_of_jobs, test_reasons_of_waiting_jobs, test_a_qos_with_a_short_walltime,
                         test_a_walltime_beyond_the_partition_is_refused
test_resources           test_a_qos_of_twelve_cpus
test_short_starts        test_ends_of_jobs
test_slurm_campaign      test_states_of_jobs, test_what_sbatch_refuses_is_quoted
test_together            test_states_of_jobs
test_training_job        test_states_of_jobs
test_unlaunched          test_states_of_jobs, test_a_job_that_its_node_could_not_launch_is_released
======================== ==================================================================================

The rest of ``tests/lab`` is about programs on nodes, which no recording shows. :mod:`tests.slurm.recorder` records.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from string import ascii_lowercase

import pytest

from megaflow_hpc.campaign import job_requests
from megaflow_hpc.campaign.jobs import Jobs
from megaflow_hpc.cli import doctor
from megaflow_hpc.config import CampaignConfig, parse
from megaflow_hpc.errors import ConfigError, SiteError
from megaflow_hpc.ledger import Ledger
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.record import read_run
from megaflow_hpc.slurm import accounting, arrays, fits, limits, site
from megaflow_hpc.slurm.arrays import Arrays
from megaflow_hpc.slurm.ids import scancel
from tests.slurm.recorder import RECORDED, SCENES, Slurm, read
from tests.support.labs import REASONS
from tests.support.places import ROOT
from tests.support.training import training_run
from tests.support.waiting import until

Play = Callable[[str], Slurm]


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Play:
    """Lets Slurm's commands answer as in a recorded scene; ``sbatch`` too, which writes scripts to ``submitted.N``."""
    monkeypatch.delenv("MEGAFLOW_MPI", raising=False)
    monkeypatch.setattr(site, "has_slurm", lambda: True)

    def make(scene: str) -> Slurm:
        for value in vars(site).values():
            if hasattr(value, "cache_clear"):
                value.cache_clear()
        slurm = Slurm(scene, tmp_path)
        folder = tmp_path / f"bin-{scene}"
        folder.mkdir()
        for number, call in enumerate(call for call in read(scene) if call.words == "sbatch SCRIPT"):
            (folder / f"out.{number}").write_text(call.out)
            (folder / f"err.{number}").write_text(call.err)
            (folder / f"status.{number}").write_text(str(call.status))
        (folder / "sbatch").write_text(
            f"#!/bin/sh\ncd {folder}; n=$(ls {tmp_path} | grep -c ^submitted)\ncp $1 {tmp_path}/submitted.$n\n"
            "cat out.$n; cat err.$n >&2; exit $(cat status.$n)\n"
        )
        (folder / "sbatch").chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
        monkeypatch.setattr(site, "subprocess", _Subprocess(slurm))
        return slurm

    return make


class _Subprocess:
    """The module ``subprocess`` with another ``run``."""

    TimeoutExpired = subprocess.TimeoutExpired

    def __init__(self, slurm: Slurm) -> None:
        self.run = slurm.run


def campaign(**slurm: object) -> CampaignConfig:
    return parse({"name": "small", "tasks": "t", "agent": "nop", "slurm": slurm})


def test_every_scene_is_recorded_in_a_lab_test_that_exists() -> None:
    assert {path.stem for path in RECORDED.iterdir()} == set(SCENES)
    for scene, test in SCENES.items():
        file, _, name = test.partition("::")
        assert f"def {name}(" in (ROOT / "tests" / "lab" / file).read_text(), scene


def jobs_of(scene: str) -> list[list[str]]:
    """Returns the jobs of each answer of ``squeue`` in a scene."""
    jobs = []
    for call in read(scene):
        if re.match(r"squeue --local -h --me -t all", call.words):
            jobs.append(sorted(set(re.findall(r"^\d+", call.out, re.MULTILINE))))
    return jobs


def submitted(scene: str) -> list[str]:
    """Returns the jobs that ``sbatch`` accepted in a scene."""
    return re.findall(r"Submitted batch job (\d+)", "".join(call.out for call in read(scene)))


STATES = {
    "finished": ("a0 a1 b / -", {"a0": "COMPLETED", "a1": "COMPLETED", "b": "COMPLETED"}),
    "held-servers": ("a0! a1! b0 c / -", {"a0": "COMPLETED", "a1": "CANCELLED", "b0": "COMPLETED"}),
    "cancelled-element": ("a0 a1 b c0 c1 d / b d", {"a0": "CANCELLED", "a1": "COMPLETED"}),
    "killed-pod": ("a0 b / -", {"a0": "CANCELLED"}),
    "requeued": ("a0 a1 b / b / -", {"a0": "COMPLETED", "a1": "COMPLETED", "b": "COMPLETED"}),
    "heterogeneous": ("a b / -", {"a": "COMPLETED", "b": "COMPLETED"}),
    "requeued-trainer": ("a0 b c0 d / -", {"b": "COMPLETED"}),
    "longer-than-allowed": ("a0 a1 b / -", {"a0": "CANCELLED", "a1": "CANCELLED", "b": "CANCELLED"}),
    "brief-qos": ("c! d! / -", {"c": "CANCELLED", "d": "CANCELLED"}),
    "unlaunched": ("a0? b0! c", {}),
}
"""Scene → states of its jobs that followed one another, and how jobs ended. A state is the live elements, with a letter
for each job. ``!`` marks a held element, ``?`` one that its node could not launch."""


@pytest.mark.parametrize("scene", STATES)
def test_states_of_jobs(scene: str, play: Play) -> None:
    play(scene)
    states, ends = STATES[scene]
    seen: list[str] = []
    last: dict[str, str] = {}
    numbers = sorted({int(job) for jobs in jobs_of(scene) for job in jobs})
    letters = {str(number): letter for number, letter in zip(numbers, ascii_lowercase, strict=False)}
    for jobs in jobs_of(scene):
        live = []
        for job in accounting.live_jobs(jobs).values():
            number, _, element = job.id.partition("_")
            name = letters[number] + element
            last[name] = job.state
            if job.live:
                live.append(name + ("?" if job.unlaunched else "!" if job.held else ""))
        seen.append(" ".join(sorted(live)) or "-")
    later = iter(seen)
    assert all(state in later for state in states.split(" / ")), seen
    assert last | ends == last


@pytest.mark.parametrize(
    ("scene", "states"),
    [("ended", {"COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL", "PREEMPTED"}), ("timeout", {"TIMEOUT"})],
)
def test_ends_of_jobs(scene: str, states: set[str], play: Play) -> None:
    play(scene)
    asked = [call.words for call in read(scene) if call.words.startswith("sacct -n -X -P -j")]
    jobs = asked[-1].split()[5].split(",")
    told = [{job.state for job in accounting.finished_jobs(jobs).values()} for _ in asked]
    assert told[-1] == states
    last = [accounting.live_jobs(jobs) for _ in jobs_of(scene)][-1]
    assert not any(job.live for job in last.values())


def test_arrays_fit_the_site(play: Play, tmp_path: Path) -> None:
    slurm = play("array-limit")
    config, run = campaign(pods={"partition": "cpu", "count": 7}), RunDir(tmp_path / "run")
    run.create()
    made = Arrays(run)
    for job in arrays.pod_jobs(config, run, limits.allowance({"partition": "cpu"})):
        made.queue(job)
    first, second, gather = submitted("array-limit")
    assert [(record.id, record.elements) for record in made.records()] == [(first, 3), (second, 4)]
    assert len(accounting.live_jobs([first, second, gather])) == 8
    assert not [call for call in slurm.calls if call.startswith("squeue -h -r")], "nothing limits the number of jobs"


def test_a_qos_of_twelve_jobs(play: Play, tmp_path: Path) -> None:
    play("qos-of-twelve-jobs")
    config, run = campaign(pods={"count": 20}, qos="short"), RunDir(tmp_path / "run")
    run.create()
    allowed = limits.allowance({"qos": "short"})
    assert (allowed.submit, allowed.running, allowed.room, allowed.why) == (12, 4, 12, "QOS short allows 12")
    assert fits.longest_s({"partition": "cpu", "qos": "short"}) == 1800
    assert arrays.gather_job(config, run, "afterany:16").options["time"] == "30", "what the QOS allows of an hour"
    made = Arrays(run)
    (job,) = arrays.pod_jobs(config, run, allowed, count=11)
    made.queue(job)
    assert "#SBATCH --array=0-10%4\n" in (tmp_path / "submitted.0").read_text()
    live = accounting.live_jobs(submitted("qos-of-twelve-jobs")[:2]).values()
    assert len(live) == 12
    assert all(job.held for job in live)
    full = limits.allowance({"qos": "short"})
    assert (full.queued, full.room) == (12, 0)


def test_a_lost_submission_is_adopted(play: Play, tmp_path: Path) -> None:
    play("lost-submission")
    (comment,) = {line.partition("|")[2] for call in read("lost-submission") for line in call.out.splitlines()
                  if "|small-" in line}  # fmt: skip
    run = RunDir(tmp_path / "runs" / comment)
    run.create()
    Arrays(run).adopt("small")
    assert [(record.role, record.id) for record in Arrays(run).records()] == list(
        zip(("pods", "gather"), submitted("lost-submission"), strict=True)
    )


def test_each_cluster_is_asked_for_its_own_jobs(play: Play, tmp_path: Path) -> None:
    slurm = play("two-clusters")
    pools = [{"clusters": "cluster2", "partition": "cpu"}]
    config, run = campaign(pods={"pools": pools}), RunDir(tmp_path / "run")
    run.create()
    made = Arrays(run)
    for job in [*arrays.pod_jobs(config, run, limits.allowance({})), *arrays.pod_jobs_elsewhere(config, run)]:
        made.queue(job)
    ours, *_ = submitted("two-clusters")
    assert made.ids() == ["1@cluster2", ours]
    states: list[dict[str, str]] = []
    while not states or states[-1]["1_0@cluster2"] != "CANCELLED":
        states.append({job.id: job.state for job in accounting.live_jobs([ours, "1@cluster2"]).values()})
    assert "RUNNING" in [state["1_0@cluster2"] for state in states]
    assert states[0][f"{ours}_0"] == "RUNNING"
    scancel(["1@cluster2"], "--signal=KILL", "--full")
    assert slurm.calls[-1] == "scancel -M cluster2 --quiet --signal=KILL --full 1"


def test_a_partition_that_another_cluster_lacks(play: Play) -> None:
    play("other-partitions")
    config = campaign(pods={"pools": [{"clusters": "cluster1", "partition": "nowhere"}]})
    with pytest.raises(ConfigError, match="no partition 'nowhere' at cluster1; there are: cpu, gpu, preempt"):
        site.check_site(config, lambda key: key)


@pytest.mark.parametrize(
    ("scene", "complaints"),
    [
        ("doctor", []),
        ("no-accounting", ["accounting warn slurmdbd at 127.0.0.1:6819 does not answer"]),
        (
            "drained",
            [
                "partition warn gpu: 2 nodes.*none of them takes jobs .drained: GPU fell off the bus.",
                "partition warn preempt: .*; it is down: jobs wait in it",
            ],
        ),
        ("no-default-partition", ["partition warn there is no default"]),
        ("no-pmi", ["srun --mpi FAIL srun offers neither pmi2 nor pmix"]),
        ("no-controller", ["controller FAIL .*Unable to contact slurm controller"]),
    ],
)
def test_doctor(scene: str, complaints: list[str], play: Play) -> None:
    play(scene)
    found = [*doctor._slurm(), *(finding for finding in doctor._mpi() if finding.check == "srun --mpi")]
    bad = [f"{one.check} {one.level} {one.found}" for one in found if one.level != "ok"]
    assert {line.split()[0] for line in bad} == {line.split()[0] for line in complaints}, bad
    assert all(any(re.match(pattern, line) for line in bad) for pattern in complaints), bad
    if scene == "drained":
        (cpu,) = (one.found for one in found if one.found.startswith("cpu:"))
        assert cpu.endswith("1 of them take no jobs (drained: disk)")


def test_a_site_whose_daemons_are_gone(play: Play) -> None:
    play("daemons-killed")
    assert limits.allowance({}).submit is None, "what cannot be asked limits nothing"
    (jobs, *_) = jobs_of("daemons-killed")
    assert accounting.live_jobs(jobs)
    with pytest.raises(SiteError, match="Unable to contact slurm controller"):
        accounting.live_jobs(jobs)


def test_reasons_of_waiting_jobs(play: Play) -> None:
    play("reasons")
    said: dict[str, str] = {}
    for jobs in jobs_of("reasons"):
        for group in accounting.waiting(("pods", job) for job in accounting.live_jobs(jobs).values()):
            said[group["reason"]] = f"{group['means']}; {group['remedy']}"
    for code, words in REASONS.items():
        found = [text for reason, text in said.items() if re.fullmatch(code, reason)]
        assert found, (code, said)
        assert all(re.search(words.replace("RUN ", ".*"), text) for text in found), found


def test_a_walltime_beyond_the_partition_is_refused(play: Play) -> None:
    play("longer-than-allowed")
    refused = fits.refusals("slurm.pods", {"partition": "away", "time": "30"})
    assert refused == ["slurm.pods.time: 30 is longer than partition away allows (15:00); ask for less"]
    assert fits.refusals("slurm.pods", {"partition": "away", "time": "12"}) == []


def test_what_a_finished_run_used_is_read_from_accounting(play: Play) -> None:
    slurm = play("finished")
    asked = next(call.words for call in read("finished") if call.words.startswith("sacct -n -P -D"))
    found = accounting.efficiencies(asked.split(" -j ")[1].split()[0].split(","))
    assert slurm.calls == [asked]
    pods, gather = submitted("finished")
    assert sorted(one.id for one in found) == [f"{pods}_0", f"{pods}_1", gather]
    for one in found:
        assert (one.state, one.cores, one.gpus) == ("COMPLETED", 4, 0)
        assert one.ended_at is not None
        assert one.ended_at >= one.started_at > 1.7e9
        assert 0 < one.cpu_s < 60
        assert one.memory_asked_mb == (1800 if one.id == gather else 1000)
        assert one.id == gather or 0 < (one.memory_peak_mb or 0) < one.memory_asked_mb


def test_a_qos_with_a_short_walltime(play: Play) -> None:
    play("brief-qos")
    assert fits.walltime_s({"partition": "cpu", "qos": "brief"}) == 600
    (refused,) = fits.refusals("slurm.gather", {"partition": "cpu", "qos": "brief", "time": "60"})
    assert refused.startswith("slurm.gather.time: 60 is longer than QOS brief allows (MaxWall 00:10:00)")
    config = campaign(pods={"partition": "cpu"}, qos="brief")
    (job,) = arrays.pod_jobs(config, RunDir("/r"), limits.Allowance())
    assert job.options["time"] == "10"


def test_a_qos_of_twelve_cpus(play: Play) -> None:
    play("qos-of-twelve-cpus")
    config = campaign(pods={"count": 9, "ranks_per_node": 2, "cpus_per_rank": 2}, qos="twelvecpus")
    (job,) = arrays.pod_jobs(config, RunDir("/r"), limits.allowance({"qos": "twelvecpus"}))
    assert job.indices == "0-8%3"
    config = campaign(pods={"nodes": 2, "ranks_per_node": 3, "cpus_per_rank": 2}, qos="twelvecpus")
    with pytest.raises(SiteError, match="one pod asks for cpu=12, and QOS twelvecpus allows cpu=8"):
        job_requests.check_resources(config, [], lambda key: key)
    jobs, *_ = jobs_of("qos-of-twelve-cpus")
    accounting.live_jobs(jobs)
    (held,) = accounting.live_jobs(jobs).values()
    assert held.reason == "QOSMaxCpuPerJobLimit"
    assert accounting.explain(held.reason)[0] == "it requests more than the account or QOS allows for one job"


def test_what_sbatch_refuses_is_quoted(play: Play, tmp_path: Path) -> None:
    play("refused")
    run = RunDir(tmp_path / "run")
    run.create()
    (job,) = arrays.pod_jobs(campaign(qos="nonsense"), run, limits.allowance({"qos": "nonsense"}))
    with pytest.raises(SiteError, match=r"sbatch refused the pods job \(slurm.pods of the campaign.*nvalid qos"):
        Arrays(run).queue(job)


def test_a_job_that_its_node_could_not_launch_is_released(play: Play, tmp_path: Path) -> None:
    slurm = play("unlaunched")
    run = training_run(tmp_path / "run", None)
    record = read_run(run)
    jobs = Jobs(run, record.config, record, Ledger(run))
    (broken, held, gather), element = submitted("unlaunched"), submitted("unlaunched")[0] + "_0"
    for array in (broken, held):
        jobs.arrays._record(array, "pods", 1)
    jobs.arrays._record(gather, "gather", None)
    until(lambda: jobs.release_unlaunched() == [element], "the pod was held after its node failed", 1, 0)
    assert slurm.calls[-1] == f"scontrol release {element}"
    assert jobs.notices == [f"released a job that its node could not launch: {element}"]
