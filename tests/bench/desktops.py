"""Measures desktops in sandboxes: starts, memory, actions, tasks of MiniWoB++, and what killed owners leave.

The image is that of launchers/desktop-image.sh. A start is a fresh sandbox, ``screen start`` with a page of MiniWoB++
in Chromium, and the first screenshot. Memory is the proportional set size of all processes of a desktop. With
``--tasks`` the oracle, doing nothing and a random clicker play one episode of each page that the oracle knows.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.bench.arguments import add_count
from tests.bench.command import main
from tests.bench.figures import Figure, median
from tests.bench.sandbox import proportional
from tests.support.desktops import RandomClicker, played
from tests.support.sandboxes import host_pid

if TYPE_CHECKING:
    from megaflow_hpc.environments import ApptainerProvider, ApptainerSandbox
    from megaflow_hpc.types import Task

PAGE = "file:///opt/miniwob/miniwob/click-test-2.html"
SHOT = "/tmp/shot.png"
Note = Callable[[str], None]

OWNER = """
import asyncio, os, sys
from megaflow_hpc.environments import ApptainerProvider, SandboxSpec

async def main():
    provider = ApptainerProvider(sys.argv[1], cache=sys.argv[2])
    sandbox = await provider.start(SandboxSpec(sys.argv[3], network="gateway"))
    print("started", flush=True)
    await sandbox.exec(["screen", "start", "--url", sys.argv[4]])
    await asyncio.sleep(3000)

asyncio.run(main())
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this benchmark."""
    default = Path(os.environ.get("MEGAFLOW_TEST_BASE_SIF", "images/base.sif")).with_name("desktop.sif")
    parser.add_argument("--image", metavar="SIF", default=str(default), help=f"image of desktops ({default})")
    add_count(parser, "--starts", 20, "starts one after the other")
    add_count(parser, "--desktops", 16, "desktops that are started at once")
    add_count(parser, "--actions", 100, "actions with a screenshot")
    add_count(parser, "--owners", 200, "owners that are killed")
    parser.add_argument("--tasks", action="store_true", help="also play tasks of MiniWoB++")


def run(arguments: argparse.Namespace, note: Note) -> list[Figure]:
    """Measures desktops, and counts what killed owners leave."""
    figures = asyncio.run(_run(arguments, note))
    if arguments.tasks:
        figures += _play(Path(arguments.image), note)
    return figures


async def _run(arguments: argparse.Namespace, note: Note) -> list[Figure]:
    from megaflow_hpc.environments import ApptainerProvider

    figures = []
    async with ApptainerProvider() as provider:
        await provider.stage(arguments.image)
        note(f"{arguments.starts} starts, one after the other")
        starts = []
        for _ in range(arguments.starts):
            began = time.perf_counter()
            async with await _ready(provider, arguments.image):
                starts.append(time.perf_counter() - began)
        figures.append(median("desktop ready with its first screenshot", "s", starts, 1.5))
        note(f"{arguments.desktops} starts at once")
        figures += await _at_once(provider, arguments.image, arguments.desktops)
        note(f"{arguments.actions} actions with a screenshot")
        async with await _ready(provider, arguments.image) as sandbox:
            figures += await _actions(sandbox, arguments.actions)
        note(f"{arguments.owners} owners killed by SIGKILL at random instants, then the janitor")
        left = await asyncio.to_thread(_leftovers, arguments.image, arguments.owners, provider)
        figures += [
            Figure(f"{what} left by killed owners", "count", n, arguments.owners, goal=0) for what, n in left.items()
        ]
    return figures


async def _ready(provider: ApptainerProvider, image: str) -> ApptainerSandbox:
    from megaflow_hpc.environments import SandboxSpec

    sandbox = await provider.start(SandboxSpec(image, network="gateway", memory_mb=2000, disk_mb=2000))
    await _screen(sandbox, "start", "--url", PAGE)
    await _screen(sandbox, "do", '{"action": "screenshot"}', "--screenshot", SHOT)
    return sandbox


async def _screen(sandbox: ApptainerSandbox, *words: str) -> str:
    done = await sandbox.exec(["screen", *words])
    if done.exit_code:
        raise RuntimeError(f"screen {words[0]}: {done.stdout}{done.stderr}")
    return done.stdout


async def _at_once(provider: ApptainerProvider, image: str, count: int) -> list[Figure]:
    from megaflow_hpc.host.process import descendants

    began = time.perf_counter()
    sandboxes = await asyncio.gather(*(_ready(provider, image) for _ in range(count)))
    taken = time.perf_counter() - began
    await asyncio.sleep(1.0)
    memory, threads = [], []
    for sandbox in sandboxes:
        root = host_pid(sandbox)
        pids = [root, *descendants(root)] if root else []
        memory.append(sum(map(proportional, pids)) / 1000)
        threads.append(float(sum(len(os.listdir(f"/proc/{pid}/task")) for pid in pids)))
    await asyncio.gather(*(sandbox.stop() for sandbox in sandboxes))
    return [
        Figure(f"{count} desktops at once, all ready", "s", taken, 1, goal=20),
        median("memory of a desktop, PSS of all its processes", "MB", memory),
        median("processes and threads of a desktop", "count", threads),
    ]


async def _actions(sandbox: ApptainerSandbox, count: int) -> list[Figure]:
    acts, shots, trees = [], [], []
    for number in range(count):
        action = {"action": "left_click", "coordinate": [100 + number, 400]}
        if number % 3 == 1:
            action = {"action": "type", "text": "abc"}
        elif number % 3 == 2:
            action = {"action": "mouse_move", "coordinate": [100 + number, 300]}
        began = time.perf_counter()
        await _screen(sandbox, "do", json.dumps(action), "--screenshot", SHOT)
        acts.append((time.perf_counter() - began) * 1000)
        began = time.perf_counter()
        await _screen(sandbox, "do", '{"action": "screenshot"}', "--screenshot", SHOT)
        shots.append((time.perf_counter() - began) * 1000)
        began = time.perf_counter()
        await _screen(sandbox, "tree")
        trees.append((time.perf_counter() - began) * 1000)
    return [
        median("action with a screenshot of 1280x800", "ms", acts, 120),
        median("screenshot of 1280x800", "ms", shots),
        median("accessibility tree", "ms", trees),
    ]


def _leftovers(image: str, count: int, provider: ApptainerProvider) -> dict[str, int]:
    """Counts processes, mounts and files of killed owners' desktops after one sweep."""
    from megaflow_hpc.environments.sandbox.scratch import sweep
    from megaflow_hpc.host.process import Identity, descendants

    chance = random.Random(39)
    left = {"processes": 0, "mounts": 0, "files": 0}
    with tempfile.TemporaryDirectory(dir=provider.scratch) as scratch:
        mounts = Path("/proc/self/mountinfo").read_text().count("\n")
        for _ in range(count):
            argv = [sys.executable, "-c", OWNER, scratch, str(provider.cache), image, PAGE]
            owner = subprocess.Popen(argv, stdout=subprocess.PIPE)
            assert owner.stdout
            owner.stdout.readline()
            time.sleep(chance.uniform(0.0, 2.5))
            everyone = [identity for pid in descendants(owner.pid) if (identity := Identity.of(pid))]
            owner.send_signal(signal.SIGKILL)
            owner.wait()
            deadline = time.monotonic() + 10
            while any(identity.alive() for identity in everyone) and time.monotonic() < deadline:
                time.sleep(0.02)
            left["processes"] += sum(identity.alive() for identity in everyone)
        sweep(scratch)
        left["mounts"] = max(0, Path("/proc/self/mountinfo").read_text().count("\n") - mounts)
        left["files"] = sum(len(files) + len(names) for _, names, files in os.walk(Path(scratch, "owners")))
    return left


def _play(image: Path, note: Note) -> list[Figure]:
    """Lets the oracle, nobody and a random clicker play each task that has a solution."""
    from megaflow_hpc.agents.without_model import NopAgent, OracleAgent
    from megaflow_hpc.tasks.loading import load_tasks
    from megaflow_hpc.tasks.sets.importing import import_set

    with tempfile.TemporaryDirectory() as directory:
        output = Path(directory)
        imported = import_set(
            "miniwob", output, origin=None, mirror="", accepted=False, change=None, say=note, image=image
        )
        tasks = [task for task in load_tasks([imported.pattern], "/") if Path(task.path, "solution").exists()]
        agents = {"oracle": OracleAgent(), "nop": NopAgent(), "random": RandomClicker(20)}
        rewards = {name: asyncio.run(_rewards(tasks, image, agent, name, note)) for name, agent in agents.items()}
    return [
        Figure(
            "tasks of MiniWoB++ solved by the oracle",
            "count",
            sum(r == 1 for r in rewards["oracle"]),
            len(tasks),
            goal=20,
            better="higher",
        ),
        Figure("tasks rewarded for doing nothing", "count", sum(r > 0 for r in rewards["nop"]), len(tasks), goal=0),
        Figure("mean reward of a random clicker", "", statistics.mean(rewards["random"]), len(tasks)),
    ]


async def _rewards(tasks: list[Task], image: Path, agent: Any, name: str, note: Note) -> list[float]:
    from megaflow_hpc.environments import ApptainerProvider

    slots, rewards = asyncio.Semaphore(2), []
    async with ApptainerProvider() as provider:

        async def one(task: Task) -> None:
            async with slots:
                reward, error = await played(task, {"desktop": str(image)}, provider, agent)
                rewards.append(reward)
                note(f"{name}: {task.id}: {reward:g} {error}")

        await asyncio.gather(*map(one, tasks))
    return rewards


if __name__ == "__main__":
    sys.exit(main(__doc__, add_arguments, run))
