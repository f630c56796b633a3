"""Connections that exhaust resources of gateway and proxy: idle, slow, malformed, many; with and without a key."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megaflow_hpc.environments.sandbox.commands.container import environment_text
from megaflow_hpc.host.process import MAX_DESCRIPTORS
from megaflow_hpc.model import http_server
from megaflow_hpc.model.gateway.engine_call import EngineClient
from megaflow_hpc.model.server.tenants import Tenants
from megaflow_hpc.rundir.engine_pool import EnginePool
from megaflow_hpc.types import ModelEndpoint
from tests.support.backends import proxy_of_script
from tests.support.crowds import crowd, descriptors, raw
from tests.support.serving import Servers, call, conversation, descendants
from tests.support.waiting import until_async

BODY = {"messages": conversation("hello")}
FEW = 400
"""Limit of the attacked process's descriptors. An attack opens more connections."""
MALFORMED = (
    b"POST / HTTP/1.1\r\nContent-Length: 4\r\nContent-Length: 5\r\n\r\n",
    b"\x00\x01\x02 garbage\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
    b"GET / HTTP/1.1\r\nX: " + b"a" * 20_000 + b"\r\n\r\n",
    b"GET / HTTP/1.1\r\n" + b"".join(b"X%d: a\r\n" % n for n in range(2000)) + b"\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """A server of an engine that answers "fine", and after ten minutes what mentions "slow"."""
    slow = {"when": "slow", "answers": [{"text": "late", "delay_s": 600}]}
    with Servers(tmp_path_factory.mktemp("served")) as servers:
        servers.script({"tasks": [slow], "default": ["fine"]}, "default", "--idle-s", "3600")
        servers.record(0)
        yield servers


def head_of(model: ModelEndpoint, key: str | None = None) -> str:
    """The head of a call, without the empty line that ends it."""
    path = "/" + model.base_url.split("/", 3)[3] + "/chat/completions"
    return f"POST {path} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {model.api_key if key is None else key}\r\n"


async def works(model: ModelEndpoint) -> None:
    """Checks that a call is answered and the process can start another process."""
    status, reply = await asyncio.wait_for(call(model, BODY), 60)
    assert (status, reply["choices"][0]["message"]["content"]) == (200, "fine")
    process = await asyncio.create_subprocess_exec("true")
    assert await process.wait() == 0


# --- without a key ---


@pytest.mark.parametrize("stranger", [True, False], ids=["another user", "this user"])
async def test_idle_connections_without_a_key_leave_descriptors_for_calls(servers: Servers, stranger: bool) -> None:
    with descriptors(FEW):
        async with servers.gateway() as gateway:
            model = await gateway.open("t/default/0", "default")
            async with crowd(gateway.port, 2 * FEW, stranger=stranger) as found:
                for _ in range(3):
                    await works(model)
            assert found["made"] == 2 * FEW
            assert 0 < found["open"] <= FEW // 4


async def test_a_connection_shows_a_key_in_time_or_is_closed(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections that send nothing, half a head, single bytes, a wrong key or HEAD are closed. One with a key
    stays."""
    monkeypatch.setattr(http_server, "KEY_TIMEOUT_S", 0.5)
    async with servers.gateway() as gateway:
        model = await gateway.open("t/default/0", "default")
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        lists = head_of(model).replace("POST", "GET").replace("chat/completions", "models").encode() + b"\r\n"
        writer.write(lists)
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        says = ["", "GET /r/", head_of(model), head_of(model, "x") + "Content-Length: 0\r\n\r\n"]
        says += [head_of(model, "x") + "Content-Length: 99999\r\n\r\n{", "HEAD / HTTP/1.1\r\nHost: a\r\n\r\n"]
        closed = await asyncio.gather(*(raw(gateway.port, text.encode()) for text in says))
        assert [answer.split(b" ")[1:2] for answer in closed] == [[]] * 3 + [[b"401"]] * 2 + [[b"200"]]
        await slowly(gateway.port, head_of(model))
        writer.write(lists.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
        assert b"HTTP/1.1 200" in await asyncio.wait_for(reader.read(), 30)
        writer.close()


async def slowly(port: int, text: str) -> None:
    """Sends byte after byte until the other side closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    closed = asyncio.create_task(reader.read())
    for _ in range(600):
        for byte in text.encode():
            writer.write(bytes([byte]))
            await asyncio.sleep(0.05)
            if closed.done():
                writer.close()
                return
    raise AssertionError("a head that never ends was waited for")


async def test_a_closed_rollouts_connections_are_closed(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "KEY_TIMEOUT_S", 0.5)
    async with servers.gateway() as gateway:
        model = await gateway.open("t/default/0", "default")
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        writer.write(head_of(model).replace("POST", "GET").replace("chat/completions", "models").encode() + b"\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        await gateway.close("t/default/0")
        await asyncio.wait_for(reader.read(), 30)
        writer.close()


# --- the proxy, where TLS comes first ---


@pytest.mark.parametrize("says", ["", "\x16\x03\x01"], ids=["silent", "half a handshake"])
async def test_handshakes_that_never_end_leave_room_for_calls(tmp_path: Path, says: str) -> None:
    with descriptors(FEW):
        async with proxy_of_script(tmp_path, tls=True) as (proxy, fingerprint):
            async with crowd(proxy.port, 2 * FEW, says, stranger=True) as found:
                for _ in range(3):
                    client = EngineClient()  # without a connection from before
                    answer = await client.post(
                        f"https://127.0.0.1:{proxy.port}/v1/chat/completions",
                        json.dumps(BODY).encode(),
                        key=proxy.key,
                        fingerprint=fingerprint,
                        timeout_s=60,
                    )
                    assert answer.status == 200
                    await client.close()
            assert found["made"] == 2 * FEW
            assert found["open"] <= FEW // 4


async def test_a_handshake_ends_in_time_or_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "KEY_TIMEOUT_S", 0.5)
    async with proxy_of_script(tmp_path, tls=True) as (proxy, _):
        assert await raw(proxy.port) == b""
        assert await raw(proxy.port, b"\x16\x03\x01") == b""
        assert await raw(proxy.port, b"GET / HTTP/1.1\r\n\r\n") == b""  # no TLS at all


# --- what is malformed ---


@pytest.mark.parametrize("where", ["gateway", "proxy"])
async def test_malformed_requests_cost_a_line_and_no_traceback(
    servers: Servers, tmp_path: Path, caplog: pytest.LogCaptureFixture, where: str
) -> None:
    async with servers.gateway() as gateway, proxy_of_script(tmp_path) as (proxy, _):
        port = gateway.port if where == "gateway" else proxy.port
        with caplog.at_level(logging.WARNING):
            for _ in range(20):
                for bytes_ in MALFORMED:
                    answer = await raw(port, bytes_)
                    assert answer == b"" or answer.startswith(b"HTTP/1.0 400"), answer[:100]
        ours = [r for r in caplog.records if r.name != "asyncio"]
        assert 1 <= len(ours) <= 3
        assert len(caplog.records) <= 6
        assert not any(r.exc_info for r in caplog.records)
        assert "malformed requests" in caplog.text


async def test_descriptors_that_have_run_out_cost_a_pause_and_no_log(
    servers: Servers, caplog: pytest.LogCaptureFixture
) -> None:
    async with servers.gateway() as gateway:
        model = await gateway.open("t/default/0", "default")
        with caplog.at_level(logging.WARNING):
            spare = [socket.socket() for _ in range(50)]
            clients = [socket.socket() for _ in range(20)]
            with descriptors(max(int(name) for name in os.listdir("/proc/self/fd"))):
                filler = []
                while True:
                    try:
                        filler.append(os.dup(0))
                    except OSError:
                        break
                for client in clients:
                    client.setblocking(False)
                    client.connect_ex(("127.0.0.1", gateway.port))
                await until_async(lambda: caplog.records, "what is said of it")
                await asyncio.sleep(1.0)  # in which a server that tries again and again says so again and again
            for one in [*spare, *clients]:
                one.close()
            for descriptor in filler:
                os.close(descriptor)
            await works(model)
        assert len(caplog.records) <= 3, caplog.text[:3000]


@pytest.mark.parametrize("header", ["Authorization: Bearer ", "x-api-key: ", "Authorization: "])
@pytest.mark.parametrize("key", [b"\xff\xfe", b"\xed\xa0\x80", "schlüssel".encode("latin-1")])
async def test_a_key_that_is_no_text_is_a_wrong_key(
    servers: Servers, tmp_path: Path, caplog: pytest.LogCaptureFixture, header: str, key: bytes
) -> None:
    tenants = Tenants(EnginePool(servers.run.path), {})
    place = tmp_path / "pool"
    place.mkdir()
    async with (
        servers.gateway() as gateway,
        proxy_of_script(tmp_path) as (proxy, _),
        proxy_of_script(place, tenants=tenants) as (pool, _),
    ):
        model = await gateway.open("t/default/0", "default")
        path = head_of(model).split(" ")[1]
        end = b"Content-Length: 2\r\nConnection: close\r\n\r\n{}"
        for port, where in ((gateway.port, path), (proxy.port, "/v1/models"), (pool.port, "/v1/models")):
            head = f"POST {where} HTTP/1.1\r\nHost: a\r\n{header}".encode() + key + b"\r\n" + end
            assert (await raw(port, head)).startswith(b"HTTP/1.1 401")
    assert not any(r.exc_info for r in caplog.records)


# --- with a key ---


@pytest.mark.parametrize("says", ["half a body", "a call that waits"])
async def test_one_rollouts_connections_leave_room_for_anothers(servers: Servers, says: str) -> None:
    """An agent opens as many connections as it can with its own key, each with a slow request."""
    with descriptors(FEW):
        async with servers.gateway() as gateway:
            hostile = await gateway.open("t/default/0", "default")
            other = await gateway.open("u/default/0", "default")
            body = json.dumps({"messages": conversation("slow")})
            sent = "{" if says == "half a body" else body
            text = f"{head_of(hostile)}Content-Length: {len(body)}\r\n\r\n{sent}"
            async with crowd(gateway.port, 2 * FEW, text) as found:
                for _ in range(3):
                    await works(other)
            assert found["open"] <= FEW // 2
            assert found["said"]["HTTP/1.1 429 Too Many Requests"] > FEW // 2
            await gateway.close("t/default/0")
            await works(other)


async def test_a_rollouts_idle_connections_make_way_for_its_new_ones(servers: Servers) -> None:
    with descriptors(FEW):
        async with servers.gateway() as gateway:
            model = await gateway.open("t/default/0", "default")
            text = head_of(model).replace("POST", "GET").replace("chat/completions", "models") + "\r\n"
            async with crowd(gateway.port, 2 * FEW, text) as found:
                await works(model)
            assert found["said"]["HTTP/1.1 200 OK"] == 2 * FEW
            assert "HTTP/1.1 429 Too Many Requests" not in found["said"]


# --- the limit itself ---


def soft_limit(pid: int) -> int:
    lines = Path(f"/proc/{pid}/limits").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("Max open files")).split()[3])


def test_server_and_runner_raise_their_limit(tmp_path: Path) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    enough = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    ours, theirs = socket.socketpair()
    with Servers(tmp_path) as servers:
        with descriptors(512):
            servers.script({"default": ["fine"]})
            command = [sys.executable, "-m", "megaflow_hpc.pod.rollout.runner", str(theirs.fileno())]
            runner = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        try:
            servers.record(0)
            assert soft_limit(servers.processes[0].pid) == enough
            asyncio.run(until_async(lambda: soft_limit(runner.pid) == enough, "the runner's limit"))
            assert descendants(servers.processes[0].pid)
        finally:
            ours.close()
            theirs.close()
            assert runner.wait(60) == 0


def test_programs_in_a_sandbox_start_with_the_limit_from_before() -> None:
    program = (
        "from megaflow_hpc.host.process import raise_descriptor_limit, descriptor_limit\n"
        "from megaflow_hpc.environments.sandbox.commands.container import environment_text\n"
        "import subprocess\n"
        "raise_descriptor_limit()\n"
        "text = environment_text({}, False) + 'ulimit -Sn; ulimit -Hn\\n'\n"
        "shell = subprocess.run(['/bin/sh', '-c', text], capture_output=True, text=True, check=True)\n"
        "print(shell.stdout, descriptor_limit())\n"
    )
    with descriptors(512):
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    inside, hard, ours = done.stdout.split()
    assert (inside, hard) == ("512", str(resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    assert int(ours) > 512
    assert "ulimit -Sn" not in environment_text({}, False)  # nothing was raised here
