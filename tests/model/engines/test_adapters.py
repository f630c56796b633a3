"""Engines other than vLLM, run for real: Transformers' own server, and an external endpoint."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import yaml

from megaflow_hpc.model.gateway.server import ModelGateway
from megaflow_hpc.trajectory import Recording
from tests.support.serving import Servers, answer_to, conversation, listeners


def rollout(records: list[dict[str, Any]], policy: str = "default") -> tuple[str, Recording]:
    """Makes one call of a rollout. Returns its text and the recording."""

    async def scenario() -> tuple[str, Recording]:
        async with ModelGateway(wait_s=60) as gateway:
            gateway.update_endpoints(records)
            model = await gateway.open("t/p/0", policy)
            answer = await answer_to(model, {"messages": conversation("hello"), "max_tokens": 32})
            return answer["choices"][0]["message"]["content"], await gateway.close("t/p/0")

    return asyncio.run(scenario())


@pytest.mark.engine
@pytest.mark.timeout(900)
def test_transformers_own_server_answers_behind_the_proxy(servers: Servers, interpreter: str, tiny_model: Path) -> None:
    python = str(Path(interpreter).parents[1])
    section = {"engine": "transformers", "path": str(tiny_model), "gpus": 0, "python": python}
    servers.start({**section, "args": {"device": "cpu"}})
    record = servers.record(0, timeout_s=600)
    assert record["protocol"] == "text"
    said, recording = rollout([record])
    assert recording.messages[-1] == {"role": "assistant", "content": said}
    assert not recording.sequences  # it reports no tokens
    assert len(listeners(servers.processes[0].pid)[0]) == 2  # the proxy's port, and its own on the loopback


def test_an_external_endpoint_is_asked_with_its_key(servers: Servers, tmp_path: Path) -> None:
    """The first server is the other's endpoint. It requires a key, and has no TLS."""
    (tmp_path / "script.yaml").write_text(yaml.safe_dump({"default": ["from outside"]}))
    servers.start({"engine": "scripted", "script": str(tmp_path / "script.yaml")}, "there", MEGAFLOW_TLS="0")
    there = servers.record(0)
    (tmp_path / "key").write_text(there["key"] + "\n")
    (tmp_path / "key").chmod(0o600)
    section = {"engine": "external", "base_url": f"{there['url']}/v1", "api_key_file": str(tmp_path / "key")}
    number = servers.start({**section, "args": {"model": "there", "protocol": "plain"}}, "outside")
    said, recording = rollout([servers.record(number)], "outside")
    assert said == "from outside"
    assert bytes(t for t in recording.sequences[0].tokens if t < 256).endswith(b"from outside")
