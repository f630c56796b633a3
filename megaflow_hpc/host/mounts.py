"""Reads properties of file systems: type, mount options, and whether they support hard links."""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass
from pathlib import Path

MAX_CACHED_S = 60
"""Maximum supported time in seconds for which directory attributes may be cached. This is NFS's default."""


@dataclass(frozen=True)
class MountInfo:
    """One line of ``/proc/self/mountinfo``. See proc_pid_mountinfo(5)."""

    point: str = ""
    type: str = ""
    options: tuple[str, ...] = ()
    """Options of the mount and of the mounted file system."""
    device: str = ""
    """Source of the mounted file system, such as ``/dev/sda1`` or ``server:/export``."""

    def cached_s(self) -> int:
        """Returns the number of seconds for which an NFS client may cache attributes (acregmax, acdirmax). Default:
        60."""
        values = dict(option.partition("=")[::2] for option in self.options)
        return max(
            (int(values[name]) for name in ("acregmax", "acdirmax") if values.get(name, "").isdigit()), default=60
        )


def mount_of(path: str | os.PathLike[str], mountinfo: str | None = None) -> MountInfo:
    """Returns the mount that contains ``path``. All fields are empty if the mount is unknown.

    Args:
        mountinfo: Content of ``/proc/self/mountinfo``. Default: read the file.
    """
    real = os.path.realpath(path)
    if mountinfo is None:
        try:
            mountinfo = Path("/proc/self/mountinfo").read_text(errors="surrogateescape")
        except OSError:
            return MountInfo()
    mount = MountInfo()
    for line in mountinfo.splitlines():
        before, separator, after = line.partition(" - ")
        fields, rest = before.split(), after.split()
        if not separator or len(fields) < 6 or not rest:
            continue
        point = fields[4].replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\")
        is_inside = real == point or real.startswith(point.rstrip("/") + "/")
        # If two mounts have the same path, the later one hides the earlier one.
        if is_inside and len(point) >= len(mount.point):
            options = [*fields[5].split(","), *(rest[2].split(",") if len(rest) > 2 else [])]
            device = rest[1] if len(rest) > 1 else ""
            mount = MountInfo(point, rest[0], tuple(options), device)
    return mount


def why_no_links(folder: Path) -> str:
    """Explains why a directory does not support hard links. Returns an empty string if it does. Leaves no files behind.

    Raises:
        OSError: No file can be created there.
    """
    first = folder / f".link-{os.getpid()}-{secrets.token_hex(4)}"
    second = first.with_name(f"{first.name}-2")
    first.touch(mode=0o600, exist_ok=False)
    try:
        os.link(first, second)
        return "" if first.stat().st_nlink == 2 else "its link counts are wrong"
    except OSError as error:
        return error.strerror or str(error)
    finally:
        second.unlink(missing_ok=True)
        first.unlink(missing_ok=True)


def refusal_of_links(folder: Path) -> str:
    """Returns why a directory cannot hold a run, or an empty string if it can. Its file system must support hard links,
    which pods use to claim work."""
    if not (why := why_no_links(folder)):
        return ""
    mount = mount_of(folder)
    return (
        f"its file system ({mount.type or 'unknown'} at {mount.point or '?'}) has no hard links ({why}), which "
        "pods need to claim work; DAOS, SMB and sshfs have none; use Lustre, GPFS, BeeGFS, NFS or a local disk"
    )
