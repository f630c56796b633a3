"""Services on another node: who may connect, what is carried, and how another start is noticed."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from megaflow_hpc.environments.sandbox.sandbox import ApptainerSandbox
from megaflow_hpc.environments.services import forwarding, remote
from megaflow_hpc.environments.services.forwarding import Dialer
from megaflow_hpc.environments.services.group import ServiceGroup
from megaflow_hpc.environments.services.remote import Address, RemoteService, RemoteServices, ServiceListener
from megaflow_hpc.errors import ServiceError
from megaflow_hpc.model.server.proxy import make_context
from tests.support.waiting import until_async

PORT = 7000


class LocalDialer:
    """Connects to a server of this test instead of one in a sandbox."""

    def __init__(self, port: int) -> None:
        self._port = port

    async def connect(self, port: int) -> socket.socket:
        connection = socket.socket()
        connection.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", self._port))
        return connection


class LocalSandbox:
    """A sandbox that shares this machine's loopback."""

    async def unconnected(self, count: int) -> list[socket.socket]:
        made = [socket.socket() for _ in range(count)]
        for each in made:
            each.setblocking(False)
        return made


async def size_of_all(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answers with the number of bytes, once the other side has sent all of them."""
    size = len(await reader.read(-1))
    writer.write(b"%d" % size)
    writer.close()


@asynccontextmanager
async def service(private: Path, tls: bool = True) -> AsyncIterator[tuple[Address, ServiceListener]]:
    server = await asyncio.start_server(size_of_all, "127.0.0.1", 0)
    dialer = cast(Dialer, LocalDialer(server.sockets[0].getsockname()[1]))
    context, fingerprint = make_context(private) if tls else (None, "")
    listener = ServiceListener("k" * 64, (PORT,), dialer)
    await listener.start(context)
    try:
        url = f"http{'s' * tls}://127.0.0.1:{listener.port}"
        yield Address(url, "k" * 64, fingerprint), listener
    finally:
        listener.stop()
        server.close()


def known(address: Address | None, **failed: str) -> RemoteServices:
    services = RemoteServices()
    files: dict[str, dict[str, Any]] = {
        name: {"cause": cause, "all_failed": True, "url": ""} for name, cause in failed.items()
    }
    if address:
        files["words"] = {"url": address.url, "key": address.key, "tls_fingerprint": address.fingerprint}
    services.update(files)
    return services


@pytest.mark.parametrize("tls", [True, False], ids=["TLS", "plain"])
@pytest.mark.parametrize("size", [0, 1, 5_000_000])
async def test_all_bytes_pass_both_ways_and_their_ends(tmp_path: Path, tls: bool, size: int) -> None:
    async with service(tmp_path, tls) as (address, _):
        used = RemoteService("words", (PORT,), known(address))
        await used.begin()
        connection = await used.dial(PORT)
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(connection, b"x" * size)
        connection.shutdown(socket.SHUT_WR)
        assert await loop.sock_recv(connection, 100) == b"%d" % size
        assert await loop.sock_recv(connection, 100) == b""
        connection.close()
        used.close()


async def test_only_the_key_and_the_certificate_of_the_service_open_it(tmp_path: Path) -> None:
    async with service(tmp_path) as (address, _):
        for wrong, why in (
            (replace(address, key="j" * 64), "accepts no connection"),
            (replace(address, fingerprint="0" * 64), "another program listens there"),
        ):
            used = RemoteService("words", (PORT,), known(wrong))
            used._address = wrong
            with pytest.raises(OSError, match=why):
                await used.dial(PORT)
        used = RemoteService("words", (PORT,), known(address))
        await used.begin()
        with pytest.raises(OSError, match="port 22 accepts no connection"):
            await used.dial(22)
        reader, writer = await asyncio.open_connection("127.0.0.1", int(address.url.rpartition(":")[2]))
        writer.write(b"\n" * 10)
        assert await reader.read() == b"", "a client without TLS gets nothing"
        writer.close()


async def test_another_start_and_an_end_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "CHECK_S", 0.1)
    async with service(tmp_path) as (address, listener):
        services = known(address)
        used = RemoteService("words", (PORT,), services)
        await used.begin()
        assert await used.problem() == ""
        services.update({})
        assert await used.problem() == "", "its file is being replaced, but it answers"
        later = replace(address, key="l" * 64)
        services.update({"words": {"url": later.url, "key": later.key, "tls_fingerprint": later.fingerprint}})
        assert await asyncio.wait_for(used.ended(), 10) == "it was restarted"
        services.update({})
        listener.stop()
        assert "it does not answer" in await asyncio.wait_for(used.ended(), 10)


async def test_a_service_that_answers_slowly_under_load_has_not_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its queue of connections is full, so that further ones wait in the kernel, until it accepts again."""
    for name, seconds in (("CHECK_S", 0.1), ("POLL_S", 0.05), ("CONNECT_TIMEOUT_S", 0.5)):
        monkeypatch.setattr(remote, name, seconds)
    monkeypatch.setattr(forwarding, "CONNECT_TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server:
        server.setblocking(False)
        sandbox = cast(ApptainerSandbox, LocalSandbox())
        listener = ServiceListener("k" * 64, (server.getsockname()[1],), Dialer(sandbox))
        context, fingerprint = make_context(tmp_path)
        await listener.start(context)
        address = Address(f"https://127.0.0.1:{listener.port}", "k" * 64, fingerprint)
        used = RemoteService("words", (server.getsockname()[1],), known(address))
        await used.begin()
        clients = [socket.socket() for _ in range(8)]
        for client in clients:
            client.setblocking(False)
            client.connect_ex(server.getsockname())
        with pytest.raises(TimeoutError):
            await used.dial(server.getsockname()[1])
        ended = asyncio.create_task(used.ended())
        last = asyncio.create_task(used.problem())
        await asyncio.sleep(2)
        assert not ended.done()
        assert not last.done(), "no verdict is given on a service that may have ended"
        accepted = []
        while not last.done():
            with contextlib.suppress(BlockingIOError):
                accepted.append(server.accept()[0])
            await asyncio.sleep(0.01)
        assert last.result() == ""
        assert not ended.done()
        ended.cancel()
        monkeypatch.setattr(remote, "BUSY_S", 0.2)
        for client in [socket.socket() for _ in range(8)]:
            client.setblocking(False)
            client.connect_ex(server.getsockname())
            clients.append(client)
        assert "it does not answer (no answer within 0.5 s)" in await asyncio.wait_for(used.ended(), 20)
        for client in (*clients, *accepted):
            client.close()
    assert "port" in await asyncio.wait_for(used.problem(), 10), "a port that is closed is a problem at once"
    listener.stop()


async def test_a_rollout_waits_for_a_hanging_service_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each check ends after CONNECT_TIMEOUT_S on a clock that a check puts forward."""
    for name in ("CHECK_S", "POLL_S", "MAX_PAUSE_S"):
        monkeypatch.setattr(remote, name, 0.001)
    loop, waited = asyncio.get_running_loop(), [0.0]
    real = loop.time
    monkeypatch.setattr(loop, "time", lambda: real() + waited[0])

    class Hanging(RemoteService):
        async def _check(self) -> None:
            waited[0] += remote.CONNECT_TIMEOUT_S
            raise TimeoutError

    async def work() -> None:
        await asyncio.Event().wait()

    group = ServiceGroup([], cast(Any, None), [Hanging("words", (PORT,), known(None))])
    with pytest.raises(ServiceError, match=r"service words: it does not answer .*, while the rollout ran"):
        await group.guard(work())
    assert remote.BUSY_S < waited[0] <= remote.BUSY_S + 2 * remote.CONNECT_TIMEOUT_S


async def test_a_check_leaves_no_connection_to_a_service_that_keeps_its_side_open(tmp_path: Path) -> None:
    kept: list[asyncio.StreamWriter] = []

    async def keep(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        kept.append(writer)

    server = await asyncio.start_server(keep, "127.0.0.1", 0)
    dialer = cast(Dialer, LocalDialer(server.sockets[0].getsockname()[1]))
    context, fingerprint = make_context(tmp_path)
    listener = ServiceListener("k" * 64, (PORT,), dialer)
    await listener.start(context)
    used = RemoteService("words", (PORT,), known(Address(f"https://127.0.0.1:{listener.port}", "k" * 64, fingerprint)))
    await used.begin()
    assert await used.problem() == ""
    await until_async(lambda: len(kept) == 2 and not listener._clients, "the listener has closed them", 10)
    assert not used._carrying
    listener.stop()
    for each in kept:
        each.close()
    server.close()


@pytest.mark.parametrize("tls", [True, False], ids=["TLS", "plain"])
async def test_clients_without_a_key_wait_in_a_queue_of_fixed_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tls: bool
) -> None:
    monkeypatch.setattr(remote, "MAX_WAITING", 4)
    async with service(tmp_path, tls) as (address, listener):
        used = RemoteService("words", (PORT,), known(address))
        await used.begin()
        connection = await used.dial(PORT)
        idle = [await asyncio.open_connection("127.0.0.1", listener.port) for _ in range(10)]
        for reader, _ in idle[:6]:
            assert await asyncio.wait_for(reader.read(), 10) == b"", "older ones are closed"
        assert len(listener._waiting) == 4
        assert await used.problem() == ""
        connection.shutdown(socket.SHUT_WR)
        assert await asyncio.get_running_loop().sock_recv(connection, 100) == b"0", "those with the key stay"
        connection.close()
        used.close()
        for _, writer in idle:
            writer.close()


async def test_the_end_of_a_rollout_does_not_wait_for_a_side_that_reads_nothing() -> None:
    kept: list[asyncio.StreamWriter] = []

    async def deaf(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        kept.append(writer)
        writer.write(b"ok\n")

    server = await asyncio.start_server(deaf, "127.0.0.1", 0)
    used = RemoteService("words", (PORT,), known(None))
    used._address = Address(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", "k" * 64, "")
    with await used.dial(PORT) as full, pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.get_running_loop().sock_sendall(full, bytes(50_000_000)), 1)
    just_opened = await used.dial(PORT)
    writers = list(used._carrying.values())
    assert len(writers) == 2
    used.close()
    for writer in writers:
        with contextlib.suppress(OSError):
            await asyncio.wait_for(writer.wait_closed(), 10)
    just_opened.close()
    for each in kept:
        each.close()
    server.close()


async def test_a_rollout_waits_for_a_service_but_not_for_one_that_gave_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(ServiceError, match="service words: no disk"):
        await RemoteService("words", (PORT,), known(None, words="no disk")).begin()
    services = known(None)
    waiting = asyncio.create_task(RemoteService("words", (PORT,), services).begin())
    async with service(tmp_path) as (address, _):
        await asyncio.sleep(0.1)
        services.update({"words": {"url": address.url, "key": address.key, "tls_fingerprint": address.fingerprint}})
        await asyncio.wait_for(waiting, 10)
    monkeypatch.setattr(remote, "WAIT_S", 0.2)
    with pytest.raises(ServiceError, match=r"service words: not reached within 0\.2 s: it is not running"):
        await RemoteService("words", (PORT,), known(None)).begin()
