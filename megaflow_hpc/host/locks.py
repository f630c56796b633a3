"""File locks (``flock``). The kernel releases a lock when its last descriptor is closed, so a killed process does not
block other processes."""

from __future__ import annotations

import fcntl
import math
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

FIRST_PAUSE_S, MAX_PAUSE_S = 0.005, 0.1
"""Initial and maximum delay in seconds between attempts to take a lock with a timeout."""


def lock_descriptor(descriptor: int, *, shared: bool = False, timeout_s: float = math.inf) -> None:
    """Locks an open file or directory. If the descriptor already holds a lock, converts it.

    Args:
        timeout_s: Maximum wait in seconds. 0 or less means a single attempt.

    Raises:
        TimeoutError: Another process holds the lock.
        OSError: The file system does not support locks.
    """
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    if timeout_s == math.inf:
        fcntl.flock(descriptor, kind)
        return
    deadline = time.monotonic() + timeout_s
    pause_s = FIRST_PAUSE_S
    while True:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise TimeoutError("another process holds the lock") from None
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, MAX_PAUSE_S)


def lock_file(path: Path, *, shared: bool = False, timeout_s: float = math.inf) -> int:
    """Locks a file, creating it if needed, and returns its descriptor. Closing the descriptor releases the lock.

    The holder may remove the file. A process waiting for the lock then locks the new file at the same path.

    Raises:
        TimeoutError: Another process holds the lock.
        OSError: The file system does not support locks, or the directory is missing.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            remaining_s = deadline - time.monotonic()
            lock_descriptor(descriptor, shared=shared, timeout_s=remaining_s)
            if _is_at(path, descriptor):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


@contextmanager
def locked(path: Path, *, shared: bool = False, timeout_s: float = math.inf) -> Iterator[None]:
    """Holds a file's lock for the duration of the block. Raises the same errors as :func:`lock_file`."""
    descriptor = lock_file(path, shared=shared, timeout_s=timeout_s)
    try:
        yield
    finally:
        os.close(descriptor)


@contextmanager
def locked_if_supported(path: Path, *, timeout_s: float = math.inf) -> Iterator[None]:
    """Holds a file's lock for the duration of the block. Holds no lock if the file system does not support locks.

    Raises:
        TimeoutError: Another process holds the lock.
    """
    with ExitStack() as lock:
        try:
            lock.enter_context(locked(path, timeout_s=timeout_s))
        except TimeoutError:
            raise
        except OSError:
            pass  # the file system does not support locks
        yield


@contextmanager
def directory_locked_if_supported(path: Path, *, timeout_s: float = math.inf) -> Iterator[None]:
    """Holds the lock of an existing directory for the duration of the block.

    Holds no lock if the file system does not support locks, or if the timeout passes.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with suppress(OSError):
            lock_descriptor(descriptor, timeout_s=timeout_s)
        yield
    finally:
        os.close(descriptor)


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.stat(path).st_ino == os.fstat(descriptor).st_ino
    except FileNotFoundError:
        return False
