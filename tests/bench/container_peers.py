"""Other container tools, each with its defaults, behind one small interface: start, run a command, stop.

``apptainer exec`` keeps no container, so its start costs nothing and every command starts one. All tools get the same
SIF. A tool that keeps unpacked copies makes its own.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import shutil
import subprocess
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from megaflow_hpc.environments import ApptainerProvider
from tests.bench.figures import Figure, quantile

COMMAND = "/bin/true"

Work = Callable[[], Awaitable[object]]


async def _nothing() -> None:
    pass


@dataclass
class Box:
    """One sandbox of a tool."""

    command: Work
    stop: Work = _nothing


@dataclass
class Peer:
    """A tool. ``close`` it after all its boxes have stopped."""

    name: str
    version: str
    start: Callable[[], Awaitable[Box]]
    close: Work = _nothing


async def _run(*argv: str) -> None:
    process = await asyncio.create_subprocess_exec(
        *argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    _, errors = await process.communicate()
    if process.returncode:
        raise RuntimeError(f"{' '.join(argv[:3])}: {errors.decode(errors='replace').strip()[-300:]}")


def apptainer_exec(apptainer: str, image: str, scratch: Path) -> Peer:
    from megaflow_hpc.host.apptainer import version

    async def start() -> Box:
        return Box(lambda: _run(apptainer, "-q", "exec", "--containall", image, COMMAND))

    return Peer("apptainer exec", version(apptainer), start)


def apptainer_instance(apptainer: str, image: str, scratch: Path) -> Peer:
    from megaflow_hpc.host.apptainer import version

    async def start() -> Box:
        name = f"bench-{uuid.uuid4().hex[:12]}"
        await _run(apptainer, "-q", "instance", "start", "--containall", image, name)
        return Box(
            lambda: _run(apptainer, "-q", "exec", f"instance://{name}", COMMAND),
            lambda: _run(apptainer, "-q", "instance", "stop", name),
        )

    return Peer("apptainer instance", version(apptainer), start)


def hpc_sandbox(apptainer: str, image: str, scratch: Path) -> Peer:
    module: Any = importlib.import_module("hpc_sandbox")
    provider = module.SingularityProvider(
        binary=apptainer, scratch_root=scratch / "hpc-sandbox", image_cache=scratch / "hpc-sandbox-images"
    )

    async def start() -> Box:
        sandbox = await provider.start(module.SandboxSpec(image=image))

        async def command() -> None:
            result = await sandbox.exec([COMMAND])
            assert result.exit_code == 0, result

        return Box(command, sandbox.stop)

    close = getattr(provider, "close", None) or getattr(provider, "aclose", None) or _nothing
    return Peer("hpc-sandbox", metadata.version("hpc-sandbox"), start, close)


def mini_swe_agent(apptainer: str, image: str, scratch: Path) -> Peer:
    os.environ.setdefault("MSWEA_SILENT_STARTUP", "1")
    module: Any = importlib.import_module("minisweagent.environments.singularity")

    async def start() -> Box:
        environment = await asyncio.to_thread(module.SingularityEnvironment, image=image, executable=apptainer)

        async def command() -> None:
            result = await asyncio.to_thread(environment.execute, {"command": COMMAND})
            if result["returncode"]:
                raise RuntimeError(f"mini-swe-agent: {result['output'][-300:]} {result['exception_info']}")

        return Box(command, lambda: asyncio.to_thread(shutil.rmtree, environment.sandbox_dir, True))

    return Peer("mini-swe-agent Singularity environment", metadata.version("mini-swe-agent"), start)


KINDS = (apptainer_exec, apptainer_instance, hpc_sandbox, mini_swe_agent)


async def _working(
    apptainer: str, image: str, scratch: Path, note: Callable[[str], None], unpacked: str | None = None
) -> list[Peer]:
    """Returns the installed peers that can run a command here. ``note`` reports why others are left out.

    Args:
    unpacked: the same image as a directory, for Apptainer on nodes where users cannot mount a SIF.
    """
    working = []
    for kind in KINDS:
        name = kind.__name__.replace("_", " ")
        is_apptainer = kind in (apptainer_exec, apptainer_instance)
        for source in (image, unpacked) if is_apptainer and unpacked else (image,):
            try:
                peer = kind(apptainer, source, scratch)
                box = await peer.start()
                try:
                    await box.command()
                finally:
                    await box.stop()
            except ImportError:
                note(f"{name}: not installed, left out (pip install 'megaflow-hpc[bench]')")
            except Exception as error:  # a peer may fail in any way; measure the others
                note(f"{name}: {source} does not run here ({str(error).strip()[-300:]})")
            else:
                if source != image:
                    peer.name += " from an unpacked image"
                working.append(peer)
                break
    return working


async def _peers(provider: ApptainerProvider, image: str, note: Callable[[str], None]) -> AsyncIterator[Peer]:
    """Yields every peer that works here on the benchmark's image. Closes each before the next."""
    unpacked = await provider.stage(image)
    for peer in await _working(provider.apptainer, image, Path(provider.scratch), note, unpacked):
        note(f"{peer.name} {peer.version}")
        try:
            yield peer
        finally:
            await peer.close()


async def _milliseconds(work: Callable[[], Awaitable[object]]) -> float:
    began = time.perf_counter()
    await work()
    return (time.perf_counter() - began) * 1000


async def beside_commands(
    figures: list[Figure], provider: ApptainerProvider, image: str, count: int, note: Callable[[str], None]
) -> list[Figure]:
    """Adds peers to the figures of ``tests.bench.exec``: latency of ``count`` commands, and their rate at once."""
    figures = list(figures)
    async for peer in _peers(provider, image, note):
        box = await peer.start()
        try:
            taken = [await _milliseconds(box.command) for _ in range(count)]
            began = time.perf_counter()
            await asyncio.gather(*(box.command() for _ in range(count)))
            rate = count / (time.perf_counter() - began)
        finally:
            await box.stop()
        for number, value in ((0, quantile(taken, 0.5)), (1, quantile(taken, 0.99)), (3, rate)):
            figures[number] = figures[number].beside(peer.name, peer.version, value)
    return figures


async def beside_starts(
    figures: list[Figure], provider: ApptainerProvider, image: str, count: int, note: Callable[[str], None]
) -> list[Figure]:
    """Adds peers to the figures of ``tests.bench.sandbox``: ``count`` starts, one by one and at once."""

    async def start(peer: Peer) -> Box:
        box = await peer.start()
        await box.command()
        return box

    figures = list(figures)
    async for peer in _peers(provider, image, note):
        taken = []
        for _ in range(count):
            began = time.perf_counter()
            box = await start(peer)
            taken.append((time.perf_counter() - began) * 1000)
            await box.stop()
        began = time.perf_counter()
        boxes = await asyncio.gather(*(start(peer) for _ in range(count)))
        rate = count / (time.perf_counter() - began)
        await asyncio.gather(*(box.stop() for box in boxes))
        for number, value in ((0, quantile(taken, 0.5)), (1, rate)):
            figures[number] = figures[number].beside(peer.name, peer.version, value)
    return figures
