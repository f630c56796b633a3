"""Finds runs below a directory, newest first, for ``latest`` and ``megaflow-hpc list``.

The directory may be a home directory with a million files, or a share with other users' files. The search is therefore
breadth-first, starts with directories named ``runs``, and stops at a limit, which it reports. It follows symlinks to
directories, because ``runs`` is often a link to scratch, but reads each directory only once.
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
"""Default search depth, enough to find ``runs/NAME`` in a project below the current directory."""
DIRECTORIES = 5000
"""Maximum number of directories to read. Each costs a request to a file server."""
ENTRIES = 300_000
"""Maximum number of directory entries to read."""
LATEST = "latest"
RUNS = "runs"
"""Name of the directories to search first. It is the default ``run_dir`` of a campaign file."""
TASK = "task.toml"
"""File that marks a task directory, whose subdirectories are not searched."""

_SUBDIRECTORIES = {"ledger", "tasks", "journal"}
"""Subdirectories that every run directory has from the start."""
_FORMAT_BYTES = 4096
"""Number of bytes at the beginning of run.json in which its format name must occur."""


@dataclass
class FoundRuns:
    """The result of a search."""

    runs: list[Path] = field(default_factory=list)
    """Run directories, newest first. Some may be damaged."""
    unreadable: list[Path] = field(default_factory=list)
    """Directories that the user is not allowed to read."""
    cut: bool = False
    """True if the search stopped at its limit. Further runs may then exist."""
    cut_runs: bool = False
    """True if the search stopped before reading all directories named ``runs``."""


def find(under: str | os.PathLike[str] = ".", depth: int = DEPTH) -> FoundRuns:
    """Returns the run directories at most ``depth`` levels below ``under``, newest first.

    Runs are sorted by the modification time of ``run.json``, which is written only once. Run directories themselves are
    not searched.

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
    """Returns this user's newest run directory or, if there is none, any user's. Ignores incomplete runs.

    Raises:
        ConfigError: No run was found, or the search stopped before reading all directories named ``runs``.
    """
    search, directory = find(under), Path(under).absolute()
    if search.cut and (search.cut_runs or not any(RUNS in path.parts[:-1] for path in search.runs)):
        raise ConfigError(
            f"{LATEST}: too many files in {directory} to search; name the run, or its parent directory as DIR/{LATEST}"
        )
    complete = [path for path in search.runs if path.joinpath("run.json").exists()]
    ours = [path for path in complete if path.stat().st_uid == os.getuid()]
    for path in ours or complete:
        return path
    raise ConfigError(f"{LATEST}: no run directory in {directory} or {DEPTH} levels below; name one")


def named(text: str) -> Path:
    """Returns the run directory that the user named by a path, ``latest`` or ``DIR/latest``.

    Raises:
        ConfigError: No run was found, or the search stopped before reading all directories named ``runs``.
    """
    path = Path(text)
    return path if path.name != LATEST or path.exists() else latest(path.parent)


def _directories(root: Path, depth: int, search: FoundRuns) -> Iterator[tuple[Path, dict[str, bool]]]:
    """Yields directories breadth-first, starting with those below a directory named ``runs``.

    Each comes with its entries: names, and whether each is a directory. The caller clears this mapping to skip the
    subdirectories.
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
    """Returns the time at which a run was planned, in Unix nanoseconds. Returns ``None`` if the directory is not a
    run."""
    try:
        if "run.json" not in names:
            return path.stat().st_mtime_ns if names.keys() >= _SUBDIRECTORIES else None
        record = path / "run.json"
        if not names.keys() >= _SUBDIRECTORIES:
            with open_regular(record) as file:
                if f'"{FORMAT}"'.encode() not in file.read(_FORMAT_BYTES):
                    return None
        return record.stat().st_mtime_ns
    except OSError:
        return None
