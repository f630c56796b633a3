"""Clean up after killed processes, except sandboxes: directories of pods and builds, and MPI's shared memory."""

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
"""Seconds without a mapping after which a shared-memory file cannot belong to an MPI world that is just starting."""
POD_DIRECTORY, BUILD_DIRECTORY = "megaflow-pod", "megaflow-build"
"""``<this>.<host>.<pid>-<start>.<random>`` is a private directory, named after the process that owns it."""


def make_directory(kind: str = POD_DIRECTORY, base: str | os.PathLike[str] | None = None) -> Path:
    """Creates a private directory for this process under ``base``, by default that of temporary files."""
    me = Identity.of(os.getpid())
    return Path(tempfile.mkdtemp(prefix=f"{kind}.{os.uname().nodename}.{me}.", dir=base))


def sweep_directories(base: str | os.PathLike[str], kind: str = POD_DIRECTORY) -> int:
    """Removes directories of a kind under ``base`` whose process on this host has ended. Returns their number."""
    prefix, removed = f"{kind}.{os.uname().nodename}.", 0
    for path in _ours(base, prefix):
        owner = Identity.parse(os.path.basename(path).removeprefix(prefix).rpartition(".")[0])
        if owner and not owner.alive():
            remove_tree(path, ignore_errors=True)
            removed += 1
    return removed


def sweep_shared_memory(prefix: str = "mpich") -> int:
    """Removes shared memory of MPI worlds that were killed during their start. Returns the number of files.

    Ranks unlink their files as soon as all of them are mapped. So a file that is ours and not mapped by any process is
    garbage.
    """
    before = time.time() - STALE_S
    stale = [p for p, s in _ours(SHARED_MEMORY, prefix).items() if stat.S_ISREG(s.st_mode) and s.st_mtime < before]
    if not stale:
        return 0
    # Other users' processes cannot be read, but they have not mapped our files.
    mapped = set().union(*map(mapped_files, processes()))
    removed = 0
    for path in stale:
        with contextlib.suppress(OSError):
            if path not in mapped:
                os.unlink(path)
                removed += 1
    return removed


def _ours(base: str | os.PathLike[str], prefix: str) -> dict[str, os.stat_result]:
    """Return this user's entries with ``prefix`` in a world-writable directory. Links are not followed, because their
    creator chose the target."""
    entries: dict[str, os.stat_result] = {}
    try:
        names = [name for name in os.listdir(base) if name.startswith(prefix)]
    except OSError:
        return entries  # the directory is missing or cannot be listed
    for name in names:
        path = os.path.join(base, name)
        with contextlib.suppress(OSError):  # removed in the meantime
            status = os.lstat(path)
            if status.st_uid == os.getuid():
                entries[path] = status
    return entries
