"""The address that a node gives to others, in networks of one address family."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from megaflow_hpc.host import address
from megaflow_hpc.host.address import host_of_url, listen_everywhere

NODE = "2001:db8:1::5"
IPV6_ONLY = f"""
set -e
hostname node-without-records
mount --bind /dev/null /etc/hosts
ip link set lo up
ip addr del 127.0.0.1/8 dev lo
ip -6 addr add {NODE}/64 dev lo
ip -6 route add default dev lo
exec "$@"
"""
SERVE = """
import asyncio, os, aiohttp
from aiohttp import web
from megaflow_hpc.host.address import address, host_of_url
from megaflow_hpc.model.server.proxy import Proxy

async def main():
    proxy = Proxy()
    await proxy.start()
    url = f"http://{host_of_url(address())}:{proxy.port}"
    async with aiohttp.ClientSession() as session, session.get(f"{url}/v1/models") as answer:
        print(url.rpartition(":")[0], answer.status)
    await proxy.stop()

asyncio.run(main())
"""


def in_network(setup: str, *command: str, **environ: str) -> str:
    words = ["unshare", "-rnmu", "bash", "-c", setup, "bash", *command]
    done = subprocess.run(words, env=os.environ | environ, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_node_with_ipv6_alone_is_reached_at_its_address() -> None:
    assert in_network(IPV6_ONLY, sys.executable, "-c", SERVE) == f"http://[{NODE}] 401"


def test_a_node_without_an_address_refuses_to_serve_in_a_job() -> None:
    code = """
from pathlib import Path
from megaflow_hpc.errors import ConfigError
from megaflow_hpc.model.server.registration import check_address
try:
    check_address()
    print("ok")
except ConfigError as error:
    print(error)
"""
    alone = 'hostname lonely; mount --bind /dev/null /etc/hosts; ip link set lo up; exec "$@"'
    said = in_network(alone, sys.executable, "-c", code, SLURM_JOB_ID="7")
    assert said.startswith(
        "pods cannot reach this server: host name 'lonely' does not resolve, and the node has no route"
    )
    assert "export MEGAFLOW_ADDRESS=… in slurm.servers.setup" in said
    assert in_network(alone, sys.executable, "-c", code, SLURM_JOB_ID="7", MEGAFLOW_ADDRESS="ib0.lonely") == "ok"
    assert in_network(alone, sys.executable, "-c", code, SLURM_JOB_ID="") == "ok"


@pytest.mark.parametrize(
    ("families", "sources", "expected"),
    [
        ([socket.AF_INET, socket.AF_INET6], ["192.168.1.2", NODE], "node"),
        ([socket.AF_INET6], ["", NODE], "node"),
        ([socket.AF_INET6], ["192.168.1.2", NODE], "192.168.1.2"),
        ([], ["", NODE], NODE),
        ([], ["", "fe80::1"], "127.0.0.1"),
        ([], ["", ""], "127.0.0.1"),
    ],
)
def test_a_name_comes_before_an_address_and_ipv4_before_ipv6(
    families: list[int], sources: list[str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def resolve(host: str, port: object, family: int = 0) -> list[object]:
        if family not in families:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [object()]

    by_family = dict(zip((socket.AF_INET, socket.AF_INET6), sources, strict=True))
    monkeypatch.delenv("MEGAFLOW_ADDRESS", raising=False)
    monkeypatch.setattr(socket, "gethostname", lambda: "node")
    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(address, "_source_towards", lambda host, family: by_family[family])
    assert address.address() == expected


def test_an_ipv6_address_is_in_brackets_in_a_url(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [host_of_url(host) for host in ("node", "10.0.0.1", "fd00::1")] == ["node", "10.0.0.1", "[fd00::1]"]
    monkeypatch.setenv("MEGAFLOW_ADDRESS", "[fd00::1]")
    assert host_of_url(address.address()) == "[fd00::1]"


def test_a_listener_takes_connections_of_both_families() -> None:
    with listen_everywhere() as listener:
        port = listener.getsockname()[1]
        socket.create_connection(("127.0.0.1", port), 5).close()
        if listener.family == socket.AF_INET6:
            socket.create_connection(("::1", port), 5).close()
