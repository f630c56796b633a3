"""Planning of campaigns that train: rollouts, models, leases and the trainer's environment."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from megaflow_hpc.campaign.facade import check
from megaflow_hpc.campaign.planning.gpus import sleeping
from megaflow_hpc.config import parse
from megaflow_hpc.errors import ConfigError
from megaflow_hpc.ledger import read_blocks
from megaflow_hpc.ledger.tasks import planned_tasks
from tests.support.campaigns import Make, planned
from tests.support.scripted import SOLVE
from tests.support.tensors import safetensors

MODELS = """\
samples: 2
models:
  learner: {engine: scripted, script: answers.yaml}
  judge: {engine: scripted, script: answers.yaml}
training: {policies: {learner: {}}}
"""
TRAINED = """\
samples: 2
model: {engine: scripted, script: answers.yaml}
training: {policies: {default: {base: BASE}}}
"""
SHARED = """\
samples: 2
model: {engine: scripted, script: answers.yaml, gpus: 1}
training: {policies: {default: {}}, staleness: 0}
slurm: {trainer: {share: sleep}}
"""


def scripted(make_campaign: Make, text: str, tasks: int = 1) -> Path:
    return make_campaign(tasks, text, agent="mini-swe-agent", answers=SOLVE)


def variables(env_sh: Path, *names: str) -> list[str]:
    """The values of variables after a job has sourced ``env.sh``."""
    words = f". {env_sh}; echo " + " ".join(f"${name}" for name in names)
    return subprocess.check_output(["bash", "-c", words], text=True).split()


def test_trainers_request_the_rollouts_of_their_policies(
    tmp_path: Path, make_campaign: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGAFLOW_TRAINER_PYTHON", str(tmp_path))
    file = scripted(make_campaign, MODELS, 2)
    run = planned(file)
    assert {rollout.policy for block in read_blocks(run.dir) for rollout in block.rollouts} == {"judge"}
    status = run.status()
    assert (status["state"], status["rollouts"]["total"]) == ("planned", 4)
    assert list(status["training"]) == os.listdir(run.dir.ledger / "open") == ["learner"]
    found = variables(run.dir.env_sh, "MEGAFLOW_TRAINER_PYTHON", "MEGAFLOW_TRAINER_REQUEUES")
    assert found == [f"{tmp_path}/bin/python", "20"]
    package = run.dir.training / ".package"
    assert os.listdir(package) == ["megaflow_hpc"], "the trainer's interpreter gets this package alone"
    assert (package / "megaflow_hpc" / "training" / "plan.py").exists()
    file.write_text(file.read_text().replace("  judge: {engine: scripted, script: answers.yaml}\n", ""))
    status = planned(file).status()
    assert (status["state"], status["waits_for"], status["rollouts"]["total"]) == ("planned", ["learner"], 0)


def test_held_out_tasks_are_planned_for_evaluation_only(make_campaign: Make) -> None:
    file = scripted(make_campaign, MODELS, 3)
    fields = yaml.safe_load(file.read_text())
    fields["tasks"] = [{"path": "tasks/*", "exclude": ["task0"]}]
    fields["training"]["evaluate"] = {"tasks": [{"path": "tasks/*", "include": ["task0"]}]}
    file.write_text(yaml.safe_dump(fields))
    run = planned(file)
    assert run.record.held_out == ["task0"]
    assert sorted(planned_tasks(run.dir, run.record)) == ["task0", "task1", "task2"]
    assert "task0" not in {rollout.task_id for block in read_blocks(run.dir) for rollout in block.rollouts}
    file.write_text(yaml.safe_dump({**fields, "tasks": "tasks/*"}))
    with pytest.raises(ConfigError, match="task0: also among tasks"):
        planned(file)


def test_the_base_of_training_is_found_next_to_the_campaign_file(tmp_path: Path, make_campaign: Make) -> None:
    base = tmp_path / "models" / "base"
    base.mkdir(parents=True)
    campaign = scripted(make_campaign, TRAINED.replace("BASE", "models/base"))
    with pytest.raises(ConfigError, match=r"campaign.yaml:\d+: training.policies.default.base: .*: no config.json"):
        planned(campaign)
    for name in ("config.json", "tokenizer.json"):
        (base / name).write_text("{}")
    (base / "model.safetensors").write_bytes(safetensors(b"weights"))
    training = planned(campaign).record.config.training
    assert training
    assert training.policies["default"].base == str(base)
    campaign.write_text(campaign.read_text().replace("models/base", "./models/absent"))
    with pytest.raises(ConfigError, match=r"campaign.yaml:\d+: training.policies.default.base: './models/absent' does"):
        planned(campaign)


def test_a_base_that_differs_from_the_served_model_is_refused(tmp_path: Path, make_campaign: Make) -> None:
    shape = {"architectures": ["LlamaForCausalLM"], "vocab_size": 9, "hidden_size": 8, "num_hidden_layers": 2}
    files = {"config.json": shape, "tokenizer.json": {"model": {"vocab": {"a": 0, "b": 1}}}}
    for name in ("served", "base"):
        (tmp_path / name).mkdir()
        for file, content in files.items():
            (tmp_path / name / file).write_text(json.dumps(content))
        (tmp_path / name / "model.safetensors").write_bytes(safetensors(b"weights"))
    trained = TRAINED.replace("BASE", "./base").replace("engine: scripted, script: answers.yaml", "path: ./served")
    campaign = make_campaign(1, trained + "slurm: {setup: ['true']}\n", agent="nop")
    planned(campaign)
    for file, content, said in (
        ("config.json", {**shape, "num_hidden_layers": 3}, "num_hidden_layers is 3, and 2 in .*/served"),
        ("tokenizer.json", {"model": {"vocab": {"a": 1, "b": 0}}}, "its tokenizer maps words to other ids"),
    ):
        (tmp_path / "base" / file).write_text(json.dumps(content))
        with pytest.raises(ConfigError, match=rf"campaign.yaml:\d+: training.policies.default.base: .*/base: {said}"):
            planned(campaign)
        (tmp_path / "base" / file).write_text(json.dumps(files[file]))


def test_a_sleeping_engine_is_in_its_trainers_job_and_in_no_array(make_campaign: Make) -> None:
    judge = "judge: {engine: scripted, script: answers.yaml, gpus: 4}, other: {engine: scripted, script: answers.yaml}"
    text = SHARED.replace("model: ", "models: {learner: ").replace("gpus: 1}", f"gpus: 1}}, {judge}}}")
    run = planned(scripted(make_campaign, text.replace("default", "learner")))
    servers = [(server.policy, server.model.get("sleep_level")) for server in run.record.servers]
    assert servers[-1] == ("learner", 1)
    assert sorted(servers[:-1]) == [("judge", None), ("other", None)]
    assert [(group.first, group.count) for group in run.record.server_groups] == [(0, 1), (1, 1)]
    assert variables(run.dir.env_sh, "MEGAFLOW_TRAINER_SHARE") == ["sleep"]


@pytest.mark.parametrize(
    ("engine", "how", "level"), [("vllm", "{}", 2), ("vllm", "{lora: 32}", 1), ("scripted", "{}", 1)]
)
def test_an_engine_drops_its_weights_in_its_sleep_if_it_gets_new_ones_anyway(engine: str, how: str, level: int) -> None:
    text = SHARED.replace("engine: scripted", f"engine: {engine}").replace("default: {}", f"default: {how}")
    fields = {"name": "x", "tasks": "tasks/*", "agent": "oracle", **yaml.safe_load(text)}
    fields["model"]["path"] = "model"
    assert sleeping(parse(fields)) == {"default": level}


@pytest.mark.parametrize(
    ("right", "wrong", "said"),
    [
        ("staleness: 0", "staleness: 1", "training.staleness: 1: {}: nothing is sampled during a step: write 0"),
        ("gpus: 1}", "gpus: 2}", r"model.gpus: 2: {}: slurm.trainer.gpus is 1: write the same"),
        ("gpus: 1}", "gpus: 1, servers: [1, 2]}", r"model.servers: 2: {}: one server sleeps .*: write 1"),
        ("engine: scripted", "engine: sglang, path: judge", "model.engine: sglang: {}: only vLLM can be sent to sleep"),
        ("share: sleep", "share: sleep, nodes: 2", "slurm.trainer.nodes: 2: {}: both are on one node: leave it out"),
        ("gpus: 1}", "gpus: 1, nodes: 2}", "model.nodes: 2: {}: both are on one node: leave it out"),
        ("slurm: {", "slurm: {together: true, ", "slurm.together: True: {}: the engine is in the trainer's job"),
        ("model: {", "models: {default: {", "training.policies: default, judge: {}: one trainer takes turns"),
    ],
)
def test_keys_that_prevent_trainer_and_engine_from_taking_turns_are_named(
    make_campaign: Make, right: str, wrong: str, said: str
) -> None:
    assert SHARED.count(right) == 1
    text = SHARED.replace(right, wrong)
    if wrong.startswith("models"):
        text = text.replace("gpus: 1}", "gpus: 1}, judge: {engine: scripted, script: answers.yaml}}")
        text = text.replace("{default: {}}", "{default: {}, judge: {}}")
    with pytest.raises(ConfigError, match=r"campaign.yaml:\d+: " + said.format("slurm.trainer.share: sleep")):
        planned(scripted(make_campaign, text))


OWN = """\
samples: 2
model: {engine: scripted, script: answers.yaml}
training:
  policies: {default: {advantage: {kind: own_methods:centred}}}
  data: [own_methods:kept]
  trainer: own_methods:train
  batch: 1
  steps: 2
"""
OWN_METHODS = """\
import helper_of_methods


def centred(groups):
    return {s.id: s.reward - helper_of_methods.BASELINE for g in groups for s in g.samples}


def kept(groups, version, random):
    return groups


def train(flow):
    (flow.files.path / "trained").write_text(f"{flow.rank} of {flow.ranks}: {flow.policy}")
    flow.close()
"""


def test_functions_next_to_the_campaign_file_are_tried_and_copied_into_the_run(make_campaign: Make) -> None:
    file = scripted(make_campaign, OWN)
    (file.parent / "own_methods.py").write_text(OWN_METHODS)
    (file.parent / "helper_of_methods.py").write_text("BASELINE = None\n")
    with pytest.raises(ConfigError) as error:
        planned(file)
    (line,) = str(error.value).splitlines()
    assert f"{file}:" in line
    assert "training.policies.default.advantage.kind: own_methods:centred: raised TypeError" in line
    assert check(file, site_too=False).file == [line]
    (file.parent / "helper_of_methods.py").write_text("BASELINE = 0.5\n")
    run = planned(file)
    assert {path.name for path in run.dir.code.iterdir()} == {"own_methods.py", "helper_of_methods.py"}
    (file.parent / "own_methods.py").write_text("raise SystemExit('changed after planning')")
    command = [sys.executable, "-m", "megaflow_hpc.training.trainer", str(run.dir)]
    subprocess.run(command, check=True, cwd=file.parent)
    assert (run.dir.training / "default" / "trained").read_text() == "0 of 1: default"
    (run.dir.code / "own_methods.py").write_text(OWN_METHODS + "\n")
    done = subprocess.run(command, check=False, cwd=file.parent, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2
    assert "own_methods.py: was changed after the training began" in done.stderr


def test_a_function_that_needs_the_trainers_libraries_is_not_tried_without_them(
    make_campaign: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MEGAFLOW_TRAINER_PYTHON", "MEGAFLOW_ENGINE_VENV"):
        monkeypatch.delenv(name, raising=False)
    file = scripted(make_campaign, OWN)
    (file.parent / "own_methods.py").write_text("import a_library_of_the_trainer\n" + OWN_METHODS)
    found = check(file, site_too=False)
    assert found.file == []
    assert "not tried here; trainers try it before their first step" in found.warnings[0]


@pytest.mark.parametrize(
    ("column", "policy", "training", "said"),
    [
        ("old", "lora: 32", "", "lora publishes only adapters; leave lora or this column out"),
        ("average", "lora: 32", "", "lora publishes only adapters; leave lora or this column out"),
        ("old", "", "publish_delta: true", "publish_delta publishes differences; leave publish_delta or this column"),
        ("reference", "lora: 32", "publish_delta: true", ""),
    ],
)
def test_columns_of_earlier_versions_are_refused_if_versions_are_not_whole(
    make_campaign: Make, column: str, policy: str, training: str, said: str
) -> None:
    text = f"""\
samples: 2
model: {{engine: scripted, script: answers.yaml}}
training:
  {training}
  policies:
    default:
      {policy}
      columns: {{{column}: "megaflow_hpc.training.trainer.recipes:{column}"}}
"""
    file = scripted(make_campaign, text)
    found = [line for line in check(file, site_too=False).file if "columns" in line]
    if not said:
        assert found == []
        return
    (line,) = found
    key = f"training.policies.default.columns.{column}"
    expected = rf"{re.escape(str(file))}:\d+: {key}: megaflow_hpc.*:{column}: reads earlier versions, but {said}"
    assert re.match(expected, line)
