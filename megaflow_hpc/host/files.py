"""Trees on scratch: copying in, unpacking what a sandbox hands out, removing what it left behind."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import stat
import tarfile
from pathlib import Path, PurePosixPath

from megaflow_hpc.errors import SandboxError


def remove_tree(path: str | os.PathLike[str]) -> None:
    """Removes a tree whatever modes its directories have (``work/work`` of an overlay has none). Follows no links.

    Several may remove one tree at once: what another has removed is no error, and nothing is left for it.
    Raises :class:`OSError` if something cannot be removed, such as a file of another uid.
    """
    try:
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            os.unlink(path)
            return
    except FileNotFoundError:
        return
    try:
        shutil.rmtree(path, onerror=_raise_unless_gone)
    except PermissionError:
        open_directories(os.fspath(path))
        shutil.rmtree(path, onerror=_raise_unless_gone)


def _raise_unless_gone(_function: object, _name: str, failure: tuple[object, BaseException, object]) -> None:
    if not isinstance(failure[1], FileNotFoundError):
        raise failure[1]


def open_directories(path: str) -> None:
    """Gives the owner every right on every directory of a tree; what goes away meanwhile is passed over."""
    waiting = [path]
    while waiting:
        directory = waiting.pop()
        with contextlib.suppress(FileNotFoundError):
            os.chmod(directory, 0o700)
            waiting += [entry.path for entry in os.scandir(directory) if entry.is_dir(follow_symlinks=False)]


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
