"""Scratch of this node: which directory, what lies below it, and this user's own places there."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from megaflow_hpc.host.private import own_directories, own_directory, private_directory
from megaflow_hpc.host.process import Identity

FULL_BYTES, FULL_FILES = 64 << 20, 1000
"""Scratch with less room than this is full: one small image takes more, and the probe itself may fail for it."""

Kind = Literal["disk", "memory", "network"]

_MEMORY = {"tmpfs", "ramfs"}
_NETWORK = {"nfs", "nfs4", "lustre", "gpfs", "beegfs", "beegfs_nodev", "panfs", "ceph", "cifs", "smb3", "9p", "afs"}
_NETWORK |= {"orangefs", "pvfs2", "glusterfs", "wekafs", "virtiofs"}


def default_scratch() -> Path:
    """Returns a private directory of this user's on local scratch (:func:`scratch_base`), made if need be.

    Raises:
        SiteError: none can be made there.
    """
    return own_directory(Path(scratch_base()[0]), f"megaflow-{os.getuid()}")


def scratch_directories() -> list[Path]:
    """Returns what :func:`default_scratch` has returned on this node, for the janitor: mostly one, or none yet."""
    return own_directories(Path(scratch_base()[0]), f"megaflow-{os.getuid()}")


def workplace(scratch: Path, name: str) -> Path:
    """Makes a directory of this process's on scratch for the caller, who removes it; the janitor does if the process is
    killed."""
    identity = Identity.of(os.getpid())
    assert identity is not None
    own = private_directory(private_directory(private_directory(scratch) / "owners") / str(identity))
    return private_directory(own / f"{name}{os.getpid()}-{next(_numbers)}")


_numbers = itertools.count(1)


def file_system(path: str | os.PathLike[str], mountinfo: str | None = None) -> str:
    """Returns the type of the file system that ``path`` lies on, as ``/proc/self/mountinfo`` names it."""
    real = os.path.realpath(path)
    if mountinfo is None:
        try:
            mountinfo = Path("/proc/self/mountinfo").read_text(errors="surrogateescape")
        except OSError:
            return ""
    best, found = -1, ""
    for line in mountinfo.splitlines():
        before, separator, after = line.partition(" - ")
        fields = before.split()
        if not separator or len(fields) < 5:
            continue
        point = fields[4].replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\")
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= best:  # of two mounts on one place the later one counts
            best, found = len(point), after.split()[0]
    return found


def is_full(path: str | os.PathLike[str]) -> bool:
    """Tells whether scratch has no room for a sandbox's own files, let alone for an image."""
    room = os.statvfs(path)
    return room.f_bavail * room.f_frsize < FULL_BYTES or bool(room.f_files and room.f_favail < FULL_FILES)


def kind_of(type_: str) -> Kind:
    """Returns what a file system's type means for a writable layer. An unknown FUSE file system counts as a remote
    one."""
    if type_ in _MEMORY:
        return "memory"
    if type_ in _NETWORK or (type_.startswith("fuse.") and type_ not in ("fuse.fuse-overlayfs", "fuse.fuse2fs")):
        return "network"
    return "disk"


def scratch_base(environ: Mapping[str, str] | None = None, mountinfo: str | None = None) -> tuple[str, str]:
    """Returns where writable layers go, and a warning if that is not what was asked for.

    ``MEGAFLOW_SCRATCH``, ``SLURM_TMPDIR``, ``TMPDIR``, ``/tmp``, ``/dev/shm``: the first that is a directory and does
    not lie on a network file system, which takes no overlay's upper directory. Memory comes late: what is written there
    is charged to the job. Where all is remote the first of them it is, and sandboxes are copies of their images.
    """
    environ = os.environ if environ is None else environ
    passed = first = ""
    for name in ("MEGAFLOW_SCRATCH", "SLURM_TMPDIR", "TMPDIR", "/tmp", "/dev/shm"):
        base = name if name.startswith("/") else environ.get(name, "")
        if not base or not os.path.isdir(base):
            continue
        type_ = file_system(base, mountinfo)
        if kind_of(type_) != "network":
            return base, f"{passed}; {base} is used instead" if passed else ""
        first = first or base
        passed = passed or f"{name}={base} is on {type_}, where no overlay can lie"
    return first or "/tmp", f"{passed}; nothing local was found: sandboxes are copies of their images" if passed else ""
