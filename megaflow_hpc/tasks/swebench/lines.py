"""Tasks made of lines of a JSONL file.

A task holds where its line is and what the line's bytes hash to, not the line: patches and tests stay out of what
agents and ``run.json`` see, and a file that was edited after the campaign was planned is noticed.
"""

from __future__ import annotations

import hashlib
import os
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
VERIFIER_S = 1800.0
"""The time SWE-bench's own evaluation gives a test run."""


class LineSource(Struct, frozen=True, omit_defaults=True):
    """Where a task's line is, and how it is tested; as a plain mapping it is ``task.metadata["swebench"]``."""

    file: str
    line: int
    """From 1."""
    offset: int
    """Bytes before the line."""
    bytes: int
    sha256: str
    """Digest of the line's bytes, its end included."""
    runner: str = ""
    """``script`` or ``named``; empty until it is settled."""

    @classmethod
    def of(cls, task: Task) -> Self:
        """The source that a task carries."""
        return msgspec.convert(task.metadata["swebench"], cls)

    def put(self, task: Task) -> Task:
        """The task with this source instead of its own."""
        return replace(task, metadata={**task.metadata, "swebench": msgspec.to_builtins(self)})


def to_task(line: Line, instance: Instance) -> Task:
    """The task of an instance. How its tests are run is settled by :func:`~megaflow_hpc.tasks.swebench.plan.settle`."""
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
        verifier_timeout_s=VERIFIER_S,
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
    """Reads the instance of a task from its line.

    Raises:
        SandboxError: the file is gone, or the line is not what it was when the task was made.
    """
    source = LineSource.of(task)
    try:
        with open(source.file, "rb") as stream:
            stream.seek(source.offset)
            data = stream.read(source.bytes)
    except OSError as error:
        raise SandboxError(f"task {task.id}: {source.file} cannot be read ({error.strerror})") from error
    if hashlib.sha256(data).hexdigest() != source.sha256:
        raise SandboxError(f"task {task.id}: {source.file} was changed since this was planned; plan it again")
    return parse(Line(Path(source.file), source.line, source.offset, data))


def read_tasks(path: str | os.PathLike[str]) -> list[Task]:
    """Makes a task of every line of a file; ``plan.settle`` makes those that are used ready to run."""
    return [to_task(line, instance) for line, instance in read_instances(path)]
