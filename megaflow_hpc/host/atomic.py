"""Publishes files atomically, with the group permissions of their directory."""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

SHARED = stat.S_ISGID | stat.S_IRGRP
"""Permission bits that mark a directory as shared with its group."""


@functools.lru_cache(maxsize=256)
def file_mode(folder: Path) -> int:
    """Returns the mode for new files in ``folder``: 0640 if the folder is shared with its group, else 0600. The result
    is cached."""
    return 0o640 if folder.stat().st_mode & SHARED == SHARED else 0o600


def make_directory(path: Path) -> None:
    """Creates a directory with its parent's permissions, unless it exists."""
    if not path.is_dir():
        path.mkdir(mode=0o700, exist_ok=True)
        if file_mode(path.parent) == 0o640:
            path.chmod(0o2750)


@contextlib.contextmanager
def without_links(folder: Path) -> Iterator[Path]:
    """Opens a directory, creating it if needed, and yields a path that always refers to the opened directory.

    Use it for a run's directories, because another user's run may have a symlink in place of a directory.

    Raises:
        OSError: The directory is a symlink, or cannot be opened.
    """
    if not folder.is_symlink():
        make_directory(folder)
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if folder.is_symlink():
            raise OSError(errno.ELOOP, "is a symbolic link, which is not followed", str(folder)) from None
        raise error
    try:
        yield Path(f"/proc/{os.getpid()}/fd/{descriptor}")
    finally:
        os.close(descriptor)
        file_mode.cache_clear()  # cached paths contain a descriptor number that may be reused


def write_atomic(
    path: Path, data: bytes | str, mode: int | None = None, exclusive: bool = False, temporary: Path | None = None
) -> None:
    """Publishes ``data`` at ``path`` atomically: write, fsync, rename. The data is durable before it is visible.

    Args:
        mode: Permission bits, regardless of the umask. Default: :func:`file_mode`.
        exclusive: Fail if ``path`` exists.
        temporary: Path to write to first, on the same file system. Default: a temporary name next to ``path``.

    Raises:
        FileExistsError: ``exclusive`` is set and ``path`` exists.
    """
    with new_file(path, mode, exclusive, temporary) as file:
        file.write(data.encode() if isinstance(data, str) else data)


@contextlib.contextmanager
def new_file(
    path: Path, mode: int | None = None, exclusive: bool = False, temporary: Path | None = None
) -> Iterator[BinaryIO]:
    """Opens a file that is published at the end of the block, or removed if the block raises an exception. See
    :func:`write_atomic`."""
    mode = file_mode(path.parent) if mode is None else mode
    temporary = temporary or path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            if mode != 0o600:
                os.fchmod(descriptor, mode)
            yield file
            file.flush()
            os.fsync(file.fileno())
        if exclusive:
            os.link(temporary, path)
            temporary.unlink()
        else:
            os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def fsync(path: Path) -> None:
    """Flushes a file or directory to disk with ``fsync``."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_tree(folder: Path) -> None:
    """Flushes all files and directories of a tree to disk."""
    for path in [*folder.rglob("*"), folder]:
        fsync(path)


def to_json(value: Any) -> str:
    """Returns indented JSON with sorted keys. Values that are not JSON-serializable are converted to strings."""
    return json.dumps(value, indent=1, sort_keys=True, default=str) + "\n"


def write_json(path: Path, value: Any, mode: int | None = None) -> None:
    """Publishes ``value`` as JSON. See :func:`write_atomic`."""
    write_atomic(path, to_json(value), mode)
