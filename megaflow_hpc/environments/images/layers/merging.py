"""Merges an overlay's upper directory or a layer into a tree by moving its files, if no overlay can be mounted.

Hidden files are marked as by the kernel (a device 0/0, an extended attribute), or by files ``.wh.NAME`` and
``.wh..wh..opq``, because not every file system supports such devices and attributes. Programs that must start fast
import this module, so it imports little.
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
"""Attributes by which overlays mark a directory that hides those below. An ordinary user's overlay uses the first."""


def put_over(upper: str, root: str, top: bool = True) -> None:
    """Moves the content of ``upper`` into ``root``, and removes what ``upper`` marks as deleted.

    Does not follow links, so both trees may be untrusted. No process may write to either meanwhile.
    """
    mode = open_to_owner(upper)
    if not top and is_opaque(upper):  # A mark on the root itself comes from the agent. A root is never replaced.
        for name in os.listdir(root):
            remove_tree(os.path.join(root, name))
    with os.scandir(upper) as scanned:
        # Deletions come first, so that they do not remove new files.
        entries = sorted(scanned, key=lambda entry: not entry.name.startswith(DELETED))
    for entry in entries:
        status = entry.stat(follow_symlinks=False)
        target = os.path.join(root, entry.name)
        if entry.name == OPAQUE_MARK:
            continue
        if entry.name.startswith(DELETED):
            name = entry.name.removeprefix(DELETED)
            if name not in ("", ".", ".."):
                remove_tree(os.path.join(root, name))
        elif stat.S_ISCHR(status.st_mode) and status.st_rdev == 0:
            remove_tree(target)
        elif entry.is_dir(follow_symlinks=False) and os.path.isdir(target) and not os.path.islink(target):
            put_over(entry.path, target, top=False)
        else:
            remove_tree(target)
            move(entry.path, target)
    shutil.copystat(upper, root)
    os.chmod(root, mode)


def open_to_owner(directory: str | os.PathLike[str]) -> int:
    """Gives a directory's owner all permissions. Returns the previous mode."""
    mode = stat.S_IMODE(os.lstat(directory).st_mode)
    if mode & 0o700 != 0o700:
        os.chmod(directory, mode | 0o700)
    return mode


def move(source: str, target: str) -> None:
    """Renames ``source``, even if it is a directory that its owner may not write to."""
    try:
        os.rename(source, target)
    except PermissionError:  # Moving a directory changes its ``..``, which needs write permission.
        mode = open_to_owner(source)
        os.rename(source, target)
        os.chmod(target, mode)


def is_opaque(directory: str) -> bool:
    """Returns whether a directory of a layer hides the directories below."""
    return os.path.lexists(os.path.join(directory, OPAQUE_MARK)) or has_opaque_attribute(directory)


def has_opaque_attribute(directory: str | int) -> bool:
    """Returns whether a directory, given by path or descriptor, is marked as opaque by an extended attribute."""
    for name in OPAQUE_ATTRIBUTES:
        with contextlib.suppress(OSError):
            if os.getxattr(directory, name, follow_symlinks=isinstance(directory, int)) == b"y":
                return True
    return False


def show_through(directory: str | os.PathLike[str]) -> None:
    """Removes the opaque attributes of a directory, so that it does not hide the image's."""
    for name in OPAQUE_ATTRIBUTES:
        with contextlib.suppress(OSError):
            os.removexattr(directory, name, follow_symlinks=False)
