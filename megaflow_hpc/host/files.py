"""Files that others may have put there: opened only if they are files, and trees of them removed and copied in."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from megaflow_hpc.errors import SandboxError

LARGEST = 256 * 2**20
"""Bytes of a file that is read whole; none that this package writes for that is nearly as long."""


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Opens a file for reading its bytes, as :func:`open` does.

    Raises:
        OSError: it cannot be opened, or is a FIFO, a socket, a device or a directory, on which a reader might wait for
            ever.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOCTTY
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK)
    except BlockingIOError:  # a file that a file server has lent to somebody, who is asked for it
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise
        descriptor = os.open(path, flags)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))
    return os.fdopen(descriptor, "rb")


def read_regular(path: str | os.PathLike[str], most: int = LARGEST) -> bytes:
    """Returns the bytes of a file; raises as :func:`open_regular` does, also if they are more than ``most``."""
    with open_regular(path) as file:
        if (size := os.fstat(file.fileno()).st_size) <= most:
            data = file.read(size + 1)  # room is made for what is asked for, so that is not ``most``
            while size < len(data) <= most and (more := file.read(len(data))):  # it has grown meanwhile
                data += more
            if len(data) <= most:
                return data
    raise OSError(errno.EFBIG, f"more than {most} bytes", os.fspath(path))


def behind_hole(file: BinaryIO, offset: int) -> int:
    """Returns where at or behind ``offset`` something was written; the end of the file where nothing was.

    A hole of any length takes no room on a disk, and reading it as long as if it did.
    """
    try:
        return os.lseek(file.fileno(), offset, os.SEEK_DATA)
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        return max(offset, os.fstat(file.fileno()).st_size)


def remove_tree(path: str | os.PathLike[str], *, ignore_errors: bool = False) -> None:
    """Removes a file or a tree of any depth, whatever modes its directories have. Follows no links; idempotent.

    Several may remove one tree at once: what another has removed is no error, and nothing is left for it. Files of the
    caller's subordinate ids, which builds of images leave, are removed as well. What cannot be removed stays, with the
    directories that lead to it, and all else goes.

    Raises:
        OSError: something could not be removed, such as a file of another user; not with ``ignore_errors``.
    """
    failed: list[OSError] = []
    try:
        if stat.S_ISDIR(os.lstat(path).st_mode):
            _walk(os.fspath(path), lambda here: _unlink_files(here, failed), _rmdir, failed)
            _rmdir(None, os.fspath(path))
        else:
            os.unlink(path)
    except FileNotFoundError:
        return
    except OSError as error:
        failed.append(error)
    if failed and not (isinstance(failed[0], PermissionError) and _removed_as_root(path)) and not ignore_errors:
        raise failed[0]


def _removed_as_root(path: str | os.PathLike[str]) -> bool:
    """Empties a directory as uid 0 of a namespace with the caller's subordinate ids; whether it could be removed."""
    from megaflow_hpc.host.subordinate import all_ids  # rarely needed: who only removes trees is spared it

    target = os.path.abspath(path)
    if os.geteuid() != 0 and all_ids():
        words = [*all_ids(), "find", target, "-xdev", "-mindepth", "1", "-delete"]
        subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    try:
        os.rmdir(target)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def open_directories(path: str | os.PathLike[str]) -> None:
    """Sets mode 0700 on every directory of a tree of any depth; what goes away meanwhile is passed over."""

    def opened(directory: int) -> list[str]:
        os.fchmod(directory, 0o700)
        return [entry.name for entry in _entries(directory) if entry.is_dir(follow_symlinks=False)]

    _walk(os.fspath(path), opened, lambda parent, name: None)


def _walk(
    root: str,
    enter: Callable[[int], list[str]],
    leave: Callable[[int, str], None],
    failed: list[OSError] | None = None,
) -> None:
    """Visits every directory of a tree, holding two descriptors whatever its depth.

    A sandbox can nest directories deeper than Python recurses, than a path is long and than descriptors may be open.
    So each is reached from its neighbour: down by its name, up by ``..``, which must lead where it was come from.

    Args:
        enter: gets the descriptor of a directory; returns the names of those in it to go down to.
        leave: gets the parent's descriptor and the name of a directory whose whole tree was visited.
        failed: gets the first error of these and of directories that cannot be opened, and the walk goes on; ``None``:
            it is raised.
    """

    def note(error: OSError, name: str) -> None:
        error.filename = os.path.join(root, *(name for _, _, name in above), name)
        if failed is None:
            raise error
        if not failed:
            failed.append(error)

    above: list[tuple[tuple[int, int], list[str], str]] = []  # (identity, names still to visit, name gone down to)
    here = open_directory(root)
    try:
        waiting = enter(here)
        while waiting or above:
            if waiting:
                name = waiting.pop()
                try:
                    below = open_directory(name, here)
                except FileNotFoundError:
                    continue
                except OSError as error:
                    note(error, name)
                    continue
                above.append((_identity(here), waiting, name))
                os.close(here)
                here = below
                waiting = enter(here)
            else:
                parent = os.open("..", _DIRECTORY, dir_fd=here)
                os.close(here)
                here = parent
                identity, waiting, name = above.pop()
                if _identity(here) != identity:
                    raise OSError(errno.ESTALE, "moved elsewhere while it was walked through", name)
                try:
                    leave(here, name)
                except OSError as error:
                    note(error, name)
    except OSError as error:
        if not os.path.isabs(str(error.filename)):
            error.filename = os.path.join(root, *(name for _, _, name in above), str(error.filename or ""))
        raise
    finally:
        os.close(here)


_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def open_directory(name: str, parent: int | None = None) -> int:
    """Opens a directory, no link, after its owner, who we may be, was given every right on it; returns a descriptor."""
    try:
        opened = os.open(name, _DIRECTORY, dir_fd=parent)
    except PermissionError:
        child = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
        try:
            os.chmod(f"/proc/self/fd/{child}", 0o700)  # by its name, a link might be followed
        finally:
            os.close(child)
        return os.open(name, _DIRECTORY, dir_fd=parent)
    if os.fstat(opened).st_mode & 0o700 != 0o700:
        with contextlib.suppress(PermissionError):  # another's; what is in it can perhaps be removed all the same
            os.fchmod(opened, 0o700)
    return opened


def _identity(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


def _entries(directory: int) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(directory) as entries:
            return list(entries)
    except FileNotFoundError:  # removed while it was open
        return []


def _unlink_files(directory: int, failed: list[OSError]) -> list[str]:
    """Removes what is no directory; returns the names of the directories."""
    directories = []
    for entry in _entries(directory):
        if entry.is_dir(follow_symlinks=False):
            directories.append(entry.name)
            continue
        try:
            os.unlink(entry.name, dir_fd=directory)
        except FileNotFoundError:
            pass
        except OSError as error:
            if not failed:
                error.filename = os.path.join(os.readlink(f"/proc/self/fd/{directory}"), entry.name)
                failed.append(error)
    return directories


def _rmdir(parent: int | None, name: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.rmdir(name, dir_fd=parent)


def copy_tree(source: Path, target: Path) -> None:
    """Copies a directory with its links as links; sockets, devices and FIFOs are refused."""

    def special(directory: str, names: list[str]) -> list[str]:
        for name in names:
            mode = os.lstat(os.path.join(directory, name)).st_mode
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode)):
                raise SandboxError(f"{directory}/{name}: neither file, directory nor symbolic link; cannot be uploaded")
        return []

    shutil.copytree(source, target, symlinks=True, ignore=special)
