"""Memory of a training, predicted from a model's config and the headers of its weights."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from megaflow_hpc.config.training import PolicyTraining
from megaflow_hpc.errors import ConfigError
from megaflow_hpc.training.memory import ModelShape, gpu_flops, gpu_memory, predict
from tests.support.tensors import headers, model_without_weights

HIDDEN, INSIDE, LAYERS, WORDS = 64, 192, 3, 1000


def model(folder: Path, **changes: Any) -> Path:
    """Write a model of three layers without its weights."""
    sizes = {"hidden_size": HIDDEN, "intermediate_size": INSIDE, "num_hidden_layers": LAYERS, "vocab_size": WORDS}
    return model_without_weights(folder, **sizes | changes)


def settings(**changes: Any) -> PolicyTraining:
    return PolicyTraining.model_validate({"microbatch": 1024, **changes})


FROZEN = settings(vision="frozen")


def test_what_stays_is_18_bytes_a_parameter(tmp_path: Path) -> None:
    shape = ModelShape.read(model(tmp_path))
    count = (WORDS + 1) * HIDDEN + LAYERS * (4 * HIDDEN**2 + 3 * HIDDEN * INSIDE + 2 * HIDDEN)
    found = predict(shape, settings())
    stays = ("parameters", "masters", "moments", "gradients")
    assert shape.total == count
    assert sum(found.parts[name] for name in stays) == 18 * count
    assert (found.checkpoint, found.version) == (12 * count, 2 * count)
    halves = predict(shape, settings(), gpus=2)
    assert sum(halves.parts[name] for name in stays) == 9 * count
    away = predict(shape, settings(optimizer={"offload": True}), gpus=2)
    assert sum(away.parts[name] for name in stays) == count
    assert away.node == halves.node + 16 * count


def test_longer_rows_need_more_and_context_divides_them(tmp_path: Path) -> None:
    shape = ModelShape.read(model(tmp_path))
    layer = [predict(shape, settings(microbatch=n), gpus=4).moments["layers"]["layer"] for n in (8192, 16384)]
    assert layer[1] == 2 * layer[0]
    divided = predict(shape, settings(microbatch=16384, parallel={"context": 4}), gpus=4)
    assert layer[1] / 4 < divided.moments["layers"]["layer"] < layer[1] / 3.5  # one more copy of the output
    kept = predict(shape, settings(microbatch=16384, recompute=False), gpus=4)
    assert kept.peak > predict(shape, settings(microbatch=16384), gpus=4).peak


def test_adapters_need_memory_for_themselves_alone(tmp_path: Path) -> None:
    shape = ModelShape.read(model(tmp_path))
    found = predict(shape, settings(lora=2))
    adapters = 2 * LAYERS * (4 * 2 * HIDDEN + 3 * (HIDDEN + INSIDE))
    assert found.trained == adapters
    assert found.parts["moments"] == 8 * adapters


def test_a_vision_part_counts_by_its_parameters_and_a_frozen_one_has_no_moments(tmp_path: Path) -> None:
    plain = ModelShape.read(model(tmp_path / "plain"))
    folder = model(tmp_path / "sees")
    tower = {"visual.blocks.0.attn.qkv.weight": (99, 33), "model.visual.merger.weight": (64, 33), "mlp_AR.bias": (7,)}
    headers(folder / "vision.safetensors", tower)
    shape = ModelShape.read(folder)
    extra = 99 * 33 + 64 * 33 + 7
    assert (shape.vision, shape.total) == (extra, plain.total + extra)
    assert (shape.ends, shape.dense, shape.linear, shape.tied) == (plain.ends, plain.dense, plain.linear, plain.tied)
    stays = ("parameters", "masters", "moments", "gradients")
    before, trained, frozen = predict(plain, settings()), predict(shape, settings()), predict(shape, FROZEN)
    for found, each in ((trained, 18), (frozen, 2)):
        assert sum(found.parts[name] - before.parts[name] for name in stays) == each * extra
    assert trained.trained - frozen.trained == extra
    assert frozen.checkpoint == before.checkpoint
    assert frozen.version == trained.version == 2 * shape.total


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"hidden_size": None}, "lacks 'hidden_size'"),
        ({"num_attention_heads": 0}, "is damaged"),
        ({"vocab_size": "many"}, "is damaged"),
    ],
)
def test_a_config_without_sizes_is_named(changes: dict[str, Any], part: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=part) as caught:
        ModelShape.read(model(tmp_path, **changes))
    assert str(tmp_path / "config.json") in str(caught.value)


def test_a_model_without_safetensors_is_named(tmp_path: Path) -> None:
    (model(tmp_path) / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="has no safetensors"):
        ModelShape.read(tmp_path)


@pytest.mark.parametrize(
    ("parallel", "gpus", "part"),
    [({"context": 3}, 4, "does not divide the trainer's 4 ranks"), ({"context": 8}, 8, "4 heads and 4 key heads")],
)
def test_a_layout_that_is_impossible_is_named(parallel: dict[str, int], gpus: int, part: str, tmp_path: Path) -> None:
    shape = ModelShape.read(model(tmp_path))
    with pytest.raises(ConfigError, match=part):
        predict(shape, settings(parallel=parallel), gpus=gpus)


@pytest.mark.parametrize(
    ("name", "memory"),
    [("h100", 80), ("nvidia_h200", 141), ("a100_80gb", 80), ("1g.10gb", 10), ("a100", None), (None, None)],
)
def test_the_name_of_a_gpu_may_say_its_memory(name: str | None, memory: float | None) -> None:
    assert gpu_memory(name) == memory


def test_experts_are_divided_among_their_ranks(tmp_path: Path) -> None:
    shapes = {f"model.layers.0.mlp.experts.{n}.up_proj.weight": (32, HIDDEN) for n in range(4)}
    folder = model(tmp_path, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
    headers(folder / "experts.safetensors", shapes)
    shape = ModelShape.read(folder)
    assert shape.all_experts == shape.expert == 4 * 32 * HIDDEN
    whole, divided = (predict(shape, settings(parallel={"expert": n}), gpus=4) for n in (1, 4))
    assert whole.parts["parameters"] == divided.parts["parameters"] == math.ceil(2 * shape.total / 4)
    assert whole.moments["layers"]["gathered"] - divided.moments["layers"]["gathered"] == 2 * 2 * shape.expert


@pytest.mark.parametrize(
    ("tokens", "recompute", "measured"), [(8192, False, 46), (32_768, False, 127), (8192, True, 20), (32_768, True, 26)]
)
def test_peaks_that_were_measured_on_a_gpu_are_predicted(
    tokens: int, recompute: bool, measured: int, tmp_path: Path
) -> None:
    """The GB are those of docs/reference/benchmarks.md, measured on an H200 before AdamW had made its moments."""
    sizes = {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "vocab_size": 151_936}
    folder = model_without_weights(tmp_path, num_attention_heads=16, num_key_value_heads=8, head_dim=128, **sizes)
    names = {f"model.layers.{n}.self_attn.{x}_norm.weight": (128,) for n in range(28) for x in "qk"}
    headers(folder / "norms.safetensors", names)
    found = predict(ModelShape.read(folder), settings(microbatch=tokens, recompute=recompute))
    assert (found.peak - found.parts["moments"]) / 1e9 == pytest.approx(measured, rel=0.1)


def test_flops_are_those_of_matrices_and_attention(tmp_path: Path) -> None:
    shape = ModelShape.read(model(tmp_path / "dense"))
    layers = LAYERS * (4 * HIDDEN**2 + 3 * HIDDEN * INSIDE + 2 * HIDDEN)
    output, attention = WORDS * HIDDEN, 2 * LAYERS * HIDDEN * 1024
    found = predict(shape, settings(recompute=False)).token_flops
    assert found == pytest.approx(6 * layers + 8 * output + 3.5 * attention, rel=1e-3)
    again = predict(shape, settings()).token_flops
    assert again - found == pytest.approx(2 * layers + attention, rel=1e-3)
    adapters = predict(shape, settings(lora=2)).token_flops
    assert again - adapters == pytest.approx(2 * layers + 2 * output, rel=1e-3)
    assert predict(shape, settings(), gpus=8).token_flops == again


@pytest.mark.parametrize(
    ("gpu", "tflops"), [("h100", 247.25), ("nvidia_a100_80gb", 78), ("L40S", 90.5), ("tesla", None), (None, None)]
)
def test_assumed_speeds_of_gpus(gpu: str | None, tflops: float | None) -> None:
    speed = gpu_flops(gpu)
    assert speed == (None if tflops is None else pytest.approx(tflops * 1e12))
