"""Task formats other than Harbor's: which module reads, prepares, solves and judges tasks of a kind.

A format is a module with ``prepare(task, sandbox)``, ``solve(task, sandbox) -> ExecResult`` and
``verify(task, sandbox) -> Verdict``; ``SUBMITS_A_PATCH`` says that the verdict brings the agent's patch. They are
imported when a task of theirs is met.
"""

from __future__ import annotations

import glob
import importlib
import os
from collections.abc import Mapping, Sequence
from typing import Any

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.types import Task

KINDS: Mapping[str, str] = {
    "swebench": "megaflow_hpc.tasks.swebench.runs",
    "python": "megaflow_hpc.tasks.python_class",
}


def format_of(task: Task) -> Any:
    """The module of the task's format; ``None`` for Harbor's."""
    return importlib.import_module(KINDS[task.kind]) if task.kind in KINDS else None


def read(source: str, base: str | os.PathLike[str]) -> list[Task] | None:
    """The tasks of a source of a campaign; ``None`` if it is to be read as Harbor directories.

    Raises:
        ConfigError: names what is wrong and where.
    """
    if source.endswith(".jsonl"):
        from megaflow_hpc.tasks.swebench.instances import read_tasks

        pattern = os.path.join(base, os.path.expanduser(os.path.expandvars(source)))
        paths = sorted(glob.glob(pattern)) if glob.has_magic(pattern) else [pattern]
        if not paths:
            raise ConfigError(f"tasks: {pattern}: no such file; correct the path")
        return [task for path in paths for task in read_tasks(path)]
    from megaflow_hpc.tasks.python_class import looks_like_class, read_python_tasks

    return read_python_tasks(source, base) if looks_like_class(source) else None


def settle(tasks: Sequence[Task]) -> list[Task]:
    """The tasks a campaign has chosen of one source, with what only their format can say of how they run."""
    if tasks and tasks[0].kind == "swebench":
        from megaflow_hpc.tasks.swebench import plan

        return plan.settle(tasks)
    return list(tasks)
