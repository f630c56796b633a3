"""Router replay with a real vLLM: it reports experts, the gateway records them, and the trainer's routers follow.

Not part of the suite, because it starts vLLM twice as slowly as other tests: its kernels for CPUs are run by Triton's
interpreter (tests/support/triton_cpu). ``launchers/test tests/model/engines/routed_experts.py``.
"""

from __future__ import annotations

import asyncio
import base64
import json
import subprocess
from pathlib import Path

import pytest

from megaflow_hpc.model.gateway.server import ModelGateway
from megaflow_hpc.trajectory import Recording, TokenSequence
from tests.support.engines import make_model
from tests.support.places import ROOT
from tests.support.serving import Servers, recorded_chat
from tests.support.torch_ranks import engine_python, run_ranks

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]
MAKE = """
import sys
from pathlib import Path
import torch
from transformers import AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM
out = Path(sys.argv[1])
for file in out.glob("*.safetensors"):
    file.unlink()
tokenizer = AutoTokenizer.from_pretrained(out)
torch.manual_seed(0)
config = Qwen3MoeConfig(
    vocab_size=len(tokenizer), hidden_size=128, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
    head_dim=32, intermediate_size=128, moe_intermediate_size=64, num_experts=8, num_experts_per_tok=2,
    mlp_only_layers=[1], max_position_embeddings=4096, eos_token_id=tokenizer.eos_token_id,
    pad_token_id=tokenizer.pad_token_id, bos_token_id=None, norm_topk_prob=True, dtype="float32",
)
Qwen3MoeForCausalLM(config).save_pretrained(out)
"""
REPLAY = """
import base64, json, sys
import numpy as np
import torch
from megaflow_hpc.training.trainer.model import load
about = json.loads(sys.argv[2])
policy, seen = load(sys.argv[1], "float32"), {}
for name, module in policy.causal.named_modules():
    if name.endswith("mlp.gate"):
        layer = int(name.split("layers.")[1].split(".")[0])
        module.register_forward_hook(lambda m, given, result, layer=layer: seen.__setitem__(layer, result[2].numpy()))
tokens, sampled = torch.tensor(about["tokens"]), torch.tensor(about["sampled"])
experts = np.frombuffer(base64.b64decode(about["experts"]), np.uint8).reshape(len(tokens), 3, 2).astype(np.int16)
experts[-1] = -1
result = {}
for name, forced in {"free": None, "replayed": experts, "others": (experts + 1) % 8}.items():
    with torch.no_grad():
        found = policy(tokens, torch.arange(len(tokens)), [0, len(tokens)], sampled, None if forced is None else
                       torch.from_numpy(forced))[0][sampled]
    same = [bool((np.sort(seen[layer][:-1]) == np.sort(experts[:-1, layer])).all()) for layer in (0, 2)]
    result[name] = [float((found - torch.tensor(about["logprobs"])).abs().max()), same]
print(json.dumps(result))
"""


def check(sequence: TokenSequence, model: Path, folder: Path) -> None:
    """Without replay the routers choose almost as the engine did, with replay exactly; other experts give others."""
    assert (sequence.expert_layers, sequence.experts_per_token) == (3, 2)
    assert len(sequence.experts) == 6 * len(sequence.tokens)
    assert set(sequence.experts[-6:]) == {255}
    sampled = [place for place, mask in enumerate(sequence.loss_mask) if mask]
    about = {
        "tokens": list(sequence.tokens),
        "sampled": sampled,
        "logprobs": [sequence.logprobs[place] for place in sampled],
        "experts": base64.b64encode(sequence.experts.tobytes()).decode(),
    }
    found = run_ranks(REPLAY, folder, model, json.dumps(about))
    print(found)
    assert found["replayed"][0] <= 1e-5
    assert found["replayed"][1] == [True, True]
    assert found["free"][0] <= 1e-3
    assert found["others"][0] > 1e-2


def test_the_trainers_routers_follow_those_of_vllm(tmp_path: Path) -> None:
    python, model = engine_python(), make_model(tmp_path / "moe")
    subprocess.run([python, "-c", MAKE, str(model)], check=True, timeout=120)
    args = {"max-model-len": 4096, "dtype": "float32", "enable-return-routed-experts": True}
    args["distributed-executor-backend"] = "uni"
    section = {"engine": "vllm", "path": str(model), "gpus": 0, "python": str(python), "args": args}
    env = {"VLLM_USE_V2_MODEL_RUNNER": "1", "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    env |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    with Servers(tmp_path / "servers") as servers:
        servers.start(section, "p", PYTHONPATH=f"{ROOT / 'tests/support/triton_cpu'}:{ROOT}", **env)
        record = servers.record(0, timeout_s=600)

        async def recorded(protocol: str) -> Recording:
            async with ModelGateway(wait_s=60) as gateway:
                gateway.update_endpoints([{**record, "protocol": protocol}])
                return await recorded_chat(gateway, 3, max_tokens=12)

        split, plain = asyncio.run(recorded("split")), asyncio.run(recorded("plain"))
    (sequence,) = split.sequences
    check(sequence, model, tmp_path)
    for sequence in plain.sequences:  # random bytes are no text, so the history is encoded to other tokens
        check(sequence, model, tmp_path)
