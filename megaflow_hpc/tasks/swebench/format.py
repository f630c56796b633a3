"""SWE-bench style JSONL files as a task format."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable

from megaflow_hpc.environments.images.dockerfile.dockerfile import Dockerfiles
from megaflow_hpc.environments.sandbox.sandbox import ApptainerSandbox
from megaflow_hpc.errors import ConfigError
from megaflow_hpc.tasks.formats import OneStep, Refuse, TaskFormat, VerificationContext
from megaflow_hpc.tasks.swebench import plan, runs
from megaflow_hpc.tasks.swebench.plan import read_tasks
from megaflow_hpc.types import Task, Verdict


class SwebenchFormat(OneStep):
    """Implements :class:`~megaflow_hpc.tasks.formats.TaskFormat` for SWE-bench style JSONL files."""

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
