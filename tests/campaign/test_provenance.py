"""What a result says of where it came from."""

from __future__ import annotations

import gzip
import json
import sys
from importlib.metadata import version
from pathlib import Path

import h5py

from megaflow_hpc.campaign import plan
from megaflow_hpc.config import AgentConfig, ModelConfig, Policy
from megaflow_hpc.ledger.tasks import PlannedTask, write_tasks
from megaflow_hpc.rundir.record import RunRecord, write_run
from megaflow_hpc.trajectories import gather
from tests.support.samples import commit, run_dir, trajectory


def model(path: Path, weights: bytes = b"w" * 100) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text('{"layers": 2}')
    (path / "model.safetensors").write_bytes(weights)
    (path / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}}')
    return path


def policy(path: Path, python: Path) -> Policy:
    return Policy(agents=(AgentConfig(name="mini-swe-agent"),), model=ModelConfig(path=str(path), python=str(python)))


def test_versions_name_engine_model_and_agent_and_reach_the_campaign_file(tmp_path: Path) -> None:
    engine = tmp_path / "engine"
    for name in ("vllm-9.8.7", "torch-1.2.3+cpu", "another-1.0"):
        (engine / f"lib/python3.11/site-packages/{name}.dist-info").mkdir(parents=True)
    (engine / "bin").mkdir()
    (engine / "bin" / "python").symlink_to(sys.executable)
    policies = {"a": policy(model(tmp_path / "model"), engine)}
    found = plan.versions(policies)
    assert found["mpi4py"] == version("mpi4py")
    assert {name: found["models"]["a"][name] for name in ("engine", "vllm", "torch")} == {
        "engine": "vllm",
        "vllm": "9.8.7",
        "torch": "1.2.3+cpu",
    }
    assert "another" not in found["models"]["a"]
    run = run_dir(tmp_path / "run")
    packed = write_tasks(run, [PlannedTask({"id": "t", "image": "i"}, {"i": "/i.sif"})])
    write_run(run, RunRecord(campaign={"name": "x", "seed": 7}, versions=found, packed=packed))
    commit(run, "pod", (0, 0, trajectory(5, seed=11, inexact=2)))
    with h5py.File(gather(run)) as file:
        kept = json.loads(file.attrs["versions"])
        assert kept["models"] == found["models"]
        assert kept["images"] == {"i": "/i.sif"}
        assert kept["h5py"] == version("h5py")
        assert json.loads(file.attrs["config"])["seed"] == 7
        assert (file["trajectories/seed"][:].tolist(), file["trajectories/inexact"][:].tolist()) == ([11], [2])


def test_a_models_fingerprint_changes_with_its_files(tmp_path: Path) -> None:
    one = plan.fingerprint(model(tmp_path / "one"))
    assert one == plan.fingerprint(model(tmp_path / "two"))
    assert one != plan.fingerprint(model(tmp_path / "two", weights=b"w" * 101))
    (model(tmp_path / "two") / "config.json").write_text('{"layers": 3}')
    assert one != plan.fingerprint(tmp_path / "two")


def test_a_run_keeps_the_tokenizer_of_its_model(tmp_path: Path) -> None:
    run = run_dir(tmp_path / "run")
    plan.keep_tokenizers(run, {"a": policy(model(tmp_path / "model"), tmp_path), "b": policy(tmp_path, tmp_path)})
    (kept,) = (run.path / "tokenizers").iterdir()
    assert (kept.name, gzip.decompress(kept.read_bytes())) == ("a.json.gz", b'{"model": {"vocab": {"a": 0}}}')
