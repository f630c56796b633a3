"""Small services of the base image, and Harbor tasks that use them."""

from __future__ import annotations

import json
import stat
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from megaflow_hpc.environments import SandboxSpec
from megaflow_hpc.environments.services.group import PlannedService, ServiceGroup
from megaflow_hpc.types import HealthCheck, Service
from tests.support.campaigns import Make
from tests.support.sandboxes import Start

ECHO = """
import socketserver, sys
class Echo(socketserver.StreamRequestHandler):
    def handle(self):
        for line in self.rfile:
            self.wfile.write(sys.argv[2].encode() + line)
socketserver.ThreadingTCPServer.request_queue_size = 200
socketserver.ThreadingTCPServer(("0.0.0.0", int(sys.argv[1])), Echo).serve_forever()
"""
"""Answers each line with its second argument and the line."""

ASK = """
import socket, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=20) as out:
    out.sendall(sys.argv[3].encode() + b"\\n")
    print(out.makefile().readline(), end="")
"""
"""Sends a line to NAME PORT and prints the answer."""


def echo_service(name: str = "echo", port: int = 7000, **fields: Any) -> Service:
    """Returns a service that answers each line with its name and the line."""
    command = ("python3", "-c", ECHO, str(port), f"{name} ")
    health = HealthCheck(ready_s=30)
    return Service(**{"name": name, "command": command, "ports": (port,), "health": health, **fields})


def group_of(start: Start, *services: Service, **spec: Any) -> ServiceGroup:
    """Returns services whose sandboxes have the image of ``start``."""
    planned = [PlannedService(service, SandboxSpec(start.image, network="gateway", **spec)) for service in services]
    return ServiceGroup(planned, lambda wanted: start(**{field: getattr(wanted, field) for field in vars(wanted)}))


def ask(name: str, port: int, line: str) -> list[str]:
    """Returns a command that asks an echo service."""
    return ["python3", "-c", ASK, name, str(port), line]


SHOP = """
import http.server, json
items = ["rope"]
class Shop(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer(items)
    def do_POST(self):
        items.append(self.rfile.read(int(self.headers["Content-Length"])).decode())
        self.answer(items)
    def answer(self, value):
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
print("open", flush=True)
http.server.ThreadingHTTPServer(("0.0.0.0", 5000), Shop).serve_forever()
"""
"""Keeps a list of items: GET returns it, POST appends to it."""

MCP = """
import http.server, json
TOOL = {"name": "secret", "description": "Returns a secret.", "inputSchema": {"type": "object", "properties": {}}}
class Tools(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_error(405)
    do_DELETE = do_GET
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        print(asked.get("method"), flush=True)
        if "id" not in asked:
            self.send_response(202)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        version = asked.get("params", {}).get("protocolVersion", "2025-03-26")
        result = {
            "initialize": {
                "protocolVersion": version,
                "capabilities": {"tools": {}},
                "serverInfo": {"name": "vault", "version": "1"},
            },
            "tools/list": {"tools": [TOOL]},
            "tools/call": {"content": [{"type": "text", "text": "the secret is 4711"}]},
            "ping": {},
        }.get(asked["method"])
        answer = {"jsonrpc": "2.0", "id": asked["id"]}
        answer |= {"result": result} if result is not None else {"error": {"code": -32601, "message": "no such method"}}
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
http.server.ThreadingHTTPServer(("0.0.0.0", 8000), Tools).serve_forever()
"""
"""A server of one tool by the Model Context Protocol, over HTTP."""

TASK_TOML = """\
version = "1.0"
[agent]
timeout_sec = 120.0
[verifier]
timeout_sec = 60.0
[environment]
docker_image = "base"
workdir = "/app"
memory_mb = 1000
"""


def write_compose_task(
    root: Path,
    name: str,
    compose: str,
    files: Mapping[str, str],
    solution: str,
    test: str,
    toml: str = TASK_TOML,
) -> Path:
    """Writes a Harbor task with services.

    Args:
        files: path below ``environment/`` → text.
        test: shell command that is true of a solved task.
    """
    task = root / name
    texts = {
        "task.toml": toml,
        "instruction.md": f"Task {name}: use the services.\n",
        "environment/docker-compose.yaml": textwrap.dedent(compose),
        "solution/solve.sh": f"#!/bin/bash\n{solution}\n",
        "tests/test.sh": f"#!/bin/bash\nif {test}; then echo 1; else echo 0; fi > /logs/verifier/reward.txt\n",
        **{f"environment/{path}": text for path, text in files.items()},
    }
    for path, text in texts.items():
        file = task / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    for script in (task / "solution" / "solve.sh", task / "tests" / "test.sh"):
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return task


SHOP_COMPOSE = """
services:
  main:
    depends_on:
      shop: {condition: service_healthy}
  shop:
    build: {context: ./shop}
    expose: ["5000"]
    environment:
      - GREETING=${GREETING:-hello}
    healthcheck:
      test: ["CMD", "python3", "-c", "import socket; socket.create_connection(('localhost', 5000), timeout=2).close()"]
      interval: 1s
      retries: 15
      start_period: 5s
"""
SHOP_FILES = {
    "shop/Dockerfile": 'FROM base\nWORKDIR /srv\nCOPY shop.py .\nEXPOSE 5000\nCMD ["python3", "shop.py"]\n',
    "shop/shop.py": SHOP,
}
BUY = """python3 - <<'EOF'
import urllib.request
asked = urllib.request.urlopen("http://shop:5000/items", data=b"lamp", timeout=20)
open("/app/items.json", "wb").write(asked.read())
EOF"""
BOUGHT = 'grep -q \'\\["rope", "lamp"\\]\' /app/items.json && python3 -c ' + json.dumps(
    "import urllib.request as u; assert b'lamp' in u.urlopen('http://shop:5000/', timeout=20).read()"
)
"""The tests see the agent's file, and the service in the state that the agent left."""


def write_campaign(root: Path, base_sif: Path, **more: Any) -> Path:
    campaign = {
        "name": "beside",
        "tasks": "tasks/*",
        "agent": ["oracle", "nop"],
        "environment": {"network": "none", "images": {"base": str(base_sif)}},
        **more,
    }
    path = root / "campaign.yaml"
    path.write_text(yaml.safe_dump(campaign))
    return path


COUNTER = """
import itertools, socket, time
time.sleep(1)
server, count = socket.create_server(("0.0.0.0", 7000)), itertools.count()
while True:
    peer, _ = server.accept()
    with peer:
        if line := peer.makefile("rb").readline():
            peer.sendall(b"%d\\n" % next(count))
"""


def write_counting(
    root: Path, base_sif: Path, make_task: Make, pause_s: float = 0.0, per: str = "campaign", **more: Any
) -> Path:
    """Writes a campaign of four rollouts, each of which takes a number from one service that they share."""
    command = f"python3 -c '{ask('counter', 7000, 'x')[2]}' counter 7000 x"
    make_task(
        root / "tasks", "count", solution=f"sleep {pause_s}; {command} > answer", test="grep -qE '^[0-9]+$' answer"
    )
    counter = {"image": "base", "command": ["python3", "-c", COUNTER], "ports": [7000], "per": per}
    return write_campaign(root, base_sif, agent="oracle", samples=4, services={"counter": counter}, **more)
