"""Python in a user namespace, from which something of the node is taken away."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

CLOSED = "{ [ ! -e /dev/fuse ] || mount --bind /etc/shadow /dev/fuse; }"
"""For :func:`restricted`: nobody but root opens FUSE's device."""


def restricted(before: str, *argv: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Runs Python with ``argv`` in a user namespace, after the shell command ``before`` has changed something there."""
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


def fuse_overlay(device: str = "/dev/fuse") -> bool:
    """Whether Apptainer can take fuse-overlayfs where the kernel gives no overlay: installed, and FUSE open."""
    return shutil.which("fuse-overlayfs") is not None and os.access(device, os.R_OK | os.W_OK)
