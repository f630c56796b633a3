"""Creates tasks from the lines of a JSONL file, and uses the ``swebench`` package to decide how to test them.

A task stores the position and hash of its line instead of the line itself. This keeps patches and tests out of
``run.json`` and hidden from agents, and detects edits to the file after planning.

* Lines with ``eval_script``, ``test_cmd`` or ``test_cmds``, and repositories that the package supports, use the runner
  ``script``.
* Lines of other repositories with pytest ids, and lines with ``runner: named``, use the runner ``named``, which does
  not need the package.

Instances that neither runner supports are left out during planning, and their lines are reported. Otherwise they would
only fail later, in many rollouts.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import msgspec
from msgspec import Struct

from megaflow_hpc.errors import ConfigError, SandboxError
from megaflow_hpc.resources import install, is_installed
from megaflow_hpc.tasks.formats import Refuse, raise_error
from megaflow_hpc.tasks.swebench import package
from megaflow_hpc.tasks.swebench.instances import Instance, Line, parse, read_instances
from megaflow_hpc.types import Task

INSTALL = f"{install('swebench')} (or only the used packages: pip install --no-deps swebench unidiff)"
PARSER_TIMEOUT_S = 120.0
"""Timeout of a log parser in seconds. If it is exceeded, the tests count as failed."""


def ask(request: dict[str, Any]) -> dict[str, Any]:
    """Sends a request to the ``swebench`` package in a child process and returns the response.

    Raises:
        ConfigError: The package is not installed.
        TimeoutError, RuntimeError: A parser timed out or failed.
    """
    command = [sys.executable, "-P", package.__file__]
    timeout_s = PARSER_TIMEOUT_S + package.PLAN_TIMEOUT_S * len(request.get("instances", ()))
    try:
        done = subprocess.run(
            command, input=json.dumps(request).encode(), capture_output=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"the swebench package took longer than {timeout_s:g} s") from None
    if done.returncode:
        raise RuntimeError(f"the swebench package failed: {done.stderr.decode(errors='replace').strip()[-1000:]}")
    answer: dict[str, Any] = json.loads(done.stdout)
    if "missing" in answer:
        raise ConfigError(f"the Python package {answer['missing']!r} is not installed; {INSTALL}")
    return answer


def has_pytest_ids(instance: Instance) -> bool:
    """Returns whether pytest can run the instance's tests by id."""
    return all(".py" in test for test in instance.FAIL_TO_PASS + instance.PASS_TO_PASS)


CHUNK = 2000
"""Maximum number of instances in memory at the same time, and in one request to the ``swebench`` package."""


def settle(tasks: Sequence[Task], refuse: Refuse = raise_error) -> list[Task]:
    """Returns the tasks that can be tested and graded here, with their runners.

    Args:
        refuse: Called for every other task. The message names the line, what is missing, and the remedies.

    Raises:
        ConfigError: The ``swebench`` package is required but not installed.
    """
    return [task for first in range(0, len(tasks), CHUNK) for task in _settle(tasks[first : first + CHUNK], refuse)]


def _settle(tasks: Sequence[Task], refuse: Refuse) -> list[Task]:
    loaded = [(task, load(task)) for task in tasks]
    for_package = [(task, instance) for task, instance in loaded if instance.runner != "named"]
    if for_package and not is_installed("swebench"):
        task, instance = for_package[0]
        raise ConfigError(
            f"{_where(task)}: {instance.instance_id}: its tests are run and graded by the Python package 'swebench', "
            f"which is not installed; {INSTALL}, or run pytest by the ids (runner: named on the line, or "
            "megaflow-hpc tasks import --runner named)"
        )
    request = {"op": "plan", "instances": [request_fields(instance) for _, instance in for_package]}
    plans = ask(request)["plans"] if for_package else []
    runners = {task.id: "named" for task in tasks}
    for (task, instance), plan in zip(for_package, plans, strict=True):
        try:
            runners[task.id] = _runner(_where(task), instance, plan)
        except ConfigError as error:
            del runners[task.id]
            refuse(error)
    return [
        msgspec.structs.replace(LineSource.of(task), runner=runners[task.id]).put(task)
        for task in tasks
        if task.id in runners
    ]


def _where(task: Task) -> str:
    return f"{task.path}:{LineSource.of(task).line}"


def request_fields(instance: Instance) -> dict[str, Any]:
    """Returns the fields of an instance that the package needs. Omits solutions and the problem statement."""
    return instance.record() | {"version": instance.version, "problem_statement": "", "patch": "", "bug_patch": ""}


def _runner(where: str, instance: Instance, plan: dict[str, str]) -> str:
    if "error" in plan:
        raise ConfigError(f"{where}: {instance.instance_id}: {plan['error']}; correct it, or install another version")
    script = bool(instance.eval_script or instance.commands or plan["eval_script"])
    if script and (plan["log_parser"] or "pytest" in instance.commands):
        return "script"
    if not script and instance.runner != "script" and has_pytest_ids(instance):
        return "named"
    lacks = "log_parser (a parse_log_… function of the swebench package)" if script else "eval_script or test_cmd"
    raise ConfigError(
        f"{where}: {instance.instance_id}: the swebench package does not know {instance.repo} at version "
        f"{instance.version!r}, and the line has no {lacks}; add it to the line, give it to tasks import, or install "
        "'swebench<5', which knows the commands of SWE-bench's own repositories"
    )


# --- tasks ------------------------------------------------------------------------------------------------------------

AGENT_S = 1800.0
VERIFIER_TIMEOUT_S = 1800.0
"""Default timeout of the tests in seconds, as in SWE-bench's own evaluation."""


class LineSource(Struct, frozen=True, omit_defaults=True):
    """Position of a task's line and the task's runner. Stored as a plain mapping in ``task.metadata["swebench"]``."""

    file: str
    line: int
    """Line number, starting at 1."""
    offset: int
    """Byte offset of the line."""
    bytes: int
    sha256: str
    """SHA-256 of the line's bytes, including the line ending."""
    runner: str = ""
    """``script`` or ``named``. Empty until :func:`settle` has decided."""

    @classmethod
    def of(cls, task: Task) -> Self:
        """Returns the line source stored in a task."""
        return msgspec.convert(task.metadata["swebench"], cls)

    def put(self, task: Task) -> Task:
        """Returns a copy of the task with this source."""
        return replace(task, metadata={**task.metadata, "swebench": msgspec.to_builtins(self)})


def to_task(line: Line, instance: Instance) -> Task:
    """Creates a task from an instance. Later, :func:`settle` decides how its tests run."""
    env = {}
    if "sweb.eval" in instance.image or "swesmith" in instance.image:
        env["BASH_ENV"] = "/root/.bashrc"  # in these images, this file activates the environment
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
    """Reads a task's instance from the JSONL file.

    Raises:
        SandboxError: The file is missing, or the line has changed since planning.
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


def read_tasks(
    path: str | os.PathLike[str], wanted: Callable[[str], bool] = lambda _: True, refuse: Refuse = raise_error
) -> list[Task]:
    """Creates a task for each instance that :func:`read_instances` yields. :func:`settle` makes the selected tasks
    ready to run."""
    return [to_task(line, instance) for line, instance in read_instances(path, wanted, refuse)]
