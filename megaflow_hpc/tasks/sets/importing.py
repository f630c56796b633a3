"""Imports a task set by name, from the network or from a directory."""

from __future__ import annotations

import glob
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megaflow_hpc.errors import ConfigError, Mistakes
from megaflow_hpc.host.atomic import write_json
from megaflow_hpc.host.locks import directory_locked_if_supported
from megaflow_hpc.resources import docs
from megaflow_hpc.tasks.formats import refuse_into
from megaflow_hpc.tasks.loading import load_tasks
from megaflow_hpc.tasks.releases.sdists import cache_directory
from megaflow_hpc.tasks.sets.converters import DIRECTORIES, ROWS, to_lines, unpack, write_rows
from megaflow_hpc.tasks.sets.download import SetSource, TaskSet, digest_of, fetch, find
from megaflow_hpc.tasks.swebench.format import import_file, scratch_in
from megaflow_hpc.tasks.swebench.instances import IMAGE, Instance, image_name


@dataclass
class ImportedSet:
    """Result of :func:`import_set`."""

    path: Path
    """JSONL file, or directory that contains the task directories."""
    revision: str
    files: list[dict[str, Any]]
    """Path and SHA-256 of each input file."""
    rows: list[dict[str, Any]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    @property
    def pattern(self) -> str:
        """The path or pattern to use under ``tasks:`` in a campaign file."""
        return str(self.path) if self.path.is_file() else f"{glob.escape(str(self.path))}/*"


def import_set(
    name: str,
    output: Path,
    *,
    origin: Path | None,
    mirror: str,
    accepted: bool,
    change: Callable[[Instance], Instance] | None,
    say: Callable[[str], None],
    image: Path | None = None,
    seeds: int = 1,
    strict: bool = False,
) -> ImportedSet:
    """Writes the tasks of ``NAME[@VERSION]`` below ``output``, and ``NAME.source.json`` next to them.

    Args:
        origin: Directory with the set's files. If given, nothing is downloaded.
        mirror: Server from which to download instead of the set's own server.
        accepted: True if the user accepts the licence.
        change: Fills the values that the user gives for all lines into an instance.
        say: Reports progress.
        image: Image with the set's pages, for a set whose data is part of an image.
        seeds: Number of tasks for each page.
        strict: Write nothing if a task of the set would be left out.

    Raises:
        ConfigError: The set is unknown or cannot be imported, its licence must be accepted, or its files are invalid.
        SiteError: A file cannot be downloaded.
    """
    base, _, version = name.partition("@")
    task_set = find(base)
    if task_set.accept and not accepted:
        raise ConfigError(
            f"{base}: its licence ({task_set.licence}) must be accepted; read it at {task_set.page}, then add "
            "--accept-licence"
        )
    target = output / (f"{base}.jsonl" if task_set.format == "swebench" else base)
    record = output / f"{base}.source.json"
    if os.path.lexists(target) and not record.exists():
        raise ConfigError(f"{target}: exists, and tasks import did not write it; delete it, or name another directory")
    task_set, revision = task_set.at(version)
    files = list[tuple[Path, str]]()
    if task_set.format == "miniwob":
        origin = _image_of_pages(base, image, version, origin, mirror)
    elif origin is not None:
        paths, root = _local(base, task_set, origin), origin
        if paths[0].is_dir() and output.resolve().is_relative_to(paths[0].resolve()):
            raise ConfigError(
                f"--output {output}: is in {paths[0]}, the directory to import from; name a directory outside it"
            )
        files = [(path, digest_of(path) if path.is_file() else "") for path in paths]
    else:
        source = SetSource(base, task_set, revision, mirror)
        revision, remotes = source.files()
        root = cache_directory().with_name("sets") / base / re.sub(r"[^A-Za-z0-9_-]", "_", revision)
        files = [fetch(source, remote, root, say) for remote in remotes]
    read = [{"path": str(path.relative_to(root)), "sha256": digest} for path, digest in files]
    with scratch_in(output) as scratch:
        made, earlier = scratch / target.name, scratch / "earlier"
        if task_set.format == "miniwob":
            assert origin is not None
            revision, rows, left_out = _episodes(origin, seeds, made, say)
        elif task_set.format == "swebench":
            rows, left_out = _instances(base, task_set, [path for path, _ in files], made, change)
        else:
            rows, left_out = _directories(task_set, [path for path, _ in files], made)
        imported = ImportedSet(
            target,
            revision,
            read,
            [{**row, "path": str(target / Path(row["path"]).relative_to(made))} for row in rows],
            [line.replace(str(made), str(target)) for line in left_out],
        )
        if strict and imported.left_out:
            raise Mistakes(imported.left_out)
        with directory_locked_if_supported(output):  # only one import at a time replaces results in it
            # Write the record first, because only tasks with a record may be replaced by a repeated call.
            write_json(
                record,
                {
                    "name": base,
                    "revision": revision,
                    "from": str(origin) if origin else task_set.page,
                    "licence": task_set.licence,
                    "files": read,
                    "tasks": len(rows),
                    "left_out": imported.left_out,
                },
                mode=0o644,
            )
            if made.is_dir() and target.exists():
                target.rename(earlier)
            made.rename(target)
    return imported


def _image_of_pages(name: str, image: Path | None, version: str, origin: Path | None, mirror: str) -> Path:
    """Returns the image from which to read pages.

    Raises:
        ConfigError: The image is missing, or an option does not apply to a set whose data is part of an image.
    """
    if version or origin or mirror:
        raise ConfigError(
            f"{name}: its pages are in an image, at the image's version; leave out @VERSION, --from, --mirror"
        )
    if image is None or not image.exists():
        given = f"--image {image}: no such file" if image else f"{name}: its pages are in the image of desktops"
        raise ConfigError(
            f"{given}; build one ({docs('how-to/screens.md')}), then: tasks import {name} --image images/desktop.sif"
        )
    return image


def _episodes(
    image: Path, seeds: int, target: Path, say: Callable[[str], None]
) -> tuple[str, list[dict[str, Any]], list[str]]:
    from megaflow_hpc.tasks.sets import miniwob

    left_out = list[str]()
    target.mkdir()
    say(f"reading the pages of {image}")
    version = miniwob.write_tasks(image, seeds, target, refuse_into(left_out))
    return version, *_read_back(target, left_out)


def _local(name: str, task_set: TaskSet, origin: Path) -> list[Path]:
    """Returns the files of a set in a directory. They may be at their paths in the set, or directly in the
    directory."""
    if not origin.is_dir():
        raise ConfigError(f"--from {origin}: no such directory")
    if lacking := [file for file in task_set.needed if not (origin / file).is_file()]:
        raise ConfigError(f"--from {origin}: this release of {name} also needs {', '.join(lacking)}")
    if task_set.needed:
        return [origin / file for file in task_set.needed]
    if task_set.archive:
        archives = sorted(origin.glob("*.tar.gz"))
        return [archives[0] if len(archives) == 1 else origin]
    patterns = [*task_set.files, *(pattern.rpartition("/")[2] for pattern in task_set.files), "*.jsonl", "*.parquet"]
    for pattern in patterns:
        if matches := sorted(path for path in origin.glob(pattern) if path.is_file()):
            return matches
    raise ConfigError(f"--from {origin}: {name} needs {', '.join(task_set.files)}; none of them is there")


def _instances(
    name: str,
    task_set: TaskSet,
    files: list[Path],
    target: Path,
    change: Callable[[Instance], Instance] | None,
) -> tuple[list[dict[str, Any]], list[str]]:
    lines = target.with_name("lines.jsonl")
    to_lines(files, lines)

    def complete(instance: Instance) -> Instance:
        unnamed = instance.image == image_name(IMAGE, instance.instance_id)
        completed = instance.fill_in(task_set.image if unnamed else "", runner=task_set.runner)
        return change(completed) if change else completed

    imported = import_file(lines, target, complete)
    return imported.rows, [line.replace(f"{lines}:", f"{name}:", 1) for line in imported.left_out]


def _directories(task_set: TaskSet, files: list[Path], target: Path) -> tuple[list[dict[str, Any]], list[str]]:
    left_out = list[str]()
    target.mkdir()
    if task_set.archive:
        source, missing = target.with_name("unpacked"), list[Path]()
        if files[0].is_dir():
            shutil.copytree(files[0], source, symlinks=True)
        else:
            source, missing = unpack(files[0], source)
        DIRECTORIES[task_set.format](source, target, refuse_into(left_out), missing)
    else:
        write_rows(files, target, refuse_into(left_out), ROWS[task_set.format])
    if not any(target.iterdir()):
        raise Mistakes(left_out or [f"{files[0]}: has no {task_set.format} task; name another version or directory"])
    return _read_back(target, left_out)


def _read_back(target: Path, left_out: list[str]) -> tuple[list[dict[str, Any]], list[str]]:
    """Reads the written tasks in the same way as a campaign."""
    tasks = load_tasks([f"{glob.escape(str(target))}/*"], "/", left_out=left_out)
    return [{"id": task.id, "image": task.image, "path": task.path} for task in tasks], left_out
