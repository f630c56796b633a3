"""Trees of files that a hostile task may leave."""

from __future__ import annotations

import os
from pathlib import Path


def nest(root: Path, depth: int, name: str) -> None:
    """Make ``depth`` nested directories, far beyond the maximum path length, with a file in each."""
    root.mkdir()
    here = os.open(root, os.O_RDONLY)
    for _ in range(depth):
        os.close(os.open("file", os.O_WRONLY | os.O_CREAT, 0o600, dir_fd=here))
        os.mkdir(name, dir_fd=here)
        below = os.open(name, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
