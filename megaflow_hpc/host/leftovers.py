"""What a killed pod leaves on a node beside sandboxes: its private directory, and MPI's shared memory."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

from megaflow_hpc.host.files import remove_tree
from megaflow_hpc.host.process import Identity, mapped_files, processes

SHARED_MEMORY = "/dev/shm"
STALE_S = 60.0
"""A file of shared memory that nobody has mapped for this long belongs to no world that is just starting."""
POD_DIRECTORY = "megaflow-pod"
"""``<this>.<host>.<pid>-<start>.<random>``: a pod's private directory, named by the process that owns it."""


def make_pod_directory() -> Path:
    """Makes a private directory of this process, as ``pods.sh`` makes one for its own."""
    me = Identity.of(os.getpid())
    return Path(tempfile.mkdtemp(prefix=f"{POD_DIRECTORY}.{os.uname().nodename}.{me}."))


def sweep_pod_directories(base: str | os.PathLike[str]) -> int:
    """Removes the pod directories under ``base`` whose process on this host is gone; returns how many."""
    prefix, removed = f"{POD_DIRECTORY}.{os.uname().nodename}.", 0
    for entry in os.scandir(base):
        owner = Identity.parse(entry.name.removeprefix(prefix).rpartition(".")[0])
        if not (entry.name.startswith(prefix) and owner) or owner.alive():
            continue
        try:
            if entry.stat(follow_symlinks=False).st_uid != os.getuid():
                continue
        except FileNotFoundError:
            continue  # another janitor's
        remove_tree(entry.path, ignore_errors=True)
        removed += 1
    return removed


def sweep_shared_memory(pattern: str = "mpich*") -> int:
    """Removes MPI's shared memory that a world left which was killed as it started; returns how many files.

    Ranks unlink theirs as soon as all have it mapped, so what lies there, is ours and mapped by nobody is garbage.
    """
    found = [path for path in Path(SHARED_MEMORY).glob(pattern) if _old_and_ours(path)]
    if not found:
        return 0
    # Another user's processes cannot be read; they have not mapped ours.
    mapped = set().union(*map(mapped_files, processes()))
    gone = [path for path in found if str(path) not in mapped]
    for path in gone:
        path.unlink(missing_ok=True)
    return len(gone)


def _old_and_ours(path: Path) -> bool:
    try:
        status = path.stat()
    except OSError:
        return False
    return status.st_uid == os.getuid() and time.time() - status.st_mtime > STALE_S
