"""Task format of SWE-bench style JSONL files, and their import.

The import checks each line and writes the instances in a uniform format.
"""

from __future__ import annotations

import glob
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megaflow_hpc.environments.images.dockerfile.dockerfile import Dockerfiles
from megaflow_hpc.environments.sandbox.sandbox import ApptainerSandbox
from megaflow_hpc.errors import ConfigError, Mistakes
from megaflow_hpc.host.atomic import new_file
from megaflow_hpc.tasks.formats import Refuse, TaskFormat, VerificationContext, refuse_into
from megaflow_hpc.tasks.swebench import plan, runs
from megaflow_hpc.tasks.swebench.instances import Instance, Line, read_instances
from megaflow_hpc.tasks.swebench.plan import LineSource, read_tasks, settle, to_task
from megaflow_hpc.types import Task, Verdict


class SwebenchFormat(TaskFormat):
    """Task format of SWE-bench style JSONL files."""

    def claims(self, source: str) -> bool:
        return source.endswith(".jsonl")

    def read(
        self,
        source: str,
        base: str | os.PathLike[str],
        dockerfiles: Dockerfiles,
        wanted: Callable[[str], bool],
        refuse: Refuse,
    ) -> list[Task]:
        pattern = os.path.join(base, os.path.expanduser(os.path.expandvars(source)))
        paths = sorted(glob.glob(pattern)) if glob.has_magic(pattern) else [pattern]
        if not paths or not os.path.exists(paths[0]):
            raise ConfigError(f"tasks: {pattern}: no such file; correct the path")
        return [task for path in paths for task in read_tasks(path, wanted, refuse)]

    settle = staticmethod(plan.settle)
    prepare = staticmethod(runs.prepare)
    solve = staticmethod(runs.solve)

    async def verify(
        self, step: Task, sandbox: ApptainerSandbox, context: VerificationContext, *, stay: bool
    ) -> Verdict:
        return await runs.verify(step, sandbox, context.patch)


FORMAT: TaskFormat = SwebenchFormat()


@contextmanager
def scratch_in(folder: Path | None) -> Iterator[Path]:
    """Yields a temporary directory in ``folder``, for files that are later renamed into ``folder``. ``None`` selects
    the system's temporary directory.

    Creates ``folder`` and its parents, and removes them again if they remain empty.
    """
    created = [each for each in (folder, *folder.parents) if not each.exists()] if folder else []
    for each in reversed(created):
        each.mkdir(exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(prefix=".import-", dir=folder) as scratch:
            yield Path(scratch)
    finally:
        with suppress(OSError):
            for each in created:
                each.rmdir()


@dataclass
class ImportedFile:
    """The instances in a file that can be tested, and the errors for the other lines."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    """For each instance, its ``id``, ``repo``, ``tested_by``, numbers of tests, ``image`` and ``path``."""
    left_out: list[str] = field(default_factory=list)


def import_file(
    source: Path, target: Path | None, change: Callable[[Instance], Instance] | None, strict: bool = False
) -> ImportedFile:
    """Reads a file once and writes its instances to ``target``. Only tasks are kept in memory.

    Args:
        source: The JSONL file.
        target: File to write, or ``None`` to only check the instances.
        change: Fills the values that the user gives for all lines into an instance. ``None`` changes nothing.
        strict: Write nothing if a line would be left out.

    Raises:
        ConfigError: The file cannot be read, or none of its instances can be tested. Also raised if ``strict`` is set
            and a line would be left out.
    """
    if target is not None and target.exists() and source.exists() and target.samefile(source):
        raise ConfigError(f"{target}: is the file to read; name another directory")
    imported = ImportedFile()
    refused: list[str] = []
    tasks: list[Task] = []
    counts: dict[str, tuple[str, int, int]] = {}
    with scratch_in(target.parent if target else None) as scratch:
        copy = scratch / source.name
        with copy.open("wb") as stream:
            for line, instance in read_instances(source, refuse=refuse_into(refused)):
                if change is not None or target is not None:  # check instances in the form in which they are written
                    instance = change(instance) if change else instance
                    text = json.dumps(instance.record(), ensure_ascii=False) + "\n"
                    # Keep the line number of the source file for messages.
                    line = Line(copy, line.number, stream.tell(), text.encode("utf-8", "surrogatepass"))
                    stream.write(line.data)
                tasks.append(to_task(line, instance))
                counts[instance.task_id] = (instance.repo, len(instance.FAIL_TO_PASS), len(instance.PASS_TO_PASS))
        kept = settle(tasks, refuse_into(refused))
        imported.left_out = [message.replace(f"{copy}:", f"{source}:", 1) for message in refused]
        if not kept or (strict and imported.left_out):
            raise Mistakes(imported.left_out)
        for task in kept:
            repo, failing, passing = counts[task.id]
            imported.rows.append(
                {
                    "id": task.id,
                    "repo": repo,
                    "tested_by": LineSource.of(task).runner,
                    "fail_to_pass": failing,
                    "pass_to_pass": passing,
                    "image": task.image,
                    "path": str(target or source),
                }
            )
        if target is not None:
            with copy.open("rb") as stream, new_file(target, mode=0o644) as file:
                for task in kept:
                    position = LineSource.of(task)
                    stream.seek(position.offset)
                    file.write(stream.read(position.bytes))
    return imported
