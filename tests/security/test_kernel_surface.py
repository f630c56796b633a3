"""Kernel features within reach of a hostile command: keys, namespaces, and calls outside of limits and networks."""

from __future__ import annotations

import asyncio
import ctypes
import os
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megaflow_hpc.environments import ApptainerProvider, ApptainerSandbox, SandboxSpec
from megaflow_hpc.environments.sandbox.launcher import CALLS, REFUSED, launcher, program
from tests.support.requirements import REMEDY
from tests.support.sandboxes import Start

MACHINE = os.uname().machine
KNOWN = MACHINE in ("x86_64", "aarch64")
ADD_KEY, KEYCTL = {"x86_64": (248, 250), "aarch64": (217, 219)}.get(MACHINE, (0, 0))
CLONE3, IO_URING_SETUP = 435, 425
NEW_USER = 0x10000000

CALL = """
import ctypes, errno
libc = ctypes.CDLL(None, use_errno=True)
def call(*words):
    done = libc.syscall(*words)
    return 'done' if done >= 0 else errno.errorcode[ctypes.get_errno()]
"""
FIND = CALL + f"print(call({KEYCTL}, 10, -3, b'user', b'%s', 0))"
LEAVE = CALL + f"print(call({ADD_KEY}, b'user', b'left', b'x', 1, -3))"

MEMORY_OF_ITS_OWN = f"""{CALL}
import os
def made(child):
    if child == 0:
        os._exit(libc.unshare({NEW_USER}) != 0)
    return child > 0 and os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
print(made(os.fork()))
child = libc.syscall({CLONE3}, (ctypes.c_uint64 * 8)({NEW_USER}, 0, 0, 0, 17), 64)
if child == 0: os._exit(0)
print(child > 0)
"""
"""Prints True for each way in which a user namespace was created: unshare, clone3."""

THIRTY_TWO_BITS = """
import ctypes, mmap, struct
def call(number, first=0, second=0, third=0):
    page = mmap.mmap(-1, 4096, prot=7, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x40)
    code = b'\\x53\\xb8%s\\xbb%s\\xb9%s\\xba%s\\xcd\\x80\\x5b\\xc3'
    words = [struct.pack('<i', word) for word in (number, first, second, third)]
    page.write(code % tuple(words))
    return ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()
print(call(20) > 0, call(288, 0, -3, 1), call(425, 4), call(359, 40, 1), call(359, 2, 1) > 0)
"""
"""Calls getpid, keyctl, io_uring_setup, socket of AF_VSOCK and of AF_INET with i386 numbers."""

needs_numbers = pytest.mark.skipif(not KNOWN, reason=f"no system calls are known for {MACHINE}")


EVERY = CALL + "for number in %s: print(call(number, -1, -1, -1, -1, -1))"
"""Makes calls with arguments that the kernel rejects before it checks rights."""
REFUSED_AND_SOCKET = (*REFUSED, "socket")


def with_a_key(use: Callable[[], None]) -> None:
    """Runs ``use`` in a thread with a new session keyring that holds one key, like the tickets of a login."""
    raised: list[BaseException] = []

    def run() -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        try:
            assert libc.syscall(KEYCTL, 1, None) > 0
            assert libc.syscall(ADD_KEY, b"user", b"ticket", b"secret", 6, -3) > 0
            use()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]


def python(text: str) -> list[str]:
    return ["python3", "-c", text]


@pytest.mark.usefixtures("started_by")
@needs_numbers
@pytest.mark.parametrize("user", [None, "agent"])
def test_a_sandbox_finds_no_key_of_the_host_and_leaves_none(rootfs: str, scratch: Path, user: str | None) -> None:
    said: list[str] = []

    async def main() -> None:
        async with ApptainerProvider(scratch) as provider:
            for _ in range(2):
                async with await provider.start(SandboxSpec(rootfs, user=user)) as sandbox:
                    for program in (FIND % "ticket", FIND % "left", LEAVE):
                        said.append((await sandbox.exec(python(program))).stdout.strip())

    with_a_key(lambda: asyncio.run(main()))
    assert said == ["EPERM"] * 6


@needs_numbers
def test_where_there_is_no_filter_the_keyring_is_an_empty_one_all_the_same() -> None:
    def key(program: str, **how: Any) -> str:
        return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, **how).stdout

    def use() -> None:
        unfiltered = launcher(filtered=False)
        assert key(FIND % "ticket") == "done\n"
        assert unfiltered.call(lambda: key(FIND % "ticket")) == "EKEYREVOKED\n"
        assert unfiltered.call(lambda: key(LEAVE)) == "EKEYREVOKED\n"
        assert key(FIND % "ticket") == "done\n"  # this process still has its keys

    with_a_key(use)


HOLD = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
makes = lambda: libc.inotify_init1(0), lambda: libc.fanotify_init(0x200, 0)
print(*(sum(make() >= 0 for _ in range(900)) for make in makes), flush=True)
"""


async def check_watches(sandbox: ApptainerSandbox) -> None:
    """No sandbox takes all watches of the user."""
    shown: list[bytes] = []
    lifted = await sandbox.exec("echo 900 > /proc/sys/user/max_inotify_instances")
    assert lifted.exit_code or sandbox.spec.user  # another uid's own namespace is below the limited one
    await sandbox.exec(python(HOLD), timeout_s=20, on_output=lambda data: bool(shown.append(data)))
    instances, groups = map(int, shown[0].split())
    most = int(Path("/proc/sys/fs/inotify/max_user_instances").read_text())
    assert 0 < instances <= most // 8
    assert groups <= int(Path("/proc/sys/fs/fanotify/max_user_groups").read_text()) // 8


@pytest.mark.parametrize("started_by", ["apptainer", "clone", "copy"], indirect=True)
@pytest.mark.parametrize("user", [None, "agent"])
async def test_no_user_namespace_can_be_made_inside_and_watches_are_limited(
    start: Start, user: str | None, started_by: str, slim_rootfs: str
) -> None:
    sandbox = await start(slim_rootfs if started_by == "copy" else "", user=user)
    first = await sandbox.exec(python(MEMORY_OF_ITS_OWN))
    lifted = await sandbox.exec("echo 9 > /proc/sys/user/max_user_namespaces")
    await check_watches(sandbox)
    await sandbox.kill_processes()  # the next container is limited too
    later = await sandbox.exec(python(MEMORY_OF_ITS_OWN))
    assert (first.stdout, later.stdout) == ("False\nFalse\n", "False\nFalse\n"), first.stderr
    assert lifted.exit_code != 0


@pytest.mark.usefixtures("started_by")
@pytest.mark.parametrize("user", [None, "agent"])
async def test_a_campaign_may_give_its_sandboxes_namespaces_of_their_own(start: Start, user: str | None) -> None:
    sandbox = await start(user=user, nested=True)
    assert str((await sandbox.exec(python(MEMORY_OF_ITS_OWN))).stdout) == "True\nTrue\n"
    if user is None:
        await check_watches(sandbox)


RINGS_AND_SOCKETS = f"""{CALL}
import socket
print(call({IO_URING_SETUP}, 4, ctypes.create_string_buffer(256)))
for family in (40, socket.AF_INET, socket.AF_UNIX):
    try: print(socket.socket(family, socket.SOCK_STREAM).family.real)
    except OSError as error: print(errno.errorcode[error.errno])
"""


@pytest.mark.usefixtures("started_by")
@needs_numbers
@pytest.mark.parametrize("user", [None, "agent"])
async def test_rings_sockets_to_other_machines_and_every_call_of_the_list_are_refused(
    start: Start, user: str | None
) -> None:
    numbers = [next(iter(CALLS[MACHINE].values()))[: len(REFUSED)]]
    ask = EVERY % repr(list(*numbers))
    sandbox = await start(user=user)
    rings = (await sandbox.exec(python(RINGS_AND_SOCKETS))).stdout
    assert rings.split() == ["EPERM", "EAFNOSUPPORT", "2", "1"]
    inside = (await sandbox.exec(python(ask))).stdout.split()
    assert dict(zip(REFUSED, inside, strict=True)) == dict.fromkeys(REFUSED, "EPERM")
    outside = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True).stdout.split()
    said = dict(zip(REFUSED, outside, strict=True))
    # A node may refuse the other calls to all users (sysctls). These three show that our filter answers.
    assert "EPERM" not in {said[name] for name in ("add_key", "request_key", "keyctl")}, said


# --- the filter itself ----------------------------------------------------------------------------------------------

ALLOW, REFUSE, NO_FAMILY = 0x7FFF0000, 0x00050000 + 1, 0x00050000 + 97
OF_SOCKETCALL = {(0x40000003, "socket"): 359, (0x40000003, "socketpair"): 360, (0x40000003, "connect"): 362}
HARMLESS = ("read", "openat", "clone", "execve", "futex", "socketpair", "connect", "ptrace", "unshare", "mount")


def answer(steps: bytes, architecture: int, number: int, first: int) -> int:
    """Evaluates a filter for one call, by the rules of classic BPF."""
    data = struct.pack("=IIQ6Q", number, architecture, 0, first, 0, 0, 0, 0, 0)
    accumulator = at = 0
    while True:
        code, yes, no, value = struct.unpack_from("=HBBI", steps, 8 * at)
        at += 1
        if code == 0x20:
            (accumulator,) = struct.unpack_from("=I", data, value)
        elif code == 0x54:
            accumulator &= value
        elif code == 0x15:
            at += yes if accumulator == value else no
        else:
            assert code == 0x06
            return int(value)


def named(architecture: int, name: str) -> int:
    """Returns the number of a call from libseccomp, which uses the kernel's constants for architectures.

    For i386, libseccomp has its own numbers for calls of ``socketcall``; the kernel's headers have the real ones.
    """
    if (architecture, name) in OF_SOCKETCALL:
        return OF_SOCKETCALL[architecture, name]
    library = ctypes.CDLL("libseccomp.so.2")
    return int(library.seccomp_syscall_resolve_name_arch(ctypes.c_uint32(architecture), name.encode()))


ARCHITECTURES = [(machine, architecture) for machine, calls in CALLS.items() for architecture in calls]


@pytest.mark.parametrize(("machine", "architecture"), ARCHITECTURES)
def test_the_filter_answers_as_the_list_says_on_every_machine(machine: str, architecture: int) -> None:
    steps = program(machine)
    numbers = {name: named(architecture, name) for name in REFUSED_AND_SOCKET}
    assert tuple(numbers.values()) == CALLS[machine][architecture]
    assert {name: answer(steps, architecture, numbers[name], 2) for name in REFUSED} == dict.fromkeys(REFUSED, REFUSE)
    assert answer(steps, architecture, numbers["socket"], 40) == NO_FAMILY
    assert [answer(steps, architecture, numbers["socket"], family) for family in (1, 2, 10, 16)] == [ALLOW] * 4
    allowed = {name: answer(steps, architecture, named(architecture, name), 40) for name in HARMLESS}
    assert allowed == dict.fromkeys(HARMLESS, ALLOW)
    every = [number for number in range(600) if answer(steps, architecture, number, 2) != ALLOW]
    assert every == sorted(numbers[name] for name in REFUSED)


def test_calls_of_x32_are_answered_as_those_of_64_bits() -> None:
    for number in CALLS["x86_64"][0xC000003E][: len(REFUSED)]:
        assert answer(program("x86_64"), 0xC000003E, number | 0x40000000, 2) == REFUSE


OF_X86 = pytest.mark.skipif(MACHINE != "x86_64", reason="code and headers of x86")


@pytest.mark.parametrize(
    ("header", "prefixes", "machine", "architecture"),
    [
        ("asm-generic/unistd.h", ("__NR_", "__NR3264_"), "aarch64", 0xC00000B7),
        pytest.param("x86_64-linux-gnu/asm/unistd_64.h", ("__NR_",), "x86_64", 0xC000003E, marks=OF_X86),
        pytest.param("x86_64-linux-gnu/asm/unistd_32.h", ("__NR_",), "x86_64", 0x40000003, marks=OF_X86),
    ],
)
def test_numbers_are_those_of_the_kernels_headers(
    header: str, prefixes: tuple[str, ...], machine: str, architecture: int
) -> None:
    places = ("/usr/include", f"{os.environ['MEGAFLOW_HOME']}/packages/usr/include")
    path = next((path for place in places if (path := Path(place, header)).exists()), None)
    assert path, f"{header} is in none of {places}; {REMEDY}"
    words = [line.split()[1:3] for line in path.read_text().splitlines() if line.startswith("#define __NR")]
    numbers = {word[0]: int(word[1]) for word in words if word[1:] and word[1].isdigit()}
    found = [
        next(numbers[prefix + name] for prefix in prefixes if prefix + name in numbers) for name in REFUSED_AND_SOCKET
    ]
    assert tuple(found) == CALLS[machine][architecture]


# --- programs of 32 bits --------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("started_by")
@OF_X86
async def test_what_is_refused_is_refused_to_programs_of_32_bits_too_and_they_run(start: Start) -> None:
    sandbox = await start()
    result = await sandbox.exec(python(THIRTY_TWO_BITS))
    if result.exit_code == 128 + 11 or "-38" in result.stdout:
        pytest.skip("this kernel runs no 32-bit programs")
    assert result.stdout.split() == ["True", "-1", "-1", "-97", "True"], result.stderr
