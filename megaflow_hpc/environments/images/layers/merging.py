"""Lays an overlay's upper directory, or a layer, over a tree by moving its files: for where no overlay can be mounted.

What it hides is marked as the kernel does it (a device 0/0, an extended attribute), or by files ``.wh.NAME`` and
``.wh..wh..opq``: devices and attributes cannot be had on every file system. A program that must start fast uses this,
so it imports little.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat

from megaflow_hpc.host.files import remove_tree

DELETED = ".wh."
OPAQUE_MARK = ".wh..wh..opq"
OPAQUE_ATTRIBUTES = ("user.overlay.opaque", "user.fuseoverlayfs.opaque", "trusted.overlay.opaque")
"""How overlays mark a directory that hides what is below; the first is what an ordinary user's reads."""


def put_over(upper: str, root: str, top: bool = True) -> None:
    """Moves what is in ``upper`` to its places in ``root``, and removes what it marks as deleted.

    Both may hold whatever a stranger put there; nobody may write to either meanwhile. No link in them is followed.
    """
    mode = open_to_owner(upper)
    if not top and is_opaque(upper):  # a root is never made anew: such a mark there is the agent's
        for name in os.listdir(root):
            remove_tree(os.path.join(root, name))
    with os.scandir(upper) as found:
        entries = sorted(found, key=lambda entry: not entry.name.startswith(DELETED))  # what is new is not deleted
    for entry in entries:
        status, place = entry.stat(follow_symlinks=False), os.path.join(root, entry.name)
        if entry.name == OPAQUE_MARK:
            continue
        if entry.name.startswith(DELETED):
            if (name := entry.name.removeprefix(DELETED)) not in ("", ".", ".."):
                remove_tree(os.path.join(root, name))
        elif stat.S_ISCHR(status.st_mode) and status.st_rdev == 0:
            remove_tree(place)
        elif entry.is_dir(follow_symlinks=False) and os.path.isdir(place) and not os.path.islink(place):
            put_over(entry.path, place, top=False)
        else:
            remove_tree(place)
            move(entry.path, place)
    shutil.copystat(upper, root)
    os.chmod(root, mode)


def open_to_owner(directory: str | os.PathLike[str]) -> int:
    """Lets a directory's owner, who may be no root, read it and write there; returns the mode it had."""
    mode = stat.S_IMODE(os.lstat(directory).st_mode)
    if mode & 0o700 != 0o700:
        os.chmod(directory, mode | 0o700)
    return mode


def move(source: str, target: str) -> None:
    """Renames what is at ``source``, a directory that its owner may not write to as well."""
    try:
        os.rename(source, target)
    except PermissionError:  # a directory's own mode forbids that its ``..`` changes
        mode = open_to_owner(source)
        os.rename(source, target)
        os.chmod(target, mode)


def is_opaque(directory: str) -> bool:
    """Whether a directory of a layer hides what is below in it."""
    return os.path.lexists(os.path.join(directory, OPAQUE_MARK)) or has_opaque_attribute(directory)


def has_opaque_attribute(directory: str | int) -> bool:
    """Whether an extended attribute says so; of a path or a descriptor."""
    for name in OPAQUE_ATTRIBUTES:
        with contextlib.suppress(OSError):
            if os.getxattr(directory, name, follow_symlinks=isinstance(directory, int)) == b"y":
                return True
    return False


def show_through(directory: str | os.PathLike[str]) -> None:
    """Takes the attributes off a directory by which it would hide the image's."""
    for name in OPAQUE_ATTRIBUTES:
        with contextlib.suppress(OSError):
            os.removexattr(directory, name, follow_symlinks=False)
