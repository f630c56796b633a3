"""Router replay on one rank and on two, in the engine's environment, and in a training with damaged records."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.torch_ranks import run_ranks

pytestmark = pytest.mark.slow  # all wait for one run of torch on two ranks

SCRIPT = r'''
import json
from pathlib import Path
import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from megaflow_hpc.rundir.amendments import Amendments
from megaflow_hpc.rundir.training import Commit
from megaflow_hpc.training.dataflow import Dataflow
from megaflow_hpc.training.plan import TrainingFiles
from megaflow_hpc.training.trainer.loop import TrainingLoop
from megaflow_hpc.training.trainer.model import ProcessGroup, join, load
from megaflow_hpc.trajectory import UNROUTED
from tests.support.trainer_scripts import distance, gradients as gradients_of, refusal
from tests.support.training import Pods, training_run

EXPERTS, LAYERS = 8, 3
ALONE = ProcessGroup()
OFFSETS = [0, 7, 18, 24]


def prepare():
    common = dict(
        vocab_size=259, hidden_size=64, num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, intermediate_size=96, bos_token_id=1, eos_token_id=2,
    )
    torch.manual_seed(0)
    # The second layer has no experts.
    config = dict(moe_intermediate_size=32, num_experts=EXPERTS, num_experts_per_tok=2, mlp_only_layers=[1])
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**common, **config)).save_pretrained("moe")
    Qwen3ForCausalLM(Qwen3Config(**common)).save_pretrained("dense")


def drawn(tokens, seed):
    """Two different experts for each token and layer; those of the last token are unknown."""
    draw = np.random.default_rng(seed)
    found = np.argsort(draw.random((tokens, LAYERS, EXPERTS)), -1)[..., :2].astype(np.int16)
    found[-1] = -1
    return torch.from_numpy(found)


def watched(policy):
    """The choices of each layer's router in the last forward pass."""
    seen = {}
    for name, module in policy.causal.named_modules():
        if name.endswith("mlp.gate"):
            layer = int(name.split("layers.")[1].split(".")[0])
            module.register_forward_hook(lambda m, given, result, layer=layer: seen.__setitem__(layer, result[2]))
    return seen


def passed(ranks, experts, parallel=None, recompute=False):
    policy = load("moe", "float32", ranks, recompute=recompute, parallel=parallel)
    seen = watched(policy)
    tokens = torch.arange(OFFSETS[-1]) * 11 % 259
    positions = torch.cat([torch.arange(b - a) for a, b in zip(OFFSETS, OFFSETS[1:])])
    where = (positions > 0).nonzero()[:, 0]
    logprobs, _ = policy(tokens, positions, OFFSETS, where, experts)
    loss = (logprobs * torch.linspace(0.5, 1.5, len(tokens))).sum()
    loss.backward()
    return float(loss.detach()), gradients_of(policy), {layer: choice.tolist() for layer, choice in seen.items()}


def one_rank(result):
    experts = drawn(OFFSETS[-1], 0)
    free = passed(ALONE, None)
    loss, gradients, choices = passed(ALONE, experts)
    result["layers"] = sorted(choices)
    result["followed"] = all(c[:-1] == experts[:-1, layer].tolist() for layer, c in choices.items())
    result["free"] = all(c[:-1] != experts[:-1, layer].tolist() for layer, c in free[2].items())
    own = torch.full_like(experts, -1)
    for layer, choice in free[2].items():
        own[:, layer] = torch.tensor(choice)
    again = passed(ALONE, own)
    result["own"] = [again[0] - free[0], distance(again[1], free[1])]
    result["unknown"] = passed(ALONE, torch.full_like(experts, -1))[0] - free[0]
    result["changed"] = abs(passed(ALONE, drawn(OFFSETS[-1], 1))[0] - loss)
    result["router"] = [float(g.abs().max()) for n, g in gradients.items() if "mlp.gate.weight" in n]
    recomputed = passed(ALONE, experts, recompute=True)
    result["recomputed"] = [recomputed[0] - loss, distance(recomputed[1], gradients)]
    dense = load("dense", "float32", ALONE)
    four = torch.arange(4)
    result["dense"] = refusal(lambda: dense(four, four, [0, 4], four[1:], drawn(4, 0)))
    return loss, gradients


class Sampler(Pods):
    """Records experts with each sequence. Two rollouts have experts that the model cannot have."""

    def store(self, block, trajectory, epoch=0):
        (one,) = trajectory.sequences
        for t, sampled in enumerate(one.loss_mask):
            if sampled:
                one.logprobs[t] = -5.5
        layers = LAYERS + (trajectory.id == "task-0/default/1")
        experts = drawn(len(one.tokens), len(trajectory.id))[:, :1].repeat(1, layers, 1).numpy()
        if trajectory.id == "task-1/default/2":
            experts[3, 2] = [EXPERTS, 0]
        one.expert_layers, one.experts_per_token = experts.shape[1:]
        one.experts.frombytes(experts[:-1].astype(np.uint8).tobytes() + UNROUTED * experts[0].size)
        super().store(block, trajectory, epoch)


def training(result):
    policy = {"dtype": "float32", "microbatch": 64, "optimizer": {"lr": 1e-4}}
    section = {"policies": {"default": policy}, "batch": 2, "staleness": 0, "steps": 1}
    run = training_run(Path("run"), section, tasks=2, samples=4, model="moe")
    pods = Sampler(run)
    flow = Dataflow(run, say=lambda text: None)
    loop = TrainingLoop(flow, ALONE)
    choices = watched(loop.policy)
    flow.start()
    flow.request()
    pods.work()
    list(loop.steps())
    flow.leave()
    result["amendments"] = [[list(a.rollouts), a.cause] for a in Amendments(run, "default").read()]
    result["left_out"] = TrainingFiles(run, "default").read(Commit, 1).metrics["dropped/amended"]
    result["trained"] = bool(choices)


def main():
    torch.set_num_threads(1)
    ranks = join()
    result = {}
    if ranks.first:
        prepare()
        wanted = one_rank(result)
        training(result)
    ranks.barrier()
    for name, parallel in {"context": {"context": 2}, "expert": {"expert": 2}}.items():
        loss, gradients, _ = passed(ranks, drawn(OFFSETS[-1], 0), parallel, recompute=True)
        loss = loss if name == "context" else sum(ranks.gather(loss)) / 2  # both ranks have the same row
        if ranks.first:
            factor = 1 if name == "context" else 0.5
            gradients = {n: g * factor for n, g in gradients.items()}
            result[name] = [loss / wanted[0] - 1, distance(gradients, wanted[1])]
    ranks.leave()
    if ranks.first:
        print(json.dumps(result))


main()
'''


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run_ranks(SCRIPT, tmp_path_factory.mktemp("router"), ranks=2)


def test_every_router_chooses_the_recorded_experts(found: dict[str, Any]) -> None:
    assert found["layers"] == [0, 2]
    assert found["followed"] is True
    assert found["free"] is True
    assert found["changed"] > 1e-3


def test_the_models_own_choice_replayed_changes_nothing(found: dict[str, Any]) -> None:
    assert found["own"] == [0, 0]
    assert found["unknown"] == 0


def test_gradients_reach_the_routers_through_the_weights_of_the_experts(found: dict[str, Any]) -> None:
    assert len(found["router"]) == 2
    assert min(found["router"]) > 1e-4
    assert found["recomputed"] == [0, 0]


@pytest.mark.parametrize("name", ["context", "expert"])
def test_two_ranks_replay_as_one_does(found: dict[str, Any], name: str) -> None:
    loss, gradient = found[name]
    assert abs(loss) <= 1e-6
    assert gradient <= 2e-6  # 9e-7 to 1.2e-6, by processor: sums of float32 in another order


def test_a_model_without_routers_is_refused(found: dict[str, Any]) -> None:
    assert "Qwen3ForCausalLM has no router whose choice of experts can be replayed" in found["dense"]
    assert "leave enable-return-routed-experts out" in found["dense"]


def test_records_with_experts_that_the_model_lacks_are_damaged(found: dict[str, Any]) -> None:
    causes = {tuple(rollouts): cause for rollouts, cause in found["amendments"]}
    assert set(causes) == {("task-0/default/1",), ("task-1/default/2",)}
    layers, expert = causes["task-0/default/1",], causes["task-1/default/2",]
    assert "its record has 4 layers with 2 experts for each token, but the trainer's model has 3 with 2" in layers
    assert "its record names expert 8, but the trainer's model has 8" in expert
    assert found["left_out"] == 2
    assert found["trained"] is True
