"""Measures how much the user may still write to a directory, and chooses the image store accordingly.

The limits are the free space of the file system and the user's quotas. ``quota`` (NFS, XFS, ext4) and ``lfs quota``
(Lustre) are run if installed, with a timeout of :data:`QUOTA_TIMEOUT_S` seconds. If a program fails or its output
cannot be parsed, its quota is ignored.
"""

from __future__ import annotations

import getpass
import math
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megaflow_hpc.errors import SiteError
from megaflow_hpc.host.mounts import mount_of
from megaflow_hpc.host.private import who_may_replace

QUOTA_TIMEOUT_S = 5.0
_KIB = 1024

VARIABLE = "MEGAFLOW_IMAGE_STORE"
"""Environment variable that lists the store directories, separated by colons. New images go to the first directory."""

STORE_DIRECTORIES = ("sha256", "names", "layers", "steps", "work")
"""Subdirectories of a store."""
SITE_VARIABLES = ("SCRATCH", "PSCRATCH", "GSCRATCH", "WORK", "PROJECT")
"""Environment variables that sites set to large directories shared by all nodes."""
NEW_STORE_BYTES, NEW_STORE_INODES = 20e9, 50_000
"""Free bytes and inodes that a directory needs to be chosen for a new store."""
MIN_FREE_BYTES, MIN_FREE_INODES = 1e9, 1000
"""Minimum free bytes and inodes of a store. With less, no image is built or pulled, because it could fail halfway or
exhaust the quota."""
RECHECK_INTERVAL_S = 60.0
"""Seconds for which a successful check remains valid. Each check runs external programs."""
_checked_until: dict[Path, float] = {}


@dataclass(frozen=True)
class DiskQuota:
    """Bytes and inodes that the user may still write below ``path``. Infinity means unlimited."""

    path: str
    free_bytes: float
    free_inodes: float
    bytes_by: str = "the file system"
    """Source of the limit on bytes: ``the file system``, ``quota`` or ``lfs quota``."""
    inodes_by: str = "the file system"


def disk_quota(path: str | os.PathLike[str]) -> DiskQuota:
    """Returns the quota for a path. For a missing path, uses the closest existing parent directory.

    Raises:
        OSError: The file system does not respond.
    """
    directory = Path(path).absolute()
    while not directory.exists():
        directory = directory.parent
    disk = os.statvfs(directory)
    free_bytes, bytes_by = float(disk.f_bavail * disk.f_frsize), "the file system"
    free_inodes, inodes_by = (float(disk.f_favail) if disk.f_files else math.inf), "the file system"
    mount = mount_of(directory)
    for by, left_bytes, left_inodes in quotas(directory, mount.device, mount.type):
        if left_bytes < free_bytes:
            free_bytes, bytes_by = left_bytes, by
        if left_inodes < free_inodes:
            free_inodes, inodes_by = left_inodes, by
    return DiskQuota(str(directory), free_bytes, free_inodes, bytes_by, inodes_by)


def quotas(directory: Path, device: str, kind: str) -> Iterator[tuple[str, float, float]]:
    """Yields the name, remaining bytes and remaining inodes of each quota that applies to a file system."""
    if kind == "lustre" and shutil.which("lfs"):
        lines = _output_lines("lfs", "quota", "-q", "-u", getpass.getuser(), str(directory))
        yield from _parsed("lfs quota", lines[-1:] if lines else [])  # a long name is printed on a separate line
    elif shutil.which("quota"):
        lines = _output_lines("quota", "-w", "-p", "-u", getpass.getuser())
        yield from _parsed("quota", [line for line in lines if line.split()[:1] == [device]])


def _output_lines(*command: str) -> list[str]:
    environment = {**os.environ, "LC_ALL": "C"}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=QUOTA_TIMEOUT_S, check=False, env=environment
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line for line in done.stdout.splitlines() if line.strip()]  # status 1: over quota


def _parsed(by: str, lines: list[str]) -> Iterator[tuple[str, float, float]]:
    """Parses lines of ``[device] KiB soft hard grace files soft hard grace``. A limit of 0 means unlimited. An asterisk
    marks an exceeded limit."""
    for line in lines:
        numbers = re.findall(r"(?<=\s)(\d+)\*?(?=\s)|(?<=\s)(-)(?=\s)", f" {line} ")
        values = [int(number) if number else 0 for number, _ in numbers]
        if len(values) >= 7:
            used, soft, hard, _, files, soft_files, hard_files = values[:7]
            kib, inodes = hard or soft or math.inf, hard_files or soft_files or math.inf
            yield by, max(0.0, (kib - used) * _KIB), max(0.0, inodes - files)


def default_stores(named: str | None = None) -> list[Path]:
    """Returns the image stores named by ``MEGAFLOW_IMAGE_STORE``, or else by ``named``, or else a default.

    The default is an existing store in one of the directories of :data:`SITE_VARIABLES`. If none exists, it is the
    first of these directories that is writable and has enough space. If there is no such directory, it is the home
    directory. An existing store in the home directory is always included.

    Args:
        named: ``environment.image_store`` of a campaign or its site profile: directories, separated by colons.
    """
    parts = (os.environ.get(VARIABLE) or named or "").split(":")
    if given := [Path(os.path.expanduser(os.path.expandvars(part))) for part in parts if part]:
        return given
    home = Path.home() / ".megaflow-hpc" / "images"
    large = [
        Path(os.environ[name]) / f"megaflow-hpc-{os.getuid()}" / "images"
        for name in SITE_VARIABLES
        if os.environ.get(name)
    ]
    first = next((path for path in large if path.is_dir()), None) or next(filter(_has_space, large), None)
    if first is None:
        return [home]
    return [first, home] if home.is_dir() else [first]


def _has_space(store: Path) -> bool:
    directory = store.parents[1]
    if not directory.is_absolute() or not os.access(directory, os.W_OK | os.X_OK):
        return False
    try:
        quota = disk_quota(directory)
    except OSError:
        return False
    return quota.free_bytes >= NEW_STORE_BYTES and quota.free_inodes >= NEW_STORE_INODES


def check_quota(store: Path) -> None:
    """Checks that a store has enough free space to write to.

    Raises:
        SiteError: Too little space is left. The message gives the amount, the limit and the remedy.
    """
    if time.monotonic() < _checked_until.get(store, 0.0):
        return
    quota = disk_quota(store)
    if quota.free_bytes < MIN_FREE_BYTES or quota.free_inodes < MIN_FREE_INODES:
        left = (
            f"{quota.free_bytes / 1e6:.0f} MB ({quota.bytes_by}) and {quota.free_inodes:.0f} files ({quota.inodes_by})"
        )
        least = f"{MIN_FREE_BYTES / 1e6:.0f} MB and {MIN_FREE_INODES} files"
        raise SiteError(
            f"image store {store}: {left} are left there, less than {least}; name a larger place that nodes see: "
            f"{VARIABLE}=DIRECTORY, or environment.image_store in the campaign or its site profile; "
            "megaflow-hpc images prune makes room"
        )
    _checked_until[store] = time.monotonic() + RECHECK_INTERVAL_S


def check_safe(root: Path) -> None:
    """Checks that no other user can modify a store.

    Raises:
        SiteError: Another user may write to a directory of the store. The message names the directory and the remedy.
    """
    try:
        owner = root.stat().st_uid
    except OSError:
        return
    for directory in (root, *(root / name for name in STORE_DIRECTORIES)):
        if why := who_may_replace(directory, owner, "this image store"):
            raise SiteError(why)
