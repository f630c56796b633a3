"""What planning makes of a campaign that trains: nothing is asked for yet, it is open, and a trainer finds its way."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import yaml

from megaflow_hpc import Campaign
from megaflow_hpc.errors import ConfigError
from megaflow_hpc.ledger import read_blocks
from megaflow_hpc.ledger.tasks import planned_tasks
from tests.support.campaigns import Make
from tests.support.scripted import SOLVE

MODELS = """\
samples: 2
models:
  learner: {engine: scripted, script: answers.yaml}
  judge: {engine: scripted, script: answers.yaml}
training: {policies: {learner: {}}}
slurm: {trainer: {requeues: 7}}
"""


def test_trained_policies_are_asked_for_by_their_trainers_alone(
    tmp_path: Path, make_campaign: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "answers.yaml").write_text(yaml.safe_dump({"default": SOLVE}))
    monkeypatch.setenv("MEGAFLOW_TRAINER_PYTHON", str(tmp_path))
    run = Campaign.from_yaml(make_campaign(2, MODELS, agent="mini-swe-agent")).plan(launcher="local")
    planned = {rollout.policy for block in read_blocks(run.dir) for rollout in block.rollouts}
    assert planned == {"judge"}
    assert run.status()["rollouts"]["total"] == 4
    assert os.listdir(run.dir.ledger / "open") == ["learner"]
    shown = run.status()["training"]
    assert list(shown) == ["learner"]
    said = subprocess.check_output(
        ["bash", "-c", f'. {run.dir.env_sh}; echo "$MEGAFLOW_TRAINER_PYTHON $MEGAFLOW_TRAINER_REQUEUES"'], text=True
    )
    assert said.split() == [f"{tmp_path}/bin/python", "7"]
    # The trainer's interpreter gets this package, and no other library of ours.
    assert os.listdir(run.dir.training / ".package") == ["megaflow_hpc"]
    assert (run.dir.training / ".package" / "megaflow_hpc" / "training" / "plan.py").exists()


def test_held_out_tasks_are_planned_for_evaluation_and_not_among_what_is_asked(
    tmp_path: Path, make_campaign: Make
) -> None:
    (tmp_path / "answers.yaml").write_text(yaml.safe_dump({"default": SOLVE}))
    file = make_campaign(3, MODELS, agent="mini-swe-agent")
    fields = yaml.safe_load(file.read_text())
    (source,) = fields["tasks"] if isinstance(fields["tasks"], list) else [fields["tasks"]]
    path = source if isinstance(source, str) else source["path"]
    every = sorted(task.name for task in tmp_path.glob("**/task.toml") for task in [task.parent])
    fields["tasks"] = [{"path": path, "exclude": [every[0]]}]
    fields["training"]["evaluate"] = {"tasks": [{"path": path, "include": [every[0]]}]}
    file.write_text(yaml.safe_dump(fields))
    run = Campaign.from_yaml(file).plan(launcher="local")
    assert run.record.held_out == [every[0]]
    assert sorted(planned_tasks(run.dir, run.record)) == every
    assert every[0] not in {rollout.task_id for block in read_blocks(run.dir) for rollout in block.rollouts}
    fields["tasks"] = [path]
    file.write_text(yaml.safe_dump(fields))
    with pytest.raises(ConfigError, match=f"{every[0]}: also among tasks"):
        Campaign.from_yaml(file).plan(launcher="local")


def test_sharing_gpus_by_sleep_is_refused_rather_than_ignored(tmp_path: Path, make_campaign: Make) -> None:
    (tmp_path / "answers.yaml").write_text(yaml.safe_dump({"default": SOLVE}))
    text = MODELS.replace("requeues: 7", "share: sleep")
    with pytest.raises(ConfigError, match=r"campaign.yaml:\d+: slurm.trainer.share: sleep is not there yet"):
        Campaign.from_yaml(make_campaign(1, text, agent="mini-swe-agent")).plan(launcher="local")
