"""Measures sandbox starts in each way that a node may offer, and the cost of enforcing limits.

Sandboxes start over an overlay, over an overlay in memory, and as copies of their image, as on nodes without overlays.
The watchdog is measured by its thread's CPU time next to 32 sandboxes, idle and busy. A memory hog is measured by the
memory that it held when it was ended.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tests.bench.arguments import above_zero, add_count, add_image, image_of
from tests.bench.command import main
from tests.bench.figures import Figure, median

if TYPE_CHECKING:
    from megaflow_hpc.environments import ApptainerProvider


GOAL_MS = 60.0
HOG = ["python3", "-c", "held = []\nwhile True: held.append(b'x' * 10_000_000)"]

Note = Callable[[str], None]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this benchmark."""
    add_image(parser)
    add_count(parser, "--starts", 20, "starts over an overlay")
    add_count(parser, "--copies", 5, "starts of copies; 0 for none", least=0)
    add_count(parser, "--sandboxes", 32, "sandboxes beside the watchdog")
    parser.add_argument(
        "--watch-s", type=above_zero, default=6.0, metavar="S", help="seconds it is watched (%(default)s)"
    )
    add_count(parser, "--hogs", 5, "processes that take all the memory they can get")


def run(arguments: argparse.Namespace, note: Note) -> list[Figure]:
    """Measures starts in each way that this node offers, then the watchdog."""
    from megaflow_hpc.environments.sandbox.scratch import default_scratch

    image = image_of(arguments, sif=True)
    figures = []
    with _directory(default_scratch()) as scratch:
        note(f"{arguments.starts} starts")
        figures.append(_starts(image, scratch, arguments.starts))
        if arguments.copies:
            note(f"{arguments.copies} starts of copies")
            with _set("MEGAFLOW_SANDBOX_WITHOUT", "overlay"):
                figures.append(_starts(image, scratch, arguments.copies, ", copied: no overlay"))
        note(f"{arguments.sandboxes} sandboxes under the watchdog")
        figures += asyncio.run(_watchdog(image, scratch, arguments.sandboxes, arguments.watch_s))
        note("a memory hog")
        figures += asyncio.run(_hog(image, scratch, arguments.hogs))
    if os.access("/dev/shm", os.W_OK):
        note("layers in memory")
        with _directory(Path("/dev/shm")) as memory:
            figures.append(_starts(image, memory, arguments.starts, ", scratch in memory"))
    return figures


@contextmanager
def _directory(base: Path) -> Iterator[Path]:
    from megaflow_hpc.environments.sandbox.scratch import sweep
    from megaflow_hpc.host.files import remove_tree

    path = Path(tempfile.mkdtemp(prefix="bench-", dir=base))
    try:
        yield path
    finally:
        sweep(path)
        remove_tree(path)


@contextmanager
def _set(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before


def _starts(image: str, scratch: Path, count: int, where: str = "") -> Figure:
    from megaflow_hpc.environments import ApptainerProvider, SandboxSpec

    async def measure() -> list[float]:
        async with ApptainerProvider(scratch) as provider:
            await provider.stage(image)
            taken = []
            for _ in range(count + 1):
                began = time.perf_counter()
                sandbox = await provider.start(SandboxSpec(image, memory_mb=2000, disk_mb=2000))
                taken.append((time.perf_counter() - began) * 1000)
                await sandbox.stop()
            return taken[1:]

    goal = None if "copied" in where else GOAL_MS
    return median(f"fresh sandbox ready, from an unpacked image{where}", "ms", asyncio.run(measure()), goal)


async def _watchdog(image: str, scratch: Path, count: int, watch_s: float) -> list[Figure]:
    from megaflow_hpc.environments import ApptainerProvider, SandboxSpec

    async def work(provider: ApptainerProvider, busy: bool) -> float:
        """Returns the share of one core that the watchdog takes, in percent."""
        spec = SandboxSpec(image, memory_mb=2000, disk_mb=2000, cpu_s=10_000, wall_s=10_000)
        sandboxes = [await provider.start(spec) for _ in range(count)]
        running = []
        if busy:
            script = "while :; do dd if=/dev/zero of=/tmp/x bs=64k count=16 2>/dev/null; sleep 0.2; done"
            running = [asyncio.create_task(sandbox.exec(script, timeout_s=60)) for sandbox in sandboxes]
        await asyncio.sleep(watch_s / 3)
        before, began = _watchdog_cpu_s(), time.perf_counter()
        await asyncio.sleep(watch_s)
        share = (_watchdog_cpu_s() - before) / (time.perf_counter() - began) * 100
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await asyncio.gather(*(sandbox.stop() for sandbox in sandboxes))
        return share

    figures = []
    for busy in (False, True):
        async with ApptainerProvider(scratch) as provider:
            state = "that write" if busy else "idle"
            figures.append(
                Figure(f"watchdog beside {count} sandboxes {state}", "% of a core", await work(provider, busy), 1)
            )
    return figures


def _watchdog_cpu_s() -> float:
    (thread,) = (thread for thread in threading.enumerate() if thread.name == "sandbox limits")
    assert thread.ident is not None
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))


async def _hog(image: str, scratch: Path, times: int, limit_mb: int = 300) -> list[Figure]:
    """Measures how far a process that allocates as fast as possible exceeds its limit before it is ended."""
    from megaflow_hpc.environments import ApptainerProvider, SandboxSpec

    over = []
    async with ApptainerProvider(scratch) as provider:
        for _ in range(times):
            async with await provider.start(SandboxSpec(image, memory_mb=limit_mb)) as sandbox:
                await sandbox.exec(HOG, timeout_s=60)
                over.append(sandbox.breaches[0].value - limit_mb)
    return [median(f"memory hog: held past its limit of {limit_mb} MB when seen", "MB", over)]


if __name__ == "__main__":
    sys.exit(main(__doc__, add_arguments, run))
