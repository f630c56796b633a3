"""Cleans up after killed processes: directories of pods and builds, and MPI's shared memory. Sandboxes are not
included."""

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
"""Minimum age in seconds of an unmapped shared-memory file. A younger one may belong to an MPI world that is still
starting."""
POD_DIRECTORY, BUILD_DIRECTORY = "megaflow-pod", "megaflow-build"
"""Kinds of private directories, named ``KIND.HOST.PID-START.RANDOM`` after the process that owns them."""


def make_directory(kind: str = POD_DIRECTORY, base: str | os.PathLike[str] | None = None) -> Path:
    """Creates a private directory for this process under ``base``, by default the directory for temporary files."""
    me = Identity.of(os.getpid())
    return Path(tempfile.mkdtemp(prefix=f"{kind}.{os.uname().nodename}.{me}.", dir=base))


def sweep_directories(base: str | os.PathLike[str], kind: str = POD_DIRECTORY) -> int:
    """Removes directories of ``kind`` under ``base`` whose process on this host has ended. Returns the number
    removed."""
    prefix, removed = f"{kind}.{os.uname().nodename}.", 0
    for path in _ours(base, prefix):
        owner = Identity.parse(os.path.basename(path).removeprefix(prefix).rpartition(".")[0])
        if owner and not owner.alive():
            remove_tree(path, ignore_errors=True)
            removed += 1
    return removed


def sweep_shared_memory(prefix: str = "mpich") -> int:
    """Removes shared-memory files of MPI worlds that were killed while starting. Returns the number removed.

    Ranks unlink their files once all ranks have mapped them. So a file of this user that no process maps is garbage.
    """
    before = time.time() - STALE_S
    stale = [p for p, s in _ours(SHARED_MEMORY, prefix).items() if stat.S_ISREG(s.st_mode) and s.st_mtime < before]
    if not stale:
        return 0
    # Other users' processes cannot be inspected, but they cannot have mapped our files.
    mapped = set().union(*map(mapped_files, processes()))
    removed = 0
    for path in stale:
        with contextlib.suppress(OSError):
            if path not in mapped:
                os.unlink(path)
                removed += 1
    return removed


def _ours(base: str | os.PathLike[str], prefix: str) -> dict[str, os.stat_result]:
    """Returns this user's entries with ``prefix`` in a world-writable directory. Symlinks are not followed, because
    any user may have created them."""
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
