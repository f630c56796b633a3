"""Predicted memory compared with torch's count of the real trainer's tensors, in the engine's environment."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.torch_ranks import run_apart, run_ranks

pytestmark = pytest.mark.slow

REAL = """
import json
from pathlib import Path
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from megaflow_hpc.config.training import PolicyTraining
from megaflow_hpc.training.memory import ModelShape, predict
from megaflow_hpc.training.trainer import losses
from megaflow_hpc.training.trainer.model import load
from megaflow_hpc.training.trainer.optimizer import Optimizer

TOKENS = 2048
sizes = dict(vocab_size=8192, hidden_size=512, intermediate_size=1536, num_hidden_layers=4, head_dim=64)
config = Qwen3Config(**sizes, num_attention_heads=8, num_key_value_heads=8, tie_word_embeddings=True)

class Totals:
    tokens = sequences = samples = 1

def resident(name):
    line = next(line for line in open("/proc/self/status") if line.startswith(name))
    return int(line.split()[1]) * 1024

def micro_batch(tokens=16):
    new, entropies = policy(torch.zeros(tokens, dtype=torch.int64), torch.arange(tokens), [0, tokens],
                            torch.arange(1, tokens))
    columns = [torch.zeros(tokens) for _ in range(3)]
    batch = losses.Tokens(torch.tensor([0, tokens]), torch.ones(tokens, dtype=torch.bool), new.detach(), *columns,
                          torch.ones(1, dtype=torch.int64))
    losses.policy_loss(losses.Loss("dapo"), new, entropies.detach(), batch, Totals)[0].backward()

Qwen3ForCausalLM(config).save_pretrained("model")
policy = load("model", "float32", recompute=True)
before = resident("VmRSS") - sum(parameter.numel() * 4 for parameter in policy.parameters())
optimizer = Optimizer(policy, 1e-6)
micro_batch()
optimizer.step()
Path("/proc/self/clear_refs").write_text("5")  # the peak is measured from here on
micro_batch()
micro_batch(TOKENS)  # beside the gradients of an earlier one
optimizer.step()
found = predict(ModelShape.read(Path("model")), PolicyTraining(microbatch=TOKENS, dtype="float32"), gpus=0)
print(json.dumps({"measured": resident("VmHWM") - before, "predicted": found.peak}))
"""

COUNTED = """
import json
from pathlib import Path
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM
from tests.bench.memory import MODELS, save_headers
from megaflow_hpc.config.training import PolicyTraining
from megaflow_hpc.training.memory import ModelShape, predict

TOKENS = 512
found = {}
for name in ("Qwen3-0.6B", "Qwen3-8B"):
    folder = save_headers(Path(name), MODELS[name] | {"num_hidden_layers": 3})
    with torch.device("meta"):
        config = AutoConfig.from_pretrained(folder)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="eager")
        ids = torch.zeros(1, TOKENS, dtype=torch.int64)
        mask = torch.zeros(1, 1, TOKENS, TOKENS, dtype=torch.bfloat16)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, attention_mask=mask, use_cache=False).logits.sum().backward()
    counted = counter.get_total_flops() / TOKENS
    sizes = ModelShape.read(folder)
    attention = 2 * sizes.layers * sizes.heads * sizes.head * TOKENS
    # Attention over all pairs, with a backward pass of two products each; logits that are not recomputed.
    counted += 3.5 * attention - 6 * attention + 2 * sizes.output
    given = PolicyTraining(microbatch=TOKENS, recompute=False)
    found[name] = predict(sizes, given).token_flops / counted
print(json.dumps(found))
"""


def test_flops_are_what_torch_counts(tmp_path: Path) -> None:
    found = run_ranks(COUNTED, tmp_path)
    assert found == {name: pytest.approx(1, abs=0.01) for name in ("Qwen3-0.6B", "Qwen3-8B")}


COMPARED = """
import json
from itertools import islice
from tests.bench.memory import compare, matrix
experts = islice(matrix(["Qwen3-30B-A3B"], [8], [2048]), 2)
print(json.dumps(list(compare([*matrix(["Qwen3-0.6B"], [1, 8], [2048]), *experts], layers=2))))
"""


def test_predicted_memory_is_within_a_tenth_of_what_torch_counts(tmp_path: Path) -> None:
    """``python -m tests.bench.memory`` compares whole models; here they have two layers and short rows."""
    cases = run_ranks(COMPARED, tmp_path)
    assert len(cases) == 6
    off = {json.dumps(case): case["predicted"] / case["tracked"] - 1 for case in cases}
    assert {case: error for case, error in off.items() if abs(error) > 0.1} == {}


def test_predicted_memory_is_within_a_tenth_of_a_processs_own_peak(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real step on a CPU, whose peak the kernel counts. Freed tensors must not stay in malloc's heap."""
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")
    found = run_apart(REAL, tmp_path)
    assert found["predicted"] == pytest.approx(found["measured"], rel=0.1)
