"""What a sandbox may use: real hogs are ended and named, and a sandbox beside them does not notice."""

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
    Node,
    SandboxWatch,
    Watchdog,
)
from megaflow_hpc.errors import LimitError
from megaflow_hpc.host.process import Identity, descendants
from megaflow_hpc.types import ExecResult
from tests.support.waiting import until_async

InSandbox = Callable[..., Any]
Look = Callable[[int], Awaitable[None]]

HOG = ["python3", "-c", "import time; held = []\nwhile True: held.append(b'x' * 10_000_000); time.sleep(0.03)"]
BOMB = ["bash", "-c", "bomb() { bomb | bomb & }; bomb; sleep 60"]
FORKS = [
    "python3",
    "-c",
    "import os, time\nwhile True:\n try: os.fork()\n except OSError: time.sleep(0.01)",
]
FILLER = "i=0; while :; do i=$((i+1)); head -c 4000000 /dev/zero > /var/f$i; done"
PRINTER = "yes an endless line"


@pytest.fixture
def look(monkeypatch: pytest.MonkeyPatch) -> Look:
    """Waits until the watchdog has looked at a sandbox so many times more."""
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


def test_an_endless_printer_is_cut_off_and_costs_its_neighbour_nothing(rootfs: str, scratch: Path) -> None:
    async def main() -> tuple[ExecResult, list[ExecResult]]:
        async with ApptainerProvider(scratch) as provider:
            printer, other = [await provider.start(SandboxSpec(rootfs)) for _ in range(2)]
            printing = asyncio.create_task(printer.exec(PRINTER, timeout_s=1))
            beside = []
            while not printing.done():
                beside.append(await other.exec("echo 1"))
            return await printing, beside

    printed, beside = asyncio.run(main())
    assert (printed.exit_code, printed.timed_out, printed.truncated) == (124, True, True)
    assert len(printed.stdout_bytes) < 600_000
    assert len(beside) > 10
    assert {(r.exit_code, r.stdout) for r in beside} == {(0, "1\n")}


def test_memory_that_no_process_has_mapped_counts(in_sandbox: InSandbox) -> None:
    async def use(sandbox: ApptainerSandbox) -> tuple[ExecResult, int]:
        result = await sandbox.exec("i=0; while :; do i=$((i+1)); head -c 5000000 /dev/zero > /dev/shm/f$i; done")
        return result, len(sandbox.breaches)

    result, breaches = in_sandbox(use, memory_mb=100)
    assert result.breach.startswith("memory limit: ")
    assert breaches > 0


@pytest.mark.slow
def test_memory_that_processes_share_counts_once(in_sandbox: InSandbox, look: Look) -> None:
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

    async def use(sandbox: ApptainerSandbox) -> ExecResult:
        sharing = asyncio.create_task(sandbox.exec(["python3", "-c", code], timeout_s=60))
        await sandbox.exec("until [ -e /up ]; do sleep 0.05; done", timeout_s=60)
        await look(3)
        await sandbox.exec("touch /looked")
        return await sharing

    result = in_sandbox(use, memory_mb=250)
    assert (result.stdout, result.breach) == ("done\n", "")


@pytest.mark.slow
def test_only_the_command_that_uses_most_pays(in_sandbox: InSandbox, look: Look) -> None:
    async def use(sandbox: ApptainerSandbox) -> tuple[ExecResult, ExecResult]:
        waiting = "until [ -e /looked ]; do sleep 0.05; done; echo still here"
        bystander = asyncio.create_task(sandbox.exec(waiting, timeout_s=60))
        hog = await sandbox.exec(HOG, timeout_s=30)
        await look(2)
        await sandbox.exec("touch /looked")
        return hog, await bystander

    hog, bystander = in_sandbox(use, memory_mb=200)
    assert hog.breach
    assert (bystander.stdout, bystander.breach) == ("still here\n", "")


def test_a_hog_that_hides_costs_the_container_and_the_next_command_finds_a_fresh_one(in_sandbox: InSandbox) -> None:
    async def use(sandbox: ApptainerSandbox) -> tuple[ExecResult, ExecResult]:
        await sandbox.exec("echo kept > /kept")
        hidden = await sandbox.exec(["env", "-i", "PATH=/usr/bin", *HOG], timeout_s=30)
        return hidden, await sandbox.exec("cat /kept")

    hidden, after = in_sandbox(use, memory_mb=200)
    assert (hidden.exit_code, hidden.breach.partition(":")[0]) == (137, "memory limit")
    assert after.stdout == "kept\n"


def test_one_large_file_ends_at_the_limit_itself(in_sandbox: InSandbox) -> None:
    async def use(sandbox: ApptainerSandbox) -> tuple[ExecResult, ExecResult]:
        written = await sandbox.exec("cat /dev/zero > /large", timeout_s=30)
        return written, await sandbox.exec("wc -c < /large")

    written, size = in_sandbox(use, disk_mb=30)
    assert written.exit_code != 0
    assert not written.timed_out
    assert 0 < int(size.stdout) <= 30_000_000


def test_files_in_a_directory_without_rights_are_counted(in_sandbox: InSandbox) -> None:
    script = "mkdir /d && chmod 000 /d; i=0; while :; do i=$((i+1)); head -c 4000000 /dev/zero > /d/$i || exit 1; done"

    async def use(sandbox: ApptainerSandbox) -> ExecResult:
        return await sandbox.exec(script, timeout_s=60)

    assert in_sandbox(use, disk_mb=40).breach.startswith("disk limit: ")


@pytest.mark.slow
def test_a_layer_over_its_limit_may_shrink(in_sandbox: InSandbox) -> None:
    async def use(sandbox: ApptainerSandbox) -> tuple[ExecResult, ExecResult, ExecResult]:
        filled = await sandbox.exec(FILLER, timeout_s=60)
        removed = await sandbox.exec("sleep 0.5; rm -f /var/f*; sleep 0.5; echo removed", timeout_s=30)
        return filled, removed, await sandbox.exec("head -c 4000000 /dev/zero > /var/small; sleep 3; echo fits")

    filled, removed, after = in_sandbox(use, disk_mb=50)
    assert filled.breach
    assert (removed.stdout, removed.breach) == ("removed\n", "")
    assert (after.stdout, after.breach) == ("fits\n", "")


@pytest.mark.parametrize(
    ("spec", "limit"), [({"cpu_s": 1.0}, "cpu time"), ({"wall_s": 1.5}, "wall time")], ids=["cpu", "wall"]
)
def test_time_that_is_used_up_ends_the_sandbox_until_its_processes_are_replaced(
    in_sandbox: InSandbox, spec: dict[str, Any], limit: str
) -> None:
    async def use(sandbox: ApptainerSandbox) -> tuple[ExecResult, str, ExecResult]:
        spun = await sandbox.exec("while :; do :; done", timeout_s=30)
        try:
            await sandbox.exec("echo more")
            refused = ""
        except LimitError as error:
            refused = str(error)
        await sandbox.kill_processes()  # what comes before the verifier
        return spun, refused, await sandbox.exec("echo verified")

    spun, refused, after = in_sandbox(use, **spec)
    assert (spun.exit_code, spun.breach.startswith(f"{limit} limit: ")) == (137, True)
    assert f"has ended: {limit} limit" in refused
    assert after.stdout == "verified\n"


def test_cpu_time_of_children_that_have_ended_counts(in_sandbox: InSandbox) -> None:
    script = "while :; do sh -c 'i=0; while [ $i -lt 20000 ]; do i=$((i+1)); done'; done"

    async def use(sandbox: ApptainerSandbox) -> ExecResult:
        return await sandbox.exec(script, timeout_s=30)

    assert in_sandbox(use, cpu_s=1.0).breach.startswith("cpu time limit: ")


def test_a_sandbox_sees_and_uses_as_many_processors_as_it_may(in_sandbox: InSandbox) -> None:
    async def use(sandbox: ApptainerSandbox) -> str:
        return (await sandbox.exec("nproc")).stdout.strip()

    assert in_sandbox(use, cpus=1) == "1"
    assert in_sandbox(use) == str(len(os.sched_getaffinity(0)))


def test_a_sandbox_goes_before_its_owner_where_the_node_runs_out_of_memory(in_sandbox: InSandbox) -> None:
    async def use(sandbox: ApptainerSandbox) -> str:
        return (await sandbox.exec("cat /proc/self/oom_score_adj")).stdout.strip()

    assert int(in_sandbox(use)) > int(Path("/proc/self/oom_score_adj").read_text())


def test_processors_are_shared_out_evenly(tmp_path: Path) -> None:
    watchdog = Watchdog(str(tmp_path))
    watchdog.close()  # nobody looks: these watches have no sandbox
    ours = len(os.sched_getaffinity(0))
    watches = [SandboxWatch(SandboxSpec("x", cpus=1), str(tmp_path), lambda *_: None) for _ in range(2 * ours)]
    for watch in watches:
        watchdog.watch(watch)
    used = [cpu for watch in watches for cpu in watch.cpus]
    expected = 0 if ours == 1 else 2
    assert {used.count(cpu) for cpu in used} <= {expected}
    assert len(used) == expected * ours


def test_short_commands_bring_no_more_looks_than_a_long_one(tmp_path: Path) -> None:
    watch = SandboxWatch(SandboxSpec("x"), str(tmp_path), lambda *_: None)
    watch.init = Identity.of(os.getpid())
    node = Node(1 << 40, free_disk(str(tmp_path)), 0)
    looks, now, ticks = 0, 1000.0, 200
    for _ in range(ticks):
        now += NODE_POLL_INTERVAL_S
        watch.poke()  # as each command does
        if watch.wanted(now, node):
            watch.check(now, node)
            looks += 1
    assert (
        ticks * NODE_POLL_INTERVAL_S / BUSY_POLL_INTERVAL_S / 2
        <= looks
        <= ticks * NODE_POLL_INTERVAL_S / BUSY_POLL_INTERVAL_S + 1
    )
    idle = now + BUSY_POLL_INTERVAL_S
    watch.check(idle, node)
    watch.due = idle + 100
    assert not watch.wanted(idle + 99, node)
    watch.poke()
    assert watch.wanted(idle + 99, node)


def test_a_look_ahead_of_its_turn_does_not_put_off_the_next(tmp_path: Path) -> None:
    """As where a neighbour takes the node's memory while a command begins."""
    watch = SandboxWatch(SandboxSpec("x", memory_mb=1_000_000), str(tmp_path), lambda *_: None)
    watch.init = Identity.of(os.getpid())
    node, now = Node(1 << 42, free_disk(str(tmp_path)), 0), 1000.0
    watch.poke()
    watch.check(now, node)
    assert watch.due == now + BUSY_POLL_INTERVAL_S
    node, now = node._replace(available=1 << 40), now + NODE_POLL_INTERVAL_S
    assert watch.wanted(now, node)
    watch.check(now, node)
    assert watch.due == now + BUSY_POLL_INTERVAL_S


def test_the_watch_ends_with_its_sandboxes(rootfs: str, scratch: Path, look: Look) -> None:
    before = set(descendants(os.getpid()))  # a mount that another test used ends a minute later

    async def main() -> tuple[int, int]:
        async with ApptainerProvider(scratch) as provider:
            sandbox = await provider.start(SandboxSpec(rootfs, disk_mb=100))
            await look(2)
            await sandbox.stop()
            deadline = time.monotonic() + 10
            while set(descendants(os.getpid())) - before and time.monotonic() < deadline:
                await asyncio.sleep(0.05)
            return len(set(descendants(os.getpid())) - before), len(provider.watchdog._watches)

    assert asyncio.run(main()) == (0, 0)
