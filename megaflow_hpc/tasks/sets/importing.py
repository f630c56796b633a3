"""Imports a task set by name, from the network or from a directory."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.host.atomic import write_json
from megaflow_hpc.tasks.formats import refuse_into
from megaflow_hpc.tasks.loading import load_tasks
from megaflow_hpc.tasks.releases.sdists import cache_directory
from megaflow_hpc.tasks.sets.converters import DIRECTORIES, to_lines, unpack
from megaflow_hpc.tasks.sets.download import SetSource, fetch
from megaflow_hpc.tasks.sets.registry import TaskSet, find
from megaflow_hpc.tasks.swebench.importing import import_file
from megaflow_hpc.tasks.swebench.instances import IMAGE, Instance, image_name


@dataclass
class ImportedSet:
    """Result of :func:`import_set`."""

    path: Path
    """JSONL file, or directory of the task directories. A campaign names it under ``tasks:``."""
    revision: str
    files: list[dict[str, Any]]
    """Path and SHA-256 of each file that was read."""
    rows: list[dict[str, Any]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    @property
    def pattern(self) -> str:
        """SetSource of the tasks for a campaign file."""
        return str(self.path if self.path.is_file() else self.path / "*")


def import_set(
    name: str,
    output: Path,
    *,
    origin: Path | None,
    mirror: str,
    accepted: bool,
    change: Callable[[Instance], Instance] | None,
    say: Callable[[str], None],
) -> ImportedSet:
    """Writes the tasks of ``NAME[@VERSION]`` below ``output``, and ``NAME.source.json`` next to them.

    Args:
        origin: Directory with the set's files. Nothing is downloaded.
        mirror: Server to download from, instead of the set's own.
        accepted: True if the user accepts the licence.
        change: Returns an instance with the values that the user gives for all lines.
        say: Reports progress.

    Raises:
        ConfigError: The set is unknown or not read, its licence must be accepted, or its files are invalid.
        SiteError: A file cannot be downloaded.
    """
    base, _, version = name.partition("@")
    task_set = find(base)
    if task_set.accept and not accepted:
        raise ConfigError(
            f"{base}: its licence ({task_set.licence}) must be accepted; read it at {task_set.page}, then add "
            "--accept-licence"
        )
    output.mkdir(parents=True, exist_ok=True)
    revision, files = version or task_set.revision, list[tuple[Path, str]]()
    if origin is not None:
        paths, root = _local(base, task_set, origin), origin
        files = [(path, "") for path in paths]
    else:
        source = SetSource(base, task_set, revision, mirror)
        revision, remotes = source.files()
        root = cache_directory().with_name("sets") / base / revision.replace("/", "_")
        files = [fetch(source, remote, root, say) for remote in remotes]
    read = [{"path": str(path.relative_to(root)), "sha256": digest} for path, digest in files]
    with tempfile.TemporaryDirectory(prefix=".import-", dir=output) as scratch:
        if task_set.format == "swebench":
            imported = _instances(base, task_set, [path for path, _ in files], output, Path(scratch), change)
        else:
            imported = _directories(base, task_set, files[0][0], output, Path(scratch))
    imported.revision, imported.files = revision, read
    write_json(
        output / f"{base}.source.json",
        {
            "name": base,
            "revision": revision,
            "from": str(origin) if origin else task_set.page,
            "licence": task_set.licence,
            "files": read,
            "tasks": len(imported.rows),
            "left_out": imported.left_out,
        },
        mode=0o644,
    )
    return imported


def _local(name: str, task_set: TaskSet, origin: Path) -> list[Path]:
    """Returns the files of a set in a directory: at their paths in the set, or all of them directly in it."""
    if not origin.is_dir():
        raise ConfigError(f"--from {origin}: no such directory")
    if task_set.archive:
        archives = sorted(origin.glob("*.tar.gz"))
        return [archives[0] if len(archives) == 1 else origin]
    patterns = [*task_set.files, *(pattern.rpartition("/")[2] for pattern in task_set.files), "*.jsonl", "*.parquet"]
    for pattern in patterns:
        if found := sorted(path for path in origin.glob(pattern) if path.is_file()):
            return found
    raise ConfigError(f"--from {origin}: {name} needs {', '.join(task_set.files)}; none of them is there")


def _instances(
    name: str,
    task_set: TaskSet,
    files: list[Path],
    output: Path,
    scratch: Path,
    change: Callable[[Instance], Instance] | None,
) -> ImportedSet:
    lines = scratch / f"{name}.jsonl"
    to_lines(files, lines)

    def complete(instance: Instance) -> Instance:
        unnamed = instance.image == image_name(IMAGE, instance.instance_id)
        completed = instance.fill_in(task_set.image if unnamed else "", runner=task_set.runner)
        return change(completed) if change else completed

    target = output / lines.name
    imported = import_file(lines, target, complete)
    left_out = [line.replace(f"{lines}:", f"{name}:", 1) for line in imported.left_out]
    return ImportedSet(target, "", [], imported.rows, left_out)


def _directories(name: str, task_set: TaskSet, file: Path, output: Path, scratch: Path) -> ImportedSet:
    source, made, target = file, scratch / "made", output / name
    left_out: list[str] = []
    made.mkdir()
    if task_set.archive:
        source = scratch / "unpacked"
        if file.is_dir():
            shutil.copytree(file, source, symlinks=True)
        else:
            source = unpack(file, source)
    DIRECTORIES[task_set.format](source, made, refuse_into(left_out))
    tasks = load_tasks([f"{made}/*"], "/", left_out=left_out)
    if target.exists():
        target.rename(scratch / "earlier")
    made.rename(target)
    rows = [{"id": task.id, "image": task.image, "path": str(target / task.id)} for task in tasks]
    return ImportedSet(target, "", [], rows, [line.replace(str(made), str(target)) for line in left_out])
