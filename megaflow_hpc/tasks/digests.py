"""Detects changes to the files that a task's rollouts read, using digests computed during planning.

Planning copies instructions and settings into the run, but rollouts read tests, solutions and the source of a task's
class from their original location. If a user edited these files during a run, rollouts of the same group would see
different tests. Planning therefore hashes names, modes and contents. A rollout compares sizes and modification times,
and hashes contents only if sizes or times differ.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import stat
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import msgspec

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.tasks.formats import format_of
from megaflow_hpc.types import Task

KEY = "files"
THREADS = 16
"""Number of tasks whose files are read concurrently, to hide the latency of network file systems."""
_NOT_READ = ("__pycache__", ".git")
_CHUNK = 1 << 20


class FixedFiles(msgspec.Struct, frozen=True):
    """Digests of a task's files, stored as a plain mapping in ``task.metadata["files"]``."""

    paths: tuple[str, ...]
    content: str
    """Hash of names, modes and contents."""
    seen: str
    """Hash of names, modes, sizes and modification times."""

    @classmethod
    def of(cls, paths: Sequence[str]) -> FixedFiles:
        """Computes the digests of the current files. Raises OSError."""
        return cls(tuple(paths), _content_digest(paths), _metadata_digest(paths))


def fixed(tasks: Sequence[Task]) -> list[Task]:
    """Returns the tasks with the digests of their current files added.

    Raises:
        ConfigError: A file cannot be read.
    """
    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(_fixed, tasks))


def _fixed(task: Task) -> Task:
    paths = format_of(task).files(task)
    if not paths:
        return task
    try:
        fixed = FixedFiles.of(paths)
    except OSError as error:
        raise ConfigError(f"task {task.id}: {error.filename}: cannot be read ({error.strerror})") from None
    return replace(task, metadata={**task.metadata, KEY: msgspec.to_builtins(fixed)})


def definition_digest(task: Task) -> str:
    """Returns a digest of a task's settings, instruction and files. It is independent of the task's directory and of
    the values of the user's variables."""
    definition = task.to_dict()
    files = task.metadata.get(KEY, {}).get("content", "")
    definition["metadata"] = {name: value for name, value in task.metadata.items() if name != KEY}
    text = json.dumps(_without_secrets(definition), sort_keys=True, default=str).replace(
        json.dumps(task.path)[1:-1], "."
    )
    return hashlib.sha256(f"{files}\n{text}".encode()).hexdigest()[:32]


def _without_secrets(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_secrets(item) for name, item in value.items() if name != "secrets"}
    return [_without_secrets(item) for item in value] if isinstance(value, list | tuple) else value


def changed(tasks: Sequence[Task]) -> list[str]:
    """Returns the ids of tasks whose files have changed since planning."""

    def is_changed(task: Task) -> bool:
        try:
            check_unchanged(task)
        except ConfigError:
            return True
        return False

    with ThreadPoolExecutor(THREADS) as pool:
        return [task.id for task, differs in zip(tasks, pool.map(is_changed, tasks), strict=True) if differs]


def check_unchanged(task: Task) -> None:
    """Checks that a task's files have not changed since planning.

    Raises:
        ConfigError: A file has changed. The message names the most recently modified file.
    """
    recorded = task.metadata.get(KEY)
    if not recorded:  # this task's rollouts read no files
        return
    fixed = msgspec.convert(recorded, FixedFiles)
    try:
        seen = _metadata_digest(fixed.paths)
        if seen == fixed.seen or _cached_content_digest(fixed.paths, seen) == fixed.content:
            return
        last = max(_files(fixed.paths), key=lambda file: file[2].st_mtime_ns)[1]
    except OSError as error:
        last = f"{error.filename} ({error.strerror})"
    raise ConfigError(
        f"the task was changed after the campaign was planned (last: {last}): its rewards would not be comparable with "
        "earlier ones; restore its files and resume with --failed, accept them with --failed --accept-changes, or plan "
        "a new run"
    )


def _files(paths: Sequence[str]) -> Iterator[tuple[str, str, os.stat_result]]:
    """Yields the name, path and status of every file, directory and symlink, sorted by name. Raises OSError."""
    waiting = [(str(number), path) for number, path in enumerate(paths)][::-1]
    while waiting:
        name, path = waiting.pop()
        status = os.lstat(path) if "/" in name else os.stat(path)
        yield name, path, status
        if stat.S_ISDIR(status.st_mode):
            entries = sorted(entry for entry in os.listdir(path) if entry not in _NOT_READ)
            waiting += [(f"{name}/{entry}", f"{path}/{entry}") for entry in reversed(entries)]


def _metadata_digest(paths: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for name, _, status in _files(paths):
        regular = stat.S_ISREG(status.st_mode)  # ignore a directory's size and time, since its entries are listed
        values = (status.st_size, status.st_mtime_ns) if regular or stat.S_ISLNK(status.st_mode) else ()
        digest.update(repr((os.fsencode(name), stat.filemode(status.st_mode), *values)).encode())
    return digest.hexdigest()[:32]


def _content_digest(paths: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for name, path, status in _files(paths):
        digest.update(repr((os.fsencode(name), stat.filemode(status.st_mode))).encode())
        if stat.S_ISLNK(status.st_mode):
            digest.update(os.fsencode(os.readlink(path)))
        elif stat.S_ISREG(status.st_mode):
            with open(path, "rb") as file:
                while chunk := file.read(_CHUNK):
                    digest.update(chunk)
    return digest.hexdigest()[:32]


@functools.lru_cache(maxsize=4096)
def _cached_content_digest(paths: tuple[str, ...], seen: str) -> str:
    """Returns the content hash, and caches it under ``seen``."""
    return _content_digest(paths)
