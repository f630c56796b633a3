"""Connections out of a sandbox, tested with live listeners of the host."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from megaflow_hpc.environments import ApptainerSandbox
from megaflow_hpc.environments.sandbox import helper_python, probe
from megaflow_hpc.environments.sandbox.network import _is_listener, how_to_listen
from megaflow_hpc.errors import ConfigError, SandboxError, SiteError
from megaflow_hpc.types import Network
from tests.support.sandboxes import Start

REACH = """
import json, socket, sys
reached = {}
for name, family, address in json.loads(sys.argv[1]):
    out = socket.socket(getattr(socket, family))
    out.settimeout(3)
    try:
        out.connect(chr(0) + address if name == "abstract" else tuple(address))
        reached[name] = True
    except OSError:
        reached[name] = False
print(json.dumps(reached))
"""


@pytest.fixture
def listeners() -> Iterator[list[list[Any]]]:
    """Yields a live listener of the host for each way out: name, family, and address for Python's socket."""
    name = f"megaflow-test-{os.getpid()}"
    with (
        closing(socket.create_server(("127.0.0.1", 0))) as four,
        closing(socket.create_server(("::1", 0), family=socket.AF_INET6)) as six,
        closing(socket.create_server(("0.0.0.0", 0))) as everywhere,
        closing(socket.socket(socket.AF_UNIX)) as abstract,
    ):
        abstract.bind(f"\0{name}")
        abstract.listen()
        out = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        with closing(out):
            try:
                out.connect(("192.0.2.1", 9))  # a documentation address: nothing is sent, only a route is looked up
                own = out.getsockname()[0]
            except OSError:
                own = "127.0.0.1"
        yield [
            ["loopback", "AF_INET", ["127.0.0.1", four.getsockname()[1]]],
            ["loopback 6", "AF_INET6", ["::1", six.getsockname()[1]]],
            ["own address", "AF_INET", [own, everywhere.getsockname()[1]]],
            ["abstract", "AF_UNIX", name],
        ]


async def reached(sandbox: ApptainerSandbox, listeners: list[list[Any]]) -> set[str]:
    """Returns the names of the listeners that a sandbox reaches."""
    done = await sandbox.exec(["python3", "-c", REACH, json.dumps(listeners)], timeout_s=60)
    return {name for name, is_reached in json.loads(done.stdout).items() if is_reached}


async def test_network_host_reaches_every_listener_of_the_host(start: Start, listeners: list[list[Any]]) -> None:
    """Proves that the listeners work."""
    assert await reached(await start(network="host"), listeners) == {name for name, *_ in listeners}


@pytest.mark.parametrize("network", ["none", "gateway"])
@pytest.mark.parametrize("user", [None, "agent"], ids=["root", "user"])
async def test_without_the_hosts_network_no_listener_of_the_host_is_reached(
    start: Start, listeners: list[list[Any]], network: Network, user: str | None
) -> None:
    sandbox = await start(network=network, user=user)
    assert await reached(sandbox, listeners) == set()
    await sandbox.kill_processes()
    assert await reached(sandbox, listeners) == set()


@pytest.mark.parametrize("network", ["none", "gateway"])
async def test_there_is_no_device_but_loopback_and_none_can_be_made(start: Start, network: Network) -> None:
    sandbox = await start(network=network)
    devices = await sandbox.exec("tail -n +3 /proc/net/dev | cut -d: -f1")
    routes = await sandbox.exec("tail -n +2 /proc/net/route; grep -v ' lo$' /proc/net/ipv6_route")
    # A raw socket would see packets; a new namespace would bring rights over devices.
    raw = "import socket; socket.socket(socket.AF_PACKET, socket.SOCK_RAW)"
    assert devices.stdout.split() == ["lo"]
    assert routes.stdout == ""
    assert (await sandbox.exec(["python3", "-c", raw])).exit_code != 0


async def test_two_gateway_sandboxes_on_one_port_do_not_meet(start: Start) -> None:
    ask = "import socket, sys; print(socket.create_connection(('127.0.0.1', 8000), 5).recv(8).decode())"

    async def serve(sandbox: ApptainerSandbox, word: bytes) -> asyncio.Server:
        async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(word)
            writer.close()

        return await asyncio.start_server(answer, sock=await sandbox.listen(8000))

    first, second = await start(network="gateway"), await start(network="gateway")
    async with await serve(first, b"first"), await serve(second, b"second"):
        assert (await first.exec(["python3", "-c", ask])).stdout == "first\n"
        assert (await second.exec(["python3", "-c", ask])).stdout == "second\n"


async def test_only_a_gateway_sandbox_has_a_listener(start: Start) -> None:
    sandbox = await start(network="none")
    with pytest.raises(SandboxError, match="use 'gateway'"):
        await sandbox.listen()


# --- a listener without entering from outside ------------------------------------------------------------------------


@pytest.fixture
def by_helper(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on nodes where only root can start containers, so other users cannot enter their namespaces."""
    monkeypatch.setenv("MEGAFLOW_SANDBOX_WITHOUT", "nsenter")


async def echo(sandbox: ApptainerSandbox, port: int = 0) -> tuple[asyncio.Server, int]:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write((await reader.readline()).upper())
        writer.close()

    listener = await sandbox.listen(port)
    return await asyncio.start_server(answer, sock=listener), listener.getsockname()[1]


@pytest.mark.parametrize("user", [None, "agent"], ids=["root", "user"])
async def test_a_helper_inside_any_image_listens_where_namespaces_cannot_be_entered(
    start: Start, busybox_rootfs: str, by_helper: None, user: str | None
) -> None:
    """Uses an image with only busybox; repeats after the processes were replaced, and with two listeners."""
    sandbox = await start(busybox_rootfs, network="gateway", user=user)
    for _ in range(2):
        server, port = await echo(sandbox)
        other, _ = await echo(sandbox, 8123)
        async with server, other:
            for number, answer in ((port, "HELLO\n0\n"), (8123, "HELLO\n0\n"), (8124, "1\n")):
                asked = await sandbox.exec(f"echo hello | nc -w 3 127.0.0.1 {number}; echo $?")
                assert asked.stdout == answer
        await sandbox.kill_processes()
    # No process of it continues, and its files cannot be changed.
    server, _ = await echo(sandbox)
    server.close()
    assert (await sandbox.exec("cat /proc/[0-9]*/cmdline | grep -c python/[l]oader")).stdout == "0\n"
    assert (await sandbox.exec("echo x > /.megaflow/python/loader || echo refused")).stdout == "refused\n"


@pytest.mark.parametrize("user", [None, "agent"], ids=["root", "user"])
async def test_with_a_helper_too_no_listener_of_the_host_is_reached(
    start: Start, listeners: list[list[Any]], by_helper: None, user: str | None
) -> None:
    sandbox = await start(network="gateway", user=user)
    server, _ = await echo(sandbox)
    async with server:
        assert await reached(sandbox, listeners) == set()


async def test_a_port_that_is_taken_is_said(start: Start, by_helper: None) -> None:
    sandbox = await start(network="gateway")
    first = await sandbox.listen(8123)
    with first, pytest.raises(SandboxError, match=r"no listener on port 8123 in the sandbox: .*in use"):
        await sandbox.listen(8123)


@pytest.mark.parametrize("passed", ["a file", "two", "nothing"])
def test_only_a_listener_that_is_passed_out_is_kept(passed: str) -> None:
    """An agent of the same sandbox can pass other descriptors."""
    ours, theirs = socket.socketpair()
    with ours, theirs, open(os.devnull) as file, socket.create_server(("127.0.0.1", 0)) as server:
        descriptors = {"a file": [file.fileno()], "two": [file.fileno(), server.fileno()], "nothing": []}[passed]
        before = len(os.listdir("/proc/self/fd"))
        socket.send_fds(theirs, [b"x"], descriptors)
        received = helper_python.receive_descriptors(ours, _is_listener)
        assert len(received) == (passed == "two")
        for descriptor in received:
            with socket.socket(fileno=descriptor) as listener:
                assert listener.getsockname() == server.getsockname()
        assert len(os.listdir("/proc/self/fd")) == before


def test_the_way_of_a_listener_is_chosen_by_what_the_node_allows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert how_to_listen("") == ("nsenter", "")
    assert how_to_listen("no user namespaces") == ("helper", "")
    monkeypatch.setattr(helper_python, "why_not", lambda: "this Python cannot be taken along")
    assert how_to_listen("") == ("nsenter", "")
    assert how_to_listen("no user namespaces") == ("", "no user namespaces; and this Python cannot be taken along")
    monkeypatch.setenv("MEGAFLOW_SANDBOX_WITHOUT", "nsenter")
    without = "MEGAFLOW_SANDBOX_WITHOUT names nsenter; and this Python cannot be taken along"
    assert how_to_listen("") == ("", without)
    monkeypatch.setenv("MEGAFLOW_SANDBOX_WITHOUT", "overlay, other")
    with pytest.raises(ConfigError, match="MEGAFLOW_SANDBOX_WITHOUT: 'other': expected clones, overlay, nsenter"):
        how_to_listen("")


def test_a_campaign_that_demands_a_gateway_where_no_way_leads_to_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGAFLOW_SANDBOX_WITHOUT", "nsenter")
    monkeypatch.setattr(helper_python, "why_not", lambda: "this Python cannot be taken along")
    with pytest.raises(SiteError, match=r"network 'gateway' .* is unavailable on .*this Python cannot be taken along"):
        probe.require(["gateway"], tmp_path)
    probe.require(["none", "host"], tmp_path)
