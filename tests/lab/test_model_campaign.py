"""The demo's second campaign, small: engines in a GPU job array, agents in a pod array, every token in one file.

While it runs, one of its two vLLM servers is killed and the other is given new weights; no rollout may fail of it.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import yaml

from megaflow_hpc import Campaign
from megaflow_hpc.campaign.facade import Run
from megaflow_hpc.rundir import weights
from megaflow_hpc.slurm import accounting
from tests.support.processes import processes_of
from tests.support.scripted import SOLVE
from tests.support.waiting import until

pytestmark = [pytest.mark.lab, pytest.mark.engine, pytest.mark.usefixtures("slurm"), pytest.mark.timeout(900)]

CAMPAIGN = """\
name: model
tasks: tasks/*
agent: {name: mini-swe-agent, max_turns: 3, timeout_s: 240}
samples: 8
models:
  tiny:
    path: models/tiny
    servers: 2
    args: {max-model-len: 16384, dtype: float32, distributed-executor-backend: uni}
  scripted: {engine: scripted, script: answers.yaml, samples: 1, gpus: 1}
slurm:
  pods: {partition: cpu, count: 1, ranks_per_node: 2, slots_per_rank: 3, mem: 2G, time: 15}
  servers: {partition: gpu, time: 15}
"""
ONE_PROCESS = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
"""Variables with which an engine computes in the process that schedules, as in tests/model/engines/test_vllm.py: one of
its own spins for a second after each step, and tests/security/test_vllm_options.py starts one."""
SCORE = """
import json, sys
import numpy, torch
from transformers import AutoModelForCausalLM
torch.set_num_threads(1)
told, found = numpy.load(sys.argv[1]), []
for version, path in enumerate(sys.argv[2:]):
    model, compared, most = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), 0, 0.0
    for number in numpy.flatnonzero(told["ours"]):
        part = slice(*told["offsets"][number : number + 2])
        chosen = told["weight_version"][part][1:] == version
        if chosen.any():
            ids = torch.tensor(told["id"][part], dtype=torch.long)
            with torch.inference_mode():
                scores = model(ids[None]).logits[0, :-1].log_softmax(-1)[torch.arange(len(ids) - 1), ids[1:]].numpy()
            compared += int(chosen.sum())
            most = max(most, float(abs(scores - told["logprob"][part][1:])[chosen].max()))
    found.append([compared, most])
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    folder = tmp_path_factory.mktemp("model")
    shutil.copytree(tiny_model, folder / "models" / "tiny")
    (folder / "answers.yaml").write_text(yaml.safe_dump({"default": SOLVE}))
    return folder


@pytest.fixture(scope="module")
def run(folder: Path, other_weights: Path, base_sif: Path, write_task: Callable[..., Path]) -> Run:
    """The campaign, run to its end on the lab."""
    for name in ("alpha", "beta"):
        write_task(folder / "tasks", name)
    text = CAMPAIGN + f"environment: {{images: {{base: {base_sif}}}}}\n"
    (folder / "campaign.yaml").write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ONE_PROCESS.items():
            patch.setenv(name, value)
        run = Campaign.from_yaml(folder / "campaign.yaml").submit()
    (pods,) = run.job_ids("pods")
    subprocess.run(["scontrol", "hold", pods], check=True)  # until both servers answer, so that both are asked
    names = subprocess.check_output(["squeue", "-h", "-o", "%j", "-j", ",".join(run.job_ids())], text=True).split()
    assert set(names) == {"model"}
    until(lambda: {"tiny.0", "tiny.1"} <= {server["server"] for server in serving(run)}, "both serve", 600)
    subprocess.run(["scontrol", "release", pods], check=True)
    until(
        lambda: run.status()["rollouts"]["completed"] + run.status()["rollouts"]["truncated"] > 0,
        "a rollout is stored",
        600,
    )
    with held(run):  # so that what is left to do, and some must be, meets the new weights
        assert weights.publish(run.dir, other_weights, "tiny").version == 1
        until(
            lambda: {server["weight_version"] for server in serving(run) if server["server"] == "tiny.1"} == {1},
            "version 1 serves",
            600,
        )
    os.kill(server_process(run, 0), signal.SIGKILL)  # as the kernel does to what takes too much memory
    summary = run.wait(timeout_s=600)
    assert summary["state"] == "finished", summary
    assert summary["rollouts"]["failed"] == 0, summary
    return run


def serving(run: Run) -> list[dict[str, Any]]:
    return [server for server in run.status()["servers"] if server["state"] == "serving"]


def server_process(run: Run, number: int) -> int:
    """Pid of the server of an array's element."""
    told = f"SLURM_ARRAY_TASK_ID={number}\0".encode()
    pids = processes_of("megaflow_hpc.model.server", str(run.path))
    (pid,) = (pid for pid in pids if told in Path(f"/proc/{pid}/environ").read_bytes())
    return pid


@contextmanager
def held(run: Run) -> Iterator[None]:
    """The pods stand still: no rollout starts, goes on or ends."""
    ranks = processes_of("megaflow_hpc.pod", str(run.path))
    assert ranks
    try:
        for pid in ranks:
            os.kill(pid, signal.SIGSTOP)
        yield
    finally:
        for pid in ranks:
            os.kill(pid, signal.SIGCONT)


@pytest.fixture
def file(run: Run) -> Iterator[h5py.File]:
    with h5py.File(run.dir.trajectories) as file:
        yield file


def strings(dataset: Any) -> list[str]:
    return [value.decode() for value in dataset[:]]


def sampled(file: h5py.File, row: int) -> list[tuple[list[int], list[float]]]:
    """Token ids and log-probabilities of each turn of a trajectory, by the columns alone."""
    turns = file["turns"]
    first, last = file["trajectories/turn_offset"][row : row + 2]
    spans = zip(turns["token_start"][first:last], turns["token_end"][first:last], strict=True)
    tokens = file["tokens"]
    return [(tokens["id"][a:b].tolist(), tokens["logprob"][a:b].tolist()) for a, b in spans]


def said(file: h5py.File, row: int) -> list[str]:
    """The text that each turn of a trajectory was answered with, by the columns alone."""
    first, last = file["trajectories/turn_offset"][row : row + 2]
    answers = file["trajectories/message_offset"][row] + file["turns/message"][first:last]
    spans = [file["messages/offset"][number : number + 2] for number in answers]
    return [json.loads(file["messages/json"][a:b].tobytes())["content"] for a, b in spans]


def artifact(file: h5py.File, row: int, name: str) -> bytes:
    artifacts = file["artifacts"]
    names = strings(artifacts["name"])
    number = next(i for i, n in enumerate(names) if n == name and artifacts["trajectory"][i] == row)
    start, end = artifacts["offset"][number : number + 2]
    return artifacts["bytes"][start:end].tobytes()


def test_scripted_rollouts_act_in_the_sandbox_and_are_rewarded(file: h5py.File) -> None:
    rewards = dict(zip(strings(file["trajectories/id"]), file["trajectories/reward"][:].tolist(), strict=True))
    assert rewards == {
        **{f"{task}/tiny/{sample}": 0 for task in ("alpha", "beta") for sample in range(8)},
        **{f"{task}/scripted/0": 1 for task in ("alpha", "beta")},
    }


def test_every_sampled_token_is_what_the_engine_answered(file: h5py.File) -> None:
    checked = 0
    for row in range(len(file["trajectories/id"])):
        turns = sampled(file, row)
        assert len(turns) == len(artifact(file, row, "calls.jsonl").splitlines()) > 0
        for (ids, logprobs), text in zip(turns, said(file, row), strict=True):
            decoded = bytes(t for t in ids if t < 256).decode("utf-8", "replace")
            assert text.rstrip("\ufffd") == decoded.rstrip("\ufffd")
            assert all(logprob <= 0 for logprob in logprobs)
            checked += len(ids)
    mask = file["tokens/loss_mask"][:]
    assert checked == int(mask.sum())
    assert np.array_equal(~np.isnan(file["tokens/logprob"][:]), mask == 1)
    assert np.array_equal(file["tokens/weight_version"][:] >= 0, mask == 1)


def test_the_tokens_decode_to_the_transcript(file: h5py.File) -> None:
    for row, rollout in enumerate(strings(file["trajectories/id"])):
        first, last = file["trajectories/message_offset"][row : row + 2]
        offsets = file["messages/offset"][first : last + 1]
        blobs = [file["messages/json"][a:b].tobytes() for a, b in itertools.pairwise(offsets)]
        answers = [m["content"] for m in map(json.loads, blobs) if m["role"] == "assistant"]
        decoded = [bytes(t for t in ids if t < 256).decode("utf-8", "replace") for ids, _ in sampled(file, row)]
        assert len(answers) == len(decoded), rollout
        for answer, text in zip(answers, decoded, strict=True):
            # The engine holds back the bytes of a character that its answer ends within.
            assert answer.rstrip("\ufffd") == text.rstrip("\ufffd"), rollout


def test_both_versions_of_the_weights_answered_and_the_killed_server_did(file: h5py.File) -> None:
    versions = file["tokens/weight_version"][:]
    assert set(versions[file["tokens/loss_mask"][:] == 1].tolist()) == {0, 1}
    assert {"tiny.0", "tiny.1"} <= set(strings(file["turns/server"]))


def test_another_program_scores_the_recorded_ids_as_the_engine_did(
    interpreter: str, tiny_model: Path, other_weights: Path, folder: Path, file: h5py.File
) -> None:
    """Transformers' plain forward pass over whole sequences; each token by the weights that its row names."""
    np.savez(
        folder / "recorded.npz",
        offsets=file["sequences/token_offset"][:],
        ours=[policy == "tiny" for policy in strings(file["sequences/policy"])],
        **{name: file[f"tokens/{name}"][:] for name in ("id", "logprob", "weight_version")},
    )
    command = [interpreter, "-c", SCORE, folder / "recorded.npz", tiny_model, other_weights]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    for compared, difference in json.loads(done.stdout):
        assert compared > 0
        assert difference < 1e-2


def test_engines_end_with_the_campaign_and_accounting_knows_all_three_jobs(run: Run) -> None:
    until(lambda: not run.live_jobs(0), "every job has left", 60, every_s=1)
    states = accounting.finished_jobs(run.job_ids())
    assert len(states) == 5  # three engines, one pod, the gather job
    killed = f"{min(run.job_ids('servers'))}_0"  # it was requeued: it served again, or came too late
    assert {state.state for job, state in states.items() if job != killed} == {"COMPLETED"}, states


def test_h5dump_reads_the_file(run: Run) -> None:
    dumped = subprocess.run(["h5dump", "-H", run.dir.trajectories], capture_output=True, text=True, check=False)
    assert dumped.returncode == 0, dumped.stderr
    assert 'GROUP "tokens"' in dumped.stdout


def test_no_key_is_in_any_log(run: Run) -> None:
    for path in run.dir.logs.rglob("*"):
        if path.is_file():
            assert b"sk-" not in path.read_bytes().replace(b"task-", b""), path
    assert os.stat(run.path).st_mode & 0o077 == 0
