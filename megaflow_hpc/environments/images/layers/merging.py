"""Merges an overlay's upper directory or a layer into a tree by moving files, for hosts that cannot mount overlays.

As in the kernel's overlays, a whiteout is a 0/0 device, and an extended attribute marks an opaque directory. Some file
systems support neither, so files ``.wh.NAME`` and ``.wh..wh..opq`` are also accepted. Programs that must start fast
import this module, so it has few imports.
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
"""Extended attributes that mark an overlay directory as opaque. Unprivileged overlays use the first."""


def put_over(upper: str, root: str, top: bool = True) -> None:
    """Moves the contents of ``upper`` into ``root``, and removes the files for which ``upper`` has a whiteout.

    Does not follow links, so both trees may be untrusted. No other process may write to either tree during the call.
    """
    mode = open_to_owner(upper)
    if not top and is_opaque(upper):  # Ignore a mark on the root: it comes from the agent.
        for name in os.listdir(root):
            remove_tree(os.path.join(root, name))
    with os.scandir(upper) as scanned:
        # Process whiteouts first, so that they do not remove new files.
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
    """Grants the owner full access to a directory. Returns the previous mode."""
    mode = stat.S_IMODE(os.lstat(directory).st_mode)
    if mode & 0o700 != 0o700:
        os.chmod(directory, mode | 0o700)
    return mode


def move(source: str, target: str) -> None:
    """Renames ``source``, even if it is a directory without write permission."""
    try:
        os.rename(source, target)
    except PermissionError:  # Moving a directory updates its ``..``, which requires write permission.
        mode = open_to_owner(source)
        os.rename(source, target)
        os.chmod(target, mode)


def is_opaque(directory: str) -> bool:
    """Returns whether a layer's directory is opaque, which means that it hides the same directory in lower layers."""
    return os.path.lexists(os.path.join(directory, OPAQUE_MARK)) or has_opaque_attribute(directory)


def has_opaque_attribute(directory: str | int) -> bool:
    """Returns whether an extended attribute marks a directory, given by path or descriptor, as opaque."""
    for name in OPAQUE_ATTRIBUTES:
        with contextlib.suppress(OSError):
            if os.getxattr(directory, name, follow_symlinks=isinstance(directory, int)) == b"y":
                return True
    return False


def show_through(directory: str | os.PathLike[str]) -> None:
    """Removes the opaque attributes of a directory, so that lower layers show through."""
    for name in OPAQUE_ATTRIBUTES:
        with contextlib.suppress(OSError):
            os.removexattr(directory, name, follow_symlinks=False)
