"""Creates tasks from the lines of a JSONL file.

A task stores its line's position and hash, not the line itself. So agents and ``run.json`` do not see patches and
tests, and edits to the file after planning are detected.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Self

import msgspec
from msgspec import Struct

from megaflow_hpc.errors import SandboxError
from megaflow_hpc.tasks.swebench.datasets import Line
from megaflow_hpc.tasks.swebench.instances import Instance, parse, read_instances
from megaflow_hpc.types import Task

AGENT_S = 1800.0
VERIFIER_TIMEOUT_S = 1800.0
"""Default verifier timeout in seconds, as in SWE-bench's own evaluation."""


class LineSource(Struct, frozen=True, omit_defaults=True):
    """Position of a task's line, and its runner. Stored as a plain mapping in ``task.metadata["swebench"]``."""

    file: str
    line: int
    """Line number, from 1."""
    offset: int
    """Byte offset of the line."""
    bytes: int
    sha256: str
    """Digest of the line's bytes, including the line ending."""
    runner: str = ""
    """``script`` or ``named``. Empty until planning has decided."""

    @classmethod
    def of(cls, task: Task) -> Self:
        """Returns the line source of a task."""
        return msgspec.convert(task.metadata["swebench"], cls)

    def put(self, task: Task) -> Task:
        """Returns a copy of the task with this source."""
        return replace(task, metadata={**task.metadata, "swebench": msgspec.to_builtins(self)})


def to_task(line: Line, instance: Instance) -> Task:
    """Creates the task of an instance. :func:`~megaflow_hpc.tasks.swebench.plan.settle` decides later how its tests
    run."""
    env = {}
    if "sweb.eval" in instance.image or "swesmith" in instance.image:
        env["BASH_ENV"] = "/root/.bashrc"  # these images activate the repository's environment there
    digest = hashlib.sha256(line.data).hexdigest()
    source = LineSource(str(line.path), line.number, line.offset, len(line.data), digest)
    task = Task(
        id=instance.task_id,
        instruction=_instruction(instance),
        image=instance.image,
        path=str(line.path),
        kind="swebench",
        workdir=instance.workdir,
        env=env,
        agent_timeout_s=AGENT_S,
        verifier_timeout_s=VERIFIER_TIMEOUT_S,
        metadata={"repo": instance.repo, "version": instance.version},
    )
    return source.put(task)


def _instruction(instance: Instance) -> str:
    return (
        f"{instance.problem_statement.strip()}\n\n---\n\n"
        f"`{instance.workdir}` is a git checkout of {instance.repo}. Change the code there so that what is described "
        "above is resolved and everything else keeps working.\nTests that are not in the tree will judge the result.\n"
    )


def load(task: Task) -> Instance:
    """Reads a task's instance from its line.

    Raises:
        SandboxError: the file is missing, or the line has changed since planning.
    """
    source = LineSource.of(task)
    try:
        with open(source.file, "rb") as stream:
            stream.seek(source.offset)
            data = stream.read(source.bytes)
    except OSError as error:
        raise SandboxError(f"task {task.id}: {source.file} cannot be read ({error.strerror})") from error
    if hashlib.sha256(data).hexdigest() != source.sha256:
        raise SandboxError(f"task {task.id}: {source.file} has changed since planning; plan a new campaign")
    return parse(Line(Path(source.file), source.line, source.offset, data))


def read_tasks(path: str | os.PathLike[str], wanted: Callable[[str], bool] = lambda _: True) -> list[Task]:
    """Creates a task for every line of a file. ``plan.settle`` makes the selected ones ready to run.

    Args:
        wanted: Returns whether the task with this id is used. Invalid lines of other tasks are skipped.
    """
    return [to_task(line, instance) for line, instance in read_instances(path, wanted)]
