"""Harbor task directories as a task format, their steps, and a template for new task directories.

The steps of a multi-step task run in order in one sandbox, each with its own agent run and verdict. Each step is
represented as an ordinary :class:`Task`, so agents and verifiers do not have to handle steps.
"""

from __future__ import annotations

import asyncio
import glob
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from megaflow_hpc.environments.images.dockerfile.dockerfile import Dockerfiles
from megaflow_hpc.environments.images.sources import ImageRequest
from megaflow_hpc.environments.sandbox.sandbox import ApptainerSandbox
from megaflow_hpc.errors import ConfigError, SetupError
from megaflow_hpc.tasks.formats import TASK_ID, Refuse, StepVerdict, TaskFormat
from megaflow_hpc.tasks.harbor import artifacts, verifier
from megaflow_hpc.tasks.harbor.data import HarborData, Healthcheck, Judging, fields_of
from megaflow_hpc.tasks.harbor.ignore import TaskFiles
from megaflow_hpc.tasks.harbor.reader import read_harbor_task
from megaflow_hpc.types import ExecResult, Sandbox, Task, Verdict, is_part_reward, whole_rewards

SCRIPT = "solve.sh"


async def solve(task: Task, sandbox: Sandbox) -> ExecResult:
    """Uploads the solution of a task or step and runs it in the working directory. Uses the interpreter in the
    solution's first line, or bash by default.

    Raises:
        ConfigError: The task has no solution.
    """
    data = HarborData.of(task)
    solution = Path(data.solution or Path(task.path) / "solution")
    files = TaskFiles(task.path)
    if not (solution / SCRIPT).is_file():
        raise ConfigError(f"task {task.id}: no {solution / SCRIPT}; the oracle agent needs one")
    files.require(solution / SCRIPT)
    with tempfile.TemporaryDirectory() as scratch:
        files.copy(solution, Path(scratch, "solution"))
        copy = Path(scratch, "solution", SCRIPT)
        copy.chmod(copy.stat().st_mode | 0o755)
        await sandbox.upload(str(Path(scratch, "solution")), "/solution")
    env = {"DEBIAN_FRONTEND": "noninteractive", **data.solution_env}
    command = ["bash", f"/solution/{SCRIPT}"]
    if verifier.names_interpreter(solution / SCRIPT):
        command = [f"/solution/{SCRIPT}"]
    return await sandbox.exec(command, cwd=task.workdir, env=env)


# --- steps ------------------------------------------------------------------------------------------------------------

SETUP_TIMEOUT_S = 600.0
"""Timeout of a step's ``setup.sh`` in seconds."""


def steps_of(task: Task) -> list[Task]:
    """Returns one task per step, in order. A task without steps is its own single step."""
    data = HarborData.of(task)
    if not data.steps:
        return [task]
    return [
        HarborData(**fields_of(step), step=step).put(
            replace(
                task,
                instruction=step.instruction,
                user=step.user or task.user,
                agent_timeout_s=step.agent_timeout_s or task.agent_timeout_s,
                verifier_timeout_s=step.verifier.timeout_s,
            )
        )
        for step in data.steps
    ]


def step_name(step: Task) -> str:
    """Returns the name of a step. Empty for a task without steps."""
    harbor_step = HarborData.of(step).step
    return harbor_step.name if harbor_step else ""


async def begin_step(task: Task, sandbox: Sandbox) -> None:
    """Uploads the step's ``workdir/``, runs its ``setup.sh`` and waits until the environment is healthy.

    Raises:
        SetupError: The step cannot be set up.
    """
    step = HarborData.of(task).step
    if step is None:
        return
    workdir = task.workdir or "/"
    if files := step.workdir:
        await sandbox.upload(files, workdir)
        if os.path.isfile(os.path.join(files, "setup.sh")):
            done = await sandbox.exec(
                ["bash", os.path.join(workdir, "setup.sh")], cwd=workdir, timeout_s=SETUP_TIMEOUT_S
            )
            if done.exit_code:
                raise SetupError(
                    f"task {task.id}: step {step.name}: setup.sh ended with {done.exit_code}: "
                    f"{done.stderr.strip()[-300:]}"
                )
    await wait_healthy(f"{task.id}: step {step.name}", sandbox, step.healthcheck)


def may_continue(task: Task, verdict: Verdict) -> bool:
    """Returns whether the next step may run, which requires that every reward reaches the step's ``min_reward``."""
    step = HarborData.of(task).step
    least = step.min_reward if step else {}
    unnamed = 0.0 if verdict.error else float("-inf")
    return all(verdict.rewards.get(name, unnamed) >= value for name, value in least.items())


def combine(task: Task, verdicts: Sequence[StepVerdict]) -> Verdict:
    """Combines the verdicts of the completed steps into one verdict for the task.

    With ``mean``, each named reward is averaged over these steps. A reward that a step does not report counts as 0.
    With ``final``, the last completed step's rewards are used. A step whose verifier failed has reward 0. A turn's
    reward is taken from the last step that reports it, because each turn belongs to one step.
    """
    if len(verdicts) == 1 and not verdicts[0].name:
        return verdicts[0].verdict
    artifacts = [artifact for step in verdicts for artifact in step.verdict.artifacts]
    output = "".join(f"=== step {step.name} ===\n{step.verdict.output}\n" for step in verdicts)
    errors = [f"step {step.name}: {step.verdict.error}" for step in verdicts if step.verdict.error]
    counted = verdicts[-1:] if HarborData.of(task).reward_strategy == "final" else verdicts
    naming = [step for step in counted if not step.verdict.error] or verdicts[-1:]
    names = dict.fromkeys(name for step in naming for name in whole_rewards(step.verdict.rewards))
    rewards = {n: sum(step.verdict.rewards.get(n, 0.0) for step in counted) / len(counted) for n in names}
    for step in verdicts:
        rewards |= {name: value for name, value in step.verdict.rewards.items() if is_part_reward(name)}
    agent_error = verdicts[-1].verdict.agent_error
    return replace(Verdict.of(rewards, output, artifacts), error="; ".join(errors), agent_error=agent_error)


async def wait_healthy(who: str, sandbox: Sandbox, check: Healthcheck) -> None:
    """Runs the health check until it succeeds. Failures during the start period do not count.

    Args:
        who: Name of the task or step, for the error message.
        sandbox: The sandbox to check.
        check: The health check. If its command is empty, this function returns immediately.

    Raises:
        SetupError: The health check failed ``retries`` times.
    """
    if not check.command:
        return
    started = time.monotonic()
    failures = 0
    while True:
        result = await sandbox.exec(check.command, timeout_s=check.timeout_sec)
        if result.exit_code == 0:
            return
        starting = time.monotonic() - started < check.start_period_sec
        failures += not starting
        if failures >= check.retries:
            raise SetupError(
                f"task {who}: not healthy: {check.command!r} ended with {result.exit_code}: {result.stderr[-300:]}"
            )
        await asyncio.sleep(check.start_interval_sec if starting else check.interval_sec)


# --- the format -------------------------------------------------------------------------------------------------------


class HarborFormat(TaskFormat):
    """Task format of Harbor task directories."""

    def claims(self, source: str) -> bool:
        return True

    def read(
        self,
        source: str,
        base: str | os.PathLike[str],
        dockerfiles: Dockerfiles,
        wanted: Callable[[str], bool],
        refuse: Refuse,
    ) -> list[Task]:
        tasks = []

        def unread(directory: str, error: ConfigError) -> None:
            if wanted(os.path.basename(os.path.normpath(directory))):
                refuse(error)

        for directory in find_tasks(source, Path(base), unread):
            try:
                tasks.append(read_harbor_task(directory, dockerfiles))
            except ConfigError as error:
                unread(directory, error)
            except (OSError, RuntimeError) as error:  # unreadable files and symlink loops
                unread(directory, ConfigError(f"{directory}: {error}"))
        return tasks

    def images(self, task: Task) -> list[ImageRequest]:
        requests = [_image(task)]
        for judging in _judgings(HarborData.of(task)):
            verifier_environment = judging.verifier_environment(task.id)
            if verifier_environment is not None:
                requests.append(_image(verifier_environment))
        return requests

    def files(self, task: Task) -> list[str]:
        data = HarborData.of(task)
        paths = [os.path.join(task.path, "environment")] if data.upload_environment else []
        for judging in _judgings(data):
            paths += [*judging.tests, judging.solution]
        paths += [step.workdir for step in data.steps if step.workdir]
        return [path for path in dict.fromkeys(paths) if path and os.path.exists(path)]

    def asks_judge(self, task: Task) -> bool:
        return any(judging.verifier.judge for judging in _judgings(HarborData.of(task)))

    async def prepare(self, task: Task, sandbox: ApptainerSandbox) -> bool:
        data = HarborData.of(task)
        if data.upload_environment:
            await sandbox.upload(os.path.join(task.path, "environment"), task.workdir or "/")
        await wait_healthy(task.id, sandbox, data.healthcheck)
        if data.healthcheck.command:
            await sandbox.end_processes()
        return data.upload_environment or bool(data.healthcheck.command)

    async def put_back(self, task: Task, sandbox: ApptainerSandbox, stored: Mapping[str, bytes]) -> bool:
        await artifacts.put_back(task, sandbox, stored)
        rules = HarborData.of(task).verifier
        return rules.environment is not None and not rules.collect

    steps = staticmethod(steps_of)
    step_name = staticmethod(step_name)
    begin_step = staticmethod(begin_step)
    may_continue = staticmethod(may_continue)
    combine = staticmethod(combine)
    solve = staticmethod(solve)
    verify = staticmethod(verifier.verify)


FORMAT: TaskFormat = HarborFormat()


def _raise(directory: str, error: ConfigError) -> None:
    raise error


def find_tasks(source: str, base: Path, unread: Callable[[str, ConfigError], None] = _raise) -> list[str]:
    """Returns the task directories that match a path or glob pattern.

    Args:
        unread: Called with each directory that contains a task in another format, and an error. By default, raises the
            error.

    Raises:
        ConfigError: No task matches.
    """
    pattern = str(base / os.path.expanduser(os.path.expandvars(source)))
    matches = sorted(glob.glob(pattern)) if glob.has_magic(pattern) else [pattern]
    several = len(matches) != 1 or glob.has_magic(pattern)
    old = [match for match in matches if os.path.isfile(os.path.join(match, "task.yaml")) and not _is_task(match)]
    for match in old:
        error = f"{match}/task.yaml: a task in the first format of Terminal-Bench; convert it with: "
        unread(match, ConfigError(f"{error}harbor task migrate -i {match} -o OUTPUT"))
    matches = [match for match in matches if match not in old]
    directories = [match for match in matches if os.path.isdir(match) and (_is_task(match) or not several)]
    if old and not directories:
        return []
    if not directories:
        raise ConfigError(
            f"tasks: {pattern}: contains no Harbor task directory (with task.toml); correct the path, or begin a task "
            "with: megaflow-hpc tasks new NAME"
        )
    if len(directories) == 1 and not _is_task(directories[0]):
        inner = sorted(entry.path for entry in os.scandir(directories[0]) if entry.is_dir() and _is_task(entry.path))
        if inner:
            raise ConfigError(f"tasks: {source}: not a task, but contains {len(inner)}; write {source.rstrip('/')}/*")
    return directories


def _judgings(data: HarborData) -> Sequence[Judging]:
    """Returns the verification settings of each step, or of the task if it has no steps."""
    return data.steps or [data]


def _is_task(directory: str) -> bool:
    return os.path.isfile(os.path.join(directory, "task.toml"))


def _image(task: Task) -> ImageRequest:
    data = HarborData.of(task)
    dockerfile = Path(data.dockerfile) if data.dockerfile else None
    request = ImageRequest(task.image, data.base, dockerfile, path=task.path)
    return request if data.build_timeout_s is None else replace(request, timeout_s=data.build_timeout_s)


# --- new tasks --------------------------------------------------------------------------------------------------------

TEMPLATE = Path(__file__).parent / "template"
BASE = "docker://debian:12"
"""Source to which the template's image name ``base`` should be mapped, because no registry has an image ``base``."""


def write_template(name: str, directory: Path) -> Path:
    """Writes a new task directory ``directory/NAME`` and returns its path.

    Raises:
        ConfigError: The name is not a valid task id, or the directory already exists.
    """
    if not TASK_ID.fullmatch(name) or name.startswith("."):
        raise ConfigError(f"{name!r}: expected the id of a task: letters, digits, dot, dash and underscore")
    path = directory.absolute() / name
    try:
        shutil.copytree(TEMPLATE, path, copy_function=shutil.copyfile, ignore=shutil.ignore_patterns("__pycache__"))
    except FileExistsError as error:
        raise ConfigError(f"{path}: exists already; choose another name") from error
    for script in path.rglob("*.sh"):
        script.chmod(0o755)
    return path
