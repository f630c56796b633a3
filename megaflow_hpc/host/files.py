"""Trees of files: removed however hostile, copied in, unpacked from what a sandbox hands out."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path, PurePosixPath

from megaflow_hpc.errors import SandboxError


def remove_tree(path: str | os.PathLike[str], *, ignore_errors: bool = False) -> None:
    """Removes a file or a tree of any depth, whatever modes its directories have. Follows no links; idempotent.

    Several may remove one tree at once: what another has removed is no error, and nothing is left for it.

    Raises:
        OSError: something cannot be removed, such as a file of another uid; not with ``ignore_errors``.
    """
    try:
        if stat.S_ISDIR(os.lstat(path).st_mode):
            _walk(os.fspath(path), _unlink_files, _rmdir)
            _rmdir(None, os.fspath(path))
        else:
            os.unlink(path)
    except FileNotFoundError:
        return
    except OSError:
        if not ignore_errors:
            raise


def open_directories(path: str | os.PathLike[str]) -> None:
    """Sets mode 0700 on every directory of a tree of any depth; what goes away meanwhile is passed over."""

    def opened(directory: int) -> list[str]:
        os.fchmod(directory, 0o700)
        return [entry.name for entry in _entries(directory) if entry.is_dir(follow_symlinks=False)]

    _walk(os.fspath(path), opened, lambda parent, name: None)


def _walk(root: str, enter: Callable[[int], list[str]], leave: Callable[[int, str], None]) -> None:
    """Visits every directory of a tree, holding two descriptors whatever its depth.

    A sandbox can nest directories deeper than Python recurses, than a path is long and than descriptors may be open.
    So each is reached from its neighbour: down by its name, up by ``..``, which must lead where it was come from.

    Args:
        enter: gets the descriptor of a directory; returns the names of those in it to go down to.
        leave: gets the parent's descriptor and the name of a directory whose whole tree was visited.
    """
    above: list[tuple[tuple[int, int], list[str], str]] = []  # (identity, names still to visit, name gone down to)
    here = _open_directory(root)
    try:
        waiting = enter(here)
        while waiting or above:
            if waiting:
                name = waiting.pop()
                try:
                    below = _open_directory(name, here)
                except FileNotFoundError:
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
                leave(here, name)
    except OSError as error:
        error.filename = os.path.join(root, *(name for _, _, name in above), str(error.filename or ""))
        raise
    finally:
        os.close(here)


_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def _open_directory(name: str, parent: int | None = None) -> int:
    """Opens a directory after its owner, who we may be, was given every right on it."""
    try:
        found = os.open(name, _DIRECTORY, dir_fd=parent)
    except PermissionError:
        place = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
        try:
            os.chmod(f"/proc/self/fd/{place}", 0o700)  # by its name, a link might be followed
        finally:
            os.close(place)
        return os.open(name, _DIRECTORY, dir_fd=parent)
    if os.fstat(found).st_mode & 0o700 != 0o700:
        with contextlib.suppress(PermissionError):  # another's; what is in it can perhaps be removed all the same
            os.fchmod(found, 0o700)
    return found


def _identity(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


def _entries(directory: int) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(directory) as entries:
            return list(entries)
    except FileNotFoundError:  # removed while it was open
        return []


def _unlink_files(directory: int) -> list[str]:
    """Removes what is no directory; returns the names of the directories."""
    directories = []
    for entry in _entries(directory):
        if entry.is_dir(follow_symlinks=False):
            directories.append(entry.name)
        else:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(entry.name, dir_fd=directory)
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


def unpack(data: bytes, target: Path) -> None:
    """Writes a tar archive from a sandbox, which may be hostile, under ``target``.

    Names that leave ``target`` are refused; links come last, so that no member can be written through one; devices
    and FIFOs are left out; modes lose setuid, setgid and sticky.
    """
    import tarfile  # 10 ms, which whoever only removes trees is spared

    target.mkdir(parents=True, exist_ok=True)
    links: list[tuple[Path, str]] = []
    try:
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as archive:
            for member in archive:
                parts = [part for part in PurePosixPath(member.name).parts if part not in (".", "/")]
                if ".." in parts:
                    raise SandboxError(f"download: the archive names {member.name!r}, which leaves the directory")
                place = target.joinpath(*parts)
                if member.isdir():
                    place.mkdir(parents=True, exist_ok=True)
                elif member.isreg() or member.islnk():
                    place.parent.mkdir(parents=True, exist_ok=True)
                    content = archive.extractfile(member)
                    place.write_bytes(content.read() if content else b"")
                    place.chmod(member.mode & 0o777 | 0o600)
                elif member.issym() and not member.linkname.startswith("/"):
                    resolved = os.path.normpath(os.path.join(os.path.dirname("/".join(parts)), member.linkname))
                    if not resolved.startswith(".."):
                        links.append((place, member.linkname))
    except (tarfile.TarError, KeyError) as error:
        raise SandboxError(f"download: the sandbox sent a broken archive ({error})") from error
    for place, destination in links:
        place.parent.mkdir(parents=True, exist_ok=True)
        if place.is_symlink() or place.is_file():
            place.unlink()
        if not place.exists():
            os.symlink(destination, place)
