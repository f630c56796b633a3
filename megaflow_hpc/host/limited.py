"""Runs what reads another user's files in a child process with limits: it takes no more, whatever the files hold."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000


@dataclass(frozen=True)
class Limits:
    """What a process may take."""

    memory_bytes: int
    """Of private memory that it can write to. Of address space, libraries reserve more than they use."""
    cpu_s: int
    file_bytes: int
    """Size of each file that it writes."""


def confine(limits: Limits, network: bool = False) -> None:
    """Limits this process and its children for good.

    Args:
        network: Leave it the network. Without it, the process gets a network namespace of its own, where the kernel
            lets users make one.
    """
    kinds = (resource.RLIMIT_DATA, resource.RLIMIT_CPU, resource.RLIMIT_FSIZE, resource.RLIMIT_CORE)
    for kind, most in zip(kinds, (limits.memory_bytes, limits.cpu_s, limits.file_bytes, 0), strict=True):
        hard = resource.getrlimit(kind)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, most))
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # each thread of numpy's would take its part
    if not network:
        _leave_network()


def _leave_network() -> None:
    user, group = os.geteuid(), os.getegid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNET | (_CLONE_NEWUSER if user else 0)) or not user:
        return
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        with suppress(OSError), open(f"/proc/self/{name}", "w", encoding="ascii") as file:
            file.write(text)


def run_confined(call: Callable[[], int], limits: Limits, network: bool = False) -> int:
    """Calls a function in a child process and returns its exit status, or the negative number of a signal.

    The child has this process's terminal, so that an interruption reaches it too.
    """
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    child = os.fork()
    if not child:
        status = 1
        try:
            confine(limits, network)
            status = call()
        except MemoryError:
            status = -signal.SIGKILL
        finally:
            with suppress(OSError, ValueError, MemoryError):
                sys.stdout.flush()
                sys.stderr.flush()
            if status < 0:
                os.kill(os.getpid(), -status)
            os._exit(status & 0xFF)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    finally:
        signal.signal(signal.SIGINT, before)
