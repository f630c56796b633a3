"""Batch scripts: one pure function serves --dry-run, submission and the files in sbatch/."""

from __future__ import annotations

import subprocess

import pytest

from megaflow_hpc import config
from megaflow_hpc.errors import ConfigError
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.slurm import accounting, arrays, ids, limits, script, site
from tests.support.places import ROOT

CAMPAIGN = {
    "name": "fix-bugs",
    "tasks": "t/*",
    "agent": "oracle",
    "slurm": {"account": "lab", "qos": "long", "pods": {"partition": "cpu", "count": 3, "mem": "1500M"}},
}


@pytest.mark.parametrize(
    ("role", "name"), [("pods", "sandbox_pods"), ("servers", "model_servers"), ("trainer", "trainer")]
)
def test_the_scripts_under_sbatch_are_what_the_builder_makes(role: script.Role, name: str) -> None:
    assert (ROOT / "sbatch" / f"{name}.sbatch").read_text() == script.by_hand(role)


@pytest.mark.parametrize("role", ["pods", "servers", "trainer", "gather"])
def test_every_script_is_valid_shell(role: script.Role) -> None:
    text = script.script(script.Job(role, {}, run="/a dir/run"))
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0
    assert "='/a dir/run'" in text


def test_options_come_from_the_campaign_file() -> None:
    text = script.script(script.pod_job(config.parse(CAMPAIGN), RunDir("/runs/r1")))
    for line in (
        "--array=0-2",
        "--job-name=fix-bugs",
        "--comment=r1",
        "--account=lab",
        "--partition=cpu",
        "--mem=1500M",
        "--qos=long",
        "--signal=B:USR2@60",
        "--requeue",
        "--output=/runs/r1/logs/pod-%A_%a.log",
    ):
        assert f"#SBATCH {line}\n" in text
    assert text.count("srun --export=ALL --mpi") == 1


def test_engine_arrays_of_different_sizes_keep_their_indices() -> None:
    job = script.server_job(config.parse(CAMPAIGN), RunDir("/r"), 2, 4, first=3)
    assert job.indices == "3-4"
    assert "#SBATCH --gres=gpu:4\n" in script.script(job)


def test_job_arrays_as_squeue_prints_them_are_expanded() -> None:
    assert accounting.expand("7_[0-2,5%3]") == ["7_0", "7_1", "7_2", "7_5"]
    assert accounting.expand("7_[1-7:3]") == ["7_1", "7_4", "7_7"]
    assert accounting.expand("7_3") == ["7_3"]
    assert accounting.expand("7") == ["7"]


def test_engine_arrays_beyond_the_largest_index_count_from_a_base() -> None:
    job = script.server_job(config.parse(CAMPAIGN), RunDir("/r"), 4, 1, first=8, largest=9)
    assert job.indices == "0-3"
    assert '--index "$((8 + SLURM_ARRAY_TASK_ID))"' in script.script(job)


def test_a_service_job_has_memory_for_the_process_that_watches_the_service() -> None:
    assert script.service_job(config.parse(CAMPAIGN), RunDir("/r"), 0, 2, 1000).options["mem"] == "1512M"
    assert script.service_job(config.parse(CAMPAIGN), RunDir("/r"), 0, 2, None).options["mem"] is None
    every_job = {**CAMPAIGN, "slurm": {**CAMPAIGN["slurm"], "mem": "4G"}}
    assert script.service_job(config.parse(every_job), RunDir("/r"), 0, 2, None).options["mem"] == "4G"


def test_pools_say_only_what_they_have_otherwise() -> None:
    pods = {**CAMPAIGN["slurm"]["pods"], "pools": [{"account": "other", "time": 30, "count": 2}]}
    parsed = config.parse({**CAMPAIGN, "slurm": {**CAMPAIGN["slurm"], "pods": pods}})
    first, second = arrays.pod_jobs(parsed, RunDir("/r"), limits.Allowance())
    assert (first.indices, second.indices) == ("0-2", "0-1")
    ours, theirs = dict(first.options), dict(second.options)
    assert (theirs.pop("account"), theirs.pop("time")) == ("other", "30")
    assert (ours.pop("account"), ours.pop("time")) == ("lab", None)
    assert ours == theirs


def test_few_jobs_at_once_throttle_pods_so_that_engines_keep_their_place() -> None:
    jobs = list(arrays.pod_jobs(config.parse(CAMPAIGN), RunDir("/r"), limits.Allowance(running=4), engines=2))
    assert [job.indices for job in jobs] == ["0-2%2"]


def test_one_allocation_for_engines_and_pod_is_one_step_of_all_of_them() -> None:
    text = script.script(script.together_job(config.parse(CAMPAIGN), RunDir("/r"), [4, 1]))
    assert text.count("#SBATCH hetjob\n") == 2
    assert "#SBATCH --gres=gpu:4\n" in text
    assert "--array" not in text
    assert text.count("srun --het-group=0 --export=ALL --mpi") == 1
    assert "--het-group=2" in text
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0


def test_a_pool_at_another_cluster_waits_for_nothing_here_and_its_pods_bear_its_name() -> None:
    slurm = {"pods": {"pools": [{"clusters": "other", "count": 2}]}}
    campaign = config.parse({**CAMPAIGN, "slurm": slurm})
    job = script.pod_job(campaign, RunDir("/runs/r1"), dependency="after:7", pool=campaign.slurm.pods.pools[0])
    text = script.script(job)
    assert "#SBATCH --clusters=other" in text
    assert "dependency" not in text
    assert "_$SLURM_ARRAY_TASK_ID}@other" in text
    gather = script.script(script.gather_job(campaign, RunDir("/runs/r1"), "afterany:7", ["5"]))
    assert 'gather "$RUN" --wait --end-servers 5' in gather


def test_the_gather_jobs_walltime_follows_from_bytes_and_it_is_warned_before_its_end() -> None:
    def asked(journal_bytes: float, **gather: object) -> tuple[object, object]:
        slurm = {"gather": {"partition": "of-no-limit", **gather}}
        parsed = config.parse({**CAMPAIGN, "slurm": slurm})
        options = arrays.gather_job(parsed, RunDir("/r"), "afterany:7", (), journal_bytes).options
        assert options["requeue"] is True
        return options["time"], options["signal"]

    assert asked(0.0) == ("60", "B:USR2@120")
    assert asked(1e7 * arrays.JOURNAL_BYTES) == ("8333", "B:USR2@120"), "5 TB at 10 MB/s"
    assert asked(1e13, time=1) == (1, "B:USR2@15"), "what the campaign says comes first"
    assert asked(1e13, time=1, signal="B:USR2@30") == (1, "B:USR2@30")


def test_the_gather_job_alone_sends_a_mail() -> None:
    mail = {"mail-user": "ada@site.edu", "mail-type": "END,FAIL"}
    parsed = config.parse({**CAMPAIGN, "slurm": {"gather": mail}})
    assert "mail-user" not in script.pod_job(parsed, RunDir("/r")).options
    text = script.script(script.gather_job(parsed, RunDir("/r"), "afterany:7"))
    assert "#SBATCH --mail-user=ada@site.edu\n#SBATCH --mail-type=END,FAIL\n" in text


def test_gather_has_a_section_of_its_own() -> None:
    slurm = {"pods": {"partition": "cpu", "ranks_per_node": 3, "cpus_per_rank": 2}, "qos": "long"}

    def options(**gather: object) -> dict[str, object]:
        parsed = config.parse({**CAMPAIGN, "slurm": {**slurm, "gather": gather}})
        return dict(script.gather_job(parsed, RunDir("/r"), "afterany:7").options)

    unsaid = options()
    assert (unsaid["partition"], unsaid.get("time"), unsaid["cpus-per-task"]) == ("cpu", None, 6)
    said = options(**{"partition": "big", "time": "4:00:00", "qos": "short", "cpus-per-task": 32, "mem": "16G"})
    assert (said["partition"], said["time"], said["cpus-per-task"]) == ("big", "4:00:00", 32)
    assert (said["mem"], said["qos"]) == ("16G", "short")
    slurm["pods"]["cpus_per_rank"] = 64
    assert options()["cpus-per-task"] == 8, "never more than a pod has on a node, nor than it has use for"


def test_servers_have_cpus_and_memory() -> None:
    parsed = config.parse({**CAMPAIGN, "slurm": {"servers": {"cpus_per_gpu": 6, "mem": "100G"}}})
    text = script.script(script.server_job(parsed, RunDir("/r"), 2, 4))
    for line in ("--gres=gpu:4", "--cpus-per-task=24", "--mem=100G"):
        assert f"#SBATCH {line}\n" in text
    together = script.script(script.together_job(parsed, RunDir("/r"), [4, 1]))
    for line in ("--cpus-per-task=24", "--cpus-per-task=6", "--mem=100G"):
        assert f"#SBATCH {line}\n" in together
    assert '--cpus-per-task="${SLURM_CPUS_PER_TASK_HET_GROUP_0:-1}"' in together
    assert '--cpus-per-task="${SLURM_CPUS_PER_TASK_HET_GROUP_2:-1}" env MEGAFLOW_SERVER=1 ' in together


@pytest.mark.parametrize("where", ["slurm", "pods", "servers", "trainer", "gather"])
def test_clusters_among_the_options_are_refused(where: str) -> None:
    options = {"clusters": "other"}
    slurm = options if where == "slurm" else {where: options}
    with pytest.raises(ConfigError, match=r"pools: \[\{clusters: NAME\}\]"):
        config.parse({**CAMPAIGN, "slurm": slurm})


def test_names_of_jobs_tell_clusters_apart() -> None:
    assert ids.by_cluster(["7_1", "7_1@b", "9@b"]) == {"": ["7_1"], "b": ["7_1", "9"]}
    assert [ids.array_of(one) for one in ("7_1", "7_1@b", "9@b", "9")] == ["7", "7@b", "9@b", "9"]


def test_limits_of_this_cluster_do_not_hold_for_pods_at_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site, "max_array_size", {"other": 3}.__getitem__)
    pools = [{"count": 2}, {"count": 4, "clusters": "other"}]
    campaign = config.parse({**CAMPAIGN, "slurm": {"pods": {"count": 3, "pools": pools}}})
    run = RunDir("/runs/r1")
    few = limits.Allowance(array_size=2, running=1)
    assert [job.elements for job in arrays.pod_jobs(campaign, run, few)] == [1, 2, 2]
    elsewhere = list(arrays.pod_jobs_elsewhere(campaign, run))
    assert [(job.elements, job.cluster, job.throttle) for job in elsewhere] == [(2, "other", None), (2, "other", None)]


def test_a_trainer_has_a_section_of_its_own_and_names_its_policy() -> None:
    def options(**trainer: object) -> dict[str, object]:
        slurm = {"servers": {"partition": "gpu", "cpus_per_gpu": 6}, "qos": "long", "trainer": trainer}
        job = script.trainer_job(config.parse({**CAMPAIGN, "slurm": slurm}), RunDir("/runs/r1"), "default")
        return {name: value for name, value in job.options.items() if value is not None}

    unsaid = options()
    assert (unsaid["partition"], unsaid["gres"], unsaid["cpus-per-task"]) == ("gpu", "gpu:1", 6)
    assert (unsaid["nodes"], unsaid["ntasks-per-node"], unsaid["output"]) == (1, 1, "/runs/r1/logs/trainer-%j.log")
    said = options(partition="big", nodes=2, gpus=4, mem="64G", time="1-00:00:00", qos="own")
    assert (said["partition"], said["gres"], said["cpus-per-task"], said["nodes"]) == ("big", "gpu:4", 24, 2)
    assert (said["mem"], said["time"], said["qos"]) == ("64G", "1-00:00:00", "own")
    assert "gres" not in options(gpus=0)
    job = script.Job("trainer", {}, run="/a dir/run", policy="of two")
    assert "\npolicy='of two'\n" in script.script(job)
    assert script.command(job, "sbatch/trainer.sbatch") == "sbatch sbatch/trainer.sbatch '/a dir/run' 'of two'"


def test_each_policy_that_learns_has_a_trainer_of_its_own() -> None:
    model = {"engine": "vllm", "path": "m"}
    training = {"policies": {"coder": {}, "judge": {}}}
    fields = {
        **CAMPAIGN,
        "models": {"coder": model, "judge": model, "fixed": model},
        "training": training,
        "samples": 4,
    }
    campaign = config.parse({**fields, "agent": "mini-swe"})
    jobs = list(arrays.trainer_jobs(campaign, RunDir("/r")))
    assert [(job.role, job.policy, job.elements) for job in jobs] == [("trainer", n, None) for n in ("coder", "judge")]
    assert [job.policy for job in arrays.trainer_jobs(campaign, RunDir("/r"), {"judge"})] == ["judge"]
    assert list(arrays.trainer_jobs(config.parse(CAMPAIGN), RunDir("/r"))) == []
