"""LoRA adapters with a real vLLM: published, loaded in place under load, replaced, refused, found by a server's start.

Not part of the suite, because it starts vLLM with adapters. ``launchers/test tests/model/engines/lora.py``.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from megaflow_hpc.model.gateway.server import ModelGateway
from megaflow_hpc.rundir import weights
from tests.support.engines import make_model
from tests.support.serving import Servers, answer_to, conversation, prompt_logprobs
from tests.support.tensors import safetensors
from tests.support.waiting import until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]
MAKE = """
import json, sys, torch
from pathlib import Path
from safetensors.torch import save_file
from transformers import AutoConfig
model, out, seed = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
config, rank = AutoConfig.from_pretrained(model), 4
torch.manual_seed(seed)
tensors = {}
for layer in range(config.num_hidden_layers):
    for name in ("q_proj", "v_proj"):
        place = f"base_model.model.model.layers.{layer}.self_attn.{name}"
        tensors[f"{place}.lora_A.weight"] = torch.randn(rank, config.hidden_size)
        tensors[f"{place}.lora_B.weight"] = torch.randn(config.hidden_size, rank)
out.mkdir()
save_file(tensors, out / "adapter_model.safetensors")
about = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 8, "bias": "none"}
about |= {"target_modules": ["q_proj", "v_proj"], "base_model_name_or_path": model}
(out / "adapter_config.json").write_text(json.dumps(about))
"""


def test_adapters_are_loaded_under_load_and_every_token_says_which_sampled_it(servers: Servers, tmp_path: Path) -> None:
    python = str(Path(os.environ["MEGAFLOW_ENGINE_VENV"]) / "bin" / "python")
    model = make_model(tmp_path / "tiny")
    for seed in (1, 2):
        subprocess.run(
            [python, "-c", MAKE, str(model), str(tmp_path / f"lora{seed}"), str(seed)], check=True, timeout=120
        )
    args = {"max-model-len": 4096, "dtype": "float32", "enable-lora": True, "max-lora-rank": 8}
    section = {"engine": "vllm", "path": str(model), "gpus": 0, "python": python, "args": args}
    servers.start(section, "default", "--poll-s", "0.3")
    servers.record(0, timeout_s=600)

    async def scores(version: int, tokens: list[int]) -> list[float]:
        """Log-probabilities of ids as a prompt of the weights being served."""
        record = servers.record(0)
        assert record["weight_version"] == version
        return await prompt_logprobs({**record, "model_name": "default"}, tokens)

    def published(name: str) -> int:
        version = weights.publish(servers.run, tmp_path / name).version
        until(lambda: servers.record(0)["weight_version"] == version, f"version {version} serves", 300)
        return version

    async def scenario() -> None:
        async with ModelGateway(wait_s=60) as split, ModelGateway(wait_s=60) as plain:
            gateways: list[tuple[ModelGateway, Any]] = []
            for protocol, gateway in (("split", split), ("plain", plain)):
                gateway.update_endpoints([{**servers.record(0), "protocol": protocol}])
                gateways += [(gateway, await gateway.open(f"t/default/{n}", "default")) for n in range(2)]
            over = asyncio.Event()

            async def ask(address: Any) -> None:
                body = {"messages": conversation("Begin."), "max_tokens": 30, "logit_bias": {"256": -100}}
                while not over.is_set():
                    await answer_to(address, body)

            asking = [asyncio.create_task(ask(address)) for _, address in gateways]
            await asyncio.sleep(1)
            first = await asyncio.to_thread(published, "lora1")
            await asyncio.sleep(1)
            second = await asyncio.to_thread(published, "lora2")
            await asyncio.sleep(1)
            over.set()
            await asyncio.gather(*asking)
            recordings = [await gateway.close(f"t/default/{n % 2}") for n, (gateway, _) in enumerate(gateways)]
        sequences = [sequence for recording in recordings for sequence in recording.sequences]
        used = [{v for v, m in zip(s.weight_versions, s.loss_mask, strict=True) if m} for s in sequences]
        assert all(len(u) == 1 for u in used)
        assert set.union(*used) == {0, first, second}
        own = other = 0.0
        for sequence, (version,) in zip(sequences, used, strict=True):
            told = await scores(second, list(sequence.tokens))
            off = max(abs(a - b) for a, b, m in zip(sequence.logprobs, told, sequence.loss_mask, strict=True) if m)
            own, other = (max(own, off), other) if version == second else (own, max(other, off))
        assert own < 1e-2
        assert other > 0.1  # the adapters differ from each other and from the model

    asyncio.run(scenario())
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "adapter_model.safetensors").write_bytes(safetensors(b"no tensors of an adapter"))
    (broken / "adapter_config.json").write_text(json.dumps({"r": 4}))
    bad = weights.publish(servers.run, broken).version
    until(lambda: (servers.record(0).get("refused") or {}).get("version") == bad, "the bad one is refused", 300)
    assert servers.record(0)["weight_version"] == 2
    weights.publish(servers.run, tmp_path / "lora1")
    until(lambda: servers.record(0)["weight_version"] == 4, "version 4 serves", 300)
    servers.signal(0, signal.SIGTERM)
    assert servers.processes[0].wait(60) == 0
    servers.serve(0, "--poll-s", "0.3")  # a later start finds the adapter there
    servers.processes[0] = servers.processes.pop()
    assert servers.record(0, timeout_s=600)["weight_version"] == 4
