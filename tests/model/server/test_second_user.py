"""Another user of the node tries every route of engine, proxy and gateway, and listens on a dead engine's port."""

from __future__ import annotations

import asyncio
import signal
import socket
import ssl
import threading
from pathlib import Path

import pytest

from megaflow_hpc.model.engines.scripted.engine import ScriptedEngine
from megaflow_hpc.model.engines.scripted.script import Script
from megaflow_hpc.model.server.proxy import MODEL_PATHS
from tests.support.second_user import as_second_user
from tests.support.serving import Servers, call, conversation, descendants, listeners

INTRUDER = """
import http.client, json, os, socket, ssl, sys
told = json.load(sys.stdin)
found = {"uid": os.getuid(), "answers": [], "files": {}, "sockets": {}, "processes": {}}
context = ssl._create_unverified_context()
for base, method, path, headers in told["requests"]:
    scheme, _, place = base.partition("://")
    host, _, port = place.partition(":")
    kind = http.client.HTTPSConnection if scheme == "https" else http.client.HTTPConnection
    connection = kind(host, int(port), timeout=120, **({"context": context} if scheme == "https" else {}))
    body = json.dumps({"model": "x", "prompt": "p", "messages": [{"role": "user", "content": "hello"}]})
    connection.request(method, path, body if method == "POST" else None, headers)
    answer = connection.getresponse()
    found["answers"].append([base, method, path, answer.status, answer.read().decode()[:500]])
    connection.close()
def attempt(what, action):
    try:
        return action(what)
    except OSError as error:
        return type(error).__name__
def connect(path):
    client = socket.socket(socket.AF_UNIX)
    client.connect(path)
    return "connected"
found["files"] = {f: attempt(f, lambda p: open(p).read()) for f in told["files"]}
found["sockets"] = {s: attempt(s, connect) for s in told["sockets"]}
for pid in told["processes"]:
    found["processes"][pid] = attempt(pid, lambda p: open(f"/proc/{p}/environ").read())
    found["processes"][f"{pid} memory"] = attempt(pid, lambda p: open(f"/proc/{p}/mem").read(1))
    try:
        os.kill(int(pid), 15)
        found["processes"][f"{pid} signal"] = "sent"
    except OSError as error:
        found["processes"][f"{pid} signal"] = type(error).__name__
print(json.dumps(found))
"""


def routes(record: dict, gateway_url: str, token: str) -> list[tuple[str, str, str, dict[str, str]]]:
    """Every listener's routes, without a key and with wrong keys."""
    engine = [(r.method, r.resource.canonical) for r in ScriptedEngine(Script(), "x").application().router.routes()]
    further = [("GET", "/docs"), ("GET", "/openapi.json"), ("POST", "/tokenize"), ("GET", "/server_info"), ("GET", "/")]
    proxied = [*MODEL_PATHS, *engine, *further]
    gateway = [
        ("POST", f"/r/{t}/v1{p}") for t in (token, "x") for p in ("/chat/completions", "/messages", "/responses")
    ]
    gateway += [("GET", f"/r/{token}/v1/models"), ("GET", "/"), ("GET", "/metrics"), ("POST", "/v1/chat/completions")]
    places = [(record["url"], *r) for r in proxied] + [(gateway_url, *r) for r in gateway]
    keys = ({}, {"Authorization": "Bearer wrong"}, {"x-api-key": "wrong"})
    return [(*place, key) for place in places for key in keys]


def test_a_stranger_gets_nothing_from_engine_proxy_and_gateway(servers: Servers) -> None:
    servers.script({"default": ["secret"]})
    record = servers.record(0)

    async def scenario() -> dict:
        async with servers.gateway() as gateway:
            model = await gateway.open("t/default/0", "default")
            base, _, rest = model.base_url.partition("/r/")
            pids = [servers.processes[0].pid, *descendants(servers.processes[0].pid)]
            _, rooms = listeners(pids[0])
            assert [Path(room).name for room in rooms] == ["engine.sock"]
            told = {
                "requests": routes(record, base, rest.partition("/")[0]),
                "files": [str(p) for p in servers.run.endpoints.iterdir()],
                "sockets": rooms,
                "processes": [str(pid) for pid in pids],
            }
            assert len(told["files"]) == 1
            return await asyncio.to_thread(as_second_user, INTRUDER, told)

    found = asyncio.run(scenario())
    assert {answer[3] for answer in found["answers"]} == {401}
    assert not any("secret" in answer[4] for answer in found["answers"])
    assert set(found["files"].values()) == {"PermissionError"}
    assert set(found["sockets"].values()) == {"PermissionError"}
    assert set(found["processes"].values()) == {"PermissionError"}
    assert servers.processes[0].poll() is None


class Squatter:
    """A process on the port of a dead engine. It supports TLS with its own certificate and keeps every byte it gets."""

    def __init__(self, port: int, folder: Path, tls: bool) -> None:
        from megaflow_hpc.model.server.proxy import make_context

        self.context: ssl.SSLContext | None = make_context(folder)[0] if tls else None
        self.listener = socket.create_server(("0.0.0.0", port), reuse_port=False)
        self.connections, self.sent, self.raw = 0, b"", b""
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self.listener.accept()
            except OSError:
                return
            self.connections += 1
            client.settimeout(3)
            try:
                if self.context is not None:
                    client = self.context.wrap_socket(client, server_side=True)
                while data := client.recv(65536):
                    self.sent += data
            except OSError:
                pass
            finally:
                client.close()


@pytest.mark.slow
def test_who_takes_a_dead_engines_port_gets_not_one_byte_of_key_or_prompt(servers: Servers, tmp_path: Path) -> None:
    servers.script({"default": ["fine"]})
    record = servers.record(0)
    servers.signal(0, signal.SIGKILL)
    servers.processes[0].wait(20)
    assert servers.file(0).exists()  # nobody could take it away

    async def failure() -> str:
        async with servers.gateway(wait_s=1) as gateway:
            model = await gateway.open("t/default/0", "default")
            status, reply = await call(model, {"messages": conversation("a secret prompt")})
            assert status == 503
            return str(reply["error"]["message"])

    for tls in (True, False):
        squatter = Squatter(int(record["url"].rpartition(":")[2]), tmp_path, tls)
        said = asyncio.run(failure())
        squatter.listener.shutdown(socket.SHUT_RDWR)
        squatter.listener.close()
        assert squatter.connections >= 1
        if tls:
            assert "FingerprintMismatch" in said
            assert squatter.sent == b""  # after the handshake, nothing
        else:
            assert squatter.sent[:1] == b"\x16"  # the handshake's first record
            assert record["key"].encode() not in squatter.sent
            assert b"secret" not in squatter.sent
