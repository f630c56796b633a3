"""Simulates nodes that lack something: restricted user namespaces, and missing subordinate ids."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from megaflow_hpc.host.apptainer import unshare
from megaflow_hpc.host.subordinate import all_ids

CLOSED = "{ [ ! -e /dev/fuse ] || mount --bind /etc/shadow /dev/fuse; }"
"""Argument of :func:`restricted` that denies the FUSE device to all users but root."""


def restricted(before: str, *argv: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Runs Python with ``argv`` in a user namespace that the shell command ``before`` has changed."""
    script = f'{before} && exec "$@"'
    words = ["unshare", "--user", "--map-current-user", "--keep-caps", "--mount", "sh", "-c", script, "sh"]
    return subprocess.run(
        [*words, sys.executable, *argv],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def mount_overlay(path: Path) -> str:
    """Returns the shell command that mounts an overlay at ``path/m``, on which the kernel mounts no other."""
    for name in ("l", "u", "w", "m"):
        (path / name).mkdir()
    options = f"lowerdir={path}/l,upperdir={path}/u,workdir={path}/w,userxattr"
    return f"mount -t overlay overlay -o {options} {path}/m"


def fuse_overlay(device: str = "/dev/fuse") -> bool:
    """Returns whether Apptainer can use fuse-overlayfs: it is installed, and the FUSE device is open."""
    return shutil.which("fuse-overlayfs") is not None and os.access(device, os.R_OK | os.W_OK)


@contextmanager
def no_subordinate_ids(programs: Path, *lacking: str) -> Iterator[None]:
    """Removes ``newuidmap``, ``newgidmap`` and the named programs from PATH, which becomes the folder ``programs``."""
    programs.mkdir()
    for place in reversed(os.environ["PATH"].split(":")):
        for name in os.listdir(place) if os.path.isdir(place) else ():
            if name not in ("newuidmap", "newgidmap", *lacking):
                (programs / name).unlink(missing_ok=True)
                (programs / name).symlink_to(os.path.realpath(os.path.join(place, name)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(programs))
        all_ids.cache_clear()
        try:
            assert all_ids() == unshare()
            yield
        finally:
            all_ids.cache_clear()
