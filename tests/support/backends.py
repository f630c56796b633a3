"""A proxy in this process, with an engine that is scripted or only records the bytes that reach it."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

from megaflow_hpc.model.engines.launch import Launch
from megaflow_hpc.model.engines.scripted.engine import ScriptedEngine
from megaflow_hpc.model.engines.scripted.script import Script, ScriptedAnswer
from megaflow_hpc.model.server.proxy import Proxy, make_context

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"


@asynccontextmanager
async def proxy_of_script(folder: Path, tls: bool = False, **options: Any) -> AsyncIterator[tuple[Proxy, str]]:
    """Yields a proxy of a scripted engine that answers "fine", and the fingerprint of its certificate."""
    socket = str(folder / "engine.sock")
    engine = web.AppRunner(ScriptedEngine(Script(default=[ScriptedAnswer("fine")]), "m").application(), access_log=None)
    await engine.setup()
    await web.UnixSite(engine, socket).start()
    context, fingerprint = make_context(folder) if tls else (None, "")
    proxy = Proxy(**options)
    await proxy.start(context)
    await proxy.attach(Launch(uds=socket, model_name="m", protocol="plain"))
    try:
        yield proxy, fingerprint
    finally:
        await proxy.stop()
        await engine.cleanup()


class Witness:
    """An engine that answers every request with ``{}`` and keeps the bytes that reached it."""

    def __init__(self) -> None:
        self.heard: list[bytearray] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answers requests that have a Content-Length or no body, and keeps all bytes."""
        heard = bytearray()
        self.heard.append(heard)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                heard += head
                length = head.lower().partition(b"content-length:")[2].split(b"\r\n", 1)[0]
                heard += await reader.readexactly(int(length or 0))
                writer.write(ANSWER)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            heard += await reader.read()
            writer.close()

    def requests(self) -> list[bytes]:
        """First lines of what arrived that some reader may take for a request."""
        lines = [line for heard in self.heard for line in bytes(heard).splitlines()]
        return [line for line in lines if b" HTTP/1" in line]


@asynccontextmanager
async def proxy_of_witness() -> AsyncIterator[tuple[Proxy, Witness]]:
    """Yields a proxy without TLS, and a witness behind it."""
    with tempfile.TemporaryDirectory(prefix="w") as folder:  # of its own: a socket's path may have 107 bytes
        witness, socket = Witness(), f"{folder}/witness.sock"
        listener = await asyncio.start_unix_server(witness.serve, socket)
        proxy = Proxy()
        await proxy.start()
        await proxy.attach(Launch(uds=socket, model_name="m", protocol="plain"))
        try:
            yield proxy, witness
        finally:
            await proxy.stop()
            listener.close()
