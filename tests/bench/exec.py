"""Measures commands in running sandboxes through the public API, ``await sandbox.exec``.

Every command has its own process group, an exact exit code, separate standard output and error, a timeout and an output
limit. The goals are multiples of the time that the machine takes to start the same program without a sandbox (bare.py),
measured alternately. A shell line also costs the start of a shell.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from tests.bench import bare
from tests.bench.arguments import add_count, add_image, image_of
from tests.bench.command import main
from tests.bench.figures import Figure, median, multiple, quantile

if TYPE_CHECKING:
    from megaflow_hpc.environments import ApptainerProvider, ApptainerSandbox, SandboxSpec


SHELL_LINE = "echo one; echo two >&2"

Note = Callable[[str], None]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this benchmark."""
    add_image(parser)
    add_count(parser, "--commands", 2000, "commands one after the other, for the latency")
    add_count(parser, "--sandboxes", 32, "sandboxes that run commands at once, for the rate")
    add_count(parser, "--each", 150, "commands in each of them and round")
    add_count(parser, "--rounds", 10, "rounds of both")


def run(arguments: argparse.Namespace, note: Note) -> list[Figure]:
    """Measures latency and rate of commands in sandboxes."""
    return asyncio.run(_run(arguments, note))


async def _run(arguments: argparse.Namespace, note: Note) -> list[Figure]:
    from megaflow_hpc.environments import ApptainerProvider, SandboxSpec

    image = image_of(arguments)
    spec = SandboxSpec(image, memory_mb=2000, disk_mb=2000)
    each = max(1, arguments.commands // arguments.rounds)
    async with ApptainerProvider() as provider:
        async with await provider.start(spec) as sandbox:
            note(f"{arguments.rounds} times {each} commands, one after the other, with and without a sandbox by turns")
            ours, limit = [], []
            for _ in range(arguments.rounds):
                ours.append(await _latency(sandbox, bare.PROGRAM, each))
                limit.append(await asyncio.to_thread(bare.spawns, each))
            line = await _latency(sandbox, SHELL_LINE, arguments.commands // 4 or 1)
        note(f"{arguments.sandboxes} sandboxes at once")
        rates, limits = await _rates(provider, spec, arguments)
        true = [taken for part in ours for taken in part]
        bare_ms = statistics.median(taken for part in limit for taken in part)
        p50, p99 = (f"{bare.PROGRAM} in a running sandbox, {which}" for which in ("p50", "p99"))
        rate = f"{bare.PROGRAM} over {arguments.sandboxes} sandboxes"
        return [
            median(p50, "ms", true).beside(bare.SPAWN, "", bare_ms),
            Figure(p99, "ms", quantile(true, 0.99), len(true)),
            median("a line of shell in a running sandbox, p50", "ms", line),
            median(rate, "per s", rates, better="higher").beside(bare.SPAWN, "", statistics.median(limits)),
            multiple(p50, bare.SPAWN, [*map(statistics.median, ours)], [*map(statistics.median, limit)], 1.3),
            multiple(rate, bare.SPAWN, rates, limits, 0.8, "higher"),
        ]


async def _timed(work: Callable[[], Awaitable[object]]) -> float:
    began = time.perf_counter()
    await work()
    return (time.perf_counter() - began) * 1000


async def _latency(sandbox: ApptainerSandbox, command: str, count: int) -> list[float]:
    async def one() -> None:
        result = await sandbox.exec(command, timeout_s=30)
        assert result.exit_code == 0, result

    await one()
    return [await _timed(one) for _ in range(count)]


async def _rates(
    provider: ApptainerProvider, spec: SandboxSpec, arguments: argparse.Namespace
) -> tuple[list[float], list[float]]:
    """Returns commands per second over all sandboxes and of bare processes, round by round."""
    sandboxes = await asyncio.gather(*(provider.start(spec) for _ in range(arguments.sandboxes)))

    async def work(sandbox: ApptainerSandbox) -> None:
        for _ in range(arguments.each):
            await sandbox.exec(bare.PROGRAM, timeout_s=30)

    rates, limits = [], []
    try:
        await asyncio.gather(*(sandbox.exec(bare.PROGRAM) for sandbox in sandboxes))
        for _ in range(arguments.rounds):
            began = time.perf_counter()
            await asyncio.gather(*map(work, sandboxes))
            rates.append(len(sandboxes) * arguments.each / (time.perf_counter() - began))
            limits.append(await asyncio.to_thread(bare.spawn_rate, len(sandboxes), arguments.each))
    finally:
        await asyncio.gather(*(sandbox.stop() for sandbox in sandboxes))
    return rates, limits


if __name__ == "__main__":
    sys.exit(main(__doc__, add_arguments, run))
