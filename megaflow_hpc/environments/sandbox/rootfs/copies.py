"""Writable root file systems without an overlay: copies of the image.

::

    LAYER/root    the files of the image and of the sandbox, as one tree that a container writes to
    LAYER/upper   only the files of the sandbox, in the form of an overlay's upper directory

Only one of the two exists at a time. ``lay_out`` creates ``root`` from the image and ``upper``. ``gather`` does the
reverse. Edits of a layer between two containers (restoring programs for the verifier, snapshots) therefore always apply
to ``upper``, with or without an overlay. Whiteouts are empty files ``.wh.NAME``, because not all file systems support
the kernel's whiteouts (devices and extended attributes).

Files are compared by content rather than by time, because an agent may set times. Blocks are shared if the file system
supports reflinks, but never through hard links, because a sandbox must not write to the image.

A separate process runs this module (``lay_out|gather IMAGE LAYER``). If possible it runs as uid 0 of a user namespace,
so that it can read the owner's files regardless of their modes. It has few imports, so that it starts quickly.
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
"""Minimum size in bytes to count per file, as in limits/disk.py."""


def lay_out(image: str, layer: str) -> int:
    """Copies the image to ``LAYER/root``, merges ``LAYER/upper`` into it and removes ``upper``.

    Returns:
        Size on disk of the copied image, in bytes.
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
    """Moves files that differ from the image from ``LAYER/root`` to ``LAYER/upper`` and removes ``root``."""
    root, upper, partial = (os.path.join(layer, name) for name in ("root", "upper", "upper.partial"))
    if os.path.isdir(partial):  # left by a killed process; files it moved look like deleted ones
        raise OSError(f"{partial}: the layer was left half gathered")
    os.mkdir(partial, 0o755)
    _take_changes(os.path.realpath(image), root, partial)
    os.rename(partial, upper)
    remove_tree(root)


def _take_changes(image: str, root: str, upper: str) -> bool:
    """Moves the differing files of one directory. Returns whether any file differed. Ignores ``.wh.`` files made by an
    agent."""
    mode = open_to_owner(root)
    before = set(os.listdir(image))
    with os.scandir(root) as entries:
        now = list(entries)
    differs = mode != stat.S_IMODE(os.lstat(image).st_mode)
    for entry in now:
        original, target = os.path.join(image, entry.name), os.path.join(upper, entry.name)
        if entry.name.startswith(DELETED):
            continue
        if entry.name not in before:
            move(entry.path, target)
        elif entry.is_dir(follow_symlinks=False) and os.path.isdir(original) and not os.path.islink(original):
            os.mkdir(target, 0o755)
            if not _take_changes(original, entry.path, target):
                os.rmdir(target)
                continue
        elif same(entry.path, original):
            continue
        else:
            move(entry.path, target)
        differs = True
    for name in before - {entry.name for entry in now}:
        os.close(os.open(os.path.join(upper, DELETED + name), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        differs = True
    shutil.copystat(root, upper)
    show_through(upper)
    os.chmod(upper, mode)
    return differs


def same(one: str, other: str) -> bool:
    """Returns whether two entries have the same type, mode, time and contents. They must not both be directories."""
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
    """Command-line entry point. Runs ``lay_out`` or ``gather``."""
    try:
        if sys.argv[1] == "gather":
            gather(*sys.argv[2:])
        else:
            print(lay_out(*sys.argv[2:]))
    except (OSError, shutil.Error) as error:
        sys.exit(str(error))
