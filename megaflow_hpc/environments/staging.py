"""Unpacks an image once per node, whoever asks first: several ranks and jobs share one copy."""

from __future__ import annotations

import fcntl
import hashlib
import os
from pathlib import Path

from megaflow_hpc.environments import apptainer as runtime
from megaflow_hpc.environments.files import remove_tree
from megaflow_hpc.errors import SandboxError, SiteError


def image_key(path: Path) -> str:
    """Name of a SIF's unpacked copy: from its real path, size and time of change, which cost no read of the file."""
    found = path.stat()
    identity = f"{path.resolve()}\0{found.st_size}\0{found.st_mtime_ns}"
    return hashlib.sha256(identity.encode("utf-8", "surrogateescape")).hexdigest()[:24]


def stage(image: str, cache: Path, apptainer: str) -> str:
    """The directory with the contents of ``image``; blocks while another process unpacks it.

    An image that is a directory already is used as it is.

    Raises:
        SandboxError: there is no such image, or it cannot be unpacked.
    """
    path = Path(image)
    if path.is_dir():
        return str(path.resolve())
    if not path.is_file():
        raise SandboxError(f"{image}: no such image on this node; expected a SIF file or a directory that is an image")
    home = cache / image_key(path)
    rootfs = home / "rootfs"
    if rootfs.is_dir():
        return str(rootfs)
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(home / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if not rootfs.is_dir():
            partial = home / "partial"
            remove_tree(partial)
            try:
                runtime.build(apptainer, partial, str(path.resolve()), "--sandbox", "--fix-perms", timeout_s=1800)
            except SiteError as error:
                raise SandboxError(f"{image}: cannot be unpacked: {error}") from error
            os.rename(partial, rootfs)
    finally:
        os.close(descriptor)
    return str(rootfs)
