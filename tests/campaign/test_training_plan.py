"""What planning makes of a campaign that trains: nothing is asked for yet, it is open, and a trainer finds its way."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import yaml

from megaflow_hpc import Campaign
from megaflow_hpc.campaign.planning.gpu_sharing import sleeping
from megaflow_hpc.config import parse
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
    assert said.split() == [f"{tmp_path}/bin/python", "20"]
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


SHARED = """\
samples: 2
model: {engine: scripted, script: answers.yaml, gpus: 1}
training: {policies: {default: {}}, staleness: 0}
slurm: {trainer: {share: sleep}}
"""


def test_an_engine_that_sleeps_is_in_no_array_but_in_its_trainers_job(tmp_path: Path, make_campaign: Make) -> None:
    (tmp_path / "answers.yaml").write_text(yaml.safe_dump({"default": SOLVE}))
    (tmp_path / "judge").mkdir()
    judge = "judge: {engine: scripted, script: answers.yaml, gpus: 4}, other: {engine: scripted, script: answers.yaml}"
    text = SHARED.replace("model: ", "models: {learner: ").replace("gpus: 1}", f"gpus: 1}}, {judge}}}")
    run = Campaign.from_yaml(make_campaign(1, text.replace("default", "learner"), agent="mini-swe-agent")).plan(
        launcher="local"
    )
    servers = [(server.policy, server.model.get("sleep_level")) for server in run.record.servers]
    assert servers[-1] == ("learner", 1)
    assert sorted(servers[:-1]) == [("judge", None), ("other", None)]
    assert [(group.first, group.count) for group in run.record.server_groups] == [(0, 1), (1, 1)]
    said = subprocess.check_output(["bash", "-c", f'. {run.dir.env_sh}; echo "$MEGAFLOW_TRAINER_SHARE"'], text=True)
    assert said == "sleep\n"


@pytest.mark.parametrize(
    ("engine", "how", "level"), [("vllm", "{}", 2), ("vllm", "{lora: {}}", 1), ("scripted", "{}", 1)]
)
def test_an_engine_drops_its_weights_in_its_sleep_if_it_gets_new_ones_anyway(engine: str, how: str, level: int) -> None:
    text = SHARED.replace("engine: scripted", f"engine: {engine}").replace("default: {}", f"default: {how}")
    fields = {"name": "x", "tasks": "tasks/*", "agent": "oracle", **yaml.safe_load(text)}
    fields["model"]["path"] = "model"
    assert sleeping(parse(fields)) == {"default": level}


@pytest.mark.parametrize(
    ("right", "wrong", "said"),
    [
        (
            "staleness: 0",
            "staleness: 1",
            "training.staleness: 1: {}: nothing is sampled during a step: write 0",
        ),
        ("gpus: 1}", "gpus: 2}", r"model.gpus: 2: {}: slurm.trainer.gpus is 1: write the same"),
        (
            "gpus: 1}",
            "gpus: 1, servers: [1, 2]}",
            r"model.servers: 2: {}: one server sleeps .*: write 1",
        ),
        ("engine: scripted", "engine: sglang, path: judge", "model.engine: sglang: {}: only vLLM can be sent to sleep"),
        ("share: sleep", "share: sleep, nodes: 2", "slurm.trainer.nodes: 2: {}: both are on one node: leave it out"),
        ("gpus: 1}", "gpus: 1, nodes: 2}", "model.nodes: 2: {}: both are on one node: leave it out"),
        ("slurm: {", "slurm: {together: true, ", "slurm.together: True: {}: the engine is in the trainer's job"),
    ],
)
def test_where_trainer_and_engine_cannot_take_turns_the_key_is_named_and_what_to_do(
    tmp_path: Path, make_campaign: Make, right: str, wrong: str, said: str
) -> None:
    (tmp_path / "answers.yaml").write_text(yaml.safe_dump({"default": SOLVE}))
    assert SHARED.count(right) == 1
    campaign = make_campaign(1, SHARED.replace(right, wrong), agent="mini-swe-agent")
    with pytest.raises(ConfigError, match=r"campaign.yaml:\d+: " + said.format("slurm.trainer.share: sleep")):
        Campaign.from_yaml(campaign).plan(launcher="local")


def test_two_policies_that_learn_do_not_share_gpus_by_sleep(tmp_path: Path, make_campaign: Make) -> None:
    (tmp_path / "answers.yaml").write_text(yaml.safe_dump({"default": SOLVE}))
    text = MODELS.replace("{learner: {}}}", "{learner: {}, judge: {}}, staleness: 0}")
    text += "slurm: {trainer: {share: sleep, gpus: 0}}\n"
    with pytest.raises(ConfigError, match=r"training.policies: learner, judge: .*: one trainer takes turns"):
        Campaign.from_yaml(make_campaign(1, text, agent="mini-swe-agent")).plan(launcher="local")
