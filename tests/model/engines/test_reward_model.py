"""A reward model in a real vLLM (CPU build) as judge: it rates conversations by a number."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from megaflow_hpc.errors import ModelServiceError, UserCodeError
from megaflow_hpc.pod.rollout.judges import Judges
from tests.support.serving import Servers
from tests.support.torch_ranks import run_ranks

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]
MAKE = """\
import json, sys, torch
from transformers import AutoConfig, AutoTokenizer, LlamaForSequenceClassification
config = AutoConfig.from_pretrained(sys.argv[1])
config.num_labels = 1
torch.manual_seed(0)
model, tokens = LlamaForSequenceClassification(config).eval(), AutoTokenizer.from_pretrained(sys.argv[1])
model.save_pretrained(sys.argv[2])
tokens.save_pretrained(sys.argv[2])
talk = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
ids = tokens.apply_chat_template(talk, return_tensors="pt", return_dict=True)["input_ids"]
print(json.dumps(model(ids).logits.item()))
"""
"""Makes a random reward model, and prints its reward of a conversation."""
TALK = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]


def test_a_reward_model_is_asked_for_numbers(interpreter: str, tiny_model: Path, tmp_path: Path) -> None:
    reward_model = tmp_path / "reward"
    expected = run_ranks(MAKE, tmp_path, tiny_model, reward_model)

    async def main(servers: Servers) -> tuple[float, float, list[dict[str, Any]]]:
        async with servers.gateway(policies=["default"], judges=["rater"], wait_s=1) as gateway:
            judges = Judges(gateway, "t/default/0", ["rater"], reward_models=["rater"])
            async with judges.open() as judge:
                one, other = await judge.reward(TALK), await judge.reward(TALK[:1])
                with pytest.raises(UserCodeError, match="no judge of the campaign answers in words"):
                    await judge.ask("who?")
            agent = await gateway.open("t/default/0", "default")
            assert agent.model_name == "default"
            with pytest.raises(ModelServiceError):
                async with judges.open() as judge:
                    await judge.reward(TALK, "default")
            return one, other, judges.calls()

    with Servers(tmp_path / "served") as servers, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        section = {"engine": "vllm", "path": str(reward_model), "gpus": 0, "python": interpreter, "judge": "reward"}
        args = {"max-model-len": 512, "dtype": "float32", "distributed-executor-backend": "uni"}
        servers.start({**section, "args": args}, "rater")
        servers.record(0, timeout_s=600)
        one, other, calls = asyncio.run(main(servers))
    assert one == pytest.approx(expected, abs=1e-4)
    assert one != other
    assert [call["model"] for call in calls] == ["rater", "rater"]
    assert float(calls[0]["messages"][-1]["content"]) == one
    assert calls[0]["prompt_tokens"] > calls[1]["prompt_tokens"] > 0
