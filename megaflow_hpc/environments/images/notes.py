"""Files of a store that several write at once: notes and links that appear whole, locks, and the work of builders.

What is not at its place yet lies in the store's ``work``, and bears the name of its host and process: what a killed one
leaves there :func:`sweep` removes.
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
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from megaflow_hpc.host import locks
from megaflow_hpc.host.atomic import to_json, write_atomic
from megaflow_hpc.host.files import remove_tree
from megaflow_hpc.host.process import Identity

STALE_S = 7 * 86400.0
"""What a builder of another host left is rubbish after so long."""


def write_note(path: Path, value: Mapping[str, Any]) -> None:
    """Writes ``STORE/<room>/<name>.json``, which everybody who reaches it may read: the directory decides who does."""
    write_atomic(path, to_json(value), 0o444, temporary=_own(path.parents[1] / "work", "note"))


def link_note(path: Path, target: Path) -> None:
    """Makes ``STORE/<room>/<name>`` a link to what another store has, with its note."""
    link = _own(path.parents[1] / "work", "link")
    os.symlink(target, link)
    write_note(path.with_suffix(".json"), read_note(target.with_suffix(".json")) or {})
    os.rename(link, path)


def read_note(path: Path) -> Mapping[str, Any] | None:
    """Returns what a note says; ``None`` where there is none, or none that can be read."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


@contextmanager
def locked(path: Path, *, wait: bool = True) -> Iterator[None]:
    """Holds a lock file, and removes it. Where the file system has no locks nobody waits: work may be done twice,
    nothing breaks.

    Raises:
        TimeoutError: another process has it, with ``wait`` false.
    """
    with ExitStack() as lock:
        try:
            lock.enter_context(locks.locked(path, timeout_s=math.inf if wait else 0))
        except TimeoutError:
            raise
        except OSError:
            pass  # no locks here
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


@contextmanager
def workplace(work: Path, kind: str) -> Iterator[Path]:
    """Makes a directory below ``work``, and removes it at the end."""
    path = _own(work, kind)
    path.mkdir(mode=0o700)
    try:
        yield path
    finally:
        remove_tree(path)


def _own(work: Path, kind: str) -> Path:
    return work / f"{kind}{secrets.token_hex(8)}.{socket.gethostname()}-{Identity.of(os.getpid())}"


def sweep(work: Path) -> None:
    """Removes what killed processes have left in ``work``."""
    for path in work.iterdir():
        if path.suffix == ".lock":
            with suppress(TimeoutError), locked(path, wait=False):
                pass
        elif abandoned(path):
            remove_tree(path)


def abandoned(path: Path) -> bool:
    """Whether the builder whose file or directory this is is gone; another host's is believed for a week."""
    name = re.fullmatch(r"[^.]+\.(?P<host>.+)-(?P<pid>\d+)-(?P<start>\d+)", path.name)
    if name is None:
        return False
    if name["host"] == socket.gethostname():
        return not Identity(int(name["pid"]), int(name["start"])).alive()
    try:
        return time.time() - path.lstat().st_mtime > STALE_S
    except OSError:
        return False
