"""Files of tasks that rollouts read, fixed by their digests when a campaign is planned.

What is read then (instructions, settings) is kept with the run. Tests, solutions and the source of a task's class are
read by each rollout where they lie; edited meanwhile, they would give rollouts of one group different tests. Their
names, modes and bytes are hashed once, in planning; a rollout looks whether sizes and times are still the same, and
hashes only where they are not.
"""

from __future__ import annotations

import functools
import hashlib
import os
import stat
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import msgspec

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.tasks.formats import format_of
from megaflow_hpc.types import Task

KEY = "files"
THREADS = 16
"""Tasks whose files are read at once: a network file system answers each of them late."""
_NOT_READ = ("__pycache__", ".git")
_CHUNK = 1 << 20


class FixedFiles(msgspec.Struct, frozen=True):
    """As a plain mapping it is ``task.metadata["files"]``."""

    paths: tuple[str, ...]
    content: str
    """Hash of names, modes and bytes."""
    seen: str
    """Hash of names, modes, sizes and times of change."""

    @classmethod
    def of(cls, paths: Sequence[str]) -> FixedFiles:
        """Returns the files as they are now. Raises OSError."""
        return cls(tuple(paths), _content(paths), _seen(paths))


def fixed(tasks: Sequence[Task]) -> list[Task]:
    """Returns tasks that know their files as they are now.

    Raises:
        ConfigError: a file cannot be read.
    """
    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(_fixed, tasks))


def _fixed(task: Task) -> Task:
    paths = format_of(task).files(task)
    if not paths:
        return task
    try:
        found = FixedFiles.of(paths)
    except OSError as error:
        raise ConfigError(f"task {task.id}: {error.filename}: cannot be read ({error.strerror})") from None
    return replace(task, metadata={**task.metadata, KEY: msgspec.to_builtins(found)})


def changed(tasks: Sequence[Task]) -> list[str]:
    """Returns the ids of the tasks whose files are not what they were when the campaign was planned."""

    def is_changed(task: Task) -> bool:
        try:
            check_unchanged(task)
        except ConfigError:
            return True
        return False

    with ThreadPoolExecutor(THREADS) as pool:
        return [task.id for task, found in zip(tasks, pool.map(is_changed, tasks), strict=True) if found]


def check_unchanged(task: Task) -> None:
    """Checks that a task's files are what they were when the campaign was planned.

    Raises:
        ConfigError: they are not; names the file that was changed last.
    """
    said = task.metadata.get(KEY)
    if not said:  # planned by an earlier version, or nothing is read
        return
    known = msgspec.convert(said, FixedFiles)
    try:
        seen = _seen(known.paths)
        if seen == known.seen or _content_as_seen(known.paths, seen) == known.content:
            return
        last = max(_files(known.paths), key=lambda file: file[2].st_mtime_ns)[1]
    except OSError as error:
        last = f"{error.filename} ({error.strerror})"
    raise ConfigError(
        f"the task was changed after the campaign was planned (last: {last}): its rewards would not compare with those "
        "before; put its files back as they were and resume with --failed, or plan a new run"
    )


def _files(paths: Sequence[str]) -> Iterator[tuple[str, str, os.stat_result]]:
    """Yields name, path and status of every file, directory and link, in the order of their names. Raises OSError."""
    waiting = [(str(number), path) for number, path in enumerate(paths)][::-1]
    while waiting:
        name, path = waiting.pop()
        status = os.lstat(path) if "/" in name else os.stat(path)
        yield name, path, status
        if stat.S_ISDIR(status.st_mode):
            entries = sorted(entry for entry in os.listdir(path) if entry not in _NOT_READ)
            waiting += [(f"{name}/{entry}", f"{path}/{entry}") for entry in reversed(entries)]


def _seen(paths: Sequence[str]) -> str:
    found = hashlib.sha256()
    for name, _, status in _files(paths):
        regular = stat.S_ISREG(status.st_mode)  # what of a directory counts is what lies in it
        values = (status.st_size, status.st_mtime_ns) if regular or stat.S_ISLNK(status.st_mode) else ()
        found.update(repr((os.fsencode(name), stat.filemode(status.st_mode), *values)).encode())
    return found.hexdigest()[:32]


def _content(paths: Sequence[str]) -> str:
    found = hashlib.sha256()
    for name, path, status in _files(paths):
        found.update(repr((os.fsencode(name), stat.filemode(status.st_mode))).encode())
        if stat.S_ISLNK(status.st_mode):
            found.update(os.fsencode(os.readlink(path)))
        elif stat.S_ISREG(status.st_mode):
            with open(path, "rb") as file:
                while chunk := file.read(_CHUNK):
                    found.update(chunk)
    return found.hexdigest()[:32]


@functools.lru_cache(maxsize=4096)
def _content_as_seen(paths: tuple[str, ...], seen: str) -> str:
    """The same, read once for each state of the files that was seen: of a run that was copied with its tasks."""
    return _content(paths)
