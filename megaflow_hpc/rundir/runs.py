"""Search for runs below a directory, newest first, for ``latest`` and ``megaflow-hpc list``.

The directory may be a home directory with a million files, or a share with files of other users. So the search begins
with directories named ``runs``, and goes breadth-first, to find nearby runs first. It stops at a limit, and reports
that. It follows symlinks to directories, because ``runs`` is often a link to scratch. It reads each directory once.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.host.files import open_regular
from megaflow_hpc.rundir.record import FORMAT

DEPTH = 3
"""Default search depth. Finds ``runs/NAME`` in a project below the current directory."""
DIRECTORIES = 5000
"""Maximum number of directories that a search reads. Each is a request to a file server."""
ENTRIES = 300_000
"""Maximum number of names that a search reads."""
LATEST = "latest"
RUNS = "runs"
"""Search directories of this name first. It is the default of the campaign file's ``run_dir``."""
TASK = "task.toml"
"""Do not search a directory that contains this file, because it is a task."""

_ROOMS = {"ledger", "tasks", "journal"}
"""Subdirectories that every run directory has from the beginning."""
_HEAD = 4096
"""Search this many bytes at the beginning of run.json for its format."""


@dataclass
class FoundRuns:
    """Result of a search."""

    runs: list[Path] = field(default_factory=list)
    """Run directories, newest first. Some may be damaged."""
    unreadable: list[Path] = field(default_factory=list)
    """Directories that this user may not read."""
    cut: bool = False
    """True if the search stopped at its limit. There may be more runs."""
    cut_runs: bool = False
    """True if the search stopped before it had read all directories named ``runs``."""


def find(under: str | os.PathLike[str] = ".", depth: int = DEPTH) -> FoundRuns:
    """Returns the run directories up to ``depth`` levels below ``under``, newest first.

    ``run.json`` is written only once, so its modification time is the age of the run. Does not search in run
    directories.

    Raises:
        ConfigError: ``under`` is not a readable directory.
    """
    search, dated = FoundRuns(), []
    for path, names in _directories(Path(under), depth, search):
        if (planned := _planned_at(path, names)) is not None:
            dated.append((planned, path))
            names.clear()
    if os.fspath(under) in map(os.fspath, search.unreadable):
        raise ConfigError(f"{under}: not a readable directory; name the directory of your runs")
    search.runs = [path for _, path in sorted(dated, reverse=True)]
    return search


def latest(under: str | os.PathLike[str] = ".") -> Path:
    """Returns this user's newest run directory, or else the newest of any user. Incomplete runs are ignored.

    Raises:
        ConfigError: No run was found, or the search stopped before it had read the directories named ``runs``.
    """
    search, directory = find(under), Path(under).absolute()
    if search.cut and (search.cut_runs or not any(RUNS in path.parts[:-1] for path in search.runs)):
        raise ConfigError(
            f"{LATEST}: too many files in {directory} to search; name the run, or its parent directory as DIR/{LATEST}"
        )
    whole = [path for path in search.runs if path.joinpath("run.json").exists()]
    ours = [path for path in whole if path.stat().st_uid == os.getuid()]
    for path in ours or whole:
        return path
    raise ConfigError(f"{LATEST}: no run directory in {directory} or {DEPTH} levels below; name one")


def named(text: str) -> Path:
    """Returns the run directory that a user names: a path, ``latest`` or ``DIR/latest``.

    Raises:
        ConfigError: See :func:`latest`.
    """
    path = Path(text)
    return path if path.name != LATEST or path.exists() else latest(path.parent)


def _directories(root: Path, depth: int, search: FoundRuns) -> Iterator[tuple[Path, dict[str, bool]]]:
    """Yields directories breadth-first, those below a directory named ``runs`` first.

    Each comes with its entries, and whether each entry is a directory. The caller clears the entries to end the search
    there.
    """
    seen: set[tuple[int, int]] = set()
    first, others = deque[tuple[Path, int]](), deque([(root, depth)])
    looked = entries = 0
    while first or others:
        if looked >= DIRECTORIES or entries > ENTRIES:
            search.cut = True
            search.cut_runs = bool(first)
            return
        in_runs = bool(first)
        path, below = first.popleft() if in_runs else others.popleft()
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
        except FileNotFoundError:  # removed in the meantime, or a dangling symlink
            if path == root:
                search.unreadable.append(path)
            continue
        except OSError:
            search.unreadable.append(path)
            continue
        entries += len(names)
        yield path, names
        if below and TASK not in names:
            for name, is_directory in sorted(names.items()):
                if is_directory and name[0] != ".":
                    queue = first if in_runs or name == RUNS else others
                    queue.append((path / name, below - 1))


def _is_directory(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a circular symlink, or one into an unreadable directory
        return False


def _planned_at(path: Path, names: dict[str, bool]) -> int | None:
    """Returns the time when a run was planned, in Unix nanoseconds. ``None`` if the directory is not a run."""
    try:
        if "run.json" not in names:
            return path.stat().st_mtime_ns if names.keys() >= _ROOMS else None
        record = path / "run.json"
        if not names.keys() >= _ROOMS:
            with open_regular(record) as file:
                if f'"{FORMAT}"'.encode() not in file.read(_HEAD):
                    return None
        return record.stat().st_mtime_ns
    except OSError:
        return None
