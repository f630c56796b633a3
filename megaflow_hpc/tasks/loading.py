"""A campaign's tasks: found, read, filtered; and what a task needs done in a fresh sandbox."""

from __future__ import annotations

import fnmatch
import glob
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megaflow_hpc.environments.images.image_config import working_directory
from megaflow_hpc.environments.sandbox.sandbox import ApptainerSandbox
from megaflow_hpc.errors import ConfigError, SandboxError
from megaflow_hpc.tasks import checkout, formats
from megaflow_hpc.tasks.harbor.reader import read_harbor_task
from megaflow_hpc.tasks.healthcheck import wait_healthy
from megaflow_hpc.types import Task


def load_tasks(sources: Sequence[Mapping[str, Any] | str], base_dir: str | os.PathLike[str]) -> list[Task]:
    """Every task of every source, in order of source and, within one, of id.

    Args:
        sources: ``{path, include, exclude, limit, mode}`` as in the campaign file; a bare string is a path. Paths are
            globs relative to ``base_dir``; include and exclude are shell patterns on ids.

    Raises:
        ConfigError: a source without tasks, a broken task, an id that two tasks have.
    """
    tasks: dict[str, Task] = {}
    for source in sources:
        options: Mapping[str, Any] = {"path": source} if isinstance(source, str) else source
        found = _read_source(str(options["path"]), Path(base_dir))
        include, exclude = tuple(options.get("include") or ("*",)), tuple(options.get("exclude") or ())
        kept = [
            task
            for task in sorted(found, key=lambda task: task.id)
            if _matches(task.id, include) and not _matches(task.id, exclude)
        ]
        if not kept:
            raise ConfigError(
                f"tasks: {options['path']}: {len(found)} tasks, but none is left by include {list(include)} and "
                f"exclude {list(exclude)}; ids are such as {found[0].id}"
            )
        if mode := options.get("mode"):
            kept = [replace(task, mode=mode) for task in kept]
        for task in formats.settle(kept[: options.get("limit") or None]):
            other = tasks.get(task.id)
            if other is not None and other.path != task.path:
                raise ConfigError(
                    f"task id {task.id} is there twice: {other.path} and {task.path}; rename one directory"
                )
            tasks[task.id] = task
    if not tasks:
        raise ConfigError("tasks: no source is named; add at least one path")
    return list(tasks.values())


def _read_source(path: str, base: Path) -> list[Task]:
    other = formats.read(path, base)
    if other is not None:
        return other
    pattern = str(base / os.path.expanduser(os.path.expandvars(path)))
    matches = sorted(glob.glob(pattern)) if glob.has_magic(pattern) else [pattern]
    wild = len(matches) != 1 or glob.has_magic(pattern)
    directories = [match for match in matches if os.path.isdir(match) and not (wild and not _is_task(match))]
    for match in matches:
        if os.path.isfile(os.path.join(match, "task.yaml")) and not _is_task(match):
            raise ConfigError(
                f"{match}/task.yaml: a task in the first form of Terminal-Bench; convert it with: "
                f"harbor task migrate -i {match} -o OUTPUT"
            )
    if not directories:
        raise ConfigError(f"tasks: {pattern}: no Harbor task directory (one with task.toml) there; correct the path")
    if len(directories) == 1 and not _is_task(directories[0]):
        inner = sorted(entry.path for entry in os.scandir(directories[0]) if entry.is_dir() and _is_task(entry.path))
        if inner:
            raise ConfigError(f"tasks: {path}: not a task, but it holds {len(inner)}; write {path.rstrip('/')}/*")
    return [read_harbor_task(directory) for directory in directories]


def _is_task(directory: str) -> bool:
    return os.path.isfile(os.path.join(directory, "task.toml"))


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def in_image_directories(
    tasks: Sequence[Task], images: Mapping[str, str], mapping: Mapping[str, str], base_dir: str | os.PathLike[str]
) -> list[Task]:
    """The tasks, those that name no work directory in the one of their image (of their ``FROM``, where it was built).

    Args:
        images: what :func:`~megaflow_hpc.environments.images.resolve.resolve_images` made of ``mapping``.
    """
    from megaflow_hpc.environments.images.resolve import Images
    from megaflow_hpc.environments.images.store import ImageStore

    store = Images(ImageStore())
    placed = []
    for task in tasks:
        start = task.metadata.get("harbor", {}).get("from")
        if task.workdir is None:
            image = store.resolve(start, mapping, Path(base_dir), build=False) if start else images[task.image]
            task = replace(task, workdir=working_directory(image))
        placed.append(task)
    return placed


async def prepare(task: Task, sandbox: ApptainerSandbox) -> None:
    """Makes a fresh sandbox ready for the agent: work directory, log directories, ``environment/``, health check.

    Notes where a checkout in the work directory stands.

    Raises:
        SandboxError: it cannot be done; the rollout fails.
    """
    harbor = task.metadata.get("harbor", {})
    workdir = task.workdir or "/"
    made = await sandbox.exec(
        ["mkdir", "-p", workdir, "/logs/agent", "/logs/verifier", "/logs/artifacts"], cwd="/", timeout_s=60
    )
    if made.exit_code:
        raise SandboxError(f"task {task.id}: {workdir} and /logs cannot be made: {made.stderr.strip()[-300:]}")
    if found := formats.format_of(task):
        await found.prepare(task, sandbox)
    if harbor.get("upload_environment"):
        await sandbox.upload(os.path.join(task.path, "environment"), workdir)
    if check := harbor.get("healthcheck"):
        await wait_healthy(task.id, sandbox, check)
    await checkout.remember(sandbox, workdir)
