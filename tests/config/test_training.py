"""The ``training`` section: what is accepted, what it resolves to, and what is said about what is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from megaflow_hpc import config
from megaflow_hpc.config.model import ModelConfig
from megaflow_hpc.config.training import (
    CLIPS,
    LossConfig,
    OptimizerConfig,
    PolicyTraining,
    TrainingConfig,
)
from megaflow_hpc.errors import ConfigError
from megaflow_hpc.types import NEUTRAL
from tests.support.places import ROOT

CAMPAIGN = "name: learn\ntasks: tasks/*\nagent: mini-swe-agent\nsamples: 16\nmodel: {path: m}\n"
WHOLE = """
training:
  policies:
    default:
      base: /models/Qwen3-4B
      loss: {kind: gspo, clip: [2.0e-4, 4.0e-4], epochs: 2, minibatch: 64}
      advantage: {kind: grpo, rewards: {tests: 1.0, style: 0.1}, whiten: apart}
      importance: token
      optimizer: {lr: 1.0e-6, clip_norm: 1.0}
  batch: 64
  staleness: 2
  data: [{penalty: -0.5}, {zero_variance: {}}, {over_length: [65536, truncate]}, {replay: 0.0}]
  prompts: {order: uniform, pass_rate: [0.0, 1.0, exclusive]}
  steps: 100
  checkpoint_every: 5
  publish_delta: false
  evaluate: {tasks: tasks/held-out/*, every: 10, samples: 4}
slurm:
  trainer: {partition: gpu, nodes: 1, gpus: 4, time: 1-00:00:00, share: none}
"""


def load(tmp_path: Path, text: str) -> config.CampaignConfig:
    path = tmp_path / "campaign.yaml"
    path.write_text(text)
    return config.load(path)


def complaint(tmp_path: Path, text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    return str(caught.value)


def section(text: str) -> str:
    """The campaign, with ``text`` below ``training``."""
    return CAMPAIGN + "training:\n" + "".join(f"  {line}\n" for line in text.splitlines())


def test_everything_can_be_said(tmp_path: Path) -> None:
    campaign = load(tmp_path, CAMPAIGN + WHOLE)
    training = campaign.training
    assert training is not None
    policy = training.policies["default"]
    assert (policy.loss.band, policy.loss.minibatch, policy.loss.epochs) == ((2e-4, 4e-4), 64, 2)
    assert [step.name for step in training.data] == ["penalty", "zero_variance", "over_length", "replay"]
    assert training.data[0].penalty == -0.5
    assert training.over_length == (65536, "truncate")
    assert training.evaluate is not None
    assert training.evaluate.tasks[0].path == "tasks/held-out/*"
    assert campaign.slurm.trainer.gpus == 4


def test_one_line_is_enough(tmp_path: Path) -> None:
    training = load(tmp_path, section("policies: {default: }")).training
    assert training is not None
    assert (training.staleness, training.batch, training.steps) == (1, 16, 100)
    assert training.policies["default"].loss.band == (0.2, 0.28)


def test_a_run_directory_holds_the_section_as_json_that_reads_back_the_same(tmp_path: Path) -> None:
    campaign = load(tmp_path, CAMPAIGN + WHOLE)
    kept = json.loads(json.dumps(campaign.model_dump(mode="json")))
    assert config.resolved(config.CampaignConfig, kept).training == campaign.training


def test_gspo_has_no_importance_weights_unless_the_file_asks_for_them() -> None:
    def importance(**policy: Any) -> str:
        return TrainingConfig.model_validate({"policies": {"default": policy}}).policies["default"].engine_importance

    assert importance() == "token"
    assert importance(loss={"kind": "gspo"}) == "none"
    assert importance(loss={"kind": "gspo"}, importance="sequence") == "sequence"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("policies: {}", "names no policy; write policies: {default: {}}"),
        ("policies: {other: }", "'other' is not a policy with a model; this campaign has: default"),
        ("policies: {default: {loss: {kind: median}}}", "median is an advantage; write advantage: {kind: median}"),
        ("policies: {default: {advantage: {kind: gspo}}}", "gspo is a loss; write loss: {kind: gspo}"),
        ("policies: {default: {loss: {minibatch: {tasks: 4}}}}", "expected a whole number"),
        ("policies: {default: {lora: 8, parallel: {expert: 2}}}", "adapters (lora) need expert: 1"),
        ("policies: {default: {parallel: {context: 0}}}", "parallel.context 0: expected a whole number of at least 1"),
        ("policies: {default: {loss: {minibatch: 64}}}", "64 tasks are more than batch: 16"),
        ("policies: {default: {loss: {clip: [0, 0.2]}}}", "both positive, such as [0.2, 0.28]"),
        ("policies: {default: {loss: {kind: m2po, clip: 0.2}}}", "m2po bounds the second moment of ratios"),
        ("policies: {default: {loss: {kind: rloo, clip: 0.2}}}", "rloo takes no ratio; leave clip out"),
        ("policies: {default: {loss: {kind: dr_grpo}}}", "set max_tokens of agent mini-swe-agent, such as max_tokens"),
        ("policies: {default: {advantage: {rewards: {a: 0}}}}", "every weight is 0"),
        ("policies: {default: {advantage: {rewards: {a: .nan}}}}", "rewards.a nan: expected a number"),
        (
            "policies: {default: {optimizer: {weight_decay: -1}}}",
            "weight_decay -1: expected a number of at least 0",
        ),
        ("policies: {default: }\nstaleness: -1", "training.staleness -1: expected a whole number of at least 0"),
        ("policies: {default: }\nbatch: {tasks: 2}", "training.batch: expected a whole number of at least 1, found"),
        ("policies: {default: }\ndata: [{zero_variance: {}, penalty: -1}]", "one name with its settings"),
        ("policies: {default: }\ndata: [filter]", "unknown key 'training.data.0.filter'"),
        ("policies: {default: }\ndata: [{over_length: 1}, {over_length: 2}]", "over_length is given twice"),
        (
            "policies: {default: }\ndata: [{over_length: [0, drop]}]",
            "over_length.0 0: expected a whole number of at least 1",
        ),
        ("policies: {default: }\ndata: [{over_length: [9, cut]}]", "'cut': expected 'drop', 'truncate' or 'penalise'"),
        ("policies: {default: }\ndata: [{replay: 0.1}, {replay: 0.2}]", "replay is given twice"),
        (
            "policies: {default: }\ndata: [{replay: {ratio: 0.3}}]",
            "replay: expected a number",
        ),
        ("policies: {default: }\ndata: [{pass_rate: [0.9, 0.1]}]", "the lower one first"),
        ("policies: {default: }\nprompts: {pass_rate: [0, 2]}", "bounds are pass rates from 0 to 1"),
    ],
)
def test_a_mistake_is_told_with_its_remedy(tmp_path: Path, text: str, expected: str) -> None:
    assert expected in complaint(tmp_path, section(text))


@pytest.mark.parametrize(
    ("model", "agent", "expected"),
    [
        (
            "{path: m}",
            "{model: {temperature: 0.6}}",
            "agent.args.model.temperature 0.6: a trained policy is sampled with 1 (model.sampling.temperature)",
        ),
        ("{path: m, sampling: {temperature: 0.7}}", "{model: {temperature: 1}}", "is sampled with 0.7"),
        ("{path: m, sampling: {temperature: 0}}", "{}", "model.sampling.temperature 0: sampling without randomness"),
        ("{path: m, sampling: {top_p: 0.9}}", "{}", "model.sampling.top_p 0.9: loss dapo needs the probabilities"),
        ("{path: m, sampling: {top_k: 20}}", "{}", "model.sampling.top_k 20"),
        ("{path: m, sampling: {repetition_penalty: 1.1}}", "{}", "model.sampling.repetition_penalty 1.1"),
        ("{path: m}", "{model: {top_k: 20}}", "agent.args.model.top_k 20"),
        ("{path: m}", "{model: {logit_bias: {7: 1}}}", "agent.args.model.logit_bias"),
        ("{path: m, args: {override-generation-config: {top_p: 0.9}}}", "{}", "override-generation-config.top_p 0.9"),
        (
            "{path: m, args: {override_generation_config: '{\"temperature\": 0}'}}",
            "{}",
            "model.args.override_generation_config.temperature 0",
        ),
        ("{path: m, args: {generation-config: auto}}", "{}", "leave it out, or write vllm"),
        ("{path: m, also: [{args: {generation_config: auto}}]}", "{}", "leave it out, or write vllm"),
        ("{engine: external, base_url: 'http://x/v1'}", "{}", "engine external, which loads no trained weights"),
        ("{engine: pool, path: /runs/pool}", "{}", "an engine pool, which loads no trained weights"),
    ],
)
def test_what_would_make_ratios_wrong_is_refused_by_its_key(
    tmp_path: Path, model: str, agent: str, expected: str
) -> None:
    text = f"name: x\ntasks: t/*\nagent: {{name: mini-swe-agent, args: {agent}}}\nsamples: 4\nmodel: {model}\n"
    assert load(tmp_path, text).training is None  # only training minds
    assert expected in complaint(tmp_path, text + "training: {policies: {default: }}\n")


def test_deltas_are_refused_for_an_engine_over_several_nodes(tmp_path: Path) -> None:
    text = "name: x\ntasks: t/*\nagent: mini-swe-agent\nsamples: 4\nmodel: {path: m, nodes: 2}\n"
    said = complaint(tmp_path, text + "training: {policies: {default: }, publish_delta: true}\n")
    assert "training.publish_delta: model.nodes: an engine over several nodes reads weights on each of them" in said
    assert load(tmp_path, text + "training: {policies: {default: }}\n").training is not None


def test_values_that_change_nothing_are_accepted(tmp_path: Path) -> None:
    agent = "{name: mini-swe-agent, args: {model: {temperature: 1.0, top_p: 1, top_k: -1, presence_penalty: 0}}}"
    text = CAMPAIGN.replace("agent: mini-swe-agent", f"agent: {agent}")
    assert load(tmp_path, text + "training: {policies: {default: }}\n").training is not None


def test_a_trained_policys_engine_takes_no_sampling_from_the_models_files(tmp_path: Path) -> None:
    """Most models come with a generation_config.json that has a temperature and top-p, which engines obey."""
    models = yaml.safe_dump(
        {
            "a": {"path": "m", "args": {"max-model-len": 8192}, "also": [{"gpus": 2, "args": {"max-model-len": 4096}}]},
            "b": {"path": "m"},
            "c": {"engine": "sglang", "path": "m"},
        }
    )
    text = CAMPAIGN.replace("model: {path: m}", "models:\n  " + models.replace("\n", "\n  "))
    policies = load(tmp_path, text + "\ntraining: {policies: {a: , c: }}\n").policies()
    found = {name: policy.model for name, policy in policies.items()}
    assert found["a"]
    assert [kind.args for kind in found["a"].kinds()] == [
        {"max-model-len": 8192, "generation-config": "vllm"},
        {"max-model-len": 4096, "generation-config": "vllm"},
    ]
    assert found["b"]
    assert found["b"].args == {}
    assert found["c"]
    assert found["c"].args == {"sampling-defaults": "openai"}


def test_the_docs_show_the_defaults(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "how-to" / "training.md").read_text()
    text = text.partition("## The campaign's keys")[2].partition("```yaml\n")[2].partition("```")[0]
    policies = yaml.safe_load(text)["training"]["policies"]["default"]
    assert policies.keys() == PolicyTraining.model_fields.keys()
    assert policies["loss"].keys() == LossConfig.model_fields.keys()
    assert policies["optimizer"].keys() == OptimizerConfig.model_fields.keys()
    assert yaml.safe_load(text)["training"].keys() == TrainingConfig.model_fields.keys()
    shown, plain = load(tmp_path, CAMPAIGN + text), load(tmp_path, section("policies: {default: }"))
    assert shown.slurm == plain.slurm
    assert shown.training
    assert plain.training
    loss = shown.training.policies["default"].loss
    assert loss.band == plain.training.policies["default"].loss.band
    unclipped = shown.training.policies["default"].model_copy(update={"loss": loss.model_copy(update={"clip": None})})
    assert shown.training.model_copy(update={"policies": {"default": unclipped}}) == plain.training


def test_the_papers_recipe_is_a_campaign_file() -> None:
    campaign = config.load(ROOT / "launchers" / "learning" / "paper.yaml")
    assert campaign.training
    assert (campaign.training.staleness, campaign.samples * campaign.training.batch) == (0, 1024)
    assert campaign.training.policies["default"].loss.band == (2e-4, 4e-4)


def test_every_loss_has_a_band_of_its_paper() -> None:
    losses = {kind: LossConfig(kind=kind) for kind in CLIPS}  # type: ignore[arg-type]
    assert {kind: loss.band for kind, loss in losses.items()} == CLIPS
    assert LossConfig.model_validate({"kind": "ppo", "clip": 0.1}).band == (0.1, 0.1)


def test_the_learning_rate_rises_stays_and_falls() -> None:
    constant = OptimizerConfig(lr=8.0, warmup=4)
    assert [constant.rate(step, 10) for step in (1, 2, 4, 5, 10)] == [2, 4, 8, 8, 8]
    linear = OptimizerConfig(lr=8.0, schedule="linear", warmup=2)
    assert [linear.rate(step, 7) for step in range(1, 8)] == [4, 8, 8, 6, 4, 2, 0]
    assert linear.rate(9, 7) == 0  # more steps than were planned
    assert OptimizerConfig(lr=8.0, schedule="linear").rate(1, 1) == 8


def test_a_run_that_an_earlier_version_planned_is_read() -> None:
    fields = {"name": "x", "tasks": ["t"], "agent": ["nop"], "samples": 4, "model": {"path": "m"}}
    whole = {**fields, "training": {"policies": {"default": {"loss": {"kind": "dr_grpo", "length": 9}}}}}
    assert config.resolved(config.CampaignConfig, whole).agent[0].max_tokens is None
    policy = {"lora": {"rank": 8, "alpha": 16, "targets": "all-linear"}, "snapshot": {"to": "other", "every": 5}}
    training = config.resolved(TrainingConfig, {"policies": {"p": policy, "q": {"lora": None, "snapshot": None}}})
    assert [(p.lora, p.snapshot) for p in training.policies.values()] == [(8, {"other": 5}), (None, {})]


def test_steps_of_a_run_that_an_earlier_version_planned_are_read_or_left_out() -> None:
    stored = [
        {"penalty": -0.5, "shuffle": None},
        {"penalty": None, "shuffle": {}},
        {"over_length": {"longest": 9, "how": "drop"}},
    ]
    training = config.resolved(TrainingConfig, {"policies": {"p": {}}, "data": stored})
    assert [step.name for step in training.data] == ["penalty", "over_length"]
    assert training.over_length == (9, "drop")


def test_a_trained_policy_may_have_a_temperature(tmp_path: Path) -> None:
    text = CAMPAIGN.replace("model: {path: m}", "model: {path: m, sampling: {temperature: 0.7, top_k: 0}}")
    text = text.replace("agent: mini-swe-agent", "agent: {name: mini-swe-agent, args: {model: {temperature: 0.7}}}")
    model = load(tmp_path, text + "training: {policies: {default: }}\n").policies()["default"].model
    assert model
    assert model.sampling.model_dump() == {**NEUTRAL, "temperature": 0.7}


def test_sampling_is_neutral_by_default_and_what_engines_would_change_is_refused(tmp_path: Path) -> None:
    model = load(tmp_path, CAMPAIGN).policies()["default"].model
    assert model
    assert model.sampling.model_dump() == NEUTRAL
    assert "engines raise it to 0.01" in complaint(
        tmp_path, CAMPAIGN.replace("{path: m}", "{path: m, sampling: {temperature: 0.001}}")
    )


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("sampling: {temprature: 1}", "unknown key 'model.sampling.temprature'; did you mean 'temperature'?"),
        ("sampling: {top_p: 2}", "model.sampling.top_p 2: expected a number above 0 and of at most 1"),
        ("sampling: {top_p: 0}", "model.sampling.top_p 0: expected a number above 0 and of at most 1"),
        ("sampling: {min_p: true}", "model.sampling.min_p True: a number is expected"),
        ("price: 3", "model.price 3: expected a list"),
        ("price: [3]", "'model.price.1' is missing; add it"),
        ("price: [3, -1]", "model.price.1 -1: expected a number of at least 0"),
        ("weights: never", "model.weights 'never': expected 'rolling', 'together' or 'continue'"),
    ],
)
def test_a_wrong_model_key_is_told_with_its_remedy(tmp_path: Path, key: str, expected: str) -> None:
    assert expected in complaint(tmp_path, CAMPAIGN.replace("{path: m}", f"{{path: m, {key}}}"))


def test_a_model_that_an_earlier_version_planned_is_read() -> None:
    stored = {
        "path": "m",
        "price": {"input": 3.0, "output": 15.0},
        "weights": {"update": "together", "running": "finish"},
        "also": [{"gpus": 2, "weight": 3.0}],
    }
    model = config.resolved(ModelConfig, {**stored, "sampling": {**NEUTRAL, "temperature": 0.5}})
    assert (model.price, model.weights, model.also) == ((3.0, 15.0), "together", ({"gpus": 2},))
    assert model.sampling.temperature == 0.5


def test_a_group_of_one_sample_is_refused(tmp_path: Path) -> None:
    text = section("policies: {default: }").replace("samples: 16", "samples: 1")
    assert "a group of one sample has nothing to compare with" in complaint(tmp_path, text)


@pytest.mark.parametrize(
    ("key", "policy"),
    [("advantage.rewards", "advantage: {rewards: {tests: 1.0}}"), ("score", "score: 'judge:score'")],
)
def test_groups_are_not_closed_early_by_rewards_that_are_not_compared(tmp_path: Path, key: str, policy: str) -> None:
    early = "\nscheduling: {signal_after: 2}\n"
    load(tmp_path, section("policies: {default: }") + early)
    text = section(f"policies: {{default: {{{policy}}}}}")
    load(tmp_path, text)
    said = complaint(tmp_path, text + early)
    assert f"may be equal where those of training.policies.default.{key} differ" in said
