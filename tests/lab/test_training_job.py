"""A trainer's job on the real Slurm of the lab: killed and requeued, beside pods that wait for it; and by hand."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from megaflow_hpc import Campaign
from megaflow_hpc.campaign.facade import Run
from megaflow_hpc.rundir.training import Commit
from megaflow_hpc.slurm import accounting
from megaflow_hpc.training.plan import StepPlan, TrainingFiles
from tests.support.campaigns import Make, cli, rows, verb
from tests.support.places import ROOT
from tests.support.processes import kill, processes, processes_of
from tests.support.scripted import SOLVE
from tests.support.stand_in_trainer import interpreter, trained
from tests.support.torch_ranks import engine_python
from tests.support.waiting import until

pytestmark = [pytest.mark.lab, pytest.mark.usefixtures("slurm", "fresh_answers"), pytest.mark.timeout(600)]

LEARNING = """\
samples: 2
model: {engine: scripted, script: answers.yaml, gpus: 0}
training: {policies: {default: {}}, batch: 2, staleness: 0, steps: 3}
slurm:
  pods: {partition: cpu, count: 1, ranks_per_node: 2, slots_per_rank: 2, mem: 1G, time: 20}
  servers: {partition: gpu, time: 20}
  trainer: {partition: gpu, time: 20, mem: 1G}
"""


@pytest.fixture
def campaign(tmp_path: Path, make_campaign: Make, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A campaign that trains, in three steps; its trainer's interpreter runs the stand-in in the trainer's place."""
    (tmp_path / "answers.yaml").write_text(yaml.safe_dump({"default": SOLVE}))
    monkeypatch.setenv("MEGAFLOW_TRAINER_PYTHON", str(interpreter(tmp_path / "python", dies=2)))
    return make_campaign(2, LEARNING, agent="mini-swe-agent")


def test_a_killed_trainer_is_requeued_and_its_campaign_ends_with_the_training(campaign: Path) -> None:
    run = Campaign.from_yaml(campaign).submit()
    (trainer,) = run.job_ids("trainer")
    assert [record.role for record in run.slurm_jobs.arrays.records()] == ["servers", "trainer", "pods", "gather"]
    summary = run.wait(timeout_s=900)
    assert summary["state"] == "finished"
    told = trained(run.dir)
    assert [line[:2] for line in told] == [["1", "1"], ["1", "2"], ["2", "2"], ["2", "3"]]
    assert told[1][2:] == told[2][2:], "the step was made again of the same rollouts"
    used = [rollout for line in (told[0], *told[2:]) for rollout in line[2:]]
    assert len(used) == len(set(used)) == 12
    assert {name for name, (status, _) in rows(run.path).items() if status == "completed"} == set(used)
    assert summary["rollouts"]["total"] == summary["rollouts"]["completed"] == 12
    assert len(summary["pods"]) == 1, "the pod waited on its node for the trainer to come back"
    files = TrainingFiles(run.dir, "default")
    assert files.numbers(StepPlan) == files.numbers(Commit) == [1, 2, 3]
    until(lambda: not run.live_jobs(0), "every job has left")
    shown = json.loads(verb("status", run.path, "--json").stdout)["training"]["default"]
    assert (shown["step"], shown["steps"], shown["reward"], shown["trainer"]["state"]) == (3, 3, 1.0, "done")
    assert shown["trainer"]["job_id"] == trainer
    until(
        lambda: {state.state for state in accounting.finished_jobs([trainer]).values()} == {"COMPLETED"},
        "the trainer has ended well, as accounting knows",
    )


def test_a_trainer_whose_pods_are_gone_or_that_fails_ends_for_good_and_resume_queues_another(
    campaign: Path, tmp_path: Path
) -> None:
    python = tmp_path / "python"
    right = python.read_text()
    waits = 'until [ "$($MEGAFLOW_ASK_PODS)" = 0 ]; do sleep 1; done; sleep 8; echo "trainer: no pod"; exit 69'
    python.write_text(right.replace('echo "$*"', waits))
    run = Campaign.from_yaml(campaign).submit()
    (pods,) = run.job_ids("pods")
    until(lambda: _trainer(run.path).get("state") == "running", "the trainer waits")
    subprocess.run(["scancel", pods], check=True)
    until(lambda: any("is running or queued" in said for said in Run(run.path).status()["warnings"]), "it is told")
    until(lambda: _trainer(run.path).get("state") == "ended", "it has ended, and is not requeued")
    word = _trainer(run.path)["last_word"]
    assert (word["word"], word["exit_status"], word["cause"]) == ("failed", 69, "trainer: no pod")
    python.write_text(right.replace('echo "$*"', 'echo "trainer: no tokenizer"; exit 2'))
    assert cli("resume", run.path, "--no-wait").returncode == 0
    until(lambda: _trainer(run.path)["last_word"]["exit_status"] == 2, "the other ends too")
    until(lambda: run.pods_live() and not run.slurm_jobs.trainer_states(0), "the pod waits for another")
    word = _trainer(run.path)["last_word"]
    assert (word["word"], word["cause"]) == ("failed", "trainer: no tokenizer")
    python.write_text(right)
    done = cli("resume", run.path)
    assert done.returncode == 0, done.stderr
    assert len(run.job_ids("trainer")) == 3
    assert "default: step 3 of 3" in verb("status", run.path).stdout


STARVED = """
import os, signal, sys, time
if os.environ["RANK"] == "0":
    print("trainer: no pod", file=sys.stderr)
    sys.exit(69)
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as it is in effect while NCCL waits for the first rank
time.sleep(600)
"""


def test_on_several_nodes_too_a_trainer_whose_pods_are_gone_ends_for_good(campaign: Path, tmp_path: Path) -> None:
    (tmp_path / "starved.py").write_text(STARVED)
    python = tmp_path / "python"  # torch's own launcher, at an address that the nodes of a lab have, with other ranks
    python.write_text(
        '#!/bin/bash\nwords=("$@")\nwords=("${words[@]/#--master-addr=*/--master-addr=127.0.0.1}")\n'
        f'words=("${{words[@]/#megaflow_hpc.training.trainer/starved}}")\n'
        f'PYTHONPATH="{tmp_path}:$PYTHONPATH" exec "{engine_python()}" "${{words[@]}}"\n'
    )
    campaign.write_text(
        campaign.read_text().replace("trainer: {partition: gpu,", "trainer: {partition: gpu, nodes: 2,")
    )
    run = Campaign.from_yaml(campaign).submit()
    until(lambda: _trainer(run.path).get("state") == "ended", "it has ended, and is not requeued")
    word = _trainer(run.path)["last_word"]
    assert (word["word"], word["exit_status"]) == ("failed", 69)
    run.cancel()


def test_by_hand_a_policy_that_is_not_trained_is_refused_and_the_trainer_needs_no_environment(
    tmp_path: Path, campaign: Path
) -> None:
    planned = verb("plan", campaign)
    run = planned.stdout.strip()
    assert f"sbatch/trainer.sbatch {run} default" in planned.stderr
    script = str(ROOT / "sbatch" / "trainer.sbatch")
    words = ["sbatch", "--parsable", "--export=NONE", "--partition=gpu", "--gres=gpu:1", "--mem=1G", "--time=10"]
    log = tmp_path / "refused.log"
    job = subprocess.check_output([*words, "-o", str(log), script, run, "other"], text=True).strip()
    until(lambda: "does not train the policy other; it trains: default" in _text(log), "it is refused")
    until(lambda: {s.state for s in accounting.finished_jobs([job]).values()} == {"FAILED"}, "and not requeued")
    log = tmp_path / "trainer.log"
    job = subprocess.check_output([*words, "-o", str(log), script, run], text=True).strip()
    until(lambda: _trainer(run)["starts"] == 1, "it has entered")
    assert _trainer(run)["state"] == "running"
    assert Run(run).job_ids("trainer") == [job]
    assert f"-m megaflow_hpc.training.trainer {run} --policy default" in _text(log)
    subprocess.run(["scancel", "--batch", "--signal=USR2", job], check=True)  # as Slurm does before the walltime
    until(lambda: "last_word" in _trainer(run), "it was asked to stop")
    word = _trainer(run)["last_word"]
    assert (word["word"], word["exit_status"], word["log"]) == ("requeued", 128 + signal.SIGTERM, str(log))
    until(lambda: _trainer(run)["state"] == "queued" or _trainer(run)["starts"] == 2, "Slurm has it again")
    assert verb("cancel", run).returncode == 0
    until(lambda: not Run(run).live_jobs(0), "cancel ends it too")
    assert os.listdir(Path(run, "ledger", "open")) == []


def test_an_engine_that_shares_gpus_is_in_the_trainers_job_and_both_may_be_killed(campaign: Path) -> None:
    campaign.write_text(
        campaign.read_text().replace("trainer: {partition: gpu,", "trainer: {partition: gpu, share: sleep, gpus: 0,")
    )
    run = Campaign.from_yaml(campaign).submit()
    (trainer,) = run.job_ids("trainer")
    assert [record.role for record in run.slurm_jobs.arrays.records()] == ["trainer", "pods", "gather"]
    endpoint = run.dir.endpoints / "default.0.json"
    until(lambda: endpoint.exists() and json.loads(endpoint.read_text())["job_id"] == trainer, "it serves in the job")
    first = json.loads(endpoint.read_text())["start"]
    words = dict(processes())
    found = processes_of("megaflow_hpc.model.server", str(run.path))
    (server,) = [pid for pid in found if words[pid][1] == "-m"]
    assert kill(server)
    until(lambda: endpoint.exists() and json.loads(endpoint.read_text())["start"] != first, "another is started")
    summary = run.wait(timeout_s=900)
    assert summary["state"] == "finished"
    told = trained(run.dir)
    assert [line[:2] for line in told] == [["1", "1"], ["1", "2"], ["2", "2"], ["2", "3"]], "killed while it slept"
    used = [rollout for line in (told[0], *told[2:]) for rollout in line[2:]]
    assert len(used) == len(set(used)) == summary["rollouts"]["completed"] == 12
    assert run.job_ids("trainer") == [trainer]
    log = (run.dir.logs / f"trainer-{trainer}.log").read_text()
    assert log.count("the trainer has the GPUs") >= 4
    assert log.count("asleep after") >= 3, "but where it was started after the trainer that had the GPUs already"
    assert log.index("asleep after") < log.index("loading weights 1")
    until(lambda: not run.live_jobs(0), "every job has left")
    until(
        lambda: {state.state for state in accounting.finished_jobs([trainer]).values()} == {"COMPLETED"},
        "the trainer has ended well, as accounting knows",
    )
    assert not endpoint.exists()


def _trainer(run: str | Path) -> dict[str, Any]:
    found: dict[str, Any] = Run(run).status()["training"]["default"]["trainer"]
    return found


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""
