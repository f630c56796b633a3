"""A real vLLM's options and behaviour, compared with what the gateway passes on to it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from megaflow_hpc.model.gateway.dialects import TABLES
from tests.support.poison import GOOD, POISON, TOOL
from tests.support.serving import Servers, ask_engine, only_the_proxy_is_reached

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]
REQUESTS = {
    "/chat/completions": ["ChatCompletionRequest"],
    "/completions": ["CompletionRequest"],
    "/responses": ["ResponsesRequest"],
    "/messages": ["AnthropicMessagesRequest", "AnthropicCountTokensRequest"],
}
"""Path → vLLM's classes of its requests."""
ALLOWED: dict[str, Any] = {
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "frequency_penalty": 0.1,
    "presence_penalty": 0.1,
    "repetition_penalty": 1.1,
    "seed": 5,
    "stop": ["zz"],
    "n": 2,
    "logit_bias": {"5": 1.5},
    "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "integer"}}},
    "structured_outputs": {"choice": ["yes", "no"]},
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "include_stop_str_in_output": True,
    "add_special_tokens": False,
    "return_token_ids": True,
    "return_tokens_as_token_ids": True,
}
"""Option → a value that vLLM takes for chat and plain completions."""
ALLOWED_CHAT: dict[str, Any] = {
    "max_completion_tokens": 3,
    "logprobs": True,
    "top_logprobs": 3,
    "reasoning_effort": "low",
    "chat_template_kwargs": {"enable_thinking": False},
    "parallel_tool_calls": True,
    "tools": [TOOL],
    "stream": True,
    "stream_options": {"include_usage": True},
}


@pytest.fixture(scope="module")
def vllm(interpreter: str, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """vLLM with its defaults: the CPU build runs the model in a separate process."""
    section: dict[str, Any] = {"engine": "vllm", "path": str(tiny_model), "gpus": 0, "python": interpreter}
    args = {"max-model-len": 512, "dtype": "float32", "enable-auto-tool-choice": True, "tool-call-parser": "hermes"}
    with Servers(tmp_path_factory.mktemp("vllm")) as servers:
        servers.start({**section, "args": args}, OMP_NUM_THREADS="1", VLLM_CPU_OMP_THREADS_BIND="nobind")
        servers.record(0, 600)
        yield servers


def test_other_hosts_reach_the_proxy_of_an_engine_of_several_processes_alone(vllm: Servers) -> None:
    """The ports that torch.distributed opens for them are on the loopback, and other users reach no socket."""
    only_the_proxy_is_reached(vllm, 0)


async def test_every_field_of_the_installed_vllms_requests_has_its_place(vllm: Servers) -> None:
    """A new field is omitted until its table says how it is handled and whether it constrains the tokens."""
    _, document = await ask_engine(vllm, "/openapi.json")
    for path, names in REQUESTS.items():
        fields = {field for name in names for field in document["components"]["schemas"][name]["properties"]}
        assert fields - TABLES[path].keys() == set(), path


async def test_a_real_vllm_answers_what_is_allowed_and_never_sees_the_rest(vllm: Servers) -> None:
    async with vllm.gateway() as gateway:
        bad, good = await gateway.open("t/default/0", "default"), await gateway.open("u/default/0", "default")
        async with aiohttp.ClientSession() as session:

            async def call(model: Any, path: str, body: Any) -> tuple[int, str]:
                headers = {"Authorization": f"Bearer {model.api_key}"}
                async with session.post(model.base_url + path, json=body, headers=headers) as response:
                    return response.status, await response.text()

            calls = [("/chat/completions", {name: value}) for name, value in {**ALLOWED, **ALLOWED_CHAT}.items()]
            calls += [("/completions", {name: value}) for name, value in ALLOWED.items()]
            # All at once: after each step, vLLM's processes spin for a second.
            answers = (call(good, path, {"max_tokens": 3, **GOOD[path], **option}) for path, option in calls)
            for asked, (status, text) in zip(calls, await asyncio.gather(*answers), strict=True):
                assert status == 200, (asked, text)
            for path, poison in POISON.items():
                for body in poison:
                    status, text = await call(bad, path, {**GOOD[path], **body})
                    assert status == 400, (path, body, text)
            status, _ = await call(good, "/chat/completions", {"max_tokens": 3, **GOOD["/chat/completions"]})
            assert status == 200
        (server,) = gateway._caller.router.servers("default")
        assert (server.failed_at, server.degraded) == (0.0, False)
        assert not (await gateway.close("t/default/0")).turns
        assert len((await gateway.close("u/default/0")).turns) == len(calls) + 3  # two of them had n = 2
