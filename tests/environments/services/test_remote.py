"""Services on another node: who may connect, what is carried, and how another start is noticed."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from megaflow_hpc.environments.services import remote
from megaflow_hpc.environments.services.forwarding import Dialer
from megaflow_hpc.environments.services.remote import Address, RemoteService, RemoteServices, ServiceListener
from megaflow_hpc.errors import ServiceError
from megaflow_hpc.model.server.proxy import make_context

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
            (replace(address, fingerprint="0" * 64), "another program has taken the place"),
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
        assert await asyncio.wait_for(used.ended(), 10) == "it was started anew"
        services.update({})
        listener.stop()
        assert "it does not answer" in await asyncio.wait_for(used.ended(), 10)


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
    with pytest.raises(ServiceError, match=r"service words: not reached within 0\.2 s: no job of it is running"):
        await RemoteService("words", (PORT,), known(None)).begin()
