"""Measures a sandbox's start, reset, stop and memory, and counts what a killed owner leaves behind.

Sandboxes start from the unpacked image with limits and network ``none``, through the public API. A start includes its
first command. Its goals are multiples of bare ``apptainer exec`` (bare.py), measured alternately. Memory is the
proportional set size of all processes of an idle sandbox, including Apptainer's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from tests.bench import bare
from tests.bench.arguments import add_count, add_image, image_of
from tests.bench.command import main
from tests.bench.figures import Figure, median, multiple
from tests.support.sandboxes import host_pid

if TYPE_CHECKING:
    from megaflow_hpc.environments import ApptainerProvider, ApptainerSandbox, SandboxSpec


SETTLE_S = 1.0

Note = Callable[[str], None]

OWNER = """
import asyncio, json, os, sys
from megaflow_hpc.environments import ApptainerProvider, SandboxSpec

async def main():
    provider = ApptainerProvider(sys.argv[1], cache=sys.argv[2])
    sandboxes = [await provider.start(SandboxSpec(sys.argv[3])) for _ in range(int(sys.argv[4]))]
    for sandbox in sandboxes:
        await sandbox.exec("echo x > /file; setsid sleep 3000 &")
    print(json.dumps([sandbox.pid for sandbox in sandboxes]), flush=True)
    await asyncio.sleep(3000)

asyncio.run(main())
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this benchmark."""
    add_image(parser)
    add_count(parser, "--starts", 30, "starts one after the other, and resets")
    add_count(parser, "--sandboxes", 32, "sandboxes that are started at once")
    add_count(parser, "--rounds", 3, "rounds of starts at once")
    add_count(parser, "--owned", 5, "sandboxes of the owner that is killed")


def run(arguments: argparse.Namespace, note: Note) -> list[Figure]:
    """Measures starts, resets, stops and memory of sandboxes, and counts what a killed owner leaves."""
    return asyncio.run(_run(arguments, note))


async def _run(arguments: argparse.Namespace, note: Note) -> list[Figure]:
    from megaflow_hpc.environments import ApptainerProvider, SandboxSpec

    image = image_of(arguments)
    spec = SandboxSpec(image, memory_mb=2000, disk_mb=2000)
    async with ApptainerProvider() as provider:
        rootfs = await provider.stage(image)
        note(f"{arguments.starts} starts, one after the other")
        starts, bare_starts, stops = await _one_by_one(provider, spec, rootfs, arguments.starts)
        note(f"{arguments.sandboxes} starts at once, {arguments.rounds} times")
        rates, bare_rates, memory = await _at_once(provider, spec, rootfs, arguments)
        note("resets")
        resets = await _resets(provider, image, arguments.starts)
        one, many = "fresh sandbox with its first command", "fresh sandboxes at once"
        figures = [
            median(one, "ms", starts).beside(bare.EXEC, "", statistics.median(bare_starts)),
            median(many, "per s", rates, better="higher").beside(bare.EXEC, "", statistics.median(bare_rates)),
            multiple(one, bare.EXEC, starts, bare_starts, 0.7),
            multiple(many, bare.EXEC, rates, bare_rates, 1.3, "higher"),
            median("reset to clean", "ms", resets),
            median("stop", "ms", stops, 10),
            median("memory of an idle sandbox, PSS of all its processes", "MB", memory, 6),
        ]
        note("an owner killed by SIGKILL, then the janitor")
        left = await asyncio.to_thread(_leftovers, image, arguments.owned, provider)
        return figures + [Figure(f"{what} left by a killed owner", "count", n, 1, goal=0) for what, n in left.items()]


async def _one_by_one(
    provider: ApptainerProvider, spec: SandboxSpec, rootfs: str, count: int
) -> tuple[list[float], list[float], list[float]]:
    """Returns milliseconds of starts with a first command, of the same by bare Apptainer, and of stops."""
    starts, limits, stops = [], [], []
    for _ in range(count + 1):
        began = time.perf_counter()
        sandbox = await provider.start(spec)
        await sandbox.exec(bare.PROGRAM)
        starts.append((time.perf_counter() - began) * 1000)
        began = time.perf_counter()
        await sandbox.stop()
        stops.append((time.perf_counter() - began) * 1000)
        limits.append(await bare.container(provider.apptainer, rootfs))
    return starts[1:], limits[1:], stops[1:]


async def _at_once(
    provider: ApptainerProvider, spec: SandboxSpec, rootfs: str, arguments: argparse.Namespace
) -> tuple[list[float], list[float], list[float]]:
    """Returns starts per second, those of bare Apptainer, and MB of each sandbox of the last round."""
    from megaflow_hpc.host.process import descendants

    async def start() -> ApptainerSandbox:
        sandbox = await provider.start(spec)
        await sandbox.exec(bare.PROGRAM)
        return sandbox

    rates: list[float] = []
    limits: list[float] = []
    memory: list[float] = []
    for _ in range(arguments.rounds):
        began = time.perf_counter()
        sandboxes = await asyncio.gather(*(start() for _ in range(arguments.sandboxes)))
        rates.append(len(sandboxes) / (time.perf_counter() - began))
        await asyncio.sleep(SETTLE_S)
        memory = []
        for sandbox in sandboxes:
            root = host_pid(sandbox)
            pids = [root, *descendants(root)] if root else []
            memory.append(sum(map(proportional, pids)) / 1000)
        await asyncio.gather(*(sandbox.stop() for sandbox in sandboxes))
        limits.append(await bare.container_rate(provider.apptainer, rootfs, arguments.sandboxes))
    return rates, limits, memory


def proportional(pid: int) -> float:
    """Returns the proportional set size of a process in KB."""
    try:
        with open(f"/proc/{pid}/smaps_rollup") as file:
            return next(int(line.split()[1]) * 1.024 for line in file if line.startswith("Pss:"))
    except (OSError, StopIteration):
        return 0.0


async def _resets(provider: ApptainerProvider, image: str, count: int) -> list[float]:
    """Returns the milliseconds of each reset of a sandbox with changed files and a process in the background."""
    from megaflow_hpc.environments import SandboxSpec

    taken: list[float] = []
    async with await provider.start(SandboxSpec(image)) as sandbox:
        for _ in range(count):
            await sandbox.exec("touch /tmp/a /b; sleep 100 &")
            began = time.perf_counter()
            await sandbox.reset()
            taken.append((time.perf_counter() - began) * 1000)
            assert (await sandbox.exec("ls /b")).exit_code
    return taken


def _leftovers(image: str, count: int, provider: ApptainerProvider) -> dict[str, int]:
    """Counts processes, mounts and files of a killed owner's sandboxes after one sweep."""
    from megaflow_hpc.environments.sandbox.scratch import sweep
    from megaflow_hpc.host.process import Identity, descendants

    with tempfile.TemporaryDirectory(dir=provider.scratch) as scratch:
        argv = [sys.executable, "-c", OWNER, scratch, str(provider.cache), image, str(count)]
        owner = subprocess.Popen(argv, stdout=subprocess.PIPE)
        assert owner.stdout
        json.loads(owner.stdout.readline())
        everyone = [identity for pid in descendants(owner.pid) if (identity := Identity.of(pid))]
        mounts = Path("/proc/self/mountinfo").read_text().count("\n")
        owner.send_signal(signal.SIGKILL)
        owner.wait()
        deadline = time.monotonic() + 10
        while any(identity.alive() for identity in everyone) and time.monotonic() < deadline:
            time.sleep(0.02)
        sweep(scratch)
        return {
            "processes": sum(identity.alive() for identity in everyone),
            "mounts": max(0, Path("/proc/self/mountinfo").read_text().count("\n") - mounts),
            "files": sum(len(files) + len(names) for _, names, files in os.walk(Path(scratch, "owners"))),
        }


if __name__ == "__main__":
    sys.exit(main(__doc__, add_arguments, run))
