"""Resources that a hostile command takes in less visible ways: open files, buffers, empty files, children without a
waiting parent, directories of the verifier, readers of its output.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from megaflow_hpc.environments.sandbox.commands.command import MAX_LEFT_PAIRS
from megaflow_hpc.environments.sandbox.limits.usage import Process, lost_ticks
from megaflow_hpc.tasks.formats import VerificationContext
from megaflow_hpc.tasks.harbor.reader import read_harbor_task
from megaflow_hpc.tasks.steps import prepare, verify
from tests.support.harbor_tasks import write_task
from tests.support.sandboxes import Start

BLOCK = "import fcntl, os, socket, time\nblock = b'x' * 1_000_000\nheld = []\n"
REST = "time.sleep(110)"

MEMFD = BLOCK + "held = os.memfd_create('h')\nfor _ in range(200): os.write(held, block)\n" + REST
MANY_MEMFDS = BLOCK + ("for _ in range(200):\n held.append(os.memfd_create('h')); os.write(held[-1], block)\n" + REST)
SENT = BLOCK + (
    "while True:\n"
    " one, other = socket.socketpair(); one.setblocking(False); held.append((one, other))\n"
    " try:\n"
    "  while True: one.send(block[:65536])\n"
    " except BlockingIOError: pass\n"
    " if len(held) == 450: time.sleep(60)\n"
)
SENT_AND_CLOSED = SENT.replace("pass\n", "held[-1] = other\n").replace("450", "900")
TCP = BLOCK + (
    "server = socket.create_server(('127.0.0.1', 0))\n"
    "for _ in range(200):\n"
    " one = socket.create_connection(server.getsockname()); one.setblocking(False)\n"
    " held.append((one, server.accept()))\n"
    " try:\n"
    "  while True: one.send(block)\n"
    " except BlockingIOError: pass\n" + REST
)
PIPES = BLOCK + (
    "for _ in range(400):\n"
    " held.append(os.pipe()); os.set_blocking(held[-1][1], False)\n"
    " try: fcntl.fcntl(held[-1][1], 1031, 1 << 20)\n"
    " except OSError: pass\n"
    " try:\n"
    "  while True: os.write(held[-1][1], block)\n"
    " except BlockingIOError: pass\n"
    "if sum(fcntl.fcntl(one[1], 1032) for one in held) < 45e6: raise SystemExit('others have the pipes')\n" + REST
)
DELETED_SHM = BLOCK + (
    "held = open('/dev/shm/y', 'wb'); os.unlink('/dev/shm/y')\nfor _ in range(200): held.write(block)\n" + REST
)
DELETED = BLOCK + (
    "for number in range(10):\n"
    " held.append(open(f'/var/{number}', 'wb', 0)); os.unlink(f'/var/{number}')\n"
    " for _ in range(20): held[-1].write(block)\n" + REST
)
NEVER_NAMED = BLOCK + (
    "for number in range(10):\n"
    " held.append(os.open('/var', os.O_TMPFILE | os.O_RDWR))\n"
    " for _ in range(20): os.write(held[-1], block)\n" + REST
)
EMPTY_FILES = (
    "import os, time\nos.mkdir('/var/i')\n"
    "for number in range(30_000): os.close(os.open(f'/var/i/{number}', os.O_CREAT))\n" + REST
)
LINKS = EMPTY_FILES.replace("os.close(os.open(f'/var/i/{number}', os.O_CREAT))", "os.symlink('x', f'/var/i/{number}')")
# 160,000 descriptors are more than the limit, and far fewer than a node has.
DESCRIPTORS = (
    "import os, resource, time\n"
    "resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, resource.getrlimit(resource.RLIMIT_NOFILE)[1]),) * 2)\n"
    "for _ in range(160):\n"
    " if os.fork() == 0:\n"
    "  for _ in range(1000): os.open('/dev/null', os.O_RDONLY)\n"
    "  time.sleep(100); os._exit(0)\n" + REST
)


HELD = {
    "memfd": (MEMFD, {"memory_mb": 150}, "memory"),
    "many memfds": (MANY_MEMFDS, {"memory_mb": 150}, "memory"),
    "socket buffers": (SENT, {"memory_mb": 60}, "memory"),
    "socket buffers whose sender is closed": (SENT_AND_CLOSED, {"memory_mb": 60}, "memory"),
    "TCP buffers": (TCP, {"memory_mb": 100}, "memory"),
    "pipes": (PIPES, {"memory_mb": 30}, "memory"),
    "deleted file in memory": (DELETED_SHM, {"memory_mb": 150}, "memory"),
    "deleted files": (DELETED, {"disk_mb": 100}, "disk"),
    "files that never had a name": (NEVER_NAMED, {"disk_mb": 100}, "disk"),
    "empty files": (EMPTY_FILES, {"disk_mb": 100}, "disk"),
    "links": (LINKS, {"disk_mb": 100}, "disk"),
    "descriptors": (DESCRIPTORS, {"memory_mb": 2000}, "descriptors"),
}


@pytest.mark.parametrize(("program", "spec", "limit"), HELD.values(), ids=HELD)
async def test_what_is_held_out_of_sight_is_counted(
    start: Start, program: str, spec: dict[str, Any], limit: str
) -> None:
    sandbox = await start(**spec)
    hidden = await sandbox.exec(["python3", "-c", program], timeout_s=120)
    after = await sandbox.exec("echo alive", timeout_s=120)
    if "others have the pipes" in hidden.stderr:
        pytest.skip("the kernel bounds all pipes of a user, and others of this user have them")
    assert (hidden.exit_code, hidden.timed_out) == (137, False), hidden.stderr
    assert hidden.breach.startswith(f"{limit} limit: ")
    assert after.stdout == "alive\n"


async def test_open_files_and_buffers_of_an_ordinary_program_are_not_held_against_it(start: Start) -> None:
    program = BLOCK + (
        "held = [open(f'/var/{number}', 'wb', 0) for number in range(200)]\n"
        "pairs = [socket.socketpair() for _ in range(200)]\n"
        "for file in held[:50]: file.write(block)\n"
        "memfd = os.memfd_create('small'); os.write(memfd, block)\n"
        "end = time.monotonic() + 2\n"
        "while time.monotonic() < end: pass\n"
        "print('done')"
    )
    sandbox = await start(memory_mb=100, disk_mb=100)
    result = await sandbox.exec(["python3", "-c", program], timeout_s=40)
    assert (result.stdout, result.breach) == ("done\n", "")


# --- what the verifier's tests write --------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["/logs/verifier", "/tests"])
async def test_what_tests_write_beside_the_layer_counts(start: Start, tmp_path: Path, place: str) -> None:
    fill = f"i=0; while :; do i=$((i+1)); head -c 4000000 /dev/zero > {place}/f$i || exit 1; done"
    path = write_task(tmp_path)
    (path / "tests" / "test.sh").write_text(fill)
    task = read_harbor_task(path)
    sandbox = await start(disk_mb=60)
    await prepare(task, sandbox)
    verdict = await verify(task, sandbox, VerificationContext())
    breaches, error = [breach.limit for breach in sandbox.breaches], verdict.error
    assert breaches == ["disk"]
    assert error.startswith("disk limit")


# --- children that nobody waits for ---------------------------------------------------------------------------------

BURN = """
import ctypes, os, signal, time
%s
end = time.monotonic() + 40
while time.monotonic() < end:
    child = os.fork()
    if not child:
        spun = time.process_time()
        while time.process_time() - spun < %s: pass
        os._exit(0)
    try: os.waitpid(child, 0)
    except ChildProcessError: pass
"""
IGNORES = "signal.signal(signal.SIGCHLD, signal.SIG_IGN)"
NO_WAIT = """
class Action(ctypes.Structure):
    handler = ctypes.c_void_p
    _fields_ = [('h', handler), ('mask', ctypes.c_ulong * 16), ('flags', ctypes.c_int), ('r', handler)]
assert ctypes.CDLL(None).sigaction(signal.SIGCHLD, ctypes.byref(Action(None, flags=2)), None) == 0
"""


@pytest.mark.parametrize("seconds", [0.7, 0.04])
@pytest.mark.parametrize("how", [IGNORES, NO_WAIT], ids=["SIG_IGN", "SA_NOCLDWAIT"])
async def test_cpu_time_of_children_that_nobody_waits_for_counts(start: Start, how: str, seconds: float) -> None:
    sandbox = await start(cpu_s=1.0)
    assert (await sandbox.exec(["python3", "-c", BURN % (how, seconds)], timeout_s=60)).breach.startswith(
        "cpu time limit: "
    )


INIT, SHELL, PARENT, CHILD = 10, 11, 12, 13


def family(*, parent_waited: int, init_waited: int = 0, child: int | None = None) -> dict[int, Process]:
    found = {
        INIT: Process(1, 1, "S", 5, init_waited),
        SHELL: Process(2, INIT, "S", 5, 0),
        PARENT: Process(3, SHELL, "S", 5, parent_waited),
    }
    return found if child is None else {**found, CHILD: Process(4, PARENT, "R", child, 0)}


def test_only_what_nobody_was_left_is_lost() -> None:
    before = family(parent_waited=100, child=70)
    assert lost_ticks(before, family(parent_waited=170), INIT, 50, 2) == 0
    assert lost_ticks(before, family(parent_waited=180), INIT, 50, 2) == 0
    assert lost_ticks(before, family(parent_waited=100), INIT, 50, 2) == 70
    assert lost_ticks(before, family(parent_waited=100, child=80), INIT, 50, 2) == 0


def test_orphans_leave_their_time_to_the_first_process() -> None:
    before = family(parent_waited=0, child=70)
    after = family(parent_waited=0, init_waited=70)
    assert lost_ticks(before, after, INIT, 50, 2) == 0
    del after[PARENT]
    assert lost_ticks(before, {**after, SHELL: Process(2, INIT, "S", 5, 5)}, INIT, 50, 2) == 0


def test_a_child_that_came_and_went_between_two_looks_stands_for_others_like_it() -> None:
    assert lost_ticks(family(parent_waited=0, child=1), family(parent_waited=0), INIT, 50, 2) == 50


# --- processes left in the background -------------------------------------------------------------------------------


async def test_processes_left_in_the_background_do_not_use_up_the_workers_descriptors(start: Start) -> None:
    """Each holds the streams of its command. The worker reads only the last few."""
    prints = "(trap 'echo ended > /ended-%d; exit' PIPE; while echo x; do sleep 0.05; done) & true"
    sandbox = await start()
    await sandbox.exec("true")
    before = len(os.listdir("/proc/self/fd"))
    await sandbox.exec(["sh", "-c", prints % 0])
    for _ in range(2 * MAX_LEFT_PAIRS):
        assert (await sandbox.exec("sleep 600 & true")).exit_code == 0
    await sandbox.exec(["sh", "-c", prints % 1])
    taken = len(os.listdir("/proc/self/fd")) - before
    first = await sandbox.exec("until [ -e /ended-0 ]; do sleep 0.05; done; ls /", timeout_s=30)
    # Streams that are no longer read were not given to another command.
    outputs = [(await sandbox.exec("echo mine", timeout_s=30)).stdout for _ in range(5)]
    files = first.stdout.split()
    assert taken <= 2 * MAX_LEFT_PAIRS + 8
    assert "ended-0" in files
    assert "ended-1" not in files
    assert outputs == ["mine\n"] * 5
