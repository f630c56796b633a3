"""The thread that starts containers, without the host's keys and with a seccomp filter.

A thread's seccomp filter and session keyring are inherited by the processes that it starts. A separate thread therefore
installs the filter and gives up its keyring once, before Apptainer runs. Starting a container costs nothing extra, and
the rest of the process keeps its keys (such as AFS and Kerberos tokens). Apptainer's own ``--security seccomp:`` needs
libseccomp and kills 32-bit programs.
"""

from __future__ import annotations

import ctypes
import functools
import os
import select
import signal
import struct
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

from megaflow_hpc.host.apptainer import clean_environment
from megaflow_hpc.host.child import dies_with_parent

Result = TypeVar("Result")

_APPTAINER_ENVIRONMENT = {"GOMAXPROCS": "1", "GOGC": "off"}
"""Limits threads and turns off garbage collection, since Apptainer runs for only 50 ms."""

_PR_SET_NO_NEW_PRIVS = 38
_SECCOMP_SET_MODE_FILTER, _SPEC_ALLOW = 1, 4
_KEYCTL_JOIN_SESSION_KEYRING, _KEYCTL_REVOKE, _SESSION_KEYRING = 1, 3, -3
_AF_VSOCK = 40
_X32 = 0x40000000
_EPERM, _EAFNOSUPPORT = 1, 97

# Keys belong to the user rather than to a namespace, so other sandboxes and the host would share them. An io_uring
# holds files and memory that no descriptor shows. The other calls reach kernel code that few programs need; Docker
# blocks them too.
REFUSED = (
    "add_key",
    "request_key",
    "keyctl",
    "io_uring_setup",
    "io_uring_enter",
    "io_uring_register",
    "bpf",
    "perf_event_open",
    "userfaultfd",
)
"""System calls that fail with EPERM. ``socket`` with AF_VSOCK fails too, because such addresses belong to the
machine."""

CALLS: dict[str, dict[int, tuple[int, ...]]] = {
    "x86_64": {
        0xC000003E: (248, 249, 250, 425, 426, 427, 321, 298, 323, 41),
        0x40000003: (286, 287, 288, 425, 426, 427, 357, 336, 374, 359),
    },
    "aarch64": {
        0xC00000B7: (217, 218, 219, 425, 426, 427, 280, 241, 282, 198),
        0x40000028: (309, 310, 311, 425, 426, 427, 386, 364, 388, 281),
    },
}
"""Machine → audit architecture (linux/audit.h) → system call numbers of :data:`REFUSED` and of ``socket``."""
_SYSCALLS = {"x86_64": {"seccomp": 317, "keyctl": 250}, "aarch64": {"seccomp": 277, "keyctl": 219}}

_libc = ctypes.CDLL(None, use_errno=True)


class Launcher:
    """A thread without keys that runs functions one at a time.

    Processes that it starts with a parent-death signal die with this process, because the thread does.

    Args:
        filtered: Also apply the seccomp filter to these processes, and give them no privileges from setuid bits.
    """

    def __init__(self, filtered: bool) -> None:
        self._filtered = filtered
        self._holds_filter = False
        self._thread = ThreadPoolExecutor(1, "sandbox launcher", initializer=self._confine)

    def _confine(self) -> None:
        _leave_keys()
        self._holds_filter = self._filtered and _install(program(os.uname().machine))

    def call(self, function: Callable[[], Result]) -> Result:
        """Calls ``function`` in the launcher's thread. Returns its result or raises its exception."""
        return self._thread.submit(function).result()

    def holds_filter(self) -> bool:
        """Returns whether the filter is installed. ``False`` on unknown architectures and kernels without seccomp
        filters."""
        return self.call(lambda: self._holds_filter)


def launcher(filtered: bool) -> Launcher:
    """Returns this process's launcher of the given kind; starts it on the first call."""
    return _launcher(filtered, os.getpid())


@functools.cache
def _launcher(filtered: bool, pid: int) -> Launcher:
    return Launcher(filtered)


def start_apptainer(
    argv: Sequence[str], prefix: Sequence[str], temporary: str, *, stdin: int, stdout: int, stderr: int
) -> subprocess.Popen[bytes]:
    """Starts Apptainer in a launcher's thread.

    Args:
        prefix: Argv prefix that enters a user namespace. Setuid bits have no effect there, so the filter does not
            break Apptainer.
        temporary: TMPDIR for Apptainer itself.
    """
    return launcher(filtered=bool(prefix)).call(
        lambda: subprocess.Popen(
            [*prefix, *dies_with_parent(), *argv],
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            env={**clean_environment(temporary), **_APPTAINER_ENVIRONMENT},
            cwd="/",
            start_new_session=True,
        )
    )


class Clone:
    """The first process of a cloned sandbox, with the interface of :class:`subprocess.Popen`.

    Its parent is the template, not this process.
    """

    def __init__(self, pidfd: int, pid: int, stdin: int, stdout: int) -> None:
        self.pid = pid
        self.stdin = os.fdopen(stdin, "wb", buffering=0)
        self.stdout = os.fdopen(stdout, "rb", buffering=0)
        self._pidfd = pidfd

    def poll(self) -> int | None:
        """Returns ``None`` while the process runs."""
        if self._pidfd >= 0:
            poller = select.poll()
            poller.register(self._pidfd, select.POLLIN)
            if not poller.poll(0):
                return None
            os.close(self._pidfd)
            self._pidfd = -1
        return 0

    def kill(self) -> None:
        """Kills all processes of the sandbox."""
        if self._pidfd >= 0:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)


def _leave_keys() -> None:
    """Joins a new session keyring and revokes it, so that child processes can neither find nor store keys."""
    number = _SYSCALLS.get(os.uname().machine, {}).get("keyctl")
    if number is not None and _libc.syscall(number, _KEYCTL_JOIN_SESSION_KEYRING, None) > 0:
        _libc.syscall(number, _KEYCTL_REVOKE, _SESSION_KEYRING)


def program(machine: str) -> bytes:
    """Returns the filter as classic BPF (linux/filter.h); empty for unknown architectures."""
    load, equal, mask, answer = 0x20, 0x15, 0x54, 0x06
    refuse, allow = 0x00050000, 0x7FFF0000

    def step(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
        return struct.pack("=HBBI", code, yes, no, value)

    blocks = []
    for architecture, numbers in CALLS.get(machine, {}).items():
        *refused, socket = numbers
        block = [step(load, 0)]
        if architecture == 0xC000003E:
            block.append(step(mask, 0xFFFFFFFF ^ _X32))  # x32 programs use the same numbers
        block += [step(equal, number, len(refused) - index + 3) for index, number in enumerate(refused)]
        block += [
            step(equal, socket, 0, 2),
            step(load, 16),
            step(equal, _AF_VSOCK, 2),
            step(answer, allow),
            step(answer, refuse | _EPERM),
            step(answer, refuse | _EAFNOSUPPORT),
        ]
        blocks.append(b"".join([step(load, 4), step(equal, architecture, 0, len(block)), *block]))
    return b"".join([*blocks, step(answer, allow)]) if blocks else b""


def _install(steps: bytes) -> bool:
    """Installs the filter for this thread and the processes it starts. Returns ``False`` if the kernel refuses."""

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("steps", ctypes.c_char_p))

    number = _SYSCALLS.get(os.uname().machine, {}).get("seccomp")
    if not steps or number is None:
        return False
    if _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        return False
    wanted = Program(len(steps) // 8, steps)
    for flags in (_SPEC_ALLOW, 0):  # without the flag, older kernels slow down filtered processes
        if _libc.syscall(number, _SECCOMP_SET_MODE_FILTER, flags, ctypes.byref(wanted)) == 0:
            return True
    return False
