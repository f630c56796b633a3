"""How much a user may still write to a directory: what the file system has free, and what quotas leave; and so where
stores of images lie.

``quota`` (NFS, XFS, ext4) and ``lfs quota`` (Lustre) are asked where they are; each has :data:`ASK_S` seconds, and one
that fails, or prints what nobody understands, limits nothing.
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
from megaflow_hpc.host.private import who_may_replace

ASK_S = 5.0
_KIB = 1024

VARIABLE = "MEGAFLOW_IMAGE_STORE"
"""Directories, separated by colons; the first is the one written to."""

ROOMS = ("sha256", "names", "layers", "steps", "work")
"""Directories of a store."""
PLACES = ("SCRATCH", "PSCRATCH", "GSCRATCH", "WORK", "PROJECT")
"""Variables by which sites name directories for large files that every node sees."""
ROOMY_BYTES, ROOMY_INODES = 20e9, 50_000
"""Free at a place for a store to be begun there."""
LEAST_BYTES, LEAST_INODES = 1e9, 1000
"""Below this no image is made: it would fail half-way, or leave nothing for other files."""
LOOK_S = 60.0
"""How long a store that had room is not looked at again: quotas cost a program each."""
_roomy_until: dict[Path, float] = {}


@dataclass(frozen=True)
class Room:
    """What may still be written below ``path``; infinity where nothing bounds it."""

    path: str
    free_bytes: float
    free_inodes: float
    bytes_by: str = "the file system"
    """What bounds the bytes: ``the file system``, ``quota`` or ``lfs quota``."""
    inodes_by: str = "the file system"


def room(path: str | os.PathLike[str]) -> Room:
    """Returns the room at a path; where it is not there yet, at the directory above it that is.

    Raises:
        OSError: the file system is away.
    """
    place = Path(path).absolute()
    while not place.exists():
        place = place.parent
    found = os.statvfs(place)
    free_bytes, bytes_by = float(found.f_bavail * found.f_frsize), "the file system"
    free_inodes, inodes_by = (float(found.f_favail) if found.f_files else math.inf), "the file system"
    for by, left_bytes, left_inodes in quotas(place, *mount_of(place)):
        if left_bytes < free_bytes:
            free_bytes, bytes_by = left_bytes, by
        if left_inodes < free_inodes:
            free_inodes, inodes_by = left_inodes, by
    return Room(str(place), free_bytes, free_inodes, bytes_by, inodes_by)


def quotas(place: Path, device: str, kind: str) -> Iterator[tuple[str, float, float]]:
    """Yields what each quota on a file system leaves: its name, bytes and inodes."""
    if kind == "lustre" and shutil.which("lfs"):
        lines = _asked("lfs", "quota", "-q", "-u", getpass.getuser(), str(place))
        yield from _left("lfs quota", lines[-1:] if lines else [])  # a long name has a line of its own before it
    elif shutil.which("quota"):
        lines = _asked("quota", "-w", "-p", "-u", getpass.getuser())
        yield from _left("quota", [line for line in lines if line.split()[:1] == [device]])


def _asked(*command: str) -> list[str]:
    environment = {**os.environ, "LC_ALL": "C"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ASK_S, check=False, env=environment)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line for line in done.stdout.splitlines() if line.strip()]  # status 1: over quota


def _left(by: str, lines: list[str]) -> Iterator[tuple[str, float, float]]:
    """Reads ``[device] KiB soft hard grace files soft hard grace``; 0 is no limit, and a star says over quota."""
    for line in lines:
        numbers = re.findall(r"(?<=\s)(\d+)\*?(?=\s)|(?<=\s)(-)(?=\s)", f" {line} ")
        values = [int(number) if number else 0 for number, _ in numbers]
        if len(values) >= 7:
            used, soft, hard, _, files, soft_files, hard_files = values[:7]
            kib, inodes = hard or soft or math.inf, hard_files or soft_files or math.inf
            yield by, max(0.0, (kib - used) * _KIB), max(0.0, inodes - files)


def mount_of(place: Path) -> tuple[str, str]:
    """Returns device and type of the file system of a directory, as the kernel lists them."""
    best, found = "", ("", "")
    try:
        text = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return found
    real = os.path.realpath(place)
    for line in text.splitlines():
        before, _, after = line.partition(" - ")
        point = before.split()[4].replace("\\040", " ")
        if len(point) >= len(best) and (real == point or real.startswith(point.rstrip("/") + "/")):
            kind, device = after.split()[:2]
            best, found = point, (device, kind)
    return found


def default_stores(named: str | None = None) -> list[Path]:
    """Returns the directories of ``MEGAFLOW_IMAGE_STORE``, else those of ``named``, else the first place with room.

    Places are those that sites name for large files (:data:`PLACES`), where the user may write and there is room, and
    the home directory last: its quota is small mostly. A store that is there already is used on, and one in the home
    directory is read beside it.

    Args:
        named: ``environment.image_store`` of a campaign or its site profile: directories, separated by colons.
    """
    parts = (os.environ.get(VARIABLE) or named or "").split(":")
    if given := [Path(os.path.expanduser(os.path.expandvars(part))) for part in parts if part]:
        return given
    home = Path.home() / ".megaflow-hpc" / "images"
    large = [
        Path(os.environ[name]) / f"megaflow-hpc-{os.getuid()}" / "images" for name in PLACES if os.environ.get(name)
    ]
    first = next((path for path in large if path.is_dir()), None) or next(filter(_has_room, large), None)
    if first is None:
        return [home]
    return [first, home] if home.is_dir() else [first]


def _has_room(store: Path) -> bool:
    place = store.parents[1]
    if not place.is_absolute() or not os.access(place, os.W_OK | os.X_OK):
        return False
    try:
        found = room(place)
    except OSError:
        return False
    return found.free_bytes >= ROOMY_BYTES and found.free_inodes >= ROOMY_INODES


def check_room(store: Path) -> None:
    """Refuses to make images where there is hardly any room.

    Raises:
        SiteError: names what is left, by what, and what to do.
    """
    if time.monotonic() < _roomy_until.get(store, 0.0):
        return
    found = room(store)
    if found.free_bytes < LEAST_BYTES or found.free_inodes < LEAST_INODES:
        left = f"{found.free_bytes / 1e6:.0f} MB ({found.bytes_by}) and {found.free_inodes:.0f} files "
        raise SiteError(
            f"image store {store}: {left}({found.inodes_by}) are left there, less than {LEAST_BYTES / 1e6:.0f} MB and "
            f"{LEAST_INODES} files; name a larger place that nodes see: {VARIABLE}=DIRECTORY, or "
            "environment.image_store in the campaign or its site profile; megaflow-hpc images prune makes room"
        )
    _roomy_until[store] = time.monotonic() + LOOK_S


def check_safe(root: Path) -> None:
    """Refuses a store that users other than its owner could have changed.

    Raises:
        SiteError: names the directory that other users may write to, and the remedy.
    """
    try:
        owner = root.stat().st_uid
    except OSError:
        return
    for place in (root, *(root / name for name in ROOMS)):
        if why := who_may_replace(place, owner, "this image store"):
            raise SiteError(why)
