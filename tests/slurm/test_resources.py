"""Resources that jobs request, and how many jobs the resource limits let start."""

from __future__ import annotations

import re

import pytest

from megaflow_hpc import config
from megaflow_hpc.campaign import job_requests
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.record import ServerGroup
from megaflow_hpc.slurm import arrays, limits
from megaflow_hpc.slurm.limits import Cap, amounts, asked, at_once, caps, gpu_requests, impossible, shared

GPUS = Cap("MaxTRESPerUser", "gres/gpu", 4, "QOS a")
CPUS = Cap("GrpTRES", "cpu", 64, "QOS a")
JOB_CPUS = Cap("MaxTRESPerJob", "cpu", 32, "account b")


def test_amounts_are_read_as_sacctmgr_prints_them() -> None:
    assert amounts("") == {}
    assert amounts("cpu=8,mem=20G,gres/gpu:a100=2") == {"cpu": 8, "mem": 20480, "gres/gpu:a100": 2}
    assert amounts("mem=1.5T,cpu=unlimited") == {"mem": 1536 * 1024}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"node": 1, "cpu": 1}),
        ({"nodes": "2-4", "ntasks-per-node": 3, "cpus-per-task": 4}, {"node": 2, "cpu": 24}),
        ({"ntasks": 5, "mem-per-cpu": "2G"}, {"node": 1, "cpu": 5, "mem": 10240}),
        ({"nodes": 2, "mem": "4000M", "exclusive": True}, {"node": 2, "cpu": 2, "mem": 8000}),
        ({"gres": "gpu:a100:2,shard:1"}, {"node": 1, "cpu": 1, "gres/gpu": 2, "gres/gpu:a100": 2, "gres/shard": 1}),
        ({"nodes": 2, "ntasks-per-node": 2, "gpus-per-node": 4}, {"node": 2, "cpu": 4, "gres/gpu": 8}),
        ({"nodes": 2, "gpus": 6}, {"node": 2, "cpu": 2, "gres/gpu": 6}),
        ({"gres": "gpu:a100"}, {"node": 1, "cpu": 1, "gres/gpu": 1, "gres/gpu:a100": 1}),
        ({"nodes": "$N", "mem": "all"}, {"node": 1, "cpu": 1}),
    ],
)
def test_a_job_asks_for_what_its_options_say(options: dict[str, object], expected: dict[str, int]) -> None:
    assert asked(options) == expected


def test_of_the_same_limit_the_first_that_is_set_holds() -> None:
    rows = [
        ("QOS of the partition", {"maxtres": "cpu=8"}),
        ("QOS", {"maxtres": "cpu=4,node=2", "grptres": "cpu=100"}),
        ("account", {"maxtres": "node=1", "grptres": ""}),
    ]
    assert [str(cap) for cap in caps(rows)] == [
        "QOS of the partition allows cpu=8 (MaxTRESPerJob)",
        "QOS allows node=2 (MaxTRESPerJob)",
        "QOS allows cpu=100 (GrpTRES)",
    ]


def test_a_job_that_alone_is_beyond_a_limit_can_never_start() -> None:
    assert impossible([GPUS, CPUS, JOB_CPUS], {"cpu": 32, "gres/gpu": 4}) is None
    assert impossible([GPUS, CPUS, JOB_CPUS], {"cpu": 33}) == JOB_CPUS
    assert impossible([GPUS, CPUS, JOB_CPUS], {"cpu": 1, "gres/gpu": 5}) == GPUS


def test_so_many_jobs_run_at_once_as_fit_beside_the_others() -> None:
    assert at_once([GPUS, CPUS, JOB_CPUS], {"cpu": 16}) == (4, CPUS)
    assert at_once([GPUS, CPUS], {"cpu": 16}, [{"cpu": 8, "gres/gpu": 1}] * 3) == (2, CPUS)
    assert at_once([GPUS, CPUS], {"cpu": 16}, [{"cpu": 60}]) == (0, CPUS)
    assert at_once([GPUS, JOB_CPUS], {"cpu": 16}) is None
    assert shared({"cpu": 8, "gres/gpu": 1, "node": 1}, [GPUS, JOB_CPUS]) == {"gres/gpu": 1}


def test_pods_are_throttled_to_what_resources_leave_beside_the_engines() -> None:
    parsed = config.parse(
        {
            "name": "x",
            "tasks": "t",
            "agent": "nop",
            "slurm": {"pods": {"count": 20, "ranks_per_node": 4, "cpus_per_rank": 4}},
        }
    )
    allowed = limits.Allowance(running=15, caps=(CPUS,))
    (job,) = arrays.pod_jobs(parsed, RunDir("/r"), allowed, engines=2)
    assert job.indices == "0-19%4"
    (job,) = arrays.pod_jobs(parsed, RunDir("/r"), allowed, engines=2, server_amounts=[{"cpu": 8}] * 2)
    assert job.indices == "0-19%3"
    (job,) = arrays.pod_jobs(parsed, RunDir("/r"), allowed, engines=2, server_amounts=[{"cpu": 60}])
    assert job.indices == "0-19%1"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"gres": "gpu:4"}, {"gres": 4}),
        ({"gres": "gpu:a100:2,gpu:h100:1,tmp:3", "gpus-per-node": "a100:3"}, {"gres": 3, "gpus-per-node": 3}),
        ({"gpus": 8, "nodes": 2, "gpus-per-task": 1, "ntasks-per-node": 4}, {"gpus": 4, "gpus-per-task": 4}),
        ({"gres": "tmp:3"}, {}),
    ],
)
def test_each_option_for_gpus_is_counted_for_a_node(options: dict[str, object], expected: dict[str, float]) -> None:
    assert gpu_requests(options) == expected


@pytest.mark.parametrize(
    ("slurm", "words"),
    [
        (
            {"servers": {"gpus-per-node": 4}},
            r"slurm.servers: gpus of the model \(2\) and .*-node \(4\)",
        ),
        (
            {"servers": {"gres": "gpu:a100:1"}},
            r"slurm.servers: gpus of the model \(2\) and gres \(1\)",
        ),
        ({"gres": "gpu:1"}, r"slurm: gpus of the model \(2\) and gres \(1\)"),
        ({"pods": {"gres": "gpu:1", "gpus-per-node": 2}}, r"slurm.pods: .*different numbers of GPUs"),
        ({"servers": {"gres": "gpu:a100:2", "gpus-per-node": 2}}, None),
        ({}, None),
    ],
)
def test_contradictory_requests_for_gpus_are_refused(slurm: dict[str, object], words: str | None) -> None:
    parsed = config.parse({"name": "x", "tasks": "t/*", "agent": "oracle", "slurm": slurm})
    found = job_requests._gpu_contradictions(parsed, [ServerGroup(0, 1, 2)], lambda key: "c.yaml:3")
    assert len(found) == (words is not None)
    assert words is None or re.search(words, found[0]), found
    assert all(line.startswith("c.yaml:3: slurm") for line in found)
