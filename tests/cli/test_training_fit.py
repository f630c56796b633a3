"""``training fit``, and what ``check`` says of a training that does not fit its GPUs."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.tensors import model_without_weights

Megaflow = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def training(tmp_path: Path, campaign: Path) -> Callable[..., Path]:
    """Return a function that writes a campaign that trains a model of 33 billion parameters on GPUs of 80 GB."""
    sizes = {"hidden_size": 5120, "intermediate_size": 25_600, "num_hidden_layers": 64, "vocab_size": 151_936}
    model = model_without_weights(tmp_path / "model", num_attention_heads=64, **sizes)
    text = campaign.read_text().replace("[oracle, nop]", "oracle") + "samples: 8\n"

    def write(policy: str, trainer: str = "gpus: 8, gpu_type: h100", args: str = "{}") -> Path:
        campaign.write_text(
            f"{text}model: {{path: {model}, args: {args}}}\n"
            f"training: {{policies: {{default: {{{policy}}}}}}}\n"
            f"slurm: {{pods: {{time: 60}}, trainer: {{{trainer}}}}}\n"
        )
        return campaign

    return write


def test_fit_prints_parts_and_what_would_fit(training: Callable[..., Path], megaflow: Megaflow) -> None:
    file = training("parallel: {context: 4}")
    done = megaflow("training", "fit", file, "--json")
    (found,) = json.loads(done.stdout)
    assert done.returncode == 0
    assert found["parameters"] == pytest.approx(33e9, rel=0.1)
    assert found["gpu_bytes"] == sum(found["moments"][found["moment"]].values()) > 80e9
    assert found["fits"] is False
    assert {"optimizer.offload: true", "slurm.trainer.nodes: 2"} <= set(found["remedies"])
    page = megaflow("training", "fit", file).stdout
    assert "does not fit 80 GB; any one of these is enough: optimizer.offload: true" in page
    (more,) = json.loads(megaflow("training", "fit", file, "--json", "--nodes", "2").stdout)
    assert more["fits"] is True
    assert more["gpu_bytes"] < found["gpu_bytes"]
    unknown = training("parallel: {context: 4}", "gpus: 8")
    assert "its memory is unknown (--gpu-memory)" in megaflow("training", "fit", unknown).stdout
    assert "fits 200 GB" in megaflow("training", "fit", unknown, "--gpu-memory", "200").stdout


def test_fit_estimates_seconds_for_known_gpus(training: Callable[..., Path], megaflow: Megaflow) -> None:
    def found(trainer: str, policy: str = "parallel: {context: 4}") -> dict[str, Any]:
        (facts,) = json.loads(megaflow("training", "fit", training(policy, trainer), "--json").stdout)
        return facts  # type: ignore[no-any-return]

    known = found("gpus: 8, gpu_type: h100")
    dense = 8 * known["parameters"] * 1e6 / (8 * 989e12 / 4)
    assert dense < known["seconds_per_million_tokens"] < 1.5 * dense
    more = found("gpus: 8, nodes: 2, gpu_type: h100")
    assert more["seconds_per_million_tokens"] == pytest.approx(known["seconds_per_million_tokens"] / 2)
    assert found("gpus: 8")["seconds_per_million_tokens"] is None
    assert found("gpus: 8, gpu_type: h100", "dtype: float32")["seconds_per_million_tokens"] is None
    page = megaflow("training", "fit", training("parallel: {context: 4}")).stdout
    assert "a million tokens, forward and backward: about 1" in page


def test_every_named_remedy_is_one(training: Callable[..., Path], megaflow: Megaflow) -> None:
    policies = {
        "optimizer.offload: true": "parallel: {context: 4}, optimizer: {offload: true}",
        "lora: 32": "parallel: {context: 4}, lora: 32",
    }
    remedies = json.loads(megaflow("training", "fit", training("parallel: {context: 4}"), "--json").stdout)[0]
    assert policies.keys() <= set(remedies["remedies"])
    for policy in policies.values():
        assert json.loads(megaflow("training", "fit", training(policy), "--json").stdout)[0]["fits"] is True


def test_check_refuses_what_cannot_fit(training: Callable[..., Path], megaflow: Megaflow) -> None:
    def said(*what: str) -> tuple[list[str], list[str]]:
        found = json.loads(megaflow("check", training(*what), "--no-site", "--json").stdout)
        return found["mistakes"], found["warnings"]

    (mistake,), _ = said("parallel: {context: 4}")
    assert "campaign.yaml:7: training.policies.default: a row of 32768 tokens needs" in mistake
    assert "of each GPU, which has 80 GB; any one of these is enough: optimizer.offload: true" in mistake
    assert said("parallel: {context: 4}, optimizer: {offload: true}") == ([], [])
    mistakes, (warning,) = said("parallel: {context: 4}", "gpus: 8")  # unknown memory is no error
    assert mistakes == []
    assert "which has unknown memory; megaflow-hpc training fit shows" in warning
    _, (memory,) = said("parallel: {context: 4}, optimizer: {offload: true}", "gpus: 8, gpu_type: h100, mem: 500G")
    assert "slurm.trainer.mem: 500G: policy 'default' needs about" in memory


@pytest.mark.parametrize(
    ("parallel", "part"),
    [
        ("{context: 3}", "context 3 × tensor 1 = 3 does not divide the trainer's 8 ranks"),
        ("{replicas: 4, expert: 4}", "replicas 4 × expert 4 = 16 does not divide the trainer's 8 ranks"),
        ("{tensor: 4, expert: 2}", "parallel.expert: 2 is not a multiple of tensor: 4"),
    ],
)
def test_check_refuses_a_layout_that_ranks_cannot_have(
    parallel: str, part: str, training: Callable[..., Path], megaflow: Megaflow
) -> None:
    done = megaflow("check", training(f"parallel: {parallel}, optimizer: {{offload: true}}"), "--no-site")
    assert done.returncode == 2
    assert part in done.stderr
    assert "campaign.yaml:7: training.policies.default.parallel" in done.stderr


def test_long_sequences_are_warned_of_only_if_their_rows_do_not_fit(
    tmp_path: Path, training: Callable[..., Path], megaflow: Megaflow
) -> None:
    def warned(args: str) -> list[str]:
        file = training("parallel: {context: 4}, optimizer: {offload: true}", args=args)
        found: list[str] = json.loads(megaflow("check", file, "--no-site", "--json").stdout)["warnings"]
        return found

    assert warned("{max-model-len: 65536}") == []
    (line,) = warned("{max-model-len: 1048576}")
    assert "skipped if it does not fit: a row of 1048576 tokens needs" in line
    config = tmp_path / "model" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "max_position_embeddings": 1_048_576}))
    (line,) = warned("{}")
    assert "the servers allow sequences of 1048576" in line, "an engine without a limit allows what the model does"
    assert warned("{max-model-len: 65536}") == []


def test_fit_of_a_campaign_without_training_is_refused(campaign: Path, megaflow: Megaflow) -> None:
    done = megaflow("training", "fit", campaign)
    assert done.returncode == 2
    assert f"{campaign}: has no section training" in done.stderr
