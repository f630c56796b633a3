"""External endpoints with the habits of commercial ones, as a real server that records its requests."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web

from megaflow_hpc import Campaign, open_trajectories
from megaflow_hpc.campaign.planning.model_paths import absolute
from megaflow_hpc.config import load, parse
from megaflow_hpc.errors import ConfigError
from megaflow_hpc.model.engines import adapters
from megaflow_hpc.model.gateway.canonical import conversation_digest
from megaflow_hpc.model.gateway.replay import calls_artifact, calls_of
from megaflow_hpc.model.gateway.server import ModelGateway
from megaflow_hpc.monitor.status import servers as engine_servers
from megaflow_hpc.trajectory import Trajectory
from tests.support.campaigns import run_local
from tests.support.serving import Servers, call, conversation, in_loop, listening

KEY = "sk-rented"


@dataclass
class Rented:
    """An endpoint at any path. The first part of the path selects its habit."""

    heard: list[tuple[str, str, dict[str, Any], float]] = field(default_factory=list)
    """Method, path, body and time of every request."""
    limited: int = 0
    """Number of further requests to refuse for their rate."""

    async def answer(self, request: web.Request) -> web.Response:
        body = await request.json() if request.method == "POST" else {}
        self.heard.append((request.method, request.path, body, time.monotonic()))
        habit, _, rest = request.path.strip("/").partition("/")
        if request.headers.get("Authorization") != f"Bearer {KEY}":
            return web.json_response({"error": {"message": "Incorrect API key"}}, status=401)
        if habit == "forbids":
            return web.json_response({"error": {"message": "your plan has no models"}}, status=403)
        if rest == "models" and habit in ("lists", "v1"):
            return web.json_response({"data": [{"id": "one"}, {"id": "two"}]})
        if rest != "chat/completions":
            return web.json_response({"error": {"message": f"no {request.path}"}}, status=404)
        if self.limited:
            self.limited -= 1
            return web.json_response({"error": {"message": "slow down"}}, status=429, headers={"Retry-After": "1"})
        if "max_tokens" in body:
            said = "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead."
            return web.json_response({"error": {"message": said}}, status=400)
        if habit == "refuses" or body["model"] not in ("one", "two"):
            return web.json_response({"error": {"message": f"The model `{body['model']}` is not served"}}, status=400)
        said = "Hm.\nyes" if body["model"] == "two" else "fine"
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": said}}
        usage = {"prompt_tokens": 5, "completion_tokens": 1, "total_tokens": 6}
        return web.json_response({"id": "c1", "object": "chat.completion", "choices": [choice], "usage": usage})

    def asked(self, habit: str) -> list[tuple[str, str, dict[str, Any], float]]:
        """The requests below a path."""
        return [request for request in self.heard if request[1].startswith(f"/{habit}/")]


@contextlib.asynccontextmanager
async def rented() -> AsyncIterator[tuple[Rented, str]]:
    """An endpoint, and its address without a path."""
    endpoint, application = Rented(), web.Application()
    application.router.add_route("*", "/{path:.*}", endpoint.answer)
    async with listening(application) as port:
        yield endpoint, f"http://127.0.0.1:{port}"


def start(servers: Servers, url: str, name: str = "one", **changes: Any) -> int:
    """A server whose engine is an endpoint."""
    key = servers.run.path.parent / "key"
    key.write_text(f"{KEY}\n")
    key.chmod(0o600)
    return servers.start({"engine": "external", "base_url": url, "path": name, "api_key_file": str(key), **changes})


@in_loop
async def test_it_is_asked_at_its_own_path_and_a_refusal_of_max_tokens_names_the_setting_that_replaces_it(
    servers: Servers,
) -> None:
    async with rented() as (endpoint, url):
        for place in ("/openai", "", "/lists"):
            start(servers, url + place)
        async with servers.gateway(wait_s=60) as gateway:  # all three came up
            assert [request[:2] for request in endpoint.asked("openai")] == [
                ("GET", "/openai/models"),
                ("POST", "/openai/chat/completions"),
            ]
            assert "max_tokens" not in endpoint.asked("openai")[1][2]
            assert [request[1] for request in endpoint.asked("v1")] == ["/v1/models"]  # a bare host
            assert [request[1] for request in endpoint.asked("lists")] == ["/lists/models"]
            await one_call(gateway, servers, endpoint)
            gateway.update_endpoints([servers.record(2)])
            model = await gateway.open("t/default/0", "default")
            status, said = await call(model, {"messages": conversation("hello"), "max_tokens": 9})
            assert status == 400
            assert "Use 'max_completion_tokens' instead" in said["error"]["message"]
            assert "set engine: openai for the model in the campaign file" in said["error"]["message"]


async def one_call(gateway: ModelGateway, servers: Servers, endpoint: Rented) -> None:
    """Makes a call at one of them, which answers with a ``Retry-After`` of a second."""
    gateway.update_endpoints([servers.record(0)])
    model, endpoint.limited = await gateway.open("t/default/0", "default"), 1
    status, said = await call(model, {"messages": conversation("hello"), "temperature": 0})
    assert (status, said["choices"][0]["message"]["content"]) == (200, "fine")
    first, second = endpoint.asked("openai")[2:]
    assert second[3] - first[3] >= 1.0
    recording = await gateway.close("t/default/0")
    (turn,) = recording.turns  # a call without known tokens
    assert (turn.sequence, turn.token_end, turn.finish_reason, turn.server) == (-1, 0, "stop", "default.0")
    assert recording.sequences == []
    parts = {"turns": recording.turns, "messages": recording.messages, "artifacts": [calls_artifact(recording)]}
    kept = Trajectory("t/default/0", "t", "t/default", "default", "mine", "completed", **parts)  # type: ignore[arg-type]
    (again,) = calls_of(kept)  # for a replay
    assert (again.sample.text, again.sample.tokens, again.asked) == (
        "fine",
        [],
        conversation_digest(conversation("hello")),
    )


@in_loop
async def test_what_no_later_start_would_mend_ends_at_once_with_its_cause(servers: Servers) -> None:
    expected = {
        "/nothing/here": "HTTP 404.*no /nothing/here/chat/completions",
        "/refuses": "HTTP 400.*The model `one` is not served",
        "/forbids": "refuses the key of model.api_key_file: HTTP 403.*your plan has no models",
        "/lists": "HTTP 400.*The model `three` is not served.*it lists one, two",
    }
    async with rented() as (endpoint, url):
        for place in expected:
            start(servers, url + place, "three" if place == "/lists" else "one")
        ends = [asyncio.to_thread(process.wait, 60) for process in servers.processes]
        assert await asyncio.gather(*ends) == [2] * len(expected)
    for number, (place, said) in enumerate(expected.items()):
        failed = json.loads((servers.run.endpoints / f"default.{number}.failed.json").read_text())
        assert failed["lasting"], failed
        assert len(endpoint.asked(place.split("/")[1])) == (1 if place == "/forbids" else 3)
        assert re.search(said, failed["cause"]), failed["cause"]
        assert KEY not in failed["cause"]


async def until_shown(servers: Servers, state: str) -> dict[str, Any]:
    """Return the server's entry in a status, once it has this state."""
    deadline = time.monotonic() + 60
    while True:
        found = engine_servers(servers.run, False)
        if [entry["state"] for entry in found] == [state]:
            return found[0]
        assert time.monotonic() < deadline, found
        await asyncio.sleep(0.1)


@in_loop
async def test_an_endpoint_that_is_down_is_shown_with_its_cause(servers: Servers) -> None:
    endpoint, application = Rented(), web.Application()
    application.router.add_route("*", "/{path:.*}", endpoint.answer)
    async with rented() as (_, url):
        pass  # nobody listens there now
    start(servers, f"{url}/v1")
    down = await until_shown(servers, "down")
    assert re.search(rf"{url}/v1/models: .*Connect call failed", down["cause"]), down
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", int(url.rpartition(":")[2])).start()
    assert "cause" not in await until_shown(servers, "serving")
    async with servers.gateway(wait_s=60) as gateway:
        model = await gateway.open("t/default/0", "default")
        await runner.cleanup()
        calling = asyncio.create_task(call(model, {"messages": conversation("hello"), "temperature": 0}))
        down = await until_shown(servers, "down")
        assert down["cause"].startswith(f"{url}/v1/chat/completions does not answer: ClientConnect"), down
        calling.cancel()


def test_an_endpoint_needs_no_gpu_and_says_what_its_address_lacks(tmp_path: Path) -> None:
    section: dict[str, Any] = {"engine": "external", "base_url": "https://models.site.edu/openai", "path": "gpt"}
    (kind,) = parse({"name": "x", "model": section, "pool": {}}).policies()["default"].model.kinds()  # type: ignore[union-attr]
    assert (kind.gpus, kind.path) == (0, "gpt")
    also = {"engine": "vllm", "path": "/m", "gpus": 2, "also": [{"engine": "external", "base_url": "http://h"}]}
    policy = parse({"name": "x", "model": also, "pool": {}}).policies()["default"]
    assert [kind.gpus for kind in policy.model.kinds()] == [2, 0]  # type: ignore[union-attr]
    for wrong, said in {
        "models.site.edu": "expected http:// or https://",
        "https://h/v1?version=2": "without a query",
    }.items():
        with pytest.raises(ConfigError, match=said):
            parse({"name": "x", "model": {**section, "base_url": wrong}, "pool": {}})
    (tmp_path / "key").write_text(KEY)
    (tmp_path / "key").chmod(0o644)
    (tmp_path / "c.yaml").write_text(
        "name: x\ntasks: x\nagent: nop\nmodel:\n  engine: external\n  base_url: http://h\n  api_key_file: key\n"
    )
    policy = load(tmp_path / "c.yaml").policies()["default"]
    with pytest.raises(ConfigError, match=r"c.yaml:7: model.api_key_file: key: others .*mode 0644.; chmod 600"):
        absolute(policy, tmp_path, Campaign.from_yaml(tmp_path / "c.yaml").where, "default", False)
    with pytest.raises(ConfigError, match="chmod 600"):
        adapters.launch({**section, "api_key_file": str(tmp_path / "key")}, "p", tmp_path)


SUM = """\
from pathlib import Path
from megaflow_hpc.tasks.judging import Rubric

RUBRIC = Rubric.read(Path(__file__).with_name("rubric.yaml"))

class Sum:
    image = "none"
    instruction = "What is 2 + 2?"

    async def score(self, sandbox, roles, judge):
        assert roles["checker"][-1]["content"] == "fine", roles
        return await RUBRIC.score(judge, roles["writer"])
"""


@pytest.mark.slow
@in_loop
async def test_a_role_and_a_judge_may_each_be_a_rented_model(tmp_path: Path) -> None:
    """The role's calls are recorded as text. The judge's API takes no ``max_tokens``, which rubrics set."""
    (tmp_path / "sums.py").write_text(SUM)
    (tmp_path / "rubric.yaml").write_text("criteria: [{name: polite, text: The answer is polite.}]\nvotes: 3\n")
    (tmp_path / "author.yaml").write_text(yaml.safe_dump({"default": ["4"]}))
    (tmp_path / "key").write_text(f"{KEY}\n")
    (tmp_path / "key").chmod(0o600)
    async with rented() as (endpoint, url):
        model = {"engine": "openai", "base_url": f"{url}/lists", "api_key_file": "key"}
        fields = {
            "name": "rented",
            "tasks": "sums:Sum",
            "agent": {"name": "megaflow_hpc.agents.teams:WriterChecker", "args": {"max_tokens": 9}},
            "models": {
                "author": {"engine": "scripted", "script": "author.yaml"},
                "second": {**model, "path": "one"},
                "grader": {**model, "path": "two", "judge": True, "price": [1e6, 2e6]},
            },
            "team": {"writer": "author", "checker": "second"},
        }
        (tmp_path / "campaign.yaml").write_text(yaml.safe_dump(fields, sort_keys=False))
        result, done = await asyncio.to_thread(run_local, tmp_path / "campaign.yaml")
    assert done.returncode == 0, done.stderr
    with open_trajectories(result["run"]) as store:
        (row,) = store
        assert (row.status, row.error, row.rewards) == ("completed", "", {"reward": 1.0, "polite": 1.0})
        assert [(turn.role, turn.policy, turn.sequence >= 0) for turn in row.turns] == [
            ("writer", "author", True),
            ("checker", "second", False),
        ] * 2
        assert {sequence.policy for sequence in row.sequences} == {"author"}
        kept = {artifact.name: artifact.data for artifact in row.artifacts}
    assert [call["model"] for call in json.loads(kept["judge.json"])] == ["grader"] * 3
    asked = [body for method, path, body, _ in endpoint.heard if "chat" in path]
    assert [body["max_completion_tokens"] for body in asked if body["model"] == "two"][-3:] == [1024] * 3
    assert result["models"]["grader"] == {"calls": 3, "prompt_tokens": 15, "sampled_tokens": 3, "usd": 21.0}
    assert not [name for name, data in kept.items() if KEY.encode() in data]
