"""Models and rows divided among four ranks, compared with one rank, in the engine's environment."""

from __future__ import annotations

import pytest

from tests.support.torch_ranks import run_ranks

pytestmark = pytest.mark.slow  # all of them wait for one run of torch on four ranks

SCRIPT = r'''
import json
from pathlib import Path
import torch, transformers
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.distributed.sharding_utils import DtensorShardOperation
from megaflow_hpc.training.trainer import checkpoint
from megaflow_hpc.training.trainer.model import ProcessGroup, join, load
from megaflow_hpc.training.trainer.optimizer import Optimizer
from tests.support.trainer_scripts import (
    distance, learn, make_models, masters, refusal, same, stored_tensors as tensors, whole,
)

LORA = 4
ALONE = ProcessGroup()
CASES = {
    "replicas": ("dense", {"replicas": 2}),
    "tied": ("tied", {"tensor": 2}),
    "context 4": ("dense", {"context": 4}),
    "context 2, tensor 2": ("dense", {"context": 2, "tensor": 2}),
    "expert 4, context 2": ("moe", {"expert": 4, "context": 2}),
    "expert 2, replicas 2": ("moe", {"expert": 2, "replicas": 2}),
    "expert 2, tensor 2": ("moe", {"expert": 2, "tensor": 2}),
    "lora": ("moe", {"context": 2}, LORA),
    "lora, context 2, tensor 2": ("dense", {"context": 2, "tensor": 2}, LORA),
}
WRONG = {
    "ranks": ("dense", {"context": 3}),
    "heads": ("dense", {"tensor": 4}),
    "no experts": ("dense", {"expert": 2}),
    "fused experts": ("moe", {"tensor": 2}),
    "no plan": ("gpt2", {"tensor": 2}),
}


def prepare():
    make_models()
    GPT2LMHeadModel(GPT2Config(vocab_size=260, n_embd=32, n_layer=1, n_head=4)).save_pretrained("gpt2")


def start(ranks, name, parallel, lora=None, **options):
    torch.manual_seed(5)
    policy = load(name, "float32", ranks, lora=lora, recompute=True, parallel=parallel)
    generator = torch.Generator().manual_seed(1)
    for parameter_name, parameter in policy.trained():
        if "lora_B" in parameter_name:  # zero at first, with no gradient for A
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)
    return Optimizer(policy, 1e-4, **options)


def kinds(folder):
    return {name: [list(t.shape), str(t.dtype)] for name, t in tensors(folder).items()}


def case(result, ranks, name, model, parallel, lora=None):
    copies = parallel.get("context", 1) * parallel.get("tensor", 1)
    optimizer = start(ranks, model, parallel, lora)
    loss, gradients, norm = learn(optimizer, ranks, copies)
    there = Path(name)
    checkpoint.save(there, 1, optimizer, ranks).finish()
    checkpoint.export(there / "export", optimizer.policy, ranks)
    now = masters(optimizer)
    if ranks.first:
        one = start(ALONE, model, {}, lora)
        wanted = learn(one, ALONE)
        result[name] = [abs(loss / wanted[0] - 1), distance(gradients, wanted[1]), abs(norm / wanted[2] - 1)]
        checkpoint.restore(there / "1", one, ALONE)  # of four ranks, by one
        result[f"{name}: read by one"] = same(masters(one), now)
        result[f"{name}: moments"] = float(sum(s["exp_avg"].abs().sum() for s in one.adamw.state.values())) > 0
        if lora is None:
            result[f"{name}: as the source"] = kinds(model) == kinds(there / "export")
            read = masters(start(ALONE, there / "export", {}))
            result[f"{name}: exported"] = same(read, now)
        else:
            result[f"{name}: adapter"] = as_peft_reads(there / "export", model, one.policy)
        learn(one, ALONE)
        checkpoint.save(there, 2, one, ALONE).finish()
        now = masters(one)
    ranks.barrier()
    checkpoint.restore(there / "2", optimizer, ranks)  # of one rank, by four
    back = masters(optimizer)
    if ranks.first:
        result[f"{name}: read by four"] = same(back, now)
        if name == "lora":
            result["adapters"] = sorted({n.split(".layers.1.")[1] for n in now if ".layers.1." in n})


@torch.no_grad()
def as_peft_reads(folder, model, policy):
    """Largest difference of log-probabilities between a policy and its exported adapter."""
    import peft
    read = peft.PeftModel.from_pretrained(transformers.AutoModelForCausalLM.from_pretrained(model), folder)
    tokens = torch.arange(12) * 5
    logits = read(input_ids=tokens[None]).logits[0]
    wanted = torch.log_softmax(logits[:-1], -1).gather(-1, tokens[1:, None])[:, 0]
    return float((policy(tokens, torch.arange(12), [0, 12], torch.arange(1, 12))[0][1:] - wanted).abs().max())


def reading(result, ranks):
    """Bytes that the ranks read of a model, as a share of its files, and what each holds."""
    read, plain = [], DtensorShardOperation.shard_tensor

    def counted(*arguments, **options):
        found = plain(*arguments, **options)
        read.append(0 if found is None else found.numel() * found.element_size())
        return found

    DtensorShardOperation.shard_tensor = counted
    policy = load("moe", "float32", ranks, parallel={"expert": 2})
    DtensorShardOperation.shard_tensor = plain
    held = sum(p.to_local().numel() for p in policy.parameters()) / sum(p.numel() for p in policy.parameters())
    size = sum(t.numel() * t.element_size() for t in tensors("moe").values())
    result["read"] = [sum(sum(part) for part in ranks.gather(read)) / size, max(ranks.gather(held))]


def away(result, ranks):
    """Two steps with the optimizer in the node's memory and two without."""
    ends = []
    for offload in (False, True):
        optimizer = start(ranks, "dense", {"replicas": 2}, offload=offload)
        for _ in range(2):
            learn(optimizer, ranks)
        ends.append(masters(optimizer))
        same = all(torch.equal(whole(p), ends[-1][n]) for n, p in optimizer.policy.trained())
    result["offload"] = [distance(*ends), same]


def main():
    torch.set_num_threads(1)
    ranks = join()
    if ranks.first:
        prepare()
    ranks.barrier()
    result = {"cases": list(CASES)}
    for name, values in CASES.items():
        case(result, ranks, name, *values)
    reading(result, ranks)
    away(result, ranks)
    for name, (model, parallel) in WRONG.items():
        result[f"wrong: {name}"] = refusal(lambda: load(model, "float32", ranks, parallel=parallel))
    ranks.leave()
    if ranks.first:
        print(json.dumps(result))


main()
'''


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return run_ranks(SCRIPT, tmp_path_factory.mktemp("sharding"), ranks=4)


def test_any_layout_learns_what_one_rank_does(found):
    assert len(found["cases"]) == 9
    for name in found["cases"]:
        assert all(off <= 1e-6 for off in found[name]), name  # loss, gradient and norm


def test_checkpoints_and_exports_are_read_by_any_layout(found):
    """Exports have the names and shapes of the source, and PEFT reads exported adapters."""
    for name in found["cases"]:
        read = ["read by one", "read by four", "moments", *(() if "lora" in name else ("as the source", "exported"))]
        assert [found[f"{name}: {what}"] for what in read] == [True] * len(read), name
        assert "lora" not in name or found[f"{name}: adapter"] <= 1e-5, name


def test_ranks_together_read_a_model_once(found):
    read, held = found["read"]
    assert 0.99 <= read <= 1.05
    assert held <= 0.27  # of four ranks


def test_an_optimizer_in_the_nodes_memory_takes_the_same_steps(found):
    distance, rounded = found["offload"]
    assert distance <= 1e-6
    assert rounded is True


def test_adapters_reach_fused_experts(found):
    assert any("mlp.experts" in name and "lora_A" in name for name in found["adapters"])
    assert any("self_attn.q_proj" in name for name in found["adapters"])


def test_a_layout_that_does_not_fit_the_model_or_the_ranks_is_refused(found):
    assert "context 3 × tensor 1 = 3 does not divide the trainer's 4 ranks" in found["wrong: ranks"]
    assert "4 does not divide the 4 heads and 2 key heads" in found["wrong: heads"]
    assert "no expert-parallel plan for Qwen3ForCausalLM" in found["wrong: no experts"]
    assert "set parallel.expert to a multiple of 2" in found["wrong: fused experts"]
    assert "no tensor-parallel plan for GPT2LMHeadModel" in found["wrong: no plan"]
