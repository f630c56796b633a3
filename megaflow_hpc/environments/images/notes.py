"""Files of a store that several write at once: notes that appear whole, locks, and the work of builders that live."""

from __future__ import annotations

import fcntl
import json
import os
import re
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megaflow_hpc.host.atomic import write_json
from megaflow_hpc.host.files import remove_tree
from megaflow_hpc.host.process import Identity

STALE_S = 7 * 86400.0
"""A builder's directory that another host left is rubbish after so long."""


def write_note(path: Path, value: Mapping[str, Any]) -> None:
    """Writes a JSON file that everybody who reaches it may read."""
    write_json(path, value, 0o444)
    path.chmod(0o444)  # whatever the umask: the directory decides who reads


def read_note(path: Path) -> Mapping[str, Any] | None:
    """Returns what a note says; ``None`` where there is none, or none that can be read."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds a lock file. Where the file system has no locks nobody waits: work may be done twice, nothing breaks."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError:
            pass
        yield
    finally:
        os.close(descriptor)


@contextmanager
def workplace(work: Path, key: str, own: str = "") -> Iterator[Path]:
    """Makes a directory ``<key><own>.<host>-<pid>-<start>`` below ``work``, and removes it at the end.

    What earlier builders of the same key left is removed too, where they are gone.

    Args:
        own: Tells this one from others of the key in this process.
    """
    for left in work.glob(f"{key}*.*/" if own else f"{key}.*/"):
        if abandoned(left):
            remove_tree(left)
    path = work / f"{key}{own}.{socket.gethostname()}-{Identity.of(os.getpid())}"
    remove_tree(path)
    path.mkdir(mode=0o700)
    try:
        yield path
    finally:
        remove_tree(path)


def abandoned(path: Path) -> bool:
    """Whether the builder whose directory this is is gone; another host's is believed for a week."""
    name = re.fullmatch(r"[^.]+\.(?P<host>.+)-(?P<pid>\d+)-(?P<start>\d+)", path.name)
    if name is None:
        return False
    if name["host"] == socket.gethostname():
        return not Identity(int(name["pid"]), int(name["start"])).alive()
    try:
        return time.time() - path.stat().st_mtime > STALE_S
    except OSError:
        return False
