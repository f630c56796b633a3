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
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

from megaflow_hpc.environments import ApptainerProvider
from tests.bench.figures import Figure, quantile

COMMAND = "/bin/true"


class Box(Protocol):
    """One sandbox of a peer."""

    async def command(self) -> None: ...

    async def stop(self) -> None: ...


class PeerKind(Protocol):
    """A tool. ``close`` it after all its boxes have stopped."""

    name: str
    version: str

    async def start(self) -> Box: ...

    async def close(self) -> None: ...


async def _run(*argv: str) -> None:
    process = await asyncio.create_subprocess_exec(
        *argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    _, said = await process.communicate()
    if process.returncode:
        raise RuntimeError(f"{' '.join(argv[:3])}: {said.decode(errors='replace').strip()[-300:]}")


class _ExecBox:
    def __init__(self, *words: str) -> None:
        self._words = words

    async def command(self) -> None:
        await _run(*self._words, COMMAND)

    async def stop(self) -> None:
        pass


class _InstanceBox(_ExecBox):
    def __init__(self, apptainer: str, name: str) -> None:
        super().__init__(apptainer, "-q", "exec", f"instance://{name}")
        self._stop = (apptainer, "-q", "instance", "stop", name)

    async def stop(self) -> None:
        await _run(*self._stop)


class ApptainerExec:
    name = "apptainer exec"

    def __init__(self, apptainer: str, image: str, scratch: Path) -> None:
        from megaflow_hpc.host.apptainer import version

        self.version = version(apptainer)
        self._words = (apptainer, "-q", "exec", "--containall", image)

    async def start(self) -> Box:
        return _ExecBox(*self._words)

    async def close(self) -> None:
        pass


class ApptainerInstance(ApptainerExec):
    name = "apptainer instance"

    def __init__(self, apptainer: str, image: str, scratch: Path) -> None:
        super().__init__(apptainer, image, scratch)
        self._apptainer, self._image = apptainer, image

    async def start(self) -> Box:
        name = f"bench-{uuid.uuid4().hex[:12]}"
        await _run(self._apptainer, "-q", "instance", "start", "--containall", self._image, name)
        return _InstanceBox(self._apptainer, name)


class _HpcBox:
    def __init__(self, sandbox: Any) -> None:
        self._sandbox = sandbox

    async def command(self) -> None:
        result = await self._sandbox.exec([COMMAND])
        assert result.exit_code == 0, result

    async def stop(self) -> None:
        await self._sandbox.stop()


class HpcSandbox:
    name = "hpc-sandbox"

    def __init__(self, apptainer: str, image: str, scratch: Path) -> None:
        self._module: Any = importlib.import_module("hpc_sandbox")
        self.version = metadata.version("hpc-sandbox")
        self._image = image
        self._provider = self._module.SingularityProvider(
            binary=apptainer, scratch_root=scratch / "hpc-sandbox", image_cache=scratch / "hpc-sandbox-images"
        )

    async def start(self) -> Box:
        return _HpcBox(await self._provider.start(self._module.SandboxSpec(image=self._image)))

    async def close(self) -> None:
        closing = getattr(self._provider, "close", None) or getattr(self._provider, "aclose", None)
        if closing is not None:
            await closing()


class _MiniBox:
    def __init__(self, environment: Any) -> None:
        self._environment = environment

    async def command(self) -> None:
        result = await asyncio.to_thread(self._environment.execute, {"command": COMMAND})
        if result["returncode"]:
            raise RuntimeError(f"mini-swe-agent: {result['output'][-300:]} {result['exception_info']}")

    async def stop(self) -> None:
        await asyncio.to_thread(shutil.rmtree, self._environment.sandbox_dir, True)


class MiniSweAgent:
    name = "mini-swe-agent Singularity environment"

    def __init__(self, apptainer: str, image: str, scratch: Path) -> None:
        os.environ.setdefault("MSWEA_SILENT_STARTUP", "1")
        module: Any = importlib.import_module("minisweagent.environments.singularity")
        self.version = metadata.version("mini-swe-agent")
        self._make = lambda: module.SingularityEnvironment(image=image, executable=apptainer)

    async def start(self) -> Box:
        return _MiniBox(await asyncio.to_thread(self._make))

    async def close(self) -> None:
        pass


KINDS: tuple[Callable[[str, str, Path], PeerKind], ...] = (ApptainerExec, ApptainerInstance, HpcSandbox, MiniSweAgent)


async def _working(
    apptainer: str, image: str, scratch: Path, note: Callable[[str], None], unpacked: str | None = None
) -> list[PeerKind]:
    """Returns the installed peers that can run a command here. ``note`` reports why others are left out.

    Args:
    unpacked: the same image as a directory, for Apptainer on nodes where users cannot mount a SIF.
    """
    found = []
    for kind in KINDS:
        name = getattr(kind, "name", str(kind))
        own = kind in (ApptainerExec, ApptainerInstance)
        for source in (image, unpacked) if own and unpacked else (image,):
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
                    peer.name = f"{name} from an unpacked image"
                found.append(peer)
                break
    return found


async def _peers(provider: ApptainerProvider, image: str, note: Callable[[str], None]) -> AsyncIterator[PeerKind]:
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

    async def start(peer: PeerKind) -> Box:
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
