"""What killed processes leave on a node beside sandboxes: directories of pods and builds, MPI's shared memory."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
import time
from pathlib import Path

from megaflow_hpc.host.files import remove_tree
from megaflow_hpc.host.process import Identity, mapped_files, processes

SHARED_MEMORY = "/dev/shm"
STALE_S = 60.0
"""A file of shared memory that nobody has mapped for this long belongs to no world that is just starting."""
POD_DIRECTORY, BUILD_DIRECTORY = "megaflow-pod", "megaflow-build"
"""``<this>.<host>.<pid>-<start>.<random>``: a private directory, named by the process that owns it."""


def make_directory(kind: str = POD_DIRECTORY, base: str | os.PathLike[str] | None = None) -> Path:
    """Makes a private directory of this process under ``base``, by default the directory of temporary files."""
    me = Identity.of(os.getpid())
    return Path(tempfile.mkdtemp(prefix=f"{kind}.{os.uname().nodename}.{me}.", dir=base))


def sweep_directories(base: str | os.PathLike[str], kind: str = POD_DIRECTORY) -> int:
    """Removes the directories of a kind under ``base`` whose process on this host is gone; returns how many."""
    prefix, removed = f"{kind}.{os.uname().nodename}.", 0
    for path in _ours(base, prefix):
        owner = Identity.parse(os.path.basename(path).removeprefix(prefix).rpartition(".")[0])
        if owner and not owner.alive():
            remove_tree(path, ignore_errors=True)
            removed += 1
    return removed


def sweep_shared_memory(prefix: str = "mpich") -> int:
    """Removes MPI's shared memory that a world left which was killed as it started; returns how many files.

    Ranks unlink theirs as soon as all have it mapped, so what lies there, is ours and mapped by nobody is garbage.
    """
    before = time.time() - STALE_S
    found = [p for p, s in _ours(SHARED_MEMORY, prefix).items() if stat.S_ISREG(s.st_mode) and s.st_mtime < before]
    if not found:
        return 0
    # Another user's processes cannot be read; they have not mapped ours.
    mapped = set().union(*map(mapped_files, processes()))
    removed = 0
    for path in found:
        with contextlib.suppress(OSError):
            if path not in mapped:
                os.unlink(path)
                removed += 1
    return removed


def _ours(base: str | os.PathLike[str], prefix: str) -> dict[str, os.stat_result]:
    """What in a directory of everybody's begins with ``prefix`` and is this user's. No link is followed: whoever it
    leads to, who made it decides."""
    found: dict[str, os.stat_result] = {}
    try:
        names = [name for name in os.listdir(base) if name.startswith(prefix)]
    except OSError:
        return found  # there is none, or it cannot be listed
    for name in names:
        path = os.path.join(base, name)
        with contextlib.suppress(OSError):  # gone meanwhile
            status = os.lstat(path)
            if status.st_uid == os.getuid():
                found[path] = status
    return found
