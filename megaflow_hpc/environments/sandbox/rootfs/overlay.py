"""Mounts the overlay of an unpacked image and a writable layer before Apptainer starts.

Apptainer 1.4 can mount an overlay itself, but omits ``userxattr`` in a user namespace. Without that option the kernel
cannot hide lower files, so deleting a non-empty directory of the image fails with an I/O error. Apptainer also tries
each mount once beforehand, and each unmount waits until the file system has written all dirty data. ``volatile`` avoids
this wait, because a layer need not survive a crash of its node.

A process in the sandbox can read the directory names in the mount table. The kernel limits these names and all other
options to one page in total. The overlay is therefore mounted from a directory of symlinks: ``upper``, ``work``, and 0,
1, 2 … for the lower directories.
"""

from __future__ import annotations

import os
import stat
import subprocess
import tempfile
from collections.abc import Sequence
from typing import NamedTuple

from megaflow_hpc.environments.sandbox.launcher import as_user, set_namespace_limits
from megaflow_hpc.environments.sandbox.spec import SandboxSpec
from megaflow_hpc.errors import SandboxError
from megaflow_hpc.host.apptainer import unshare
from megaflow_hpc.host.files import remove_tree

_MOUNT = 'cd "$1" && mount -t overlay overlay -o "$2" "$3"'
"""Shell command that mounts an overlay. Its arguments are the fields of :class:`Overlay`."""

MOUNT_POINTS = ("dev", "proc", "sys", "tmp", "etc")
"""Directories that Apptainer uses as mount points. It creates them only if it mounts the overlay itself."""

MAX_LOWERS = 400
"""Maximum number of lower directories of one overlay. The kernel allows 500."""


class Overlay(NamedTuple):
    """Arguments for mounting an overlay."""

    directory: str
    """Working directory of the mount command, which contains the symlinks."""
    options: str
    merged: str
    """Mount point."""


def prepare(lowers: Sequence[str], layer: str, merged: str) -> Overlay | None:
    """Creates the directories of an overlay. Returns how to mount it, or ``None`` if Apptainer must mount it itself.

    Args:
        lowers: Directories of the image, topmost first.
        layer: Directory of the writable layer, in which ``upper`` and ``work`` are created.
        merged: The mount point.

    Raises:
        SandboxError: The image has more layers than the kernel allows.
    """
    if has_reserved_character(layer, merged):
        return None
    if os.geteuid() == 0 or not works(os.path.dirname(layer)):
        return None
    remove_tree(f"{layer}/work")  # a marker left by an earlier volatile mount makes the next mount fail
    for path in (f"{layer}/upper", f"{layer}/work", merged):
        os.makedirs(path, mode=0o755, exist_ok=True)
    for name in MOUNT_POINTS:
        path = f"{layer}/upper/{name}"
        if not os.path.lexists(path) and not _has(lowers, name):
            os.mkdir(path, 0o755)
    return arguments(lowers, layer, merged)


def argv_prefix(mounted: Overlay, spec: SandboxSpec, namespace: Sequence[str] | None = None) -> list[str]:
    """Returns the argv prefix that enters new namespaces, mounts an overlay and becomes the spec's user.

    Args:
        namespace: Argv prefix that enters a user namespace. Default: the prefix of :func:`unshare`.
    """
    script = f'{_MOUNT} && cd / && shift 3 || exit 1; {set_namespace_limits(spec)}exec "$@"'
    prefix = [*_enter(namespace), "/bin/sh", "-c", script, "sh", *mounted]
    return prefix if spec.as_root else [*prefix, *as_user()]


def has_reserved_character(*paths: str) -> bool:
    """Returns whether a path contains a character that separates the options of a bind or overlay."""
    return any(letter in path for path in paths for letter in ',:\\"')


def _has(lowers: Sequence[str], name: str) -> bool:
    """Returns whether an image has ``name`` in its root directory. The topmost layer with an entry decides."""
    for lower in lowers:
        try:
            status = os.lstat(f"{lower}/{name}")
        except OSError:
            continue
        is_whiteout = stat.S_ISCHR(status.st_mode) and status.st_rdev == 0
        return not is_whiteout
    return False


def arguments(lowers: Sequence[str], layer: str, merged: str) -> Overlay:
    """Creates the directory of symlinks for an overlay and returns how to mount it.

    Raises:
        SandboxError: There are more lower directories than the kernel allows.
    """
    if len(lowers) > MAX_LOWERS:
        raise SandboxError(f"{layer}: the image has {len(lowers)} layers; an overlay supports {MAX_LOWERS}")
    directory = f"{layer}.links"
    remove_tree(directory)
    os.mkdir(directory, 0o700)
    links = {str(number): lower for number, lower in enumerate(lowers)}
    for name, target in {**links, "upper": f"{layer}/upper", "work": f"{layer}/work"}.items():
        os.symlink(target, f"{directory}/{name}")
    options = f"lowerdir={':'.join(links)},upperdir=upper,workdir=work,userxattr,volatile"
    return Overlay(directory, options, merged)


def _enter(namespace: Sequence[str] | None = None) -> Sequence[str]:
    first = unshare() if namespace is None else (*namespace, unshare()[0])
    return (*first, "--mount", "--propagation", "private", "--")


_works_on_device: dict[int, bool] = {}


def works(directory: str) -> bool:
    """Returns whether an ordinary user can mount an overlay on a directory's file system. Tests each file system
    once."""
    device = os.stat(directory).st_dev
    if device not in _works_on_device:
        _works_on_device[device] = bool(unshare()) and _try(directory)
    return _works_on_device[device]


def _try(directory: str) -> bool:
    with tempfile.TemporaryDirectory(dir=directory) as temporary:
        for name in ("lower/below/deep", "layer/upper", "layer/work", "merged"):
            os.makedirs(f"{temporary}/{name}")
        mounted = arguments([f"{temporary}/lower"], f"{temporary}/layer", f"{temporary}/merged")
        script = f'{_MOUNT} && rm -r "$3/below" && mkdir "$3/below"'
        argv = [*_enter(), "/bin/sh", "-c", script, "sh", *mounted]
        done = subprocess.run(argv, capture_output=True, check=False, timeout=60)
        remove_tree(f"{temporary}/layer")
    return done.returncode == 0
