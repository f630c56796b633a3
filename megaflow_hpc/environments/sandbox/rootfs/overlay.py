"""The overlay of an unpacked image and a writable layer, mounted by us before Apptainer starts.

Apptainer 1.4 mounts one itself, but in a user namespace without ``userxattr``: then no directory of the image that
holds others can be deleted (``rm -rf`` ends with an I/O error), since the mark that hides what was below cannot be set.
It also tries the mount out first, and each unmounting waits until the file system has written everything of everybody.
``volatile`` spares that: a layer need not outlive its node.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Sequence

from megaflow_hpc.environments.sandbox.argv import as_user, bounded
from megaflow_hpc.environments.sandbox.spec import SandboxSpec
from megaflow_hpc.host.apptainer import unshare
from megaflow_hpc.host.files import remove_tree

MOUNT = 'mount -t overlay overlay -o "$1" "$2" && shift 2 && '
MOUNT_POINTS = ("dev", "proc", "sys", "tmp", "etc")
"""Apptainer makes none in a root that it does not overlay itself."""


def argv_prefix(
    lower: str, layer: str, merged: str, spec: SandboxSpec, namespace: Sequence[str] | None = None
) -> list[str] | None:
    """Returns the argv prefix of a container's command line: into namespaces of its own, and there an overlay at
    ``merged``.

    Args:
        layer: directory of the writable layer; ``upper`` and ``work`` are made in it, and what a volatile mount leaves
            in ``work`` goes.
        spec: says who to be from there on.
        namespace: argv prefix that enters a user namespace; default :func:`unshare`'s.

    Returns:
        ``None`` where this does not work: then Apptainer's own overlay has to do.
    """
    if any(letter in text for text in (lower, layer, merged) for letter in ',:\\"'):
        return None
    if os.geteuid() == 0 or not works(os.path.dirname(layer)):
        return None
    remove_tree(f"{layer}/work")
    for path in (f"{layer}/upper", f"{layer}/work", merged):
        os.makedirs(path, mode=0o755, exist_ok=True)
    for name in MOUNT_POINTS:
        place = f"{layer}/upper/{name}"
        if not os.path.lexists(f"{lower}/{name}") and not os.path.lexists(place):
            os.mkdir(place, 0o755)
    script = f'{MOUNT}{bounded(spec)}exec "$@"'
    result = [*_enter(namespace), "/bin/sh", "-c", script, "sh", _options(lower, layer), merged]
    return result if spec.as_root else [*result, *as_user()]


def _enter(namespace: Sequence[str] | None = None) -> Sequence[str]:
    first = unshare() if namespace is None else (*namespace, unshare()[0])
    return (*first, "--mount", "--propagation", "private", "--")


def _options(lower: str, layer: str) -> str:
    return f"lowerdir={lower},upperdir={layer}/upper,workdir={layer}/work,userxattr,volatile"


_tried: dict[int, bool] = {}


def works(directory: str) -> bool:
    """Whether the kernel gives an ordinary user such an overlay on this directory's file system; tried out once."""
    device = os.stat(directory).st_dev
    if device not in _tried:
        _tried[device] = bool(unshare()) and _try(directory)
    return _tried[device]


def _try(directory: str) -> bool:
    with tempfile.TemporaryDirectory(dir=directory) as where:
        for name in ("lower/below/deep", "layer/upper", "layer/work", "merged"):
            os.makedirs(f"{where}/{name}")
        script = f'{MOUNT.partition("&&")[0]} && rm -r "$2/below" && mkdir "$2/below"'
        argv = [
            *_enter(),
            "/bin/sh",
            "-c",
            script,
            "sh",
            _options(f"{where}/lower", f"{where}/layer"),
            f"{where}/merged",
        ]
        done = subprocess.run(argv, capture_output=True, check=False, timeout=60)
        remove_tree(f"{where}/layer")
    return done.returncode == 0
