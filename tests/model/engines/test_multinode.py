"""An engine over several nodes: the job step, and the command of each node."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megaflow_hpc import config
from megaflow_hpc.campaign import plan
from megaflow_hpc.campaign.planning import draft
from megaflow_hpc.errors import ConfigError
from megaflow_hpc.model.engines import adapters
from megaflow_hpc.model.engines.launch import part_command
from megaflow_hpc.model.engines.process import cause
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.slurm import arrays, script
from megaflow_hpc.slurm.limits import Allowance


@pytest.fixture(autouse=True)
def unlooked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skips the check of model files: models here are empty directories."""
    monkeypatch.setattr(draft, "check_models", lambda *_: [])


def option(words: list[str], name: str) -> str:
    return words[words.index(name) + 1]


def planned(tmp_path: Path, *models: dict[str, Any], **slurm: Any) -> draft.Draft:
    (tmp_path / "m").mkdir(exist_ok=True)
    policies = {f"p{n}": {"path": "m", **model} for n, model in enumerate(models)}
    return plan.make(config.parse({"name": "x", "models": policies, "pool": {}, "slurm": slurm}), tmp_path, str)


def test_a_server_of_several_nodes_is_an_element_of_so_many_tasks_one_on_each(tmp_path: Path) -> None:
    made = planned(tmp_path, {"gpus": 8}, {"gpus": 8, "nodes": 2, "servers": [1, 3]}, servers={"exclusive": True})
    run = RunDir(tmp_path / "run")
    jobs = list(arrays.server_jobs(made.config, run, made.server_groups, Allowance(1000)))
    assert [(job.indices, job.options["nodes"]) for job in jobs] == [("0-0", 2), ("1-2", 2), ("3-3", 1)]
    assert [server.policy for server in made.servers] == ["p1", "p1", "p1", "p0"]
    text = script.script(jobs[0])
    for line in ("--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--gres=gpu:8", "--exclusive"):
        assert f"#SBATCH {line}\n" in text
    assert "--ntasks-per-node" not in script.script(jobs[2])


def test_each_node_runs_its_part_of_one_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "16")
    monkeypatch.setenv("MEGAFLOW_ADDRESS", "gpu7")
    model = {"engine": "vllm", "path": "/m", "gpus": 8, "nodes": 2, "python": sys.executable}
    words = adapters.launch(model, "solver", tmp_path).command
    step, engine = words[: words.index(sys.executable)], words[words.index(sys.executable, words.index("-m")) :]
    assert step[0] == "srun"
    assert {"--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--cpus-per-task=16", "--kill-on-bad-exit=1"} < set(step)
    assert words[len(step) : len(step) + 4] == [
        sys.executable,
        "-m",
        "megaflow_hpc.model.engines.launch",
        str(tmp_path),
    ]
    assert engine[:4] == [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve"]
    shape = {"--tensor-parallel-size": "8", "--pipeline-parallel-size": "2", "--nnodes": "2", "--master-addr": "gpu7"}
    assert {name: option(engine, name) for name in shape} == shape
    assert int(option(engine, "--master-port")) > 1024
    assert part_command(0, engine)[-2:] == ["--node-rank", "0"]
    assert part_command(1, engine)[-3:] == ["--node-rank", "1", "--headless"]
    other = adapters.launch({**model, "args": {"tensor-parallel-size": 16, "pipeline-parallel-size": 1}}, "s", tmp_path)
    assert option(other.command, "--tensor-parallel-size") == "16"


def test_more_nodes_than_the_allocation_has_are_refused_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = {"engine": "vllm", "path": "/m", "nodes": 2, "python": sys.executable}
    for nodes, said in ((None, "no nodes of Slurm"), ("1", "1 nodes of Slurm")):
        monkeypatch.delenv("SLURM_NNODES", raising=False)
        monkeypatch.delenv("SLURM_JOB_NUM_NODES", raising=False)
        if nodes:
            monkeypatch.setenv("SLURM_JOB_NUM_NODES", nodes)
        with pytest.raises(ConfigError, match=f"{said}; .* sbatch --nodes=2 --ntasks=2"):
            adapters.launch(model, "solver", tmp_path)
    with pytest.raises(ConfigError, match="nodes: engine sglang is started on one node"):
        planned(tmp_path, {"engine": "sglang", "nodes": 2})
    with pytest.raises(ConfigError, match="together: its engines have one node each"):
        draft.check_together(planned(tmp_path, {"nodes": 2}, together=True).config, str)


@pytest.mark.parametrize(("mode", "status"), [(0o700, 0), (0o755, 1), (None, 0)])
def test_a_part_runs_in_a_directory_of_its_own_alone(tmp_path: Path, mode: int | None, status: int) -> None:
    """An existing directory of that name must be closed to other users. A directory that the part creates is
    deleted."""
    private = tmp_path / "private"
    if mode is not None:
        private.mkdir(mode)
        private.chmod(mode)
    command = [sys.executable, "-m", "megaflow_hpc.model.engines.launch", str(private), "/bin/sh", "-c"]
    program = 'test "$(stat -c %a "$PRIVATE")" = 700 && test "$1 $2" = "1 --headless"'
    env = {"SLURM_PROCID": "1", "PRIVATE": str(private), "PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(sys.path)}
    asked = {"stdin": subprocess.PIPE, "stderr": subprocess.PIPE}  # end-of-file would end it
    with subprocess.Popen([*command, program], env=env, text=True, **asked) as process:
        assert process.stderr is not None
        said = process.stderr.read()
        assert process.wait() == status, said
    assert ("belongs to another user, or is open to others" in said) == bool(status)
    assert private.exists() == (mode is not None)


def test_the_part_that_ended_is_the_cause_and_not_that_slurm_ended_the_others() -> None:
    log = "srun: error: gpu2: task 1: Exited with exit code 137\nsrun: launch/slurm: _step_signal: Terminating\n"
    assert "gpu2: task 1" in cause(f"{log}slurmstepd-gpu1: error: *** STEP 345.0 ON gpu1 CANCELLED AT now ***\n", 137)
