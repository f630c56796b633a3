"""A writable root where there is no overlay: a copy of the image, and what in it differs from the image.

::

    LAYER/root    the image's files and the sandbox's, as one tree that a container writes to
    LAYER/upper   the sandbox's files alone, in the form of an overlay's upper directory

One of the two is there at a time: ``lay_out`` makes ``root`` of the image and ``upper``, ``gather`` the reverse. So
all that is done with a layer while nothing runs (the verifier's restoring of programs, snapshots) is done on ``upper``
and need not know how the sandbox writes. A deleted name is marked by an empty file ``.wh.NAME`` there: devices and
extended attributes, the kernel's marks, cannot be had on every file system.

What differs is found by comparing contents, not times, which an agent may set. Blocks are shared where the file system
can (reflinks), never hard links: what a sandbox writes into must not be the image.

A process of its own runs it (``lay_out|gather IMAGE LAYER``), as uid 0 of a user namespace where that can be had: there
it may read the owner's files whatever their modes say. It imports little, so that it starts fast.
"""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys

from megaflow_hpc.environments.images.layers.merging import DELETED, move, open_to_owner, put_over, show_through
from megaflow_hpc.host import child
from megaflow_hpc.host.files import remove_tree

_BLOCK = 1 << 20
_COUNTED = 4096
"""Bytes as which every file counts at least, as where the layer is measured (limits/disk.py)."""


def lay_out(image: str, layer: str) -> int:
    """Copies the image to ``LAYER/root`` and puts ``LAYER/upper`` over it, which is gone then.

    Returns:
        Bytes on disk that the copy takes by itself.
    """
    root, upper, partial = (os.path.join(layer, name) for name in ("root", "upper", "root.partial"))
    remove_tree(partial)
    if why := child.cp(os.path.realpath(image), partial):
        raise OSError(why)
    size = max(_du("-B1", partial), _COUNTED * _du("--inodes", partial))
    if os.path.isdir(upper):
        put_over(upper, partial)
        remove_tree(upper)
    os.rename(partial, root)
    return size


def _du(option: str, path: str) -> int:
    measured = subprocess.run(["du", "-s", option, "--", path], stdout=subprocess.PIPE, check=False).stdout
    return int(measured.split()[0]) if measured else 0


def gather(image: str, layer: str) -> None:
    """Moves what differs from the image from ``LAYER/root`` to ``LAYER/upper``; ``root`` is gone then."""
    root, upper, partial = (os.path.join(layer, name) for name in ("root", "upper", "upper.partial"))
    if os.path.isdir(partial):  # of a gathering that was killed: what it had moved cannot be told from the image's
        raise OSError(f"{partial}: the layer was left half gathered")
    os.mkdir(partial, 0o755)
    _take_changes(os.path.realpath(image), root, partial)
    os.rename(partial, upper)
    remove_tree(root)


def _take_changes(image: str, root: str, upper: str) -> bool:
    """Returns whether anything differs. What an agent made to look like a mark of ours is left behind."""
    mode = open_to_owner(root)
    before = set(os.listdir(image))
    with os.scandir(root) as entries:
        now = list(entries)
    differs = mode != stat.S_IMODE(os.lstat(image).st_mode)
    for entry in now:
        below, place = os.path.join(image, entry.name), os.path.join(upper, entry.name)
        if entry.name.startswith(DELETED):
            continue
        if entry.name not in before:
            move(entry.path, place)
        elif entry.is_dir(follow_symlinks=False) and os.path.isdir(below) and not os.path.islink(below):
            os.mkdir(place, 0o755)
            if not _take_changes(below, entry.path, place):
                os.rmdir(place)
                continue
        elif same(entry.path, below):
            continue
        else:
            move(entry.path, place)
        differs = True
    for name in before - {entry.name for entry in now}:
        os.close(os.open(os.path.join(upper, DELETED + name), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        differs = True
    shutil.copystat(root, upper)
    show_through(upper)
    os.chmod(upper, mode)
    return differs


def same(one: str, other: str) -> bool:
    """Whether two entries that are not both directories agree in type, mode, time and contents."""
    first, second = os.lstat(one), os.lstat(other)
    if first.st_mode != second.st_mode:
        return False
    if stat.S_ISLNK(first.st_mode):
        return os.readlink(one) == os.readlink(other)
    if not stat.S_ISREG(first.st_mode):
        return first.st_rdev == second.st_rdev
    if (first.st_size, first.st_mtime_ns // 1000) != (second.st_size, second.st_mtime_ns // 1000):
        return False
    try:
        with open(one, "rb", buffering=0) as left, open(other, "rb", buffering=0) as right:
            while True:
                data = left.read(_BLOCK)
                if data != right.read(_BLOCK):
                    return False
                if not data:
                    return True
    except PermissionError:
        return False


def main() -> None:
    """Entry point of the process that lays a copy out, or gathers one."""
    try:
        if sys.argv[1] == "gather":
            gather(*sys.argv[2:])
        else:
            print(lay_out(*sys.argv[2:]))
    except (OSError, shutil.Error) as error:
        sys.exit(str(error))
