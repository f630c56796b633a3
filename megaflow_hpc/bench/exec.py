"""Commands in running sandboxes through the public API: ``await sandbox.exec``, with everything it promises.

Every command has its own process group, an exact exit code, separate standard output and error, a timeout and a bound
on its output. ``/bin/true`` is what the goal is about; a line of shell costs the start of a shell more.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from megaflow_hpc.bench.arguments import add_count, add_image, image_of
from megaflow_hpc.bench.checkout import from_checkout
from megaflow_hpc.bench.figures import Figure, median, quantile

if TYPE_CHECKING:
    from megaflow_hpc.environments import ApptainerProvider, ApptainerSandbox

HELP = "commands in running sandboxes: latency and rate"

SHELL_LINE = "echo one; echo two >&2"

Note = Callable[[str], None]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this benchmark."""
    add_image(parser)
    add_count(parser, "--commands", 2000, "commands one after the other, for the latency")
    add_count(parser, "--sandboxes", 32, "sandboxes that run commands at once, for the rate")
    add_count(parser, "--each", 150, "commands in each of them and round")
    add_count(parser, "--rounds", 5, "rounds of the rate")
    add_count(parser, "--peer-commands", 20, "commands of each peer")


def run(arguments: argparse.Namespace, note: Note) -> list[Figure]:
    """Measures latency and rate of commands in sandboxes."""
    return asyncio.run(_run(arguments, note))


async def _run(arguments: argparse.Namespace, note: Note) -> list[Figure]:
    from megaflow_hpc.environments import ApptainerProvider, SandboxSpec

    image = image_of(arguments)
    peers = from_checkout("container_peers", "--peers") if arguments.peers else None
    spec = SandboxSpec(image, memory_mb=2000, disk_mb=2000)
    async with ApptainerProvider() as provider:
        async with await provider.start(spec) as sandbox:
            note(f"{arguments.commands} commands, one after the other")
            true = await _latency(sandbox, "/bin/true", arguments.commands)
            line = await _latency(sandbox, SHELL_LINE, arguments.commands // 4 or 1)
        note(f"{arguments.sandboxes} sandboxes at once")
        rates = await _rates(provider, spec, arguments)
        spread = (quantile(true, 0.1), quantile(true, 0.9))
        figures = [
            Figure("/bin/true in a running sandbox, p50", "ms", quantile(true, 0.5), len(true), spread, 0.6),
            Figure("/bin/true in a running sandbox, p99", "ms", quantile(true, 0.99), len(true), None, 3.0),
            median("a line of shell in a running sandbox, p50", "ms", line),
            median(f"/bin/true over {arguments.sandboxes} sandboxes", "per s", rates, 3000, "higher"),
        ]
        if peers:
            figures = await peers.beside_commands(figures, provider, image, arguments.peer_commands, note)
    return figures


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


async def _rates(provider: ApptainerProvider, spec: object, arguments: argparse.Namespace) -> list[float]:
    starting = (provider.start(spec) for _ in range(arguments.sandboxes))  # type: ignore[arg-type]
    sandboxes = await asyncio.gather(*starting)

    async def work(sandbox: ApptainerSandbox) -> None:
        for _ in range(arguments.each):
            await sandbox.exec("/bin/true", timeout_s=30)

    rates = []
    try:
        await asyncio.gather(*(sandbox.exec("/bin/true") for sandbox in sandboxes))
        for _ in range(arguments.rounds):
            began = time.perf_counter()
            await asyncio.gather(*map(work, sandboxes))
            rates.append(len(sandboxes) * arguments.each / (time.perf_counter() - began))
    finally:
        await asyncio.gather(*(sandbox.stop() for sandbox in sandboxes))
    return rates
