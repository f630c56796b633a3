"""Reads, removes and copies files and directory trees that an untrusted process may have created."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import subprocess
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from megaflow_hpc.errors import SandboxError

LARGEST = 256 * 2**20
"""Default maximum size in bytes of a file to read. The package's own files are much smaller."""


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Opens a regular file for reading in binary mode.

    Raises:
        OSError: The file cannot be opened or is not a regular file. Reading from a FIFO or a device could block
            forever.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOCTTY
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK)
    except BlockingIOError:  # another process holds a lease on the file; a blocking open breaks the lease
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise
        descriptor = os.open(path, flags)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))
    return os.fdopen(descriptor, "rb")


def read_regular(path: str | os.PathLike[str], most: int = LARGEST) -> bytes:
    """Returns the content of a regular file.

    Raises:
        OSError: The file cannot be opened, is not a regular file, or is larger than ``most`` bytes.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size <= most:
            data = file.read(size + 1)  # reading ``most`` bytes would allocate a buffer of that size
            while size < len(data) <= most:  # the file has grown
                more = file.read(len(data))
                if not more:
                    break
                data += more
            if len(data) <= most:
                return data
    raise OSError(errno.EFBIG, f"more than {most} bytes", os.fspath(path))


def behind_hole(file: BinaryIO, offset: int) -> int:
    """Returns the offset of the first data at or after ``offset``, or the file's size if only a hole follows.

    Use it to skip holes in sparse files, which take as long to read as data.
    """
    try:
        return os.lseek(file.fileno(), offset, os.SEEK_DATA)
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        return max(offset, os.fstat(file.fileno()).st_size)


def remove_tree(path: str | os.PathLike[str], *, ignore_errors: bool = False) -> None:
    """Removes a file or a tree of any depth, even if its directories are not writable. Does not follow symlinks.

    A missing tree is not an error, and several processes may remove the same tree concurrently. Files owned by the
    caller's subordinate ids, left by image builds, are removed too. If a file cannot be removed, the rest of the tree
    is still removed.

    Raises:
        OSError: A file could not be removed, for example because it belongs to another user. Not raised if
            ``ignore_errors`` is set.
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
    """Removes a directory as uid 0 of a namespace that maps the caller's subordinate ids. Returns whether it is
    gone."""
    from megaflow_hpc.host.subordinate import all_ids  # deferred, because it is rarely needed

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
    """Sets mode 0700 on every directory in a tree of any depth. Skips directories that are removed in the meantime."""

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
    """Walks a directory tree with at most two open descriptors.

    A sandbox can nest directories beyond Python's recursion limit, the maximum path length and the descriptor limit.
    Therefore the walk descends by name, ascends by ``..``, and checks that ``..`` leads back to the parent.

    Args:
        enter: Called with the descriptor of a directory. Returns the names of the subdirectories to visit.
        leave: Called with the parent's descriptor and a directory's name, after visiting that directory's tree.
        failed: List that receives the first error of these calls and of opening directories, while the walk continues.
            If ``None``, errors are raised.
    """

    def note(error: OSError, name: str) -> None:
        error.filename = os.path.join(root, *(name for _, _, name in above), name)
        if failed is None:
            raise error
        if not failed:
            failed.append(error)

    # Stack of parent directories: identity, names still to visit, name of the subdirectory entered.
    above: list[tuple[tuple[int, int], list[str], str]] = []
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
                    raise OSError(errno.ESTALE, "moved while its tree was walked", name)
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
    """Opens a directory without following symlinks, and returns its descriptor. If the owner of the directory lacks
    access to it, first tries to set its mode to 0700."""
    try:
        opened = os.open(name, _DIRECTORY, dir_fd=parent)
    except PermissionError:
        child = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
        try:
            os.chmod(f"/proc/self/fd/{child}", 0o700)  # chmod by name might follow a symlink
        finally:
            os.close(child)
        return os.open(name, _DIRECTORY, dir_fd=parent)
    if os.fstat(opened).st_mode & 0o700 != 0o700:
        with contextlib.suppress(PermissionError):  # another user's directory, whose contents may still be removable
            os.fchmod(opened, 0o700)
    return opened


def _identity(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


def _entries(directory: int) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(directory) as entries:
            return list(entries)
    except FileNotFoundError:  # removed after it was opened
        return []


def _unlink_files(directory: int, failed: list[OSError]) -> list[str]:
    """Removes all entries of an open directory except subdirectories. Returns the names of the subdirectories."""
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
    """Copies a directory tree. Symlinks are copied as symlinks. Sockets, devices and FIFOs are rejected."""

    def special(directory: str, names: list[str]) -> list[str]:
        for name in names:
            mode = os.lstat(os.path.join(directory, name)).st_mode
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode)):
                raise SandboxError(f"{directory}/{name}: neither file, directory nor symbolic link; cannot be uploaded")
        return []

    shutil.copytree(source, target, symlinks=True, ignore=special)


# --- paths below a directory ------------------------------------------------------------------------------------------

_STEP = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_MAX_LINKS = 40


@contextlib.contextmanager
def opened_below(root: int, path: str, *, follow: bool = True, as_root: bool = False) -> Iterator[tuple[int, str]]:
    """Yields an ``O_PATH`` descriptor for ``path`` below ``root``, and its path relative to ``root`` without symlinks.

    Resolving a path twice may give different results, because another process can change symlinks in between. Therefore
    every component is opened by name, relative to the directory already open. The object that is used is then
    the object that was checked. This emulates ``openat2``, which requires Linux 5.6.

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
                descriptor = _replace(descriptor, _descend(root, names))
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
                    descriptor = _replace(descriptor, _descend(root, names))
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


def _descend(root: int, names: list[str]) -> int:
    """Opens a directory by descending from the root. Following ``..`` would be unsafe if a directory was moved in the
    meantime."""
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
