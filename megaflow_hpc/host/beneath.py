"""Paths below a directory, resolved by the user's own eyes: one component at a time, no link ever leading out.

What a path means to the kernel may change between two looks at it. Here every component is opened by its name in the
directory that is open already, so that what is used is what was looked at. Linux has ``openat2`` for this from 5.6 on.
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
    """Yields an ``O_PATH`` descriptor of what ``path`` names below ``root``, and its path there without links.

    Args:
        root: descriptor of a directory.
        follow: of a link that is the last component, yield what it leads to; without it, the link itself.
        as_root: links are read as if ``root`` were ``/``: one that leads out of it leads to something in it.

    Raises:
        OSError: with ``EXDEV`` for a path that leads out of ``root``; else as the kernel has it.
    """
    place = os.open(".", _STEP | os.O_DIRECTORY, dir_fd=root)
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
                place = _replace(place, _walk(root, names))
                continue
            below = os.open(name, _STEP, dir_fd=place)
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
                    place = _replace(place, _walk(root, names))
                waiting.extendleft(reversed(target.split("/")))
                continue
            place = _replace(place, below)
            names = [*names, name]
        yield place, "/".join(names) or "."
    finally:
        os.close(place)


def reopen(descriptor: int, flags: int) -> int:
    """Opens what an ``O_PATH`` descriptor stands for, anew and with rights; it must be no link."""
    return os.open(f"/proc/self/fd/{descriptor}", flags | os.O_CLOEXEC)


def _walk(root: int, names: list[str]) -> int:
    """Descriptor of a directory, from the top: ``..`` of one that was moved away would lead elsewhere."""
    place = os.open(".", _STEP | os.O_DIRECTORY, dir_fd=root)
    for name in names:
        try:
            below = os.open(name, _STEP | os.O_DIRECTORY, dir_fd=place)
        except BaseException:
            os.close(place)
            raise
        place = _replace(place, below)
    return place


def _replace(old: int, new: int) -> int:
    os.close(old)
    return new
