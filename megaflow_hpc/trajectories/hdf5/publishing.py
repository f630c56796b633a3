"""Publishes large files atomically: write under a temporary name in the same directory, fsync, rename.

The temporary name identifies the writing process: ``.<name>.<host>~<boot>.<pid>-<start>.<4 hex>``. :func:`clean_up`
removes a temporary file if its writer ran on this host and no longer exists. A temporary file from another host is
removed once it has not changed for a day.

A writer that is asked to stop leaves its work in ``.<name>.unfinished`` (:func:`unfinished`). The next writer renames
that file to its own temporary name before changing it, so a file left by a killed writer is never continued.
"""

from __future__ import annotations

import glob
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megaflow_hpc.errors import MegaflowError
from megaflow_hpc.host.atomic import file_mode, fsync
from megaflow_hpc.host.process import Identity, boot_id

FOREIGN_AGE_S = 86400.0
"""Age in seconds at which an unchanged temporary file of another host is considered abandoned."""


class Unfinished(MegaflowError):
    """Raised when a writer stops on request. The data written so far is kept, and repeating the call continues."""

    exit_status = 75  # EX_TEMPFAIL of sysexits.h


@contextmanager
def published(target: Path) -> Iterator[Path]:
    """Yields a temporary path. Renames it to ``target`` on success, and removes it after an error. Makes the directory
    of ``target``.

    After :class:`Unfinished`, the file is kept at :func:`unfinished`.

    Raises:
        OSError: The file cannot be synced or renamed.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    clean_up(target)
    identity = Identity.of(os.getpid())
    temporary = target.with_name(f".{target.name}.{_host()}.{identity}.{secrets.token_hex(2)}")
    try:
        yield temporary
        os.chmod(temporary, file_mode(target.parent))
        fsync(temporary)
        os.replace(temporary, target)
        fsync(target.parent)
    except Unfinished:
        fsync(temporary)
        os.replace(temporary, unfinished(target))
        fsync(target.parent)
        raise
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def unfinished(target: Path) -> Path:
    """Returns the path where a stopped writer of ``target`` leaves its work."""
    return target.with_name(f".{target.name}.unfinished")


def clean_up(target: Path) -> list[Path]:
    """Removes temporary files left by killed writers of ``target``, and returns their paths."""
    removed = []
    for path in target.parent.glob(f".{glob.escape(target.name)}.*"):
        if _abandoned(path, target.name):
            path.unlink(missing_ok=True)
            removed.append(path)
    return removed


def _abandoned(path: Path, name: str) -> bool:
    parts = path.name[len(name) + 2 :].split(".")
    if len(parts) != 3:
        return False  # another program's file
    host, process, _ = parts
    identity = Identity.parse(process)
    if identity is None:
        return False
    if host == _host():
        return not identity.alive()
    try:
        return time.time() - path.stat().st_mtime > FOREIGN_AGE_S
    except OSError:
        return False


def _host() -> str:
    """Returns an id of this host and its current boot. Together with a pid and a start time, it identifies a
    process."""
    boot = boot_id().replace("-", "")[:12]
    return f"{os.uname().nodename.partition('.')[0]}~{boot}"
