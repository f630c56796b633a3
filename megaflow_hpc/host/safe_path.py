"""Resolve untrusted paths below a directory, one component at a time, so that no link leads out of it.

The kernel may resolve a path differently at two times, because another process can change links in between. Here every
component is opened by name in the directory that is already open, so the object that was checked is the one that is
used. Since Linux 5.6 ``openat2`` does the same.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections import deque
from collections.abc import Iterator

_STEP = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_MOST_LINKS = 40


@contextlib.contextmanager
def opened(root: int, path: str, *, follow: bool = True, as_root: bool = False) -> Iterator[tuple[int, str]]:
    """Yields an ``O_PATH`` descriptor for ``path`` below ``root``, and its path there without links.

    Args:
        root: Descriptor of a directory.
        follow: If the last component is a link, yield its target. Otherwise yield the link itself.
        as_root: Resolve links as if ``root`` were ``/``, so a link that leads out of it is resolved inside it.

    Raises:
        OSError: ``EXDEV`` if the path leads out of ``root``, otherwise the kernel's error.
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
                if links > _MOST_LINKS:
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
    """Opens the object of an ``O_PATH`` descriptor for access. It must not be a link."""
    return os.open(f"/proc/self/fd/{descriptor}", flags | os.O_CLOEXEC)


def _walk(root: int, names: list[str]) -> int:
    """Open a directory from the root. Using ``..`` would lead elsewhere if a directory was moved."""
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
