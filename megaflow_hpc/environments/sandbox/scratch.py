"""Finds this node's scratch directory, the kind of storage it is on, and this user's directories there."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from megaflow_hpc.host.mounts import mount_of
from megaflow_hpc.host.private import own_directories, own_directory, private_directory
from megaflow_hpc.host.process import Identity

FULL_BYTES, FULL_FILES = 64 << 20, 1000
"""Scratch with fewer free bytes or files counts as full. Even a small image needs more, and the probe might fail."""

Kind = Literal["disk", "memory", "network"]

_MEMORY = {"tmpfs", "ramfs"}
_NETWORK = {"nfs", "nfs4", "lustre", "gpfs", "beegfs", "beegfs_nodev", "panfs", "ceph", "cifs", "smb3", "9p", "afs"}
_NETWORK |= {"orangefs", "pvfs2", "glusterfs", "wekafs", "virtiofs"}


def default_scratch() -> Path:
    """Returns a private directory of this user on local scratch (:func:`scratch_base`), creating it if necessary.

    Raises:
        SiteError: The directory cannot be created.
    """
    return own_directory(Path(scratch_base()[0]), f"megaflow-{os.getuid()}")


def scratch_directories() -> list[Path]:
    """Returns the directories that :func:`default_scratch` has created on this node, for the janitor."""
    return own_directories(Path(scratch_base()[0]), f"megaflow-{os.getuid()}")


def workplace(scratch: Path, name: str) -> Path:
    """Creates a directory for this process on scratch. The caller removes it, or the janitor if the process is
    killed."""
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

    The first of ``MEGAFLOW_SCRATCH``, ``SLURM_TMPDIR``, ``TMPDIR``, ``/tmp`` and ``/dev/shm`` that is a directory and
    not on a network file system, which cannot hold an overlay's upper directory. ``/dev/shm`` comes last, because its
    files count as memory of the job. If all are on network file systems, the first is used, and sandboxes are copies of
    their images.
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
            first, reason = base, reason or f"{name}={base} is on {type_}, which takes no overlay"
    if not first:
        return "/tmp", ""
    return first, f"{reason}; nothing local was found: sandboxes are copies of their images"
