"""Connections that this process carries to services: how many at a time, and how long each keeps the process."""

from __future__ import annotations

import asyncio
import socket
from contextlib import ExitStack, closing

from megaflow_hpc.environments.services.forwarding import Forwarding, _copy

ENOUGH = 10_000


class Endless(socket.socket):
    """Always has data, and always has room."""

    reads = 0

    def recv(self, size: int, flags: int = 0) -> bytes:
        self.reads += 1
        return b"x" * size if self.reads < ENOUGH else b""

    def send(self, data: object, flags: int = 0) -> int:
        return len(data)  # type: ignore[arg-type]

    def shutdown(self, how: int) -> None:
        pass


async def test_a_connection_that_never_waits_leaves_the_event_loop_to_others() -> None:
    with closing(Endless()) as source, closing(Endless()) as target:
        copying = asyncio.create_task(_copy(source, target))
        for _ in range(3):
            await asyncio.sleep(0)
        assert 0 < source.reads < 10
        copying.cancel()


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(100):
        writer.write(data)
    writer.close()


async def test_listeners_that_share_slots_wait_for_one_another_only_while_they_carry() -> None:
    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    service = server.sockets[0].getsockname()

    async def dial() -> socket.socket:
        there = socket.socket()
        there.setblocking(False)
        await asyncio.get_running_loop().sock_connect(there, service)
        return there

    with ExitStack() as stack:
        listeners = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(3)]
        for listener in listeners:
            listener.setblocking(False)
        served = {listener.getsockname(): listener for listener in listeners}
        forwarding = Forwarding(served, dict.fromkeys(served, dial), asyncio.Semaphore(1))
        for address in served:
            reader, writer = await asyncio.open_connection(*address)
            writer.write(b"hello")
            assert await asyncio.wait_for(reader.readexactly(5), 10) == b"hello"
            other, waiting = await asyncio.open_connection(*address)
            waiting.write(b"later")
            answer = asyncio.create_task(other.readexactly(5))
            await asyncio.wait([answer], timeout=0.2)
            assert not answer.done()
            writer.close()
            assert await asyncio.wait_for(answer, 10) == b"later"
            waiting.close()
        forwarding.close()
    server.close()
