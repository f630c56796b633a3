"""What this machine does without a sandbox: the limits that sandboxes are measured against, in the same run.

A command is set against ``posix_spawn`` and wait of the same program, a start against ``apptainer exec`` of the same
unpacked image with Apptainer's own defaults. As a program it prints the rate of spawns by many processes at once::

    python -m tests.bench.bare PROGRAM PROCESSES EACH
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time

from megaflow_hpc.host.apptainer import clean_environment

PROGRAM = "/bin/true"

SPAWN = "posix_spawn and wait"
EXEC = "apptainer exec"


def spawns(count: int) -> list[float]:
    """Milliseconds of each of ``count`` runs of :data:`PROGRAM`, one after the other: posix_spawn and wait."""
    taken = []
    for _ in range(count):
        began = time.perf_counter()
        os.waitpid(os.posix_spawn(PROGRAM, [PROGRAM], {}), 0)
        taken.append((time.perf_counter() - began) * 1000)
    return taken


def spawn_rate(at_once: int, each: int) -> float:
    """Runs of :data:`PROGRAM` per second by ``at_once`` processes of which each spawns and waits ``each`` times."""
    argv = [sys.executable, "-m", __name__, PROGRAM, str(at_once), str(each)]
    return float(subprocess.run(argv, stdout=subprocess.PIPE, check=True).stdout)


async def container(apptainer: str, rootfs: str) -> float:
    """Milliseconds of one ``apptainer exec`` of :data:`PROGRAM` over an unpacked image.

    Raises:
        RuntimeError: it does not run here; with Apptainer's words.
    """
    began = time.perf_counter()
    process = await asyncio.create_subprocess_exec(
        *(apptainer, "-q", "exec", "--containall", rootfs, PROGRAM),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=clean_environment(),
    )
    _, said = await process.communicate()
    if process.returncode:
        raise RuntimeError(f"apptainer exec {rootfs}: {said.decode(errors='replace').strip()[-300:]}")
    return (time.perf_counter() - began) * 1000


async def container_rate(apptainer: str, rootfs: str, at_once: int) -> float:
    """Runs of ``apptainer exec`` per second, ``at_once`` at the same time."""
    began = time.perf_counter()
    await asyncio.gather(*(container(apptainer, rootfs) for _ in range(at_once)))
    return at_once / (time.perf_counter() - began)


def _spawn_and_wait(program: str, at_once: int, each: int) -> float:
    began = time.perf_counter()
    for _ in range(at_once):
        if os.fork() == 0:
            for _ in range(each):
                os.waitpid(os.posix_spawn(program, [program], {}), 0)
            os._exit(0)
    for _ in range(at_once):
        os.wait()
    return at_once * each / (time.perf_counter() - began)


if __name__ == "__main__":
    print(_spawn_and_wait(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
