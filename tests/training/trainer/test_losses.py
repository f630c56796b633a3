"""Losses, compared with values computed here token by token in float64 without torch, and with TRL's own loss."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import Any

import numpy as np
import pytest

from tests.support.torch_ranks import run_ranks

pytestmark = pytest.mark.slow  # all of them wait for one run of torch and TRL

LENGTHS = [9, 4, 12, 6]
ADVANTAGES = [1.5, -1.0, -0.25, 0.75]
ROLLOUTS = [0, 1, 2, 2]
"""The rollout of each sequence."""
LENGTH = 20
"""The constant of Dr.GRPO."""
KINDS = {
    "ppo": (0.2, 0.2),
    "grpo": (0.2, 0.2),
    "dr_grpo": (0.2, 0.2),
    "dapo": (0.2, 0.28),
    "gspo": (0.03, 0.04),
    "cispo": (1.0, 0.25),
    "m2po": (math.inf, math.inf),
    "rloo": (0.2, 0.2),
}
TRL = {  # ours → TRL's loss type, level of the ratio, and bounds
    "ppo": ("dapo", "token", 0.2, 0.2),
    "grpo": ("grpo", "token", 0.2, 0.2),
    "dapo": ("dapo", "token", 0.2, 0.28),
    "dr_grpo": ("dr_grpo", "token", 0.2, 0.2),
    "cispo": ("cispo", "token", 0.2, 1.25),  # its bound applies to the ratio itself
    "gspo": ("grpo", "sequence", 0.03, 0.04),
}

SCRIPT = r'''
import json, sys, warnings
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

warnings.simplefilter("ignore")
import torch
from launchers.tiny_model import make
from megaflow_hpc.training.trainer import recipes
from megaflow_hpc.training.trainer.losses import Loss, Tokens, add, policy_loss, report, second_moment_limit
from tests.support.trainer_scripts import refusal
from tests.training.trainer import own_losses

given = json.load(open(sys.argv[1]))
torch.set_num_threads(1)
DTYPE = torch.float64


def tokens(columns, begin=0, end=None, dtype=DTYPE):
    """The sequences from ``begin`` to ``end``."""
    counts = torch.tensor(columns["rollout_tokens"])[begin:end]
    offsets = torch.tensor(columns["offsets"])[begin : None if end is None else end + 1]
    part = slice(int(offsets[0]), int(offsets[-1]))
    floats = {name: torch.tensor(columns[name], dtype=dtype)[part] for name in FLOATS}
    mask = torch.tensor(columns["mask"], dtype=torch.bool)[part]
    return Tokens(offsets - offsets[0], mask, **floats, rollout_tokens=counts), part


FLOATS = ("proximal", "engine", "advantages", "weights")
totals = SimpleNamespace(**given["totals"])


def run(loss, columns, parts=((0, None),), dtype=DTYPE, limit=float("inf")):
    """Loss, gradient and report of the parts together, each by itself."""
    new = torch.tensor(columns["new"], dtype=dtype, requires_grad=True)
    entropies = torch.tensor(columns["entropies"], dtype=dtype, requires_grad=True)
    value, statistics = 0.0, None
    for begin, end in parts:
        batch, part = tokens(columns, begin, end, dtype)
        one, found = policy_loss(loss, new[part], entropies[part], batch, totals, limit)
        one.backward()
        value += one.item()
        statistics = found if statistics is None else add(statistics, found)
    return {
        "loss": value,
        "gradient": new.grad.tolist(),
        "entropy_gradient": None if entropies.grad is None else entropies.grad.tolist(),
        "report": report(statistics),
    }


result = {"kinds": {}, "parts": {}, "float32": {}, "importance": {}, "nan": {}, "same": {}}
columns = given["columns"]
whole, _ = tokens(columns)
limit = result["limit"] = second_moment_limit([whole], given["threshold"])
result["limit_of_parts"] = second_moment_limit([tokens(columns, 0, 1)[0], tokens(columns, 1, 4)[0]], given["threshold"])
result["limit_of_near"] = second_moment_limit([whole], 100.0)
spoiled = {n: [v if m else float("nan") for v, m in zip(c, columns["mask"])] for n, c in columns.items()
           if n in FLOATS or n in ("new", "entropies")}
for kind, clip in given["kinds"].items():
    loss = Loss(kind, tuple(clip), importance="none", length=given["length"])
    result["kinds"][kind] = run(loss, columns, limit=limit)
    result["float32"][kind] = run(loss, columns, dtype=torch.float32, limit=limit)
    bonus = Loss(kind, tuple(clip), entropy=0.01, length=given["length"])
    result["parts"][kind] = [run(bonus, columns, p, limit=limit) for p in ([(0, 4)], [(0, 1), (1, 3), (4, 4), (3, 4)])]
    result["nan"][kind] = run(bonus, {**columns, **spoiled}, limit=limit)
    result["same"][kind] = run(loss, {**columns, "proximal": columns["new"]}, limit=limit)
for level in ("none", "token", "sequence"):
    result["importance"][level] = run(Loss("dapo", (0.2, 0.28), importance=level, truncate=1.1), columns)
result["empty"] = run(Loss("gspo"), {**{n: [] for n in columns}, "offsets": [0]})
result["refused"] = []
for wrong in ({"kind": "pgo"}, {"kind": "ppo", "importance": "word"}, {"kind": "dr_grpo"}):
    result["refused"].append(refusal(lambda: Loss(**wrong)))

own = Loss(own_losses.sapo, importance=recipes.geometric, entropy=0.01)
result["own"] = run(Loss(own_losses.sapo, importance=recipes.geometric), columns)
result["own whole"] = run(own, columns)
result["own parts"] = run(own, columns, [(0, 1), (1, 3), (4, 4), (3, 4)])
result["own nan"] = run(own, {**columns, **spoiled})
result["broken"] = {}
for name in ("only_a_loss", "by_token", "constant", "sums_by_token", "sums_of_text", "one_weight", "negative_weights"):
    function = getattr(own_losses, name)
    about = {"importance": function} if "weight" in name else {"kind": function}
    result["broken"][name] = refusal(lambda: run(Loss(**{"kind": "dapo", **about}), columns))


def pulls(kind):
    """The gradient's sum over each of four rollouts: (sequences, tokens of each, advantage)."""
    rollouts = [(1, 240, 0.5), (1, 240, -0.5), (12, 20, 0.5), (1, 240, -0.5)]
    lengths = [1 + tokens for count, tokens, _ in rollouts for _ in range(count)]
    owner = torch.tensor([n for n, (count, tokens, _) in enumerate(rollouts) for _ in range(count * (1 + tokens))])
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    mask = torch.ones(len(owner), dtype=torch.bool)
    mask[offsets[:-1]] = False
    old = torch.full((len(owner),), -1.0, dtype=DTYPE)
    new = old.clone().requires_grad_()
    advantages = torch.tensor([advantage for _, _, advantage in rollouts], dtype=DTYPE)[owner]
    batch = Tokens(offsets, mask, old, old, advantages, mask.to(DTYPE), torch.full((len(lengths),), 240))
    counts = SimpleNamespace(tokens=int(mask.sum()), sequences=len(lengths), samples=4)
    policy_loss(Loss(kind, importance="none", length=4096), new, old, batch, counts)[0].backward()
    return [-float(new.grad[owner == n].sum()) for n in range(4)]


result["pulls"] = {kind: pulls(kind) for kind in ("grpo", "gspo", "dapo", "dr_grpo", "rloo")}

# TRL's loss of the same log-probabilities, padded as TRL has them, prompts apart.
from transformers import AutoModelForCausalLM, AutoTokenizer
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

make(Path(sys.argv[2]), layers=1)
model = AutoModelForCausalLM.from_pretrained(sys.argv[2])
names = AutoTokenizer.from_pretrained(sys.argv[2])
longest = max(given["lengths"])


def padded(name):
    values, rows, at = columns[name], [], 0
    for length in given["lengths"]:
        rows.append(values[at : at + length] + [0] * (longest - length))
        at += length
    return torch.tensor(rows, dtype=torch.long if name == "mask" else torch.float32)


class Oracle(GRPOTrainer):
    def _get_per_token_logps_and_entropies(self, *_, **__):
        return self.given


def trl_ratio(mode, mask, low=0.8, high=1.1):
    """The ratio that TRL multiplies the loss by (trl 1.16, ``_generate_and_score_completions``)."""
    gap = torch.nan_to_num((padded("proximal") - padded("engine")) * mask, nan=0.0)
    ratio = torch.exp(gap.sum(-1, keepdim=True) if mode == "sequence" else gap)
    if mode == "token_mask":
        return ratio.masked_fill((ratio < low) | (ratio > high), 0.0)
    return ratio.clamp(max=high)


# TRL has one sequence per rollout.
single = {**columns, "rollout_tokens": [sum(columns["mask"][a:b]) for a, b in pairwise(columns["offsets"])]}
totals = SimpleNamespace(**given["totals"] | {"samples": 4})
result["trl"] = {}
for kind, (name, level, low, high) in {**given["trl"], "sapo": ("sapo", "token", 0.2, 0.2)}.items():
    for entropy in (0.0, 0.01):
        config = GRPOConfig(
            output_dir=sys.argv[3], per_device_train_batch_size=4, num_generations=4, loss_type=name, epsilon=low,
            epsilon_high=high, importance_sampling_level=level, beta=0.0, use_cpu=True, bf16=False, report_to=[],
            max_completion_length=given["length"], gradient_checkpointing=False, entropy_coef=entropy,
        )
        oracle = Oracle(model=model, reward_funcs=lambda completions, **_: [0.0] * len(completions), args=config,
                        train_dataset=Dataset.from_dict({"prompt": ["x"] * 4}), processing_class=names)
        oracle.model.train()
        oracle.current_gradient_accumulation_steps = 1
        for mode in ("none", "token", "sequence", "token_mask"):
            new = padded("new").requires_grad_()
            oracle.given = new, padded("entropies"), None
            mask = padded("mask")
            inputs = {
                "prompt_ids": torch.zeros(4, 1, dtype=torch.long), "prompt_mask": torch.ones(4, 1, dtype=torch.long),
                "completion_ids": torch.zeros_like(mask), "completion_mask": torch.ones_like(mask), "tool_mask": mask,
                "advantages": torch.tensor(given["advantages"]), "old_per_token_logps": padded("proximal"),
                "num_items_in_batch": mask.sum(),
            }
            if mode != "none":
                oracle.use_vllm = oracle.vllm_importance_sampling_correction = True
                inputs["importance_sampling_ratio"] = trl_ratio(mode, mask)
            value = oracle._compute_loss(oracle.model, inputs)
            oracle.use_vllm = False
            value.backward()
            gradient = [g for row, n in zip(new.grad.tolist(), given["lengths"]) for g in row[:n]]
            importance = partial(recipes.icepop, low=0.8, high=1.1) if mode == "token_mask" else mode
            how = {"importance": importance, "truncate": 1.1}
            how |= {"entropy": entropy, "length": given["length"]}
            clip = tuple(given["kinds"].get(kind, (0.2, 0.2)))
            ours = run(Loss(recipes.sapo if kind == "sapo" else kind, clip, **how), single, dtype=torch.float32)
            result["trl"][f"{kind} {mode} {entropy}"] = {"loss": value.item(), "gradient": gradient, "ours": ours}
print(json.dumps(result))
'''


@dataclass
class Sample:
    """The tokens of all these tests, by column and by sequence."""

    columns: dict[str, Any]
    new: np.ndarray
    proximal: np.ndarray
    engine: np.ndarray
    mask: np.ndarray
    rows: list[slice]

    def of(self, column: np.ndarray) -> list[np.ndarray]:
        """Return the counted values of each sequence."""
        return [column[row][self.mask[row] == 1] for row in self.rows]


@pytest.fixture(scope="module")
def sample() -> Sample:
    """Return four sequences of several turns, with ratios inside and outside of every clip and advantages of both
    signs."""
    draw = np.random.default_rng(11)
    total, offsets = sum(LENGTHS), np.cumsum([0, *LENGTHS])
    mask = (draw.random(total) < 0.7).astype(int)
    mask[offsets[:-1]] = 0
    new = -3 * draw.random(total)
    proximal = new + draw.normal(0, 0.25, total)
    engine = np.where(mask == 1, proximal + draw.normal(0, 0.2, total), math.nan)
    counts = np.add.reduceat(mask, offsets[:-1])
    columns = {
        "offsets": offsets.tolist(),
        "mask": mask.tolist(),
        "new": new.tolist(),
        "proximal": proximal.tolist(),
        "engine": engine.tolist(),
        "rollout_tokens": [int(counts[np.equal(ROLLOUTS, rollout)].sum()) for rollout in ROLLOUTS],
        "entropies": draw.random(total).tolist(),
        "advantages": (np.repeat(ADVANTAGES, LENGTHS) * mask).tolist(),
        "weights": mask.astype(float).tolist(),
    }
    rows = [slice(a, b) for a, b in pairwise(offsets)]
    return Sample(columns, new, proximal, engine, mask, rows)


@pytest.fixture(scope="module")
def results(sample: Sample, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("losses")
    given = {
        "columns": sample.columns,
        "kinds": KINDS,
        "trl": TRL,
        "lengths": LENGTHS,
        "advantages": ADVANTAGES,
        "threshold": 0.02,
        "length": LENGTH,
        "totals": {"tokens": int(sample.mask.sum()), "sequences": 4, "samples": 3},
    }
    (folder / "given.json").write_text(json.dumps(given))
    found: dict[str, Any] = run_ranks(SCRIPT, folder, folder / "given.json", folder / "tiny", folder / "out")
    return found


# The objectives of the papers, to be minimised, as functions of the log-probabilities. ``held`` marks where a paper
# stops the gradient.


def clipped(ratio: float, advantage: float, low: float, high: float) -> float:
    return min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)


def by_hand(sample: Sample, kind: str, new: np.ndarray, limit: float) -> float:
    low, high = KINDS[kind]
    current, held, old, engine = (sample.of(c) for c in (new, sample.new, sample.proximal, sample.engine))
    tokens = sum(map(len, old))
    of_rollout = [sum(len(own) for own, r in zip(old, ROLLOUTS, strict=True) if r == rollout) for rollout in ROLLOUTS]
    objective = 0.0
    for i, advantage in enumerate(ADVANTAGES):
        length = len(old[i])
        for t in range(length):
            ratio = math.exp(current[i][t] - old[i][t])
            if kind in ("ppo", "dapo"):
                objective += clipped(ratio, advantage, low, high) / tokens
            elif kind == "grpo":
                objective += clipped(ratio, advantage, low, high) / of_rollout[i] / 3
            elif kind == "dr_grpo":
                objective += clipped(ratio, advantage, low, high) / (3 * LENGTH)
            elif kind == "gspo":
                whole = math.exp(sum(current[i][s] - old[i][s] for s in range(length)) / length)
                objective += clipped(whole, advantage, low, high) / of_rollout[i] / 3
            elif kind == "cispo":
                weight = min(max(math.exp(held[i][t] - old[i][t]), 1 - low), 1 + high)
                objective += weight * advantage * current[i][t] / tokens
            elif kind == "m2po":
                gone = held[i][t] - engine[i][t]
                masked = abs(gone) >= limit and gone * advantage > 0
                objective += 0.0 if masked else ratio * advantage / tokens
            elif kind == "rloo":
                objective += advantage * current[i][t] / 3
    return -objective


def slopes(f: Callable[[np.ndarray], float], at: np.ndarray, step: float = 1e-6) -> np.ndarray:
    """Return the gradient by central differences."""
    unit = np.eye(len(at)) * step
    return np.array([(f(at + one) - f(at - one)) / (2 * step) for one in unit])


@pytest.mark.parametrize("kind", KINDS)
def test_value_and_gradient_are_those_of_the_paper(sample, results, kind):
    found, limit = results["kinds"][kind], results["limit"]
    assert found["loss"] == pytest.approx(by_hand(sample, kind, sample.new, limit), abs=1e-12)
    expected = slopes(lambda new: by_hand(sample, kind, new, limit), sample.new)
    assert found["gradient"] == pytest.approx(expected, abs=1e-8)
    assert results["float32"][kind]["loss"] == pytest.approx(found["loss"], abs=1e-6)
    assert results["float32"][kind]["gradient"] == pytest.approx(found["gradient"], abs=1e-6)


@pytest.mark.parametrize("entropy", [0.0, 0.01])
@pytest.mark.parametrize("level", ["none", "token", "sequence", "token_mask"])
@pytest.mark.parametrize("kind", [*TRL, "sapo"])
def test_loss_and_gradient_equal_those_of_trl_in_float32(results, kind, level, entropy):
    found = results["trl"][f"{kind} {level} {entropy}"]
    assert found["loss"] == pytest.approx(found["ours"]["loss"], abs=1e-6)
    assert found["gradient"] == pytest.approx(found["ours"]["gradient"], abs=1e-6)
    assert np.abs(found["gradient"]).max() > 1e-3


def test_importance_levels_of_the_comparison_differ(results):
    for kind in TRL:
        levels = ("none", "token", "sequence", "token_mask")
        values = [results["trl"][f"{kind} {level} 0.0"]["loss"] for level in levels]
        assert min(abs(a - b) for a, b in combinations(values, 2)) > 1e-5, kind


@pytest.mark.parametrize("kind", ["grpo", "gspo", "dapo", "dr_grpo", "rloo"])
def test_a_rollout_of_many_sequences_weighs_as_one_of_a_single_sequence(results, kind):
    """Two rollouts succeed with 240 tokens each, one of them in twelve sequences; two fail."""
    pull = {"dr_grpo": 240 / 4096 / 8, "rloo": 30}.get(kind, 0.125)
    assert results["pulls"][kind] == pytest.approx([pull, -pull, pull, -pull])


def test_a_loss_and_weights_of_the_users_get_what_the_contract_promises(sample, results):
    found = results["own"]
    moved = [np.exp(n - p) for n, p in zip(sample.of(sample.new), sample.of(sample.proximal), strict=True)]
    tokens = sum(map(len, moved))
    assert found["report"]["loss/ratio"] == pytest.approx(sum(r.sum() for r in moved) / tokens)
    assert "clipped" not in found["report"]
    gap = [p - e for p, e in zip(sample.of(sample.proximal), sample.of(sample.engine), strict=True)]
    geometric = np.concatenate([np.full(len(g), math.exp(g.mean())) for g in gap])
    assert found["report"]["importance"] == pytest.approx(geometric.mean())
    whole, parts, spoiled = (results[f"own {name}"] for name in ("whole", "parts", "nan"))
    assert parts["gradient"] == pytest.approx(whole["gradient"], abs=1e-16)
    assert parts["report"] == pytest.approx(whole["report"], abs=1e-12)
    assert spoiled == whole


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("only_a_loss", "own_losses:only_a_loss: returned Tensor; expected a loss and sums by name"),
        ("by_token", "own_losses:by_token: returned torch.float64 (31,) as the loss; expected a floating-point scalar"),
        ("constant", "own_losses:constant: returned torch.float64 () as the loss; expected a floating-point scalar"),
        ("sums_by_token", "own_losses:sums_by_token: sum 'ratio' has the shape (31,); expected a scalar"),
        ("sums_of_text", "own_losses:sums_of_text: sum 'ratio' is str"),
        ("one_weight", "own_losses:one_weight: returned torch.float64 (1,); expected a floating-point weight for each"),
        ("negative_weights", "own_losses:negative_weights: returned weights that are negative or not finite"),
    ],
)
def test_what_breaks_the_contract_is_refused_by_the_functions_name(results, case, message):
    assert message in results["broken"][case]


@pytest.mark.parametrize("kind", ["ppo", "dapo", "gspo", "m2po"])
def test_what_is_clipped_has_no_gradient_and_the_rest_has_the_advantages_sign(sample, results, kind):
    gradient = np.array(results["kinds"][kind]["gradient"])
    advantages = np.array(sample.columns["advantages"])
    moved = gradient != 0
    assert (np.sign(gradient[moved]) == -np.sign(advantages[moved])).all()
    still = (sample.mask == 1) & ~moved
    assert 0 < still.sum() < sample.mask.sum()
    assert results["kinds"][kind]["report"]["clipped"] == pytest.approx(still.sum() / sample.mask.sum())
    reference = sample.engine if kind == "m2po" else sample.proximal
    if kind != "gspo":  # whose ratio belongs to the sequence
        assert ((sample.new - reference)[still] * advantages[still] > 0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_micro_batches_add_up_to_the_minibatch(results, kind):
    whole, parts = results["parts"][kind]
    assert parts["loss"] == pytest.approx(whole["loss"], abs=1e-14)
    assert parts["gradient"] == pytest.approx(whole["gradient"], abs=1e-16)
    assert parts["entropy_gradient"] == pytest.approx(whole["entropy_gradient"], abs=1e-16)
    assert parts["report"] == pytest.approx(whole["report"], abs=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_masked_does_not_leak_not_even_nan(sample, results, kind):
    spoiled, whole = results["nan"][kind], results["parts"][kind][0]
    assert spoiled == whole
    assert [g for g, m in zip(spoiled["gradient"], sample.mask, strict=True) if not m and g != 0] == []
    assert [g for g, m in zip(spoiled["entropy_gradient"], sample.mask, strict=True) if not m and g != 0] == []


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"m2po"}))
def test_before_the_first_update_every_ratio_is_exactly_one(results, kind):
    """With a learning rate of 0 every ratio is 1, no matter how much the engine differs."""
    found = results["same"][kind]["report"]
    assert (found["clipped"], found["kl"], found["log_ratio_max"]) == (0.0, 0.0, 0.0)
    assert found["mismatch_max"] > 0.05


@pytest.mark.parametrize("level", ["none", "token", "sequence"])
def test_truncated_weights_of_proximal_over_engine(sample, results, level):
    gap = [p - e for p, e in zip(sample.of(sample.proximal), sample.of(sample.engine), strict=True)]
    weights = {
        "none": [np.ones(len(g)) for g in gap],
        "token": [np.minimum(np.exp(g), 1.1) for g in gap],
        "sequence": [np.full(len(g), min(math.exp(g.sum()), 1.1)) for g in gap],
    }[level]
    tokens = sum(map(len, gap))
    rows = zip(weights, sample.of(sample.new), sample.of(sample.proximal), ADVANTAGES, strict=True)
    expected = sum(
        w * clipped(math.exp(n - p), a, 0.2, 0.28) for ws, ns, ps, a in rows for w, n, p in zip(ws, ns, ps, strict=True)
    )
    found = results["importance"][level]
    assert found["loss"] == pytest.approx(-expected / tokens, abs=1e-12)
    assert found["report"]["importance"] == pytest.approx(np.concatenate(weights).mean())
    assert found["report"]["truncated"] == pytest.approx((np.concatenate(weights) == 1.1).mean())


def test_entropy_costs_nothing_where_there_is_no_bonus(results):
    assert results["kinds"]["dapo"]["entropy_gradient"] is None
    assert results["parts"]["dapo"][0]["entropy_gradient"] is not None


def test_metrics_are_those_of_their_definitions(sample, results):
    found = results["kinds"]["dapo"]["report"]
    new, old, engine = (np.concatenate(sample.of(c)) for c in (sample.new, sample.proximal, sample.engine))
    entropies = np.concatenate(sample.of(np.array(sample.columns["entropies"])))
    drift = np.exp(new - engine)
    expected = {
        "loss": results["kinds"]["dapo"]["loss"],
        "entropy": entropies.mean(),
        "kl": (np.exp(new - old) - 1 - (new - old)).mean(),
        "engine_kl": (np.exp(old - engine) - 1 - (old - engine)).mean(),
        "mismatch": np.abs(old - engine).mean(),
        "mismatch_max": np.abs(old - engine).max(),
        "log_ratio_max": np.abs(new - old).max(),
        "effective": drift.sum() ** 2 / (drift**2).sum() / len(drift),
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected)


def test_second_moment_of_what_is_kept_is_under_the_threshold(sample, results):
    advantages = np.array(sample.columns["advantages"])
    gone = sample.proximal - sample.engine
    gone = np.abs(gone[(sample.mask == 1) & (gone * advantages > 0)])
    limit = results["limit"]
    kept = gone[gone < limit]
    assert 0 < len(kept) < len(gone)
    assert (kept**2).mean() <= 0.02 < (np.append(kept, limit) ** 2).mean()
    assert limit == results["limit_of_parts"]
    assert results["limit_of_near"] == math.inf


def test_an_empty_micro_batch_costs_nothing(results):
    assert (results["empty"]["loss"], results["empty"]["gradient"]) == (0.0, [])


def test_an_unknown_loss_is_refused_by_name(results):
    assert len(results["refused"]) == 3
    assert "'pgo'" in results["refused"][0]
    assert "'word'" in results["refused"][1]
    assert "dr_grpo needs length" in results["refused"][2]
