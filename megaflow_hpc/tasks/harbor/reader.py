"""Reads Harbor task directories (schema up to 1.4; keys and defaults are those of Harbor 0.25).

::

    TASK/  task.toml  instruction.md  environment/[Dockerfile …]  tests/test.sh …  [solution/solve.sh …]
           or, with [[steps]], steps/NAME/{instruction.md, tests/, solution/, workdir/}

Fields for the verifier, the image store, ``prepare`` or the oracle are in :class:`.data.HarborData`. The author's
``[metadata]`` becomes the task's metadata. Keys that Harbor ignores are ignored. Settings that a cluster cannot provide
are rejected.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import cast

import msgspec

from megaflow_hpc.environments.images.dockerfile.dockerfile import Dockerfiles
from megaflow_hpc.errors import ConfigError
from megaflow_hpc.tasks.formats import TASK_ID
from megaflow_hpc.tasks.harbor.data import HarborData, HarborStep, Healthcheck, Judging, fields_of
from megaflow_hpc.tasks.harbor.environment import inside, read_environment, read_network
from megaflow_hpc.tasks.harbor.task_toml import TomlTable, read_text, read_toml
from megaflow_hpc.tasks.harbor.verifier_section import read_judging
from megaflow_hpc.types import Task

NEWEST_SCHEMA = (1, 4)
"""Newest supported schema version of task.toml."""
DEFAULT_AGENT_TIMEOUT_S = 900.0
"""Default agent timeout in seconds. Harbor has none, but a rollout needs a limit."""

_CANARY = re.compile(r"(<!--.*canary.*-->|#.*canary.*)", re.IGNORECASE)
_STEP = re.compile(r"[^<>:\"/\\|?*\x00-\x1f\x7f]{0,254}[^<>:\"/\\|?*\x00-\x1f\x7f. ]")


def read_harbor_task(path: str | os.PathLike[str], dockerfiles: Dockerfiles | None = None) -> Task:
    """Reads one task directory.

    Args:
        path: the directory.
        dockerfiles: reads and caches the task's Dockerfiles.

    Raises:
        ConfigError: names the file, the line if known, the value and the remedy.
    """
    root = Path(path).absolute()
    toml = read_toml(inside(root, root / "task.toml"))
    if not TASK_ID.fullmatch(root.name) or root.name in (".", ".."):
        raise ConfigError(
            f"{root}: task id {root.name!r}: expected letters, digits, '.', '_' and '-'; rename the directory"
        )
    _check_version(toml)
    table = toml.table("environment")
    dockerfiles = dockerfiles or Dockerfiles()
    environment = read_environment(table, inside(root, root / "environment"), root, dockerfiles)
    agent = toml.table("agent")
    steps = toml.tables("steps")
    data = msgspec.structs.replace(
        HarborData.of(environment),
        upload_environment=bool(table.text("docker_image"))
        and not (root / "environment" / "Dockerfile").is_file()
        and (root / "environment").is_dir(),
        healthcheck=read_healthcheck(table),
    )
    if steps:
        read_steps = _read_steps(toml, steps, root, environment, dockerfiles)
        strategy = toml.choice("multi_step_reward_strategy", "mean", "final") or "mean"
        data = msgspec.structs.replace(data, steps=read_steps, reward_strategy=strategy)
        instruction, judging = read_steps[0].instruction, cast(Judging, read_steps[0])
    else:
        instruction, judging = read_instruction(root, root), read_judging(toml, root, environment, dockerfiles)
        data = msgspec.structs.replace(data, **fields_of(judging))
    network = read_network(agent) if "network_mode" in agent else environment.network
    task = replace(
        environment,
        id=root.name,
        instruction=instruction,
        user=agent.user() or environment.user,
        agent_timeout_s=agent.number("timeout_sec", DEFAULT_AGENT_TIMEOUT_S) or DEFAULT_AGENT_TIMEOUT_S,
        verifier_timeout_s=judging.verifier.timeout_s,
        network=network,
        metadata=toml.table("metadata").data,
    )
    return data.put(task)


def read_instruction(root: Path, home: Path) -> str:
    """Reads ``instruction.md`` without its leading canary lines, which help detect benchmarks in training data."""
    file = home / "instruction.md"
    if not file.is_file():
        raise ConfigError(f"{file}: missing; a Harbor task needs an instruction")
    if (home / "trajectory.json").is_file():
        raise ConfigError(
            f"{home / 'trajectory.json'}: agents here cannot start from an earlier conversation; leave this task out"
        )
    lines = read_text(inside(root, file)).splitlines(keepends=True)
    marked = 0
    while marked < len(lines) and _CANARY.fullmatch(lines[marked].strip()):
        marked += 1
    while marked and marked < len(lines) and not lines[marked].strip():
        marked += 1
    return "".join(lines[marked:])


def read_healthcheck(table: TomlTable) -> Healthcheck:
    """Reads the table's ``[healthcheck]``. If it is missing, the result has an empty command."""
    check = table.table("healthcheck")
    if not check:
        return Healthcheck()
    command = check.text("command")
    if command is None:
        raise check.error("command", None, "a shell command that exits 0 when the environment is healthy")
    given = {key: check.number(key) for key in ("interval_sec", "timeout_sec", "start_interval_sec")}
    if check.data.get("start_period_sec"):
        given["start_period_sec"] = check.number("start_period_sec")
    times = {key: seconds for key, seconds in given.items() if seconds is not None}
    return Healthcheck(command, int(check.number("retries") or 3), **times)


def _check_version(toml: TomlTable) -> None:
    key = "schema_version" if "schema_version" in toml else "version"
    value = toml.data.get(key, "1.0")
    match = re.fullmatch(r"(\d{1,9})\.(\d{1,9})(?:\.\d+)?", str(value))
    if not match:
        raise toml.error(key, value, "a version such as '1.4'")
    if (int(match[1]), int(match[2])) > NEWEST_SCHEMA:
        newest = ".".join(map(str, NEWEST_SCHEMA))
        raise toml.error(
            key, value, f"at most {newest}: upgrade megaflow_hpc, or write {newest} if the task uses nothing newer"
        )


def _read_steps(
    toml: TomlTable, steps: list[TomlTable], root: Path, environment: Task, dockerfiles: Dockerfiles
) -> list[HarborStep]:
    """Reads the fields of each step. steps.py turns them into tasks."""
    steps_read: list[HarborStep] = []
    for step in steps:
        name = step.text("name")
        if name is None or not _STEP.fullmatch(name) or name in (".", ".."):
            raise step.error("name", name, "the name of a directory under steps/")
        if name.casefold() in {other.name.casefold() for other in steps_read}:
            raise step.error("name", name, "a name that no other step has")
        home = root / "steps" / name
        if not home.is_dir():
            raise ConfigError(f"{home}: missing; every step in {toml.path.name} needs a directory of its name")
        inside(root, home)
        agent = step.table("agent")
        if "network_mode" in agent:
            raise agent.error("network_mode", agent.data["network_mode"], "one network for all steps, under [agent]")
        steps_read.append(
            HarborStep(
                name=name,
                instruction=read_instruction(root, home),
                agent_timeout_s=agent.number("timeout_sec"),
                user=agent.user(),
                min_reward=_min_reward(step),
                healthcheck=read_healthcheck(step),
                workdir=str(inside(root, home / "workdir")) if (home / "workdir").is_dir() else None,
                **fields_of(read_judging(toml, root, environment, dockerfiles, step)),
            )
        )
    return steps_read


def _min_reward(step: TomlTable) -> dict[str, float]:
    """Returns minimum rewards by name. A bare number applies to ``reward``."""
    value = step.data.get("min_reward")
    if value is None:
        return {}
    named = value if isinstance(value, dict) else {"reward": value}
    if not all(isinstance(number, int | float) and not isinstance(number, bool) for number in named.values()):
        raise step.error("min_reward", value, "a number, or a table of numbers by reward")
    return {str(name): float(number) for name, number in named.items()}
