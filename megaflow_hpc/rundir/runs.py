"""The runs under a directory, newest first: what ``latest`` stands for, and ``megaflow-hpc list`` shows."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from megaflow_hpc.errors import ConfigError

DEPTH = 3
"""How deep runs are looked for: ``runs/NAME`` below a project below where one stands."""


def find(under: str | os.PathLike[str] = ".", depth: int = DEPTH) -> list[Path]:
    """Returns the run directories in ``under`` and at most ``depth`` directories below it, newest first.

    A run directory has a ``run.json``, written once: its time is the age of the run. Nothing below one is looked at.
    """
    found = [(path.joinpath("run.json").stat().st_mtime_ns, path) for path in _walk(Path(under), depth)]
    return [path for _, path in sorted(found, reverse=True)]


def latest(under: str | os.PathLike[str] = ".") -> Path:
    """Returns the newest run directory.

    Raises:
        ConfigError: there is none.
    """
    found = find(under)
    if not found:
        raise ConfigError(f"latest: no run directory in {Path(under).absolute()} or {DEPTH} levels below; name one")
    return found[0]


def _walk(path: Path, depth: int) -> Iterator[Path]:
    if path.joinpath("run.json").is_file():
        yield path
        return
    if depth == 0:
        return
    try:
        entries = [entry for entry in os.scandir(path) if entry.is_dir(follow_symlinks=False)]
    except OSError:  # not ours to read, or gone meanwhile
        return
    for entry in entries:
        if not entry.name.startswith("."):
            yield from _walk(Path(entry.path), depth - 1)
