"""Writes records and links atomically, and locks files, in a store that several processes write to.

Unfinished files are kept in the store's ``work`` directory. Their names contain the host and process that made them.
:func:`sweep` removes the files of killed processes.
"""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from megaflow_hpc.host.atomic import to_json, write_atomic
from megaflow_hpc.host.files import remove_tree
from megaflow_hpc.host.locks import locked_if_supported
from megaflow_hpc.host.process import Identity

STALE_S = 7 * 86400.0
"""Remove another host's unfinished files after this many seconds without a change."""


def write_record(path: Path, value: Mapping[str, Any]) -> None:
    """Writes a record to ``STORE/<directory>/<name>.json``. Every user who can enter the directory can read it."""
    write_atomic(path, to_json(value), 0o444, temporary=_own(path.parents[1] / "work", "note"))


def link_record(path: Path, target: Path) -> None:
    """Links ``STORE/<directory>/<name>`` to a file in another store, and copies its record."""
    link = _own(path.parents[1] / "work", "link")
    os.symlink(target, link)
    write_record(path.with_suffix(".json"), read_record(target.with_suffix(".json")) or {})
    os.rename(link, path)


def read_record(path: Path) -> Mapping[str, Any] | None:
    """Reads a record. Returns ``None`` if it is missing or malformed."""
    try:
        record = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) else None


@contextmanager
def locked(path: Path, *, wait: bool = True) -> Iterator[None]:
    """Holds a file lock and removes the lock file on exit.

    If the file system does not support locks, the context is entered without a lock. Two processes may then do the same
    work, which is harmless.

    Raises:
        TimeoutError: ``wait`` is false and another process holds the lock.
    """
    with locked_if_supported(path, timeout_s=math.inf if wait else 0):
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


@contextmanager
def work_directory(work: Path, kind: str) -> Iterator[Path]:
    """Creates a private directory below ``work`` and removes it on exit."""
    path = _own(work, kind)
    path.mkdir(mode=0o700)
    try:
        yield path
    finally:
        remove_tree(path)


def _own(work: Path, kind: str) -> Path:
    return work / f"{kind}{secrets.token_hex(8)}.{socket.gethostname()}-{Identity.of(os.getpid())}"


def sweep(work: Path) -> None:
    """Removes files that killed processes left in ``work``."""
    for path in work.iterdir():
        if path.suffix == ".lock":
            with suppress(TimeoutError), locked(path, wait=False):
                pass
        elif abandoned(path):
            remove_tree(path)


def abandoned(path: Path) -> bool:
    """Returns whether the process that created a file is gone. A process on another host counts as alive for a week."""
    name = re.fullmatch(r"[^.]+\.(?P<host>.+)-(?P<pid>\d+)-(?P<start>\d+)", path.name)
    if name is None:
        return False
    if name["host"] == socket.gethostname():
        return not Identity(int(name["pid"]), int(name["start"])).alive()
    try:
        return time.time() - path.lstat().st_mtime > STALE_S
    except OSError:
        return False
