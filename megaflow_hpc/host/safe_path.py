"""Resolves untrusted paths below a directory, one component at a time, so that no symlink can escape it.

Resolving a path twice may give different results, because another process can change symlinks in between. This module
opens every component by name, relative to the directory already open. So the object that was checked is also the object
that is used. Since Linux 5.6, ``openat2`` does the same.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections import deque
from collections.abc import Iterator

_STEP = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_MAX_LINKS = 40


@contextlib.contextmanager
def opened(root: int, path: str, *, follow: bool = True, as_root: bool = False) -> Iterator[tuple[int, str]]:
    """Yields an ``O_PATH`` descriptor for ``path`` below ``root``, and its path relative to ``root`` without symlinks.

    Args:
        root: Descriptor of a directory.
        follow: If the last component is a symlink, open its target. Otherwise open the symlink itself.
        as_root: Resolve symlinks as if ``root`` were ``/``, as after a chroot, so that no symlink can escape.

    Raises:
        OSError: ``EXDEV`` if the path escapes ``root``, otherwise the kernel's error.
    """
    descriptor = os.open(".", _STEP | os.O_DIRECTORY, dir_fd=root)
    names: list[str] = []
    waiting = deque(path.split("/"))
    links = 0
    try:
        while waiting:
            name = waiting.popleft()
            if name in ("", "."):
                continue
            if name == "..":
                if not names and not as_root:
                    raise OSError(errno.EXDEV, "leads out of its directory", path)
                names = names[:-1]
                descriptor = _replace(descriptor, _walk(root, names))
                continue
            below = os.open(name, _STEP, dir_fd=descriptor)
            if stat.S_ISLNK(os.fstat(below).st_mode) and (follow or any(each not in ("", ".") for each in waiting)):
                try:
                    target = os.readlink("", dir_fd=below)
                finally:
                    os.close(below)
                links += 1
                if links > _MAX_LINKS:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
                if target.startswith("/"):
                    if not as_root:
                        raise OSError(errno.EXDEV, "leads out of its directory", path)
                    names = []
                    descriptor = _replace(descriptor, _walk(root, names))
                waiting.extendleft(reversed(target.split("/")))
                continue
            descriptor = _replace(descriptor, below)
            names = [*names, name]
        yield descriptor, "/".join(names) or "."
    finally:
        os.close(descriptor)


def reopen(descriptor: int, flags: int) -> int:
    """Reopens the object of an ``O_PATH`` descriptor for reading or writing. The object must not be a symlink."""
    return os.open(f"/proc/self/fd/{descriptor}", flags | os.O_CLOEXEC)


def _walk(root: int, names: list[str]) -> int:
    """Opens a directory by descending from the root. Following ``..`` would be unsafe if a directory was moved
    meanwhile."""
    descriptor = os.open(".", _STEP | os.O_DIRECTORY, dir_fd=root)
    for name in names:
        try:
            below = os.open(name, _STEP | os.O_DIRECTORY, dir_fd=descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        descriptor = _replace(descriptor, below)
    return descriptor


def _replace(old: int, new: int) -> int:
    os.close(old)
    return new
