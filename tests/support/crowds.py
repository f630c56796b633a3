"""Many connections from another process of this user, or of another user of the node."""

from __future__ import annotations

import asyncio
import json
import resource
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from tests.support.second_user import as_second_user

CROWD = """
import json, os, resource, socket, sys
told = json.load(sys.stdin)
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
held = []
for _ in range(told["number"]):
    try:
        one = socket.create_connection(("127.0.0.1", told["port"]), timeout=10)
        held.append(one)
        one.sendall(told["says"].encode())
    except OSError:
        pass
control = socket.create_connection(("127.0.0.1", told["control"]))
control.sendall(b"held")
control.recv(1)
open_, said = 0, {}
for one in held:
    one.setblocking(False)
    try:
        line = one.recv(1 << 16).partition(b"\\r")[0].decode("latin-1")
        said[line] = said.get(line, 0) + 1
    except BlockingIOError:
        open_ += 1
    except OSError:
        pass
print(json.dumps({"uid": os.getuid(), "made": len(held), "open": open_, "said": said}))
"""


@asynccontextmanager
async def crowd(port: int, number: int, says: str = "", stranger: bool = False) -> AsyncIterator[dict[str, Any]]:
    """Holds connections to a port of the loopback, each of which has sent ``says``.

    Yields a dictionary that is filled at the end: the number of connections that were ``made``, the number that is
    still ``open`` and silent, and the first lines that the others received (``said``).

    Args:
        stranger: connect as another user.
    """
    found: dict[str, Any] = {}
    with socket.create_server(("127.0.0.1", 0)) as control:
        control.settimeout(120)
        told = {"port": port, "number": number, "says": says, "control": control.getsockname()[1]}
        running = asyncio.create_task(asyncio.to_thread(as_second_user if stranger else _as_this_user, CROWD, told))
        client, _ = await asyncio.to_thread(control.accept)
        try:
            client.settimeout(120)
            assert await asyncio.to_thread(client.recv, 4) == b"held"
            yield found
        finally:
            client.close()
            found.update(await running)


def _as_this_user(program: str, told: Any) -> Any:
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, input=json.dumps(told), capture_output=True, text=True, timeout=120, check=True)
    return json.loads(done.stdout)


@contextmanager
def descriptors(number: int) -> Iterator[None]:
    """Limits the number of files that this process may open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (number, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def raw(port: int, *parts: bytes, timeout_s: float = 30.0) -> bytes:
    """Sends bytes to a port of the loopback. Returns all bytes received until the other side closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for part in parts:
            writer.write(part)
            await writer.drain()
        return await asyncio.wait_for(reader.read(), timeout_s)
    except ConnectionError:
        return b""
    finally:
        writer.close()
