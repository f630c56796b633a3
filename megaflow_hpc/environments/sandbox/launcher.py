"""Starts containers. Builds Apptainer's command line and runs it in a thread with a seccomp filter and without keys.

Processes inherit the seccomp filter and the session keyring of the thread that starts them. A separate thread therefore
installs the filter and gives up its keyring once, before it starts any container. All other threads keep their keys
(such as AFS and Kerberos tokens). Apptainer's own ``--security seccomp:`` needs libseccomp and kills 32-bit programs.
"""

from __future__ import annotations

import ctypes
import functools
import os
import select
import signal
import struct
import subprocess
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

from megaflow_hpc.environments.sandbox.spec import SandboxSpec
from megaflow_hpc.host.apptainer import CONTROL_DIR, clean_environment, only_by_root, unshare
from megaflow_hpc.host.child import dies_with_parent

Result = TypeVar("Result")

START_TIMEOUT_S = 60.0
"""Timeout in seconds for a container to become ready, not counting the time to unpack its image."""

ROOT_MAY = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "NET_BIND_SERVICE", "SETGID", "SETUID", "SYS_CHROOT")
"""Capabilities of uid 0 in a sandbox, valid only in its own namespaces. Docker grants the same ones, so scripts written
for root work."""

_SHARED = {
    "max_inotify_instances": "inotify/max_user_instances",
    "max_inotify_watches": "inotify/max_user_watches",
    "max_fanotify_groups": "fanotify/max_user_groups",
    "max_fanotify_marks": "fanotify/max_user_marks",
}
"""Maps each limit of a user namespace to the user's limit across all namespaces, as a path below ``/proc/sys/fs``."""
_FRACTION = 8
_NESTED = {f"max_{kind}_namespaces": 256 for kind in ("user", "mnt", "pid", "ipc", "net", "uts", "cgroup", "time")}

_APPTAINER_ENVIRONMENT = {"GOMAXPROCS": "1", "GOGC": "off"}
"""Variables that limit Apptainer to one thread and disable its garbage collection, because it runs for only 50 ms."""

_PR_SET_NO_NEW_PRIVS = 38
_SECCOMP_SET_MODE_FILTER, _SPEC_ALLOW = 1, 4
_KEYCTL_JOIN_SESSION_KEYRING, _KEYCTL_REVOKE, _SESSION_KEYRING = 1, 3, -3
_AF_VSOCK = 40
_X32 = 0x40000000
_EPERM, _EAFNOSUPPORT = 1, 97

# Keys belong to the user rather than to a namespace, so sandboxes would share them with each other and the host. An
# io_uring holds files and memory that no descriptor shows. The other calls reach kernel code that few programs need.
# Docker blocks them too.
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
"""System calls that fail with EPERM. ``socket`` also fails for AF_VSOCK, because vsock addresses belong to the whole
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
"""Maps each machine and audit architecture (linux/audit.h) to the system call numbers of :data:`REFUSED` and
``socket``."""
_SYSCALLS = {"x86_64": {"seccomp": 317, "keyctl": 250}, "aarch64": {"seccomp": 277, "keyctl": 219}}

_libc = ctypes.CDLL(None, use_errno=True)


@functools.cache
def _shared_limits() -> dict[str, int]:
    """Returns the limits of one sandbox. Each is an eighth of the user's limit, so that no sandbox can exhaust it."""
    limits: dict[str, int] = {}
    for name, file in _SHARED.items():
        try:
            with open(f"/proc/sys/fs/{file}") as text:
                limits[name] = max(1, int(text.read()) // _FRACTION)
        except (OSError, ValueError):  # this kernel does not have the limit
            continue
    return limits


def namespace_limits(spec: SandboxSpec) -> Mapping[str, int]:
    """Returns the limits of a sandbox's outermost user namespace, by file name in ``/proc/sys/user``.

    In a new user namespace, a process could reach kernel code that is otherwise reserved for root. It could also mount
    in-memory file systems that no limit counts. A sandbox therefore gets only the namespaces needed to start it. Uid 0
    needs none. Another uid needs two, its own and Apptainer's. No process in the sandbox can raise a limit.
    """
    if spec.nested:
        return {**_shared_limits(), **_NESTED}
    return {**_shared_limits(), "max_user_namespaces": 0 if spec.as_root else 2}


def set_namespace_limits(spec: SandboxSpec) -> str:
    """Returns shell code that sets :func:`namespace_limits` as root of the outermost user namespace.

    It has no effect if ``/proc/sys`` is read-only.
    """
    lines = "".join(f"echo {number} >/proc/sys/user/{name}; " for name, number in namespace_limits(spec).items())
    return f"{{ {lines}}} 2>/dev/null; "


def namespace_root(spec: SandboxSpec) -> tuple[str, ...]:
    """Returns the argv prefix that starts Apptainer as uid 0 of a user namespace. Empty if the spec's user is not root.

    ``--fakeroot`` has the same effect but keeps a second Apptainer running, which costs 40 ms and 9 MB per sandbox.
    """
    return _outermost(spec) if spec.as_root else ()


def namespace_user(spec: SandboxSpec) -> tuple[str, ...]:
    """Returns the argv prefix that starts Apptainer as this user, in a user namespace nested inside one that has
    limits."""
    prefix = () if spec.as_root else _outermost(spec)
    return (*prefix, *as_user()) if prefix else ()


def _outermost(spec: SandboxSpec) -> tuple[str, ...]:
    if os.geteuid() == 0 or not unshare():
        return ()
    return (*unshare(), "/bin/sh", "-c", f'{set_namespace_limits(spec)}exec "$@"', "sh")


def as_user() -> tuple[str, ...]:
    """Returns the argv prefix that runs a command as this user inside a user namespace whose root is this user."""
    return (unshare()[0], "--user", f"--map-user={os.getuid()}", f"--map-group={os.getgid()}", "--")


def exec_argv(
    apptainer: str, spec: SandboxSpec, rootfs: str, *, overlay: str | None, control: str, command: Sequence[str]
) -> list[str]:
    """Returns the command line of a sandbox's container process.

    ``--no-init`` makes the runner PID 1 of the container, which no process inside can kill. This user becomes uid 0
    through :func:`namespace_root`, or through ``--fakeroot`` without subordinate ids, and therefore owns all files.
    ``/tmp`` is part of the overlay, so it lasts as long as the sandbox, uses no memory and is not limited to 64 MB.
    """
    argv = [apptainer, "-q", "exec", "--containall", "--cleanenv", "--no-home", "--no-eval", "--no-init", "--no-privs"]
    argv += ["--no-mount", "tmp,bind-paths", "--pwd", "/"]
    if spec.as_root and not only_by_root():
        if spec.fakeroot:
            argv += ["--fakeroot", "--ignore-subuid"]
        elif not namespace_root(spec):
            argv += ["--fakeroot", "--ignore-subuid", "--ignore-fakeroot-command"]
        argv += ["--add-caps", ",".join(f"CAP_{name}" for name in ROOT_MAY)]
    elif os.geteuid() == 0:
        argv += ["--userns"]
    if spec.network != "host":
        argv += ["--net", "--network", "none"]
    # If Apptainer mounts no overlay, the root itself is writable: it is already an overlay, or a copy.
    argv += ["--overlay", overlay] if overlay is not None else ["--writable"]
    argv += ["--bind", f"{control}:{CONTROL_DIR}:ro"]
    for bind in spec.binds:
        argv += ["--bind", bind]
    return [*argv, rootfs, *command]


class Launcher:
    """Calls functions one at a time in a thread without access to the user's keys.

    A process that this thread starts with a parent-death signal dies when the thread ends, and so with this process.

    Args:
        filtered: Also apply the seccomp filter to the thread's processes, and disable setuid bits for them.
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
        """Returns whether the seccomp filter is installed. It is missing if the architecture is unknown or the kernel
        lacks filters."""
        return self.call(lambda: self._holds_filter)


def launcher(filtered: bool) -> Launcher:
    """Returns this process's launcher with or without the seccomp filter. Starts it on the first call."""
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
        """Returns ``None`` while the process runs, and 0 once it has exited."""
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
    """Returns the seccomp filter as classic BPF (linux/filter.h). Empty for unknown architectures."""
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
    """Installs the filter for this thread and the processes it starts. Returns ``False`` if the kernel refuses it."""

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
