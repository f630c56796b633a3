"""A real vLLM's options and behaviour, compared with what the gateway passes on to it."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from megaflow_hpc.model.engines import adapters
from megaflow_hpc.model.gateway.dialects import TABLES
from tests.support.poison import GOOD, POISON, TOOL
from tests.support.serving import Servers, only_the_proxy_is_reached
from tests.support.warm import WarmPython

MODULES = (
    "vllm.entrypoints.openai.chat_completion.protocol",
    "vllm.entrypoints.openai.completion.protocol",
    "vllm.entrypoints.openai.responses.protocol",
    "vllm.entrypoints.anthropic.protocol",
    "vllm.multimodal.media.connector",
)
FIELDS = """
import json
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.anthropic.protocol import AnthropicCountTokensRequest, AnthropicMessagesRequest
requests = {
    "/chat/completions": [ChatCompletionRequest],
    "/completions": [CompletionRequest],
    "/responses": [ResponsesRequest],
    "/messages": [AnthropicMessagesRequest, AnthropicCountTokensRequest],
}
print(json.dumps({table: sorted({f for c in those for f in c.model_fields}) for table, those in requests.items()}))
"""
FETCH = """
import asyncio, sys
from vllm.multimodal.media.connector import MediaConnector
connector = MediaConnector(allowed_media_domains=sys.argv[1].split(","))
async def fetch():
    for url in sys.argv[2:]:
        try:
            print("fetched", await connector.fetch_image_async(url))
        except Exception as error:
            print(type(error).__name__, str(error)[:200].replace("\\n", " "))
asyncio.run(fetch())
"""


@pytest.fixture(scope="module")
def with_vllm(interpreter: str) -> Iterator[WarmPython]:
    """The engine's Python, which takes 8 s of CPU to import vLLM."""
    with WarmPython(*MODULES, python=interpreter) as python:
        yield python


def started(tmp_path: Path, interpreter: str) -> tuple[str, dict[str, str]]:
    """The hosts and variables with which the adapter starts vLLM."""
    section = {"engine": "vllm", "path": "x", "python": interpreter}
    launch = adapters.launch(section, "p", tmp_path)
    assert not any("local-media" in argument for argument in launch.command)
    return launch.command[launch.command.index("--allowed-media-domains") + 1], launch.env


@pytest.mark.engine
@pytest.mark.timeout(300)
def test_every_field_of_the_installed_vllms_requests_has_its_place(with_vllm: WarmPython) -> None:
    """A new field is omitted until its table says how it is handled and whether it constrains the tokens."""
    done = with_vllm.run(FIELDS)
    assert done.returncode == 0, done.stderr
    fields = json.loads(done.stdout.splitlines()[-1])
    missing = {path: set(known) - TABLES[path].keys() for path, known in fields.items()}
    assert missing == {path: set() for path in fields}


@pytest.fixture
def neighbour() -> Iterator[tuple[str, list[str]]]:
    """Yields a service on the node's loopback, which redirects to a private page, and the requested paths."""
    seen: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append(self.path)
            self.send_response(302 if self.path == "/redirect" else 200)
            self.send_header("Location", "/internal")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", seen
        server.shutdown()
        thread.join()


@pytest.mark.engine
@pytest.mark.timeout(300)
def test_vllm_itself_fetches_nothing(
    interpreter: str,
    with_vllm: WarmPython,
    tmp_path: Path,
    neighbour: tuple[str, list[str]],
) -> None:
    url, seen = neighbour
    domains, env = started(tmp_path, interpreter)
    urls = [f"{url}/direct", f"{url}/redirect", "file:///etc/passwd"]
    done = with_vllm.run(FETCH, domains, *urls, variables=env)
    assert done.returncode == 0, done.stderr
    assert "fetched" not in done.stdout
    assert seen == [], done.stdout
    assert done.stdout.count("allowed domains") == 2


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


@pytest.mark.engine
@pytest.mark.timeout(900)
def test_other_hosts_reach_the_proxy_of_an_engine_of_several_processes_alone(vllm: Servers) -> None:
    """The ports that torch.distributed opens for them are on the loopback, and other users reach no socket."""
    only_the_proxy_is_reached(vllm, 0)


@pytest.mark.engine
@pytest.mark.timeout(900)
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
