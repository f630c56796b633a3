"""Campaigns that train: what planning makes of the section."""

from __future__ import annotations

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
