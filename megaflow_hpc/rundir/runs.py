"""The runs under a directory, newest first: what ``latest`` stands for, and ``megaflow-hpc list`` shows.

Where one stands may be a home directory with a million files, or a share with other people's: the search goes level by
level, so that what is near is found first, and ends at a bound that it states. Links to directories are followed, since
``runs`` often lies on scratch; each directory is looked at once.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.host.files import open_regular
from megaflow_hpc.rundir.record import FORMAT

DEPTH = 3
"""How deep runs are looked for: ``runs/NAME`` below a project below where one stands."""
DIRECTORIES = 5000
"""Directories that are looked at in one search: each is a question to a file server."""
ENTRIES = 300_000
"""Names that are read in one search."""
LATEST = "latest"

_ROOMS = {"ledger", "tasks", "journal"}
"""What a run directory has from the beginning."""
_HEAD = 4096
"""Bytes of run.json in which its format stands."""


@dataclass
class Found:
    """What a search has found."""

    runs: list[Path] = field(default_factory=list)
    """Run directories, newest first; some may be damaged."""
    unreadable: list[Path] = field(default_factory=list)
    """Directories that are closed to this user."""
    cut: bool = False
    """Whether the search ended at its bound, and there may be more."""


def find(under: str | os.PathLike[str] = ".", depth: int = DEPTH) -> Found:
    """Returns the run directories in ``under`` and at most ``depth`` directories below it, newest first.

    ``run.json`` is written once: its time is the age of the run. Nothing below a run is looked at.

    Raises:
        ConfigError: ``under`` is no directory that can be read.
    """
    found, dated = Found(), []
    for path, names in _directories(Path(under), depth, found):
        if (planned := _planned_at(path, names)) is not None:
            dated.append((planned, path))
            names.clear()
    if os.fspath(under) in map(os.fspath, found.unreadable):
        raise ConfigError(f"{under}: no directory that can be read; name the one that your runs are in")
    found.runs = [path for _, path in sorted(dated, reverse=True)]
    return found


def latest(under: str | os.PathLike[str] = ".") -> Path:
    """Returns this user's newest run directory, or else anybody's; those aside whose planning did not end.

    Raises:
        ConfigError: there is none, or too much to look through: the newest might be elsewhere.
    """
    found, place = find(under), Path(under).absolute()
    if found.cut:
        raise ConfigError(
            f"{LATEST}: too much in {place} to look through; name the run, or as DIR/{LATEST} the directory it is in"
        )
    whole = [path for path in found.runs if path.joinpath("run.json").exists()]
    ours = [path for path in whole if path.stat().st_uid == os.getuid()]
    for path in ours or whole:
        return path
    raise ConfigError(f"{LATEST}: no run directory in {place} or {DEPTH} levels below; name one")


def named(text: str) -> Path:
    """Returns the run directory that a user means by ``text``: a path, ``latest``, or ``DIR/latest``.

    Raises:
        ConfigError: see :func:`latest`.
    """
    path = Path(text)
    return path if path.name != LATEST or path.exists() else latest(path.parent)


def _directories(root: Path, depth: int, found: Found) -> Iterator[tuple[Path, dict[str, bool]]]:
    """Yields directories level by level, with the names in each and whether it is a directory; who clears them ends the
    search there."""
    seen: set[tuple[int, int]] = set()
    level, looked, entries = [root], 0, 0
    for below in range(depth, -1, -1):
        deeper: list[Path] = []
        for path in level:
            if looked >= DIRECTORIES or entries > ENTRIES:
                found.cut = True
                return
            looked += 1
            names: dict[str, bool] = {}
            try:
                status = path.stat()
                if (status.st_dev, status.st_ino) in seen:
                    continue
                seen.add((status.st_dev, status.st_ino))
                with os.scandir(path) as listed:
                    for entry in listed:
                        names[entry.name] = _is_directory(entry)
                        if len(names) + entries > ENTRIES:
                            break
            except FileNotFoundError:  # removed meanwhile, or a link that leads nowhere
                if path == root:
                    found.unreadable.append(path)
                continue
            except OSError:
                found.unreadable.append(path)
                continue
            entries += len(names)
            yield path, names
            if below:
                deeper += [
                    path / name for name, is_directory in sorted(names.items()) if is_directory and name[0] != "."
                ]
        level = deeper


def _is_directory(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link in a circle, or into what is closed
        return False


def _planned_at(path: Path, names: dict[str, bool]) -> int | None:
    """When a run was planned, in nanoseconds UTC; ``None`` of a directory that is none of ours."""
    try:
        if "run.json" not in names:
            return path.stat().st_mtime_ns if names.keys() >= _ROOMS else None
        place = path / "run.json"
        if not names.keys() >= _ROOMS:
            with open_regular(place) as file:
                if f'"{FORMAT}"'.encode() not in file.read(_HEAD):
                    return None
        return place.stat().st_mtime_ns
    except OSError:
        return None
