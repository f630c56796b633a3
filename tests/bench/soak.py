"""Runs random commands in many sandboxes while their owners are killed at random, and checks that nothing is left.

``python -m tests.bench.soak --sandboxes 10000 --slots 32 --seed 1 --log soak.log``. Worker processes own the sandboxes.
Now and then one gets SIGKILL and is replaced. The new worker's provider sweeps the directories of the killed one.
Processes of this user, mounts, files on scratch and descriptors are counted before and after.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, TextIO

from megaflow_hpc.environments import ApptainerProvider, SandboxSpec
from megaflow_hpc.environments.sandbox.scratch import sweep
from megaflow_hpc.errors import MegaflowError
from megaflow_hpc.host.files import remove_tree
from tests.support.waiting import eventually, until

WORKERS = 4
COMMANDS = (
    ("true", 0),
    ("exit 7", 7),
    ("kill -9 $$", 137),
    ("echo out; echo err >&2", 0),
    ("head -c 3000000 /dev/zero", 0),
    ("rm -rf /usr/share/doc; mkdir -p /usr/share/doc/x", 0),
    ("mkdir -p /a/b && echo x > /a/b/c && chmod 0 /a/b", 0),
    ("i=0; while [ $i -lt 50 ]; do echo $i > /tmp/$i; i=$((i+1)); done", 0),
    ("(setsid sleep 3000 &)", 0),
    ("sleep 3000 & sleep 0.05", 0),
    ("cat", 0),
    ("kill -9 -1", 137),
)
SLOW = ("trap '' TERM; sleep 3000", 124)


async def _sandbox(provider: ApptainerProvider, image: str, luck: random.Random) -> None:
    """Runs one sandbox; raises AssertionError on a wrong result."""
    async with await provider.start(SandboxSpec(image)) as sandbox:
        for _ in range(luck.randrange(1, 8)):
            kind = luck.random()
            if kind < 0.05:
                result = await sandbox.exec(SLOW[0], timeout_s=0.2)
                assert result.exit_code == SLOW[1], result
            elif kind < 0.10:
                results = await asyncio.gather(*(sandbox.exec(f"echo {n}") for n in range(5)))
                assert [r.stdout for r in results] == [f"{n}\n" for n in range(5)], results
            elif kind < 0.14:
                await sandbox.reset()
            elif kind < 0.18:
                await sandbox.kill_processes()
            else:
                command, status = luck.choice(COMMANDS)
                result = await sandbox.exec(command, timeout_s=60, user_input="x" if command == "cat" else None)
                assert result.exit_code == status, (command, result)


async def _work(scratch: str, cache: str, image: str, slots: int, seed: int) -> None:
    """Runs a worker, which prints a line for each finished sandbox until standard input ends."""
    luck = random.Random(seed)
    stopping = asyncio.Event()
    asyncio.get_running_loop().add_reader(0, lambda: stopping.set() if not os.read(0, 100) else None)
    async with ApptainerProvider(scratch, cache) as provider:

        async def slot() -> None:
            while not stopping.is_set():
                error = ""
                try:
                    await _sandbox(provider, image, luck)
                except (MegaflowError, AssertionError, OSError) as problem:
                    error = repr(problem)
                print(json.dumps({"error": error}), flush=True)

        await asyncio.gather(*(slot() for _ in range(slots)))
    asyncio.get_running_loop().remove_reader(0)


def count(scratch: Path) -> dict[str, int]:
    """Counts what must be equal before and after. Processes are those that see a mount of ``scratch``."""
    mine = 0
    for entry in os.scandir("/proc"):
        try:
            mine += entry.name.isdigit() and bytes(scratch) in Path(entry.path, "mountinfo").read_bytes()
        except OSError:
            continue
    return {
        "processes": mine,
        "mounts": Path("/proc/self/mountinfo").read_text().count("\n"),
        "files": sum(len(files) + len(names) for _, names, files in os.walk(scratch / "owners")),
        "descriptors": len(os.listdir("/proc/self/fd")),
    }


def soak(image: str, sandboxes: int, slots: int, seed: int, scratch: Path, log: TextIO) -> dict[str, Any]:
    """Runs the soak test. Returns its result, which is also the last line of the log."""
    luck = random.Random(seed)
    cache = scratch / "cache"

    async def stage() -> None:
        async with ApptainerProvider(scratch, cache) as provider:
            async with await provider.start(SandboxSpec(image)):
                pass

    asyncio.run(stage())
    before, began = count(scratch), time.monotonic()
    done = kills = number = 0
    errors: list[str] = []
    each = max(1, slots // WORKERS)
    workers: list[subprocess.Popen[bytes]] = []

    def hire() -> None:
        nonlocal number
        number += 1
        words = [str(scratch), str(cache), image, str(each), str(seed * 100_000 + number)]
        argv = [sys.executable, "-m", "tests.bench.soak", "--worker", *words]
        workers.append(subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        assert workers[-1].stdout
        os.set_blocking(workers[-1].stdout.fileno(), False)

    def listen() -> None:
        nonlocal done
        for worker in workers:
            assert worker.stdout
            if worker.stdout.closed:
                continue
            for line in (worker.stdout.read() or b"").splitlines():
                try:
                    error = json.loads(line)["error"]
                except ValueError:
                    continue  # cut off by the kill
                done += 1
                if error:
                    errors.append(error)
                    print(f"error: {error}", file=log, flush=True)

    for _ in range(min(WORKERS, slots)):
        hire()
    reported, next_kill = 0, luck.randrange(10, 60)
    try:
        while done < sandboxes:
            time.sleep(0.05)
            listen()
            if done >= next_kill:
                victim = workers.pop(luck.randrange(len(workers)))
                victim.send_signal(signal.SIGKILL)
                victim.wait()
                for pipe in (victim.stdin, victim.stdout):
                    assert pipe
                    pipe.close()
                kills += 1
                next_kill = done + luck.randrange(10, 60)
                hire()
            if any(worker.poll() is not None for worker in workers):
                raise SystemExit("a worker ended by itself; its output is above")
            if done - reported >= max(10, sandboxes // 100):
                reported = done
                rate = done / (time.monotonic() - began)
                figures = f"{done} sandboxes, {kills} workers killed, {len(errors)} errors, {rate:.1f} per s"
                print(figures, file=log, flush=True)
    except BaseException:  # interrupted: end the workers here
        for worker in workers:
            worker.kill()
            worker.wait()
        sweep(scratch)
        raise
    for worker in workers:
        assert worker.stdin
        worker.stdin.close()

    def ended() -> bool:
        listen()
        return all(worker.poll() is not None for worker in workers)

    until(ended, "every worker ends when its input does")
    for worker in workers:
        assert worker.stdout
        worker.stdout.close()

    def clean() -> bool:
        if count(scratch) == before:
            return True
        sweep(scratch)
        return False

    eventually(clean, 20, every_s=0.2)
    after = count(scratch)
    verdict = {
        "sandboxes": done,
        "workers_killed": kills,
        "errors": len(errors),
        "before": before,
        "after": after,
        "seed": seed,
        "seconds": round(time.monotonic() - began, 1),
        "passed": before == after and not errors,
    }
    print(json.dumps(verdict), file=log, flush=True)
    return verdict


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worker", nargs=5, help=argparse.SUPPRESS)
    parser.add_argument("--sandboxes", type=int, default=300)
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--image", default=os.environ.get("MEGAFLOW_TEST_BASE_SIF"))
    parser.add_argument("--log", type=argparse.FileType("a"), default=sys.stdout)
    arguments = parser.parse_args()
    if arguments.worker:
        scratch, cache, image, slots, seed = arguments.worker
        asyncio.run(_work(scratch, cache, image, int(slots), int(seed)))
        return 0
    scratch = Path(tempfile.mkdtemp(prefix="megaflow-soak-"))
    try:
        verdict = soak(arguments.image, arguments.sandboxes, arguments.slots, arguments.seed, scratch, arguments.log)
    finally:
        sweep(scratch)
        remove_tree(scratch)
    print(json.dumps(verdict))
    return 0 if verdict["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
