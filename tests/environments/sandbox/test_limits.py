"""Limits: real hogs are ended and named, and a neighbouring sandbox does not notice."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from megaflow_hpc.environments import ApptainerProvider, ApptainerSandbox, SandboxSpec
from megaflow_hpc.environments.sandbox.limits.disk import free_disk
from megaflow_hpc.environments.sandbox.limits.watchdog import (
    BUSY_POLL_INTERVAL_S,
    NODE_POLL_INTERVAL_S,
    Breach,
    ContainerState,
    Node,
    SandboxWatch,
    Watchdog,
)
from megaflow_hpc.errors import LimitError
from megaflow_hpc.host.process import Identity, descendants
from megaflow_hpc.types import ExecResult
from tests.support.sandboxes import Start
from tests.support.waiting import until_async

Look = Callable[[int], Awaitable[None]]

HOG = ["python3", "-c", "import time; held = []\nwhile True: held.append(b'x' * 10_000_000); time.sleep(0.03)"]
BOMB = ["bash", "-c", "bomb() { bomb | bomb & }; bomb; sleep 60"]
FORKS = ["python3", "-c", "import os, time\nwhile True:\n try: os.fork()\n except OSError: time.sleep(0.01)"]
FILLER = "i=0; while :; do i=$((i+1)); head -c 4000000 /dev/zero > /var/f$i; done"
PRINTER = "yes an endless line"


@pytest.fixture
def look(monkeypatch: pytest.MonkeyPatch) -> Look:
    """Waits for a number of further looks of the watchdog."""
    check, looks = SandboxWatch.check, 0

    def counted(watch: SandboxWatch, now: float, node: Node) -> None:
        nonlocal looks
        check(watch, now, node)
        looks += 1

    async def more(number: int) -> None:
        goal = looks + number
        await until_async(lambda: looks >= goal, "the watchdog looks")

    monkeypatch.setattr(SandboxWatch, "check", counted)
    return more


@pytest.mark.parametrize(
    ("command", "spec", "limit"),
    [
        (HOG, {"memory_mb": 200}, "memory"),
        (BOMB, {"processes": 100}, "processes"),
        (FORKS, {"processes": 100}, "processes"),
        (FILLER, {"disk_mb": 50}, "disk"),
    ],
    ids=["memory hog", "fork bomb of a shell", "fork bomb that waits", "disk filler"],
)
def test_a_hog_is_ended_and_named_while_its_neighbour_works_on(
    rootfs: str, scratch: Path, command: Any, spec: dict[str, Any], limit: str
) -> None:
    async def neighbour(sandbox: ApptainerSandbox, until: asyncio.Event) -> list[ExecResult]:
        results = []
        while not until.is_set():
            results.append(await sandbox.exec("echo 1 > /tmp/x && sh -c 'sh -c \"cat /tmp/x\"'", timeout_s=20))
        return results

    async def main() -> tuple[ExecResult, ExecResult, list[Breach], list[ExecResult], list[Breach]]:
        async with ApptainerProvider(scratch) as provider:
            hog, other = [await provider.start(SandboxSpec(rootfs, **spec)) for _ in range(2)]
            ended = asyncio.Event()
            works = asyncio.create_task(neighbour(other, ended))
            result = await hog.exec(command, timeout_s=60)
            ended.set()
            after = await hog.exec("echo alive", timeout_s=20)
            return result, after, hog.breaches, await works, other.breaches

    result, after, breaches, beside, others = asyncio.run(main())
    assert result.exit_code == 137
    assert not result.timed_out
    assert result.breach.startswith(f"{limit} limit: ")
    assert f"[killed: {limit} limit: " in result.stderr
    assert {breach.limit for breach in breaches} == {limit}
    assert (after.exit_code, after.stdout) == (0, "alive\n")
    assert len(beside) > 3
    assert {(r.exit_code, r.stdout, r.breach) for r in beside} == {(0, "1\n", "")}
    assert others == []


FILL_SHM = "i=0; while :; do i=$((i+1)); head -c 5000000 /dev/zero > /dev/shm/f$i; done"
FILL_LOCKED = "mkdir /d; chmod 000 /d; i=0; while :; do i=$((i+1)); head -c 4000000 /dev/zero > /d/$i || exit 1; done"
SHORT_CHILDREN = "while :; do sh -c 'i=0; while [ $i -lt 20000 ]; do i=$((i+1)); done'; done"


@pytest.mark.parametrize(
    ("script", "spec", "limit"),
    [
        (FILL_SHM, {"memory_mb": 100}, "memory"),
        (FILL_LOCKED, {"disk_mb": 40}, "disk"),
        (SHORT_CHILDREN, {"cpu_s": 1.0}, "cpu time"),
    ],
    ids=["memory that no process has mapped", "files in a directory without rights", "children that have ended"],
)
async def test_less_visible_use_counts(start: Start, script: str, spec: dict[str, Any], limit: str) -> None:
    sandbox = await start(**spec)
    result = await sandbox.exec(script, timeout_s=60)
    assert result.breach.startswith(f"{limit} limit: ")
    assert [breach.limit for breach in sandbox.breaches[:1]] == [limit]


async def test_an_endless_printer_is_cut_off_and_costs_its_neighbour_nothing(start: Start) -> None:
    printer, other = await start(), await start()
    printing = asyncio.create_task(printer.exec(PRINTER, timeout_s=1))
    beside = []
    while not printing.done():
        beside.append(await other.exec("echo 1"))
    printed = await printing
    assert (printed.exit_code, printed.timed_out, printed.truncated) == (124, True, True)
    assert len(printed.stdout_bytes) < 600_000
    assert len(beside) > 10
    assert {(r.exit_code, r.stdout) for r in beside} == {(0, "1\n")}


@pytest.mark.slow
async def test_memory_that_processes_share_counts_once(start: Start, look: Look) -> None:
    code = (
        "import mmap, os, time\n"
        "held = bytearray(b'x' * 120_000_000)\n"
        "for _ in range(5):\n"
        "    if os.fork() == 0:\n"
        "        while not os.path.exists('/looked'): time.sleep(0.05)\n"
        "        os._exit(0)\n"
        "open('/up', 'x')\n"
        "for _ in range(5): os.wait()\n"
        "print('done')"
    )
    sandbox = await start(memory_mb=250)
    sharing = asyncio.create_task(sandbox.exec(["python3", "-c", code], timeout_s=60))
    await sandbox.exec("until [ -e /up ]; do sleep 0.05; done", timeout_s=60)
    await look(3)
    await sandbox.exec("touch /looked")
    result = await sharing
    assert (result.stdout, result.breach) == ("done\n", "")


@pytest.mark.slow
async def test_only_the_command_that_uses_most_pays(start: Start, look: Look) -> None:
    sandbox = await start(memory_mb=200)
    waiting = "until [ -e /looked ]; do sleep 0.05; done; echo still here"
    bystander = asyncio.create_task(sandbox.exec(waiting, timeout_s=60))
    hog = await sandbox.exec(HOG, timeout_s=30)
    await look(2)
    await sandbox.exec("touch /looked")
    bystander = await bystander
    assert hog.breach
    assert (bystander.stdout, bystander.breach) == ("still here\n", "")


async def test_a_hog_that_hides_costs_the_container_and_the_next_command_finds_a_fresh_one(start: Start) -> None:
    sandbox = await start(memory_mb=200)
    await sandbox.exec("echo kept > /kept")
    hidden = await sandbox.exec(["env", "-i", "PATH=/usr/bin", *HOG], timeout_s=30)
    after = await sandbox.exec("cat /kept")
    assert (hidden.exit_code, hidden.breach.partition(":")[0]) == (137, "memory limit")
    assert after.stdout == "kept\n"


async def test_one_large_file_ends_at_the_limit_itself(start: Start) -> None:
    sandbox = await start(disk_mb=30)
    written = await sandbox.exec("cat /dev/zero > /large", timeout_s=30)
    assert written.exit_code != 0
    assert not written.timed_out
    assert 0 < Path(sandbox.directory, "layer", "upper", "large").stat().st_size <= 30_000_000


@pytest.mark.slow
async def test_a_layer_over_its_limit_may_shrink(start: Start) -> None:
    sandbox = await start(disk_mb=50)
    filled = await sandbox.exec(FILLER, timeout_s=60)
    removed = await sandbox.exec("sleep 0.5; rm -f /var/f*; sleep 0.5; echo removed", timeout_s=30)
    after = await sandbox.exec("head -c 4000000 /dev/zero > /var/small; sleep 3; echo fits")
    assert filled.breach
    assert (removed.stdout, removed.breach) == ("removed\n", "")
    assert (after.stdout, after.breach) == ("fits\n", "")


async def test_time_that_is_used_up_ends_the_sandbox_until_its_processes_are_replaced(start: Start) -> None:
    sandbox = await start(cpu_s=1.0)
    spun = await sandbox.exec("while :; do :; done", timeout_s=30)
    assert (spun.exit_code, spun.breach.startswith("cpu time limit: ")) == (137, True)
    with pytest.raises(LimitError, match="has ended: cpu time limit"):
        await sandbox.exec("echo more")
    await sandbox.kill_processes()  # as before the verifier
    assert (await sandbox.exec("echo verified")).stdout == "verified\n"


async def test_a_sandbox_uses_as_many_processors_as_it_may_and_goes_before_its_owner_without_memory(
    start: Start,
) -> None:
    limited, free = await start(cpus=1), await start()
    assert (await limited.exec("nproc")).stdout == "1\n"
    assert (await free.exec("nproc")).stdout == f"{len(os.sched_getaffinity(0))}\n"
    adjustment = int((await free.exec("cat /proc/self/oom_score_adj")).stdout.strip())
    assert adjustment > int(Path("/proc/self/oom_score_adj").read_text())


def test_processors_are_shared_out_evenly(tmp_path: Path) -> None:
    watchdog = Watchdog(str(tmp_path))
    watchdog.close()  # no thread looks, because these watches have no sandbox
    ours = len(os.sched_getaffinity(0))
    watches = [SandboxWatch(SandboxSpec("x", cpus=1), str(tmp_path), lambda *_: None) for _ in range(2 * ours)]
    for watch in watches:
        watchdog.watch(watch)
    used = [cpu for watch in watches for cpu in watch.cpus]
    expected = 0 if ours == 1 else 2
    assert {used.count(cpu) for cpu in used} <= {expected}
    assert len(used) == expected * ours


def this_process() -> Identity:
    identity = Identity.of(os.getpid())
    assert identity is not None
    return identity


def test_short_commands_bring_no_more_looks_than_a_long_one(tmp_path: Path) -> None:
    watch = SandboxWatch(SandboxSpec("x"), str(tmp_path), lambda *_: None)
    watch.container = ContainerState(this_process())
    node = Node(1 << 40, free_disk(str(tmp_path)), 0)
    looks, now, ticks = 0, 1000.0, 200
    for _ in range(ticks):
        now += NODE_POLL_INTERVAL_S
        watch.poke()  # as each command does
        if watch.wanted(now, node):
            watch.check(now, node)
            looks += 1
    most = ticks * NODE_POLL_INTERVAL_S / BUSY_POLL_INTERVAL_S
    assert most / 2 <= looks <= most + 1
    idle = now + BUSY_POLL_INTERVAL_S
    watch.check(idle, node)
    watch.next_poll = idle + 100
    assert not watch.wanted(idle + 99, node)
    watch.poke()
    assert watch.wanted(idle + 99, node)


def test_a_look_ahead_of_its_turn_does_not_put_off_the_next(tmp_path: Path) -> None:
    """A neighbour may take the node's memory while a command begins."""
    watch = SandboxWatch(SandboxSpec("x", memory_mb=1_000_000), str(tmp_path), lambda *_: None)
    watch.container = ContainerState(this_process())
    node, now = Node(1 << 42, free_disk(str(tmp_path)), 0), 1000.0
    watch.poke()
    watch.check(now, node)
    assert watch.next_poll == now + BUSY_POLL_INTERVAL_S
    node, now = node._replace(available=1 << 40), now + NODE_POLL_INTERVAL_S
    assert watch.wanted(now, node)
    watch.check(now, node)
    assert watch.next_poll == now + BUSY_POLL_INTERVAL_S


async def test_the_watch_ends_with_its_sandboxes(rootfs: str, scratch: Path, look: Look) -> None:
    before = set(descendants(os.getpid()))  # a mount of another test ends a minute later
    async with ApptainerProvider(scratch) as provider:
        sandbox = await provider.start(SandboxSpec(rootfs, disk_mb=100))
        await look(2)
        await sandbox.stop()
        deadline = time.monotonic() + 120
        while set(descendants(os.getpid())) - before and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        result = len(set(descendants(os.getpid())) - before), len(provider.watchdog._watches)
    assert result == (0, 0)
