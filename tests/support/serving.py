"""Real model servers for tests: the wrapper process with a scripted or vLLM engine, and a gateway that knows them."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from aiohttp import web

from megaflow_hpc.model.engines.adapters import launch
from megaflow_hpc.model.engines.launch import Launch
from megaflow_hpc.model.engines.scripted.engine import ScriptedEngine
from megaflow_hpc.model.engines.scripted.script import load
from megaflow_hpc.model.gateway.server import ModelGateway
from megaflow_hpc.model.server.proxy import Proxy
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.record import PolicyRecord, RunRecord, ServerRecord, read_run, write_run
from megaflow_hpc.trajectory import Recording
from megaflow_hpc.types import ModelEndpoint


class Servers:
    """A run directory and the model servers that were started on it. Use it as a context manager."""

    def __init__(self, folder: Path) -> None:
        self.run = RunDir(folder / "run")
        self.run.create()
        self.entries: list[ServerRecord] = []
        self.processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Servers:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.terminate()
        for process in self.processes:
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def start(self, model: Mapping[str, Any], policy: str = "default", *options: str, **env: str) -> int:
        """Starts the wrapper of one more array element; its number."""
        number = len(self.entries)
        self.entries.append(ServerRecord(policy, dict(model)))
        policies = {entry.policy: PolicyRecord(model=entry.model) for entry in self.entries}
        write_run(self.run, RunRecord(servers=self.entries, policies=policies, campaign={"name": "served"}))
        self.serve(number, *options, **env)
        return number

    def serve(self, number: int, *options: str, **env: str) -> None:
        """Starts the wrapper of an element that run.json contains."""
        self.entries = self.entries or read_run(self.run).servers
        quickly = ["--backoff-s", "0.2", "--poll-s", "0.2"]  # explicit options come later and win
        command = [sys.executable, "-m", "megaflow_hpc.model.server", str(self.run), *quickly, *options]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_")}
        environment |= {"SLURM_ARRAY_TASK_ID": str(number), **env}
        self.processes.append(subprocess.Popen(command, env=environment))

    def script(self, script: Mapping[str, Any], policy: str = "default", *options: str, **args: Any) -> int:
        """Starts a server that answers from ``script``."""
        file = self.run.path / f"script{len(self.entries)}.yaml"
        file.write_text(yaml.safe_dump(dict(script)))
        return self.start({"engine": "scripted", "script": str(file), "args": args}, policy, *options)

    def file(self, number: int) -> Path:
        """The endpoint file of server ``number``."""
        return self.run.endpoints / f"{self.entries[number].policy}.{number}.json"

    def record(self, number: int, timeout_s: float = 180.0) -> dict[str, Any]:
        """The endpoint file, once it exists."""
        deadline = time.monotonic() + timeout_s
        while not self.file(number).exists():
            if self.processes[number].poll() is not None or time.monotonic() > deadline:
                log = self.run.logs / f"{self.entries[number].policy}.{number}.engine.log"
                tail = log.read_text()[-3000:] if log.exists() else "no log"
                raise AssertionError(f"server {number} did not register: {self.processes[number].poll()}\n{tail}")
            time.sleep(0.02)
        return json.loads(self.file(number).read_text())

    def await_load(self, number: int, in_flight: int, timeout_s: float = 60.0) -> dict[str, Any]:
        """The endpoint file, once this many requests are in flight and two more heartbeats have passed."""
        since, deadline = self.record(number)["heartbeat"], time.monotonic() + timeout_s
        while (found := self.record(number))["heartbeat"] < since + 2 or found["in_flight"] < in_flight:
            assert time.monotonic() < deadline, found
            time.sleep(0.02)
        return found

    def records(self) -> list[dict[str, Any]]:
        """All endpoint records."""
        return [json.loads(f.read_text()) for f in self.run.endpoints.glob("*.json")]

    def signal(self, number: int, which: signal.Signals) -> None:
        """Sends a signal to the server's wrapper."""
        self.processes[number].send_signal(which)

    @contextlib.asynccontextmanager
    async def gateway(self, **options: Any) -> AsyncIterator[ModelGateway]:
        """A gateway that has the list of the current servers."""
        await asyncio.gather(*(asyncio.to_thread(self.record, n) for n in range(len(self.entries))))
        async with ModelGateway(**options) as gateway:
            gateway.update_endpoints(self.records())
            yield gateway


class Engines:
    """Scripted engines in this process, for tests that need no server's processes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._engines: list[tuple[str, ScriptedEngine]] = []

    def script(self, script: Mapping[str, Any], policy: str = "default", max_model_len: int = 1_000_000) -> None:
        """Adds an engine that answers from ``script``."""
        file = self._folder / f"script{len(self._engines)}.yaml"
        file.write_text(yaml.safe_dump(dict(script)))
        self._engines.append((policy, ScriptedEngine(load(file), policy, max_model_len)))

    @contextlib.asynccontextmanager
    async def gateway(self, **options: Any) -> AsyncIterator[ModelGateway]:
        """Serves the engines, and yields a gateway that has the list of them."""
        async with contextlib.AsyncExitStack() as stack:
            records = []
            for number, (policy, engine) in enumerate(self._engines):
                port = await stack.enter_async_context(listening(engine.application()))
                records.append(endpoint(port, policy, server=f"{policy}.{number}", model_name=policy))
            gateway = await stack.enter_async_context(ModelGateway(**options))
            gateway.update_endpoints(records)
            yield gateway


class Proxies:
    """Servers' proxies of endpoints in this process, for tests that need no server's processes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._endpoints: list[tuple[str, Launch]] = []

    def start(self, model: Mapping[str, Any], policy: str = "default") -> None:
        """Adds the proxy of an endpoint."""
        self._endpoints.append((policy, launch(model, policy, self._folder)))

    @contextlib.asynccontextmanager
    async def gateway(self, **options: Any) -> AsyncIterator[ModelGateway]:
        """Starts the proxies, and yields a gateway that has the list of them."""
        async with contextlib.AsyncExitStack() as stack:
            records = []
            for number, (policy, engine) in enumerate(self._endpoints):
                proxy = Proxy()
                await proxy.start()
                stack.push_async_callback(proxy.stop)
                await proxy.attach(engine)
                about = {"server": f"{policy}.{number}", "key": proxy.key, "model_name": engine.model_name}
                records.append(endpoint(proxy.port, policy, **about, protocol=engine.protocol, api=engine.api))
            gateway = await stack.enter_async_context(ModelGateway(**options))
            gateway.update_endpoints(records)
            yield gateway


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Runs an async test in an event loop of its own."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(test(*args, **kwargs))

    return run


def endpoint(address: int | str, policy: str = "p", **more: Any) -> dict[str, Any]:
    """The endpoint record of an engine at a port of this node, or at a URL."""
    url = address if isinstance(address, str) else f"http://127.0.0.1:{address}"
    record = {"server": f"{policy}.0", "policy": policy, "url": url, "key": "k", "model_name": "m"}
    return {**record, "protocol": "plain", **more}


@contextlib.asynccontextmanager
async def listening(application: web.Application | web.Server) -> AsyncIterator[int]:
    """Serves an application in this process; yields its port."""
    runner: web.BaseRunner = (
        web.AppRunner(application, access_log=None, handler_cancellation=True)
        if isinstance(application, web.Application)
        else web.ServerRunner(application)
    )
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


@contextlib.asynccontextmanager
async def gateway_before(
    engine: ScriptedEngine, protocol: str = "plain", policy: str = "default", **options: Any
) -> AsyncIterator[ModelGateway]:
    """A gateway and its engine, both in this process."""
    async with listening(engine.application()) as port, ModelGateway(**{"wait_s": 20, **options}) as gateway:
        gateway.update_endpoints([endpoint(port, policy, protocol=protocol)])
        yield gateway


async def recorded_chat(gateway: ModelGateway, turns: int, policy: str = "p", **options: Any) -> Recording:
    """Holds a conversation and returns its recording."""
    model = await gateway.open("t/p/0", policy)
    messages: list[dict[str, Any]] = [{"role": "user", "content": "question"}]
    for number in range(turns):
        answer = await answer_to(model, {"messages": messages, **options})
        messages += [answer["choices"][0]["message"], {"role": "user", "content": f"observation {number}"}]
    return await gateway.close("t/p/0")


def call_failure(gateway: ModelGateway, rollout_id: str) -> str:
    """Returns why the latest call of an open rollout got no answer. Unlike ``outage``, it does not end the rollout."""
    return gateway._by_id[rollout_id].failure


def conversation(*texts: str) -> list[dict[str, str]]:
    """Messages of user and assistant in turn."""
    return [{"role": "assistant" if n % 2 else "user", "content": text} for n, text in enumerate(texts)]


async def proxied(record: dict, method: str, path: str, key: str | None, body: dict | None = None) -> tuple[int, str]:
    """Returns status and text of a request to a server's proxy. Checks the certificate's fingerprint."""
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    pin = aiohttp.Fingerprint(bytes.fromhex(record["tls_fingerprint"]))
    async with aiohttp.ClientSession() as session:
        async with session.request(method, record["url"] + path, headers=headers, json=body, ssl=pin) as response:
            return response.status, (await response.read()).decode(errors="replace")


async def ask(record: dict, method: str, path: str, key: str | None, body: dict | None = None) -> int:
    """Returns the status of a request to a server's proxy."""
    return (await proxied(record, method, path, key, body))[0]


async def prompt_logprobs(record: dict[str, Any], tokens: Sequence[int]) -> list[float]:
    """Returns vLLM's log-probabilities of these ids, given as a prompt."""
    body = {"model": record["model_name"], "prompt": [*tokens], "max_tokens": 1, "prompt_logprobs": 0}
    _, text = await proxied(record, "POST", "/v1/completions", record["key"], body)
    entries = json.loads(text)["choices"][0]["prompt_logprobs"]
    return [float("nan")] + [e[str(t)]["logprob"] for e, t in zip(entries[1:], tokens[1:], strict=True)]


def chat(record: dict, key: str | None, text: str = "hello"):
    """Requests a conversation's next answer from a server's proxy."""
    return ask(record, "POST", "/v1/chat/completions", key, {"messages": conversation(text)})


LOOPBACK = ("0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F")
"""127.0.0.1, ::1 and ::ffff:127.0.0.1 in the form of /proc/net."""


def listeners(pid: int, loopback: bool = True) -> tuple[list[int], list[str]]:
    """Returns the TCP ports and Unix sockets on which ``pid`` and its descendants listen."""
    inodes = set()
    for process in {pid, *descendants(pid)}:
        for fd in Path(f"/proc/{process}/fd").iterdir():
            try:
                inodes.add(os.readlink(fd).removeprefix("socket:[").rstrip("]"))
            except OSError:
                pass
    rows = [row.split() for t in ("tcp", "tcp6") for row in Path(f"/proc/net/{t}").read_text().splitlines()[1:]]
    addresses = [row[1].rpartition(":") for row in rows if row[3] == "0A" and row[9] in inodes]
    ports = [int(port, 16) for address, _, port in addresses if loopback or address not in LOOPBACK]
    local = [row.split() for row in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return sorted(ports), sorted({row[7] for row in local if len(row) > 7 and row[6] in inodes})


def only_the_proxy_is_reached(servers: Servers, number: int) -> None:
    """Fails if other hosts reach any port but the proxy's, or other users reach any socket."""
    ports, rooms = listeners(servers.processes[number].pid, loopback=False)
    assert ports == [int(servers.record(number)["url"].rpartition(":")[2])]
    assert len(rooms) > 1
    assert {Path(room).parent.stat().st_mode & 0o077 for room in rooms} == {0}


async def ask_engine(servers: Servers, path: str, body: Any = None) -> tuple[int, Any]:
    """Returns status and JSON of a request to the first server's engine itself, past the proxy."""
    (socket,) = [path for path in listeners(servers.processes[0].pid)[1] if Path(path).name == "engine.sock"]
    async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(socket)) as session:
        async with session.request("POST" if body else "GET", f"http://engine{path}", json=body) as reply:
            return reply.status, await reply.json()


def descendants(pid: int) -> Sequence[int]:
    """Returns the processes that ``pid`` started, and their descendants."""
    pairs = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            pairs.append((int(entry.name), int((entry / "stat").read_text().rpartition(")")[2].split()[1])))
    found, todo = [], [pid]
    while todo:
        parent = todo.pop()
        children = [p for p, pp in pairs if pp == parent]
        found += children
        todo += children
    return found


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Servers]:
    """Engine servers on a run directory below ``tmp_path``. The test's end ends them."""
    with Servers(tmp_path) as started:
        yield started


@pytest.fixture
def proxies(tmp_path: Path) -> Proxies:
    """Proxies of endpoints in this process."""
    return Proxies(tmp_path)


@pytest.fixture
def engines(tmp_path: Path) -> Engines:
    """Scripted engines in this process."""
    return Engines(tmp_path)


async def call(model: ModelEndpoint, body: dict[str, Any], path: str = "/chat/completions", key: str | None = None):
    """The status and body of a call to a gateway: JSON, or the text of a stream."""
    headers = {"Authorization": f"Bearer {model.api_key if key is None else key}"}
    async with aiohttp.ClientSession() as session:
        async with session.post(model.base_url + path, json=body, headers=headers) as response:
            text = await response.text()
            return response.status, text if response.content_type == "text/event-stream" else json.loads(text)


async def answer_to(model: ModelEndpoint, body: dict[str, Any], path: str = "/chat/completions") -> Any:
    """The JSON answer to a call to a gateway, which must succeed."""
    status, answer = await call(model, body, path)
    assert status == 200, answer
    return answer
