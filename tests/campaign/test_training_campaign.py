"""Campaigns that train: what planning makes of the section."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megaflow_hpc import Campaign
from megaflow_hpc.errors import ConfigError
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.record import read_run
from tests.support.campaigns import Make
from tests.support.tensors import safetensors

TRAINED = """
samples: 2
model: {engine: scripted, script: answers.yaml}
training: {policies: {default: {base: BASE}}}
"""


def test_the_model_that_training_starts_from_is_found_beside_the_campaign_file(
    tmp_path: Path, make_campaign: Make
) -> None:
    (tmp_path / "answers.yaml").write_text("answers: []\n")
    base = tmp_path / "models" / "base"
    base.mkdir(parents=True)
    campaign = make_campaign(1, TRAINED.replace("BASE", "models/base"), agent="nop")
    with pytest.raises(ConfigError, match=r"campaign.yaml:\d+: training.policies.default.base: .*: no config.json"):
        Campaign.from_yaml(campaign).plan(launcher="local")
    for name in ("config.json", "tokenizer.json"):
        (base / name).write_text("{}")
    (base / "model.safetensors").write_bytes(safetensors(b"weights"))
    run = Campaign.from_yaml(campaign).plan(launcher="local")
    training = read_run(RunDir(run.dir.path)).config.training
    assert training
    assert training.policies["default"].base == str(tmp_path / "models" / "base")
    campaign.write_text(campaign.read_text().replace("models/base", "./models/absent"))
    with pytest.raises(ConfigError, match=r"campaign.yaml:\d+: training.policies.default.base: './models/absent' does"):
        Campaign.from_yaml(campaign).plan(launcher="local")


def test_a_model_that_cannot_be_served_in_the_place_of_what_is_served_is_not_planned(
    tmp_path: Path, make_campaign: Make
) -> None:
    shape = {"architectures": ["LlamaForCausalLM"], "vocab_size": 9, "hidden_size": 8, "num_hidden_layers": 2}
    words = {"model": {"vocab": {"a": 0, "b": 1}}}
    for name in ("served", "base"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(shape))
        (tmp_path / name / "tokenizer.json").write_text(json.dumps(words))
        (tmp_path / name / "model.safetensors").write_bytes(safetensors(b"weights"))
    trained = TRAINED.replace("BASE", "./base").replace("engine: scripted, script: answers.yaml", "path: ./served")
    campaign = make_campaign(1, trained + "slurm: {setup: ['true']}\n", agent="nop")
    Campaign.from_yaml(campaign).plan(launcher="local")
    for name, content, said in (
        ("config.json", {**shape, "num_hidden_layers": 3}, "num_hidden_layers is 3, and 2 in .*/served"),
        ("tokenizer.json", {"model": {"vocab": {"a": 1, "b": 0}}}, "its tokenizer gives other numbers to words"),
    ):
        before = (tmp_path / "base" / name).read_text()
        (tmp_path / "base" / name).write_text(json.dumps(content))
        with pytest.raises(ConfigError, match=rf"campaign.yaml:\d+: training.policies.default.base: .*/base: {said}"):
            Campaign.from_yaml(campaign).plan(launcher="local")
        (tmp_path / "base" / name).write_text(before)
    Campaign.from_yaml(campaign).plan(launcher="local")
