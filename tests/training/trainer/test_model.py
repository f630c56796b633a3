"""The policy on packed rows, and its optimizer, on one rank and on two, in the engine's environment."""

from __future__ import annotations

import pytest

from tests.support.torch_ranks import run_ranks

pytestmark = pytest.mark.slow  # all of them wait for one run of torch on two ranks

SCRIPT = r'''
import json
from pathlib import Path
import torch, transformers
from launchers.tiny_model import make
from megaflow_hpc.errors import ConfigError
from megaflow_hpc.training.trainer import layers, model as room
from megaflow_hpc.training.trainer.model import ProcessGroup, join, load
from megaflow_hpc.training.trainer.optimizer import Optimizer
from tests.support.trainer_scripts import copies, distance, gradients, refusal

LENGTHS = [7, 33, 1, 2, 60, 24]
LORA = 4


def row(lengths=LENGTHS, words=259, seed=0):
    """Tokens, positions, offsets, and every second token that may be judged."""
    tokens = torch.randint(0, words, (sum(lengths),), generator=torch.Generator().manual_seed(seed))
    positions = torch.cat([torch.arange(n) for n in lengths])
    offsets = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    return tokens, positions, offsets, (positions > 0).nonzero()[::2, 0]


def weigh(policy, tokens, positions, offsets, where):
    """A loss with a gradient through both outputs, different for each token of the row."""
    logprobs, entropies = policy(tokens, positions, offsets, where)
    return (logprobs * torch.linspace(0.5, 1.5, len(tokens))).sum() + 0.3 * (entropies * positions.sin()).sum()


def one_by_one(policy):
    """Log-probabilities, entropies and gradients of the same, each sequence through transformers' own forward."""
    tokens, positions, offsets, where = row()
    chosen, scale = set(where.tolist()), torch.linspace(0.5, 1.5, len(tokens))
    found, loss = torch.zeros(2, len(tokens)), 0
    policy.causal.set_attn_implementation("eager")
    for begin, end in zip(offsets, offsets[1:]):
        logits = policy.causal(input_ids=tokens[None, begin:end]).logits[0]
        for t in range(begin + 1, end):
            if t in chosen:
                every = torch.log_softmax(logits[t - 1 - begin], -1)
                logprob, entropy = every[tokens[t]], -(every.exp() * every).sum()
                loss = loss + logprob * scale[t] + 0.3 * entropy * positions[t].sin()
                found[:, t] = torch.stack([logprob, entropy]).detach()
    loss.backward()
    policy.causal.set_attn_implementation(layers.ATTENTION_NAME)
    return found, gradients(policy)


def alone(result, here):
    policy = load("tiny", "float32")
    found, wanted = one_by_one(policy)
    policy.zero_grad()
    with torch.no_grad():
        result["packed"] = float((torch.stack(policy(*row())) - found).abs().max())
    result["zeros"] = int((torch.stack(policy(*row())) == 0).sum(1).min())
    result["asked"] = len(row()[3])
    weigh(policy, *row()).backward()
    result["gradient"] = distance(gradients(policy), wanted)
    policy.zero_grad()
    whole, room.CHUNK_LOGITS = room.CHUNK_LOGITS, 259 * 10
    weigh(policy, *row()).backward()
    result["chunks"] = distance(gradients(policy), wanted)
    room.CHUNK_LOGITS = whole

    tokens, positions, offsets, where = row()
    policy.zero_grad()
    weigh(policy, tokens, positions, offsets, where[:0]).backward()
    result["masked"] = max(float(g.abs().max()) for g in gradients(policy).values())

    again = load("tiny", "float32", recompute=True)
    weigh(again, *row()).backward()
    result["recomputed"] = distance(gradients(again), wanted)


def optimizers(result):
    policy = load("tiny", "float32")
    names = [name for name, _ in policy.trained()]
    plain = [p.detach().clone().requires_grad_() for _, p in policy.trained()]
    oracle = torch.optim.AdamW(plain, lr=1e-3, betas=(0.9, 0.95), eps=1e-7, weight_decay=0.1, foreach=False)
    ours = Optimizer(policy, 1.0, betas=(0.9, 0.95), eps=1e-7, weight_decay=0.1, clip_norm=0.5)
    for seed, lr in enumerate([1e-3, 5e-4]):
        weigh(policy, *row(seed=seed)).backward()
        for p, master in zip(plain, ours.masters.values()):
            p.grad = master.grad.clone()
        norm = torch.nn.utils.clip_grad_norm_(plain, 0.5)
        oracle.param_groups[0]["lr"] = lr
        oracle.step()
        result["norm"] = [ours.step(lr), float(norm)]
    result["adamw"] = distance(dict(zip(names, plain)), ours.masters)

    before = copies(ours.masters)
    weigh(policy, *row()).backward()
    next(iter(ours.masters.values())).grad[0] = float("nan")
    result["nan"] = str(ours.step())
    result["unmoved"] = all(torch.equal(before[n], m) for n, m in ours.masters.items())
    result["forgotten"] = all(m.grad is None for m in ours.masters.values())

    half = load("tiny", "bfloat16")
    was = copies(dict(half.trained()))
    ours = Optimizer(half, 1e-6)
    for part in (0, 1):
        weigh(half, *row(seed=part)).backward()
    ours.step()
    still = sum(int((p == was[n]).sum()) for n, p in half.trained())
    moved = sum(int((m != was[n].float()).sum()) for n, m in ours.masters.items())
    count = sum(p.numel() for p in was.values())
    rounding = all(torch.equal(p, ours.masters[n].to(p.dtype)) for n, p in half.trained())
    result["half"] = [still / count, moved / count, rounding, str(half.stored)]


def kinds(result):
    from transformers import CohereConfig, MambaConfig, MistralConfig, Phi3Config
    factors = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "original_max_position_embeddings": 32}
    common = dict(vocab_size=259, hidden_size=64, num_hidden_layers=2, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    heads = dict(num_attention_heads=4, num_key_value_heads=2, intermediate_size=64)
    configs = {
        "window": MistralConfig(**common, **heads, sliding_window=4),
        "scaled": CohereConfig(**common, **heads, logit_scale=0.3),
        "mamba": MambaConfig(**common),
        "longrope": Phi3Config(
            **common, **heads, max_position_embeddings=64,
            rope_parameters={"rope_type": "longrope", "rope_theta": 1e4, **factors},
        ),
    }
    for name, config in configs.items():
        torch.manual_seed(0)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(name)
    for name in configs:
        try:
            policy = load(name, "float32")
            found, _ = one_by_one(policy)
            with torch.no_grad():
                result[name] = float((torch.stack(policy(*row())) - found).abs().max())
        except ConfigError as error:
            result[name] = str(error)
    result["none"], result["dtype"] = refusal(lambda: load("nothing")), refusal(lambda: load("tiny", "float8"))


def shared(ranks):
    """Gradients and parameters after two steps, each rank with half of the sequences, or one with all."""
    found = []
    for lora in (None, LORA):
        torch.manual_seed(5)
        policy = load("tiny", "float32", ranks, lora=lora, recompute=True)
        with torch.no_grad():
            for name, parameter in policy.trained():
                if "lora_B" in name:  # zero at first, with no gradient for A
                    parameter.normal_(0, 0.1)
        optimizer = Optimizer(policy, 1e-3, clip_norm=1.0)
        for seed in (0, 1):
            with torch.no_grad():
                policy(*row([9, 9]))  # as proximal log-probabilities are computed
            for part in (0, 1) if ranks.count == 1 else (ranks.rank,):
                weigh(policy, *row(LENGTHS[part::2], seed=10 * seed + part)).backward()
            optimizer.reduce()
            if seed == 0:
                first = gradients(policy)
            norm = optimizer.step()
        found.append((first, copies(optimizer.masters), norm))
    return found


def main():
    torch.set_num_threads(1)
    ranks = join()
    if ranks.first:
        make(Path("tiny"))
    ranks.barrier()
    both = shared(ranks)
    if not ranks.first:
        return ranks.leave()
    result = {}
    single = shared(ProcessGroup(0, 1, ranks.device))
    for name, one, two in zip(("all", "lora"), single, both):
        result[f"ranks {name}"] = [distance(two[0], one[0]), distance(two[1], one[1]), abs(two[2] - one[2]) / one[2]]
    result["lora names"] = sorted({name.split(".lora_")[1] for name in single[1][0]})
    alone(result, ranks)
    optimizers(result)
    kinds(result)
    ranks.leave()
    print(json.dumps(result))


main()
'''


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return run_ranks(SCRIPT, tmp_path_factory.mktemp("model"), ranks=2)


def test_packed_sequences_are_judged_as_each_alone(found):
    assert found["packed"] <= 1e-5
    assert found["gradient"] <= 1e-5
    assert found["window"] <= 1e-5
    assert found["scaled"] <= 1e-5


def test_chunks_and_recomputing_change_no_gradient(found):
    assert found["chunks"] <= 1e-5
    assert found["recomputed"] <= 1e-5


def test_only_the_tokens_asked_for_are_judged(found):
    assert found["asked"] > 50
    assert found["zeros"] == 127 - found["asked"]
    assert found["masked"] == 0.0


def test_two_ranks_learn_what_one_does(found):
    for name in ("ranks all", "ranks lora"):
        gradient, _, norm = found[name]
        assert gradient <= 1e-6
        assert norm <= 1e-6
        assert found[name][1] <= 1e-4


def test_lora_trains_adapters_alone(found):
    assert found["lora names"] == ["A.default.weight", "B.default.weight"]


def test_the_optimizer_is_adamw_with_a_clipped_norm(found):
    assert found["norm"][0] == pytest.approx(found["norm"][1], rel=1e-6)
    assert found["adamw"] <= 1e-6


def test_a_gradient_that_is_no_number_moves_nothing(found):
    assert found["nan"] == "nan"
    assert found["unmoved"] is True
    assert found["forgotten"] is True


def test_masters_keep_updates_that_bfloat16_swallows(found):
    still, moved, rounding, stored = found["half"]
    assert still > 0.8
    assert moved > 0.9
    assert rounding is True
    assert stored == "torch.float32"


def test_a_model_whose_sequences_leak_is_refused(found):
    assert "MambaForCausalLM" in found["mamba"]
    assert "packed" in found["mamba"]
    assert "Phi3ForCausalLM computes a token differently in long rows (longrope)" in found["longrope"]


def test_errors_name_the_directory_and_the_value(found):
    assert found["none"].startswith("nothing: has no config.json")
    assert "'float8'" in found["dtype"]
