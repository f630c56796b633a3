"""Model servers without engines: they notice versions, pass them on and read them, with the real code and real sockets.

``python -m tests.support.weight_readers RUN NUMBER NODE SCRATCH`` runs one until it is ended. It prints a line of JSON
for each version that it has read.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import hashlib
import json
import os
import struct
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

from megaflow_hpc.model.server.proxy import Proxy, Serving, make_context
from megaflow_hpc.model.server.registration import Assignment
from megaflow_hpc.model.server.weight_updates import WeightUpdater
from megaflow_hpc.rundir.endpoints import Endpoint, EndpointFiles
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.weights import Version


class Reader:
    """A server of the policy ``default``, as if on the node ``node``.

    Args:
        run: the run directory.
        number: number of the server.
        node: name of its node.
        scratch: its private directory; it is created.
        update: ``rolling`` or ``together``.
    """

    def __init__(self, run: RunDir, number: int, node: str, scratch: Path, update: str = "together") -> None:
        scratch.mkdir(mode=0o700, exist_ok=True)
        self.proxy = Proxy()
        what = Assignment(number, "default", {"weights": update})
        with mock.patch.dict(os.environ, {"SLURMD_NODENAME": node}):
            self.updater = WeightUpdater(run, what, self.proxy)
        self.updater.copies.scratch = self._scratch = scratch
        self.copies, self._files = self.updater.copies, EndpointFiles(run)
        self.endpoint = Endpoint(server=what.name, policy="default", url="", key=self.proxy.key, node=node, start="1")

    async def start(self) -> Reader:
        # Servers that share a process would otherwise wait for each other's threads.
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(64))
        context, self.endpoint.tls_fingerprint = make_context(self._scratch)
        await self.proxy.start(context)
        self.endpoint.url = f"https://127.0.0.1:{self.proxy.port}"
        self.beat()
        return self

    def beat(self) -> None:
        """Publishes the endpoint file."""
        self.endpoint.heartbeat += 1
        self.endpoint.weight_version = self.proxy.serving.weights.version
        self._files.publish(self.endpoint)

    async def read(self, version: Version) -> str:
        """Reads a version as an engine does. Returns the SHA-256 of all its bytes."""
        local = await asyncio.to_thread(self.updater.whole, version)
        digest = await asyncio.to_thread(_digest, Path(local.path))
        self.proxy.serving = Serving(local)
        self.beat()
        return digest

    async def stop(self) -> None:
        self.copies.close()
        await self.proxy.stop()


def _digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


@contextlib.contextmanager
def opens(folder: Path) -> Iterator[Counter[str]]:
    """Counts how often files of a directory are opened inside the context, by any process (inotify(7)). The counts are
    complete after the context."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    assert libc.inotify_add_watch(descriptor, os.fsencode(folder), 0x20 | 0x10) > 0  # IN_OPEN, IN_CLOSE_NOWRITE
    counts: Counter[str] = Counter()
    try:
        yield counts
        with contextlib.suppress(BlockingIOError):
            while data := os.read(descriptor, 65536):
                while data:
                    _, mask, _, length = struct.unpack_from("iIII", data)
                    counts[data[16 : 16 + length].rstrip(b"\0").decode()] += bool(mask & 0x20)
                    data = data[16 + length :]
    finally:
        os.close(descriptor)


async def main(run: RunDir, number: int, node: str, scratch: Path, poll_s: float, update: str) -> None:
    """Reads each version that is published, until the process is ended."""
    reader = await Reader(run, number, node, scratch, update).start()
    print("{}", flush=True)
    while True:
        await asyncio.sleep(poll_s)
        version = reader.updater.next()
        if version is None:
            continue
        digest = await reader.read(version)
        place = Path(reader.proxy.serving.weights.path)
        shared = reader.copies.shared_bytes
        if place.is_relative_to(run.path):
            shared += sum(path.stat().st_size for path in place.iterdir())
        line = {"version": version.version, "at": time.time(), "digest": digest, "shared_bytes": shared}
        print(json.dumps({**line, "peer_bytes": reader.copies.peer_bytes}), flush=True)
        reader.copies.shared_bytes = reader.copies.peer_bytes = 0


if __name__ == "__main__":
    _, run, number, node, scratch, *rest = sys.argv
    poll_s, update = [*rest, "0.1", "together"][:1] + [*rest[1:], "together"][:1]
    asyncio.run(main(RunDir(run), int(number), node, Path(scratch), float(poll_s), update))
