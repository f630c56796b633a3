"""Finds this node's scratch directory, creates the user's directories in it, and cleans up after killed processes.

The janitor cleans up after killed owners of sandboxes: it kills their containers' processes and removes their scratch
directories. The kernel has usually killed the processes already. The janitor never touches a directory of a living
owner.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Literal

from megaflow_hpc.environments.images.cache import index
from megaflow_hpc.environments.sandbox.processes import namespace_init
from megaflow_hpc.errors import SiteError
from megaflow_hpc.host.files import remove_tree
from megaflow_hpc.host.locks import lock_file
from megaflow_hpc.host.mounts import mount_of
from megaflow_hpc.host.private import is_private, own_directories, own_directory, private_directory
from megaflow_hpc.host.process import Identity, descendants

FULL_BYTES, FULL_FILES = 64 << 20, 1000
"""Scratch with fewer free bytes or files counts as full. Even a small image needs more, and the probe might fail."""

Kind = Literal["disk", "memory", "network"]

_MEMORY = {"tmpfs", "ramfs"}
_NETWORK = {"nfs", "nfs4", "lustre", "gpfs", "beegfs", "beegfs_nodev", "panfs", "ceph", "cifs", "smb3", "9p", "afs"}
_NETWORK |= {"orangefs", "pvfs2", "glusterfs", "wekafs", "virtiofs"}


def default_scratch() -> Path:
    """Returns this user's private directory on local scratch (:func:`scratch_base`). Creates it if it is missing.

    Raises:
        SiteError: The directory cannot be created.
    """
    return own_directory(Path(scratch_base()[0]), f"megaflow-{os.getuid()}")


def scratch_directories() -> list[Path]:
    """Returns the directories that :func:`default_scratch` has created on this node, for the janitor."""
    return own_directories(Path(scratch_base()[0]), f"megaflow-{os.getuid()}")


def workplace(scratch: Path, name: str) -> Path:
    """Creates a directory for this process on scratch. The caller must remove it. If the process is killed, the janitor
    removes it."""
    identity = Identity.of(os.getpid())
    assert identity is not None
    own = private_directory(private_directory(private_directory(scratch) / "owners") / str(identity))
    return private_directory(own / f"{name}{os.getpid()}-{next(_numbers)}")


_numbers = itertools.count(1)


def file_system(path: str | os.PathLike[str], mountinfo: str | None = None) -> str:
    """Returns the type of the file system that contains ``path``, as named in ``/proc/self/mountinfo``."""
    return mount_of(path, mountinfo).type


def is_full(path: str | os.PathLike[str]) -> bool:
    """Returns whether scratch lacks space for the files of a sandbox."""
    status = os.statvfs(path)
    lacks_files = status.f_files > 0 and status.f_favail < FULL_FILES
    return status.f_bavail * status.f_frsize < FULL_BYTES or lacks_files


def kind_of(type_: str) -> Kind:
    """Returns the kind of storage for a file system type. Unknown FUSE file systems count as network storage."""
    if type_ in _MEMORY:
        return "memory"
    is_unknown_fuse = type_.startswith("fuse.") and type_ not in ("fuse.fuse-overlayfs", "fuse.fuse2fs")
    return "network" if type_ in _NETWORK or is_unknown_fuse else "disk"


def scratch_base(environ: Mapping[str, str] | None = None, mountinfo: str | None = None) -> tuple[str, str]:
    """Returns the base directory of writable layers, and a warning if it is not the one the user asked for.

    Candidates are ``MEGAFLOW_SCRATCH``, ``SLURM_TMPDIR``, ``TMPDIR``, ``/tmp`` and ``/dev/shm``. ``/dev/shm`` comes
    last, because its files count as memory of the job. The first directory on a local file system is chosen, because
    network file systems cannot hold an overlay's upper directory. If all are on network file systems, the first is
    used, and sandboxes are copies of their images.
    """
    environ = os.environ if environ is None else environ
    first = reason = ""
    for name in ("MEGAFLOW_SCRATCH", "SLURM_TMPDIR", "TMPDIR", "/tmp", "/dev/shm"):
        base = name if name.startswith("/") else environ.get(name, "")
        if base and name == "MEGAFLOW_SCRATCH" and not os.path.isdir(base):
            reason = f"{name}={base} is not a directory"
        if not base or not os.path.isdir(base):
            continue
        type_ = file_system(base, mountinfo)
        if kind_of(type_) != "network":
            return base, f"{reason}; {base} is used instead" if reason else ""
        if not first:
            first, reason = base, reason or f"{name}={base} is on {type_}, which supports no overlays"
    if not first:
        return "/tmp", ""
    return first, f"{reason}; no local directory was found, so sandboxes are copies of their images"


# --- the janitor ------------------------------------------------------------------------------------------------------


def _sweep_services(services: Path) -> None:
    """Removes the directories of services that no process runs."""
    for directory in services.iterdir():
        locks: list[int] = []
        try:
            entries = sorted(directory.iterdir())
            for path in entries:
                if path.suffix == ".lock":
                    locks.append(lock_file(path, timeout_s=0))
            for path in entries:
                path.unlink(missing_ok=True)
            directory.rmdir()  # fails if a process has just started to use it
        except (TimeoutError, OSError):
            continue
        finally:
            for lock in locks:
                os.close(lock)


def sweep(scratch: str | os.PathLike[str]) -> dict[str, int]:
    """Removes the directories of dead owners from ``SCRATCH/owners``, and their unfinished copies from the image cache.

    Files in these directories name the processes to kill. Directories that other users may have written to are
    therefore left alone.

    Returns:
        The numbers of ``owners``, ``sandboxes`` and ``processes`` that were removed or killed, and of directories that
        could not be removed (``left``).

    Raises:
        SiteError: ``scratch`` belongs to another user, or other users may write to it.
    """
    counts = {"owners": 0, "sandboxes": 0, "processes": 0, "left": 0}
    if not os.path.lexists(scratch):
        return counts
    if not is_private(scratch):
        raise SiteError(f"{scratch}: other users own it or may write to it, so it may contain files of others")
    cache = Path(scratch) / "cache"
    if is_private(cache):
        with suppress(OSError):
            index.tidy(cache)
    services = Path(scratch) / "services"
    if is_private(services):
        with suppress(OSError):
            _sweep_services(services)
    if not is_private(Path(scratch) / "owners"):
        return counts
    try:
        owners = [entry for entry in os.scandir(Path(scratch) / "owners") if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return counts
    for entry in owners:
        owner = Identity.parse(entry.name)
        if owner is None or owner.alive():
            continue
        try:
            sandboxes = list(Path(entry.path).iterdir())
        except OSError:  # another janitor was faster
            continue
        counts["owners"] += 1
        for sandbox in sandboxes:
            counts["sandboxes"] += 1
            counts["processes"] += _end(sandbox)
        try:
            remove_tree(entry.path)
        except OSError:
            counts["left"] += int(os.path.exists(entry.path))
    return counts


def _end(sandbox: Path) -> int:
    """Kills the container that uses a sandbox's directory. Returns the number of processes killed."""
    try:
        identity = Identity.parse((sandbox / "owner").read_text(errors="replace").strip())
    except OSError:
        return 0
    if identity is None or not identity.alive():
        return 0
    count = 1 + sum(1 for _ in descendants(identity.pid))
    init = namespace_init(identity.pid)  # None if this is PID 1 itself; killing it kills all others
    first = Identity.of(init) if init is not None else None
    if first is not None:
        first.kill()
    identity.kill()
    return count
