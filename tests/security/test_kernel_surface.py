"""What of the kernel a hostile command reaches: keys, namespaces, and calls that no limit and no network holds."""

from __future__ import annotations

import asyncio
import ctypes
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megaflow_hpc.environments import ApptainerProvider, ApptainerSandbox, SandboxSpec
from megaflow_hpc.environments.sandbox.commands.launcher import launcher
from megaflow_hpc.types import ExecResult

InSandbox = Callable[..., Any]

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

MEMORY_OF_ITS_OWN = (
    CALL
    + f"""
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
)
"""True for every way in which a user namespace was made: by unshare, by clone3."""

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
"""getpid, keyctl, io_uring_setup, socket of AF_VSOCK and of AF_INET, as i386 calls them."""

needs_numbers = pytest.mark.skipif(not KNOWN, reason=f"no system calls are known for {MACHINE}")


def with_a_key(use: Callable[[], None]) -> None:
    """Runs ``use`` in a thread whose session keyring is new and holds one key, as a login's holds its tickets."""
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
        assert key(FIND % "ticket") == "done\n"  # this process has kept its own

    with_a_key(use)


@pytest.mark.parametrize("layer", ["overlay", "copy"])
@pytest.mark.parametrize("user", [None, "agent"])
def test_no_user_namespace_can_be_made_inside(
    rootfs: str, scratch: Path, user: str | None, layer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGAFLOW_LAYER", layer)

    async def main() -> list[ExecResult]:
        async with ApptainerProvider(scratch) as provider:
            async with await provider.start(SandboxSpec(rootfs, user=user)) as sandbox:
                tried = [await sandbox.exec(python(MEMORY_OF_ITS_OWN))]
                tried.append(await sandbox.exec("echo 9 > /proc/sys/user/max_user_namespaces"))
                await sandbox.kill_processes()  # what starts anew is bound as well
                return [*tried, await sandbox.exec(python(MEMORY_OF_ITS_OWN))]

    first, lifted, later = asyncio.run(main())
    assert (first.stdout, later.stdout) == ("False\nFalse\n", "False\nFalse\n"), first.stderr
    assert lifted.exit_code != 0


@pytest.mark.parametrize("user", [None, "agent"])
def test_a_campaign_may_give_its_sandboxes_namespaces_of_their_own(in_sandbox: InSandbox, user: str | None) -> None:
    async def use(sandbox: ApptainerSandbox) -> str:
        return str((await sandbox.exec(python(MEMORY_OF_ITS_OWN))).stdout)

    assert in_sandbox(use, user=user, nested=True) == "True\nTrue\n"


@needs_numbers
@pytest.mark.parametrize("user", [None, "agent"])
def test_rings_sockets_to_other_machines_and_the_kernels_debuggers_are_refused(
    in_sandbox: InSandbox, user: str | None
) -> None:
    program = (
        CALL
        + f"""
import socket
print(call({IO_URING_SETUP}, 4, ctypes.create_string_buffer(256)))
for family in (40, socket.AF_INET, socket.AF_UNIX):
    try: print(socket.socket(family, socket.SOCK_STREAM).family.real)
    except OSError as error: print(errno.errorcode[error.errno])
"""
    )

    async def use(sandbox: ApptainerSandbox) -> str:
        return str((await sandbox.exec(python(program))).stdout)

    assert in_sandbox(use, user=user).split() == ["EPERM", "EAFNOSUPPORT", "2", "1"]


@pytest.mark.skipif(MACHINE != "x86_64", reason="code of i386")
def test_what_is_refused_is_refused_to_programs_of_32_bits_too_and_they_run(in_sandbox: InSandbox) -> None:
    async def use(sandbox: ApptainerSandbox) -> ExecResult:
        return await sandbox.exec(python(THIRTY_TWO_BITS))

    result = in_sandbox(use)
    if result.exit_code == 128 + 11 or "-38" in result.stdout:
        pytest.skip("this kernel runs no 32-bit programs")
    assert result.stdout.split() == ["True", "-1", "-1", "-97", "True"], result.stderr
