"""Runs that earlier versions planned: literals that 0.1.0 wrote, read, shown, resumed and gathered by this one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megaflow_hpc.campaign.run import Run
from megaflow_hpc.errors import ConfigError
from megaflow_hpc.ledger import Ledger
from megaflow_hpc.ledger.tasks import planned_tasks
from megaflow_hpc.monitor.status import Monitor
from megaflow_hpc.pod.master.assembly import room_per_rank
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.record import RunRecord, ServerGroup, check_version, read_run, write_run
from megaflow_hpc.trajectories import open_trajectories
from tests.support.harbor_tasks import write_solved_task

RUN_JSON = r"""
{
 "campaign":
  {"agent": [{"args": {}, "max_tokens": null, "max_turns": null, "name": "oracle", "timeout_s": null}], "environment":
  {"air_gapped": false, "images": {"base": "@SIF@"}, "limits": {"cpu_s": null, "cpus": null, "disk_mb": null,
  "memory_mb": null, "processes": null, "wall_s": null}, "mirrors": {}, "mode": "ephemeral", "network": "none",
  "verification": "shared"}, "evaluation": {"ks": [], "threshold": 1.0}, "limits": {"core_hours": null, "failures":
  null, "gpu_hours": null, "systematic": 32, "wall": null}, "model": {"agent": null, "also": [], "api_key_file": null,
  "args": {}, "base_url": null, "binds": [], "engine": "scripted", "gpus": 0, "image": null, "include": [], "nodes":
  1, "path": null, "pool": null, "python": null, "samples": null, "script": "answers.yaml", "servers": {"max": 2,
  "min": 1, "queue": 4.0, "wait_s": 10.0}, "weight": 1.0, "weights": {"running": "finish", "update": "rolling"}},
  "models": {}, "name": "small", "pool": null, "quotas": {"in_flight": null, "requests_per_s": null, "slots": null,
  "tokens_per_s": null}, "run_dir": "runs", "samples": 2, "scheduling": {"copies": false, "cuts": 16, "groups":
  "spread", "learn_from": [], "order": "fifo", "pack": [], "partial_mb": 256, "retry_every": null, "share": "policy",
  "signal_after": null, "spare": 0, "weights": {}}, "seed": null, "share": "user", "slurm": {"account": null, "extra":
  {}, "pods": {"count": 1, "cpus_per_rank": null, "extra": {}, "mem_gb": 4.0, "nodes": 1, "partition": null, "pools":
  [], "ranks_per_node": null, "slots_per_rank": null, "throttle": null, "time": null}, "requeues": 3, "servers":
  {"extra": {}, "partition": null, "time": null}, "setup": [], "together": false}, "tasks": [{"exclude": [],
  "include": [], "limit": null, "mode": null, "path": "tasks/*"}]},
 "format":
  "megaflow-hpc/run",
 "format_version":
  1,
 "images":
  {"base": "@SIF@"},
 "jobs":
  [],
 "learned":
  [],
 "policies":
  {"default": {"agent": {"args": {}, "max_tokens": null, "max_turns": null, "name": "oracle", "timeout_s": null},
  "include": [], "model": {"agent": null, "also": [], "api_key_file": null, "args": {}, "base_url": null, "binds": [],
  "engine": "scripted", "gpus": 0, "image": null, "include": [], "nodes": 1, "path": null, "pool": null, "python":
  null, "samples": null, "script": "@PLACE@/answers.yaml", "servers": {"max": 2, "min": 1, "queue": 4.0, "wait_s":
  10.0}, "weight": 1.0, "weights": {"running": "finish", "update": "rolling"}}, "samples": 2}},
 "pools":
  {},
 "python":
  "3.11.2",
 "server_groups":
  [[0, 1, 0, false, 1], [1, 1, 0, true, 1]],
 "servers":
  [{"held": false, "model": {"api_key_file": null, "args": {}, "base_url": null, "binds": [], "engine": "scripted",
  "gpus": 0, "image": null, "include": [], "nodes": 1, "path": null, "pool": null, "python": null, "samples": null,
  "script": "@PLACE@/answers.yaml", "servers": {"max": 2, "min": 1, "queue": 4.0, "wait_s": 10.0}, "weight": 1.0,
  "weights": {"running": "finish", "update": "rolling"}}, "policy": "default"}, {"held": true, "model":
  {"api_key_file": null, "args": {}, "base_url": null, "binds": [], "engine": "scripted", "gpus": 0, "image": null,
  "include": [], "nodes": 1, "path": null, "pool": null, "python": null, "samples": null, "script":
  "@PLACE@/answers.yaml", "servers": {"max": 2, "min": 1, "queue": 4.0, "wait_s": 10.0}, "weight": 1.0, "weights":
  {"running": "finish", "update": "rolling"}}, "policy": "default"}],
 "tasks":
  {"t1": {"agent_timeout_s": 60.0, "env": {}, "id": "t1", "image": "base", "instruction": "Say 42.\n", "kind":
  "harbor", "limits": {"cpu_s": null, "cpus": null, "disk_mb": null, "memory_mb": null, "processes": 512, "wall_s":
  null}, "metadata": {"difficulty": "easy", "harbor": {"artifacts": [], "healthcheck": {}, "solution":
  "@PLACE@/tasks/t1/solution", "solution_env": {}, "tests": ["@PLACE@/tasks/t1/tests"], "upload_environment": true,
  "verifier": {"collect": [], "env": {}, "network": null, "timeout_s": 60.0, "user": null}}}, "mode": null, "network":
  null, "path": "@PLACE@/tasks/t1", "user": null, "verifier_timeout_s": 60.0, "workdir": null}},
 "total":
  2,
 "version":
  "0.1.0",
 "versions":
  {"apptainer": "1.4.5", "mini-swe-agent": "2.4.6", "models": {"default": {"engine": "scripted", "script":
  "@PLACE@/answers.yaml", "sha256": "25cc8cb3706a38550f3d520bafb27eaebf5878c070f6d992d3442a1912ec8c93"}}, "mpi4py":
  "4.1.2", "planned by megaflow-hpc": "0.1.0", "python": "3.11.2", "swebench": "4.1.0"}
}
"""
BLOCK = """
{
 "rollouts": [
  {"agent": "oracle", "policy": "default", "sample_index": 0, "task_id": "t1"},
  {"agent": "oracle", "policy": "default", "sample_index": 1, "task_id": "t1"}
 ]
}
"""
ENDPOINT = """
{
 "heartbeat": 1,
 "in_flight": 0,
 "job_id": "",
 "key": "not-a-key-that-opens-anything",
 "model_name": "default",
 "node": "vm",
 "policy": "default",
 "protocol": "plain",
 "refused": null,
 "server": "default.0",
 "start": "85ed4ef0c1c5b863",
 "started_at": 1795335180.4123309,
 "tls_fingerprint": "b40fd23bbc585a5aabaa4f0a149b728568ed33c48ce1cb30c9bc8f8135ed986c",
 "url": "https://vm:41249",
 "wait_s": 0.0,
 "waiting": 0,
 "weight": 1.0,
 "weight_version": 0
}
"""
EVENTS = """\
{"t": 1795335121.219, "event": "pod", "state": "started", "job_id": "", "node": "vm", "ranks": 2}
{"t": 1795335124.229, "event": "worker", "rank": 1, "state": "ready", "slots": 2, "node": "vm"}
{"t": 1795335124.23, "event": "claim", "block": 0, "epoch": 0, "state": "claimed", "rollouts": 2}
{"t": 1795335125.23, "event": "endpoints", "servers": ["default.0.json"]}
{"t": 1795335126.226, "event": "progress", "running": 2, "queued": 0, "stored": 0, "core_s": 10.0}
{"t": 1795335126.991, "event": "pod", "state": "drained", "stored": 0}
"""


@pytest.fixture
def old(tmp_path: Path, base_sif: Path) -> RunDir:
    """A run directory of 0.1.0: one pod began, was drained and has stored nothing; a server is registered."""
    write_solved_task(tmp_path / "tasks", "t1")
    run = RunDir(tmp_path / "run")
    run.create()
    Ledger(run).create()
    run.run_json.write_text(RUN_JSON.replace("@PLACE@", str(tmp_path)).replace("@SIF@", str(base_sif)))
    run.campaign_yaml.touch()
    run.env_sh.touch()
    run.block(0).write_text(BLOCK)
    run.endpoint("default.0").write_text(ENDPOINT)
    run.event_file("7_0", "0").write_text(EVENTS)
    (tmp_path / "answers.yaml").write_text('default: ["42"]\n')
    return run


def test_its_record_is_read_whole_and_written_the_same(old: RunDir) -> None:
    planned = read_run(old)
    assert (planned.name, planned.total, planned.version) == ("small", 2, "0.1.0")
    assert planned.server_groups == [ServerGroup(0, 1, 0), ServerGroup(1, 1, 0, held=True)]
    assert [(server.policy, server.held, server.model["engine"]) for server in planned.servers] == [
        ("default", False, "scripted"),
        ("default", True, "scripted"),
    ]
    assert planned.policies["default"].samples == 2
    check_version(planned, old)
    assert room_per_rank(planned.config.slurm.pods) == (None, 2000), "two ranks share 4 GB"
    (task,) = planned_tasks(old, planned).values()
    assert (task.image, task.alike) == (planned.images["base"], 1)
    before = json.loads(old.run_json.read_text())
    write_run(old, planned)
    after = json.loads(old.run_json.read_text())
    assert {name: after.pop(name) for name in before} == before
    assert not any(after.values()), "what later versions know beside is empty"


def test_keys_of_a_later_version_are_ignored_and_a_later_format_is_refused(old: RunDir) -> None:
    content = json.loads(old.run_json.read_text())
    content["later"] = content["campaign"]["later"] = content["campaign"]["slurm"]["pods"]["later"] = [1]
    content["servers"][0]["later"] = 1
    old.run_json.write_text(json.dumps(content))
    assert read_run(old).config.slurm.pods.mem_gb == 4
    old.run_json.write_text(json.dumps({**content, "format_version": 3, "servers": "otherwise"}))
    with pytest.raises(ConfigError, match=r"version 3, expected megaflow-hpc/run up to version 2; use a newer"):
        read_run(old)


@pytest.mark.parametrize("text", ['{"format": "megaflow-hpc/run", "format_version": 1, "total": "many"}', '{"format"'])
def test_a_damaged_record_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(ConfigError, match=r"run\.json: cannot be read \(.*the run directory is damaged"):
        read_run(RunDir(tmp_path))


def test_a_record_of_nothing_has_every_default(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    write_run(run, RunRecord(campaign={"name": "x"}))
    assert read_run(run) == RunRecord(campaign={"name": "x"})


def test_its_state_is_shown(old: RunDir) -> None:
    status = Monitor(old).status()
    assert (status["state"], status["rollouts"]["pending"]) == ("stopped", 2)
    (pod,) = status["pods"]
    assert (pod["state"], pod["node"], pod["slots"], pod["running"]) == ("drained", "vm", 2, 0)
    (server,) = status["servers"]
    assert server == {
        "server": "default.0",
        "policy": "default",
        "node": "vm",
        "job_id": "",
        "model_name": "default",
        "template": "",
        "weight_version": 0,
        "waiting": 0,
        "state": "serving",
    }


def test_it_is_resumed_and_gathered(old: RunDir) -> None:
    run = Run(old)
    assert run.resume(launcher="local")
    summary = run.wait(timeout_s=120)
    assert summary["state"] == "finished"
    with open_trajectories(run.path) as store:
        assert {t.id: (t.status, t.reward) for t in store} == {f"t1/default/{n}": ("completed", 1) for n in (0, 1)}
