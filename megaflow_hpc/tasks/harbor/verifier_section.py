"""What a Harbor task says of its end: ``[verifier]``, the artifacts to keep, and where the tests and solution lie.

All of it becomes plain values in ``task.metadata["harbor"]``, read by verifier.py, artifacts.py and the oracle agent.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.tasks.harbor.environment import inside, read_environment, read_network
from megaflow_hpc.tasks.harbor.ignore import TaskFiles
from megaflow_hpc.tasks.harbor.task_toml import Table
from megaflow_hpc.types import Task

SCRIPT = "test.sh"


def read_ending(toml: Table, root: Path, environment: Task, step: Table | None = None) -> dict[str, Any]:
    """``tests`` ``solution`` ``solution_env`` ``artifacts`` ``verifier`` of a task, or of one of its steps.

    Args:
        toml: the task's root table.
        environment: as the agent has it; a separate verifier without an image of its own gets the same.
        step: its ``[[steps]]`` table.
    """
    tests = [root / "tests"]
    solution = root / "solution"
    if step is not None:
        home = root / "steps" / str(step.data["name"])
        tests.append(home / "tests")
        if (home / "solution").is_dir():
            solution = home / "solution"
    tests = [inside(root, directory) for directory in tests if directory.is_dir()]
    levels = [table.table("verifier") for table in (toml, step) if table is not None]
    verifier = _read_verifier(levels)
    separate = _read_separate(levels, tests, root, environment)
    if separate is not None:
        verifier["environment"] = separate.to_dict()
        verifier["bundled"] = bool(separate.metadata["harbor"].pop("bundled", False))
    script = next((directory / SCRIPT for directory in reversed(tests) if (directory / SCRIPT).is_file()), None)
    if script is not None and not verifier.get("bundled"):
        TaskFiles(root).require(script)
    elif script is None and not verifier.get("bundled"):
        place = (root if step is None else root / "steps" / str(step.data["name"])) / "tests" / SCRIPT
        raise ConfigError(f"{place}: missing; a Harbor task without tests cannot be rewarded: add tests/test.sh")
    artifacts = [entry for table in (toml, step) if table is not None for entry in _read_artifacts(table)]
    return {
        "tests": [str(directory) for directory in tests],
        "solution": str(inside(root, solution)),
        "solution_env": toml.table("solution").variables("env"),
        "artifacts": artifacts,
        "verifier": verifier,
    }


def verifier_environments(task: Task) -> list[Task]:
    """The environments in which a task's separate verifiers run, as tasks of which only the environment counts."""
    harbor = task.metadata.get("harbor", {})
    endings = harbor.get("steps") or [harbor]
    found = [ending.get("verifier", {}).get("environment") for ending in endings]
    return [replace(Task.from_dict(environment), id=task.id) for environment in found if environment]


def _read_verifier(levels: list[Table]) -> dict[str, Any]:
    """The task's values, then the step's over them."""
    merged: dict[str, Any] = {"timeout_s": 600.0, "user": None, "env": {}, "network": None, "collect": []}
    for table in levels:
        merged["timeout_s"] = table.number("timeout_sec") or merged["timeout_s"]
        merged["user"] = table.user() or merged["user"]
        merged["env"] = {**merged["env"], **table.variables("env")}
        if "network_mode" in table:
            # "" leaves it to the campaign, even where the agent has no network.
            merged["network"] = "none" if read_network(table) else ""
        merged["collect"] += [_read_collect(hook) for hook in table.tables("collect")]
    return merged


def _read_collect(hook: Table) -> dict[str, Any]:
    command = hook.text("command")
    if command is None:
        raise hook.error("command", None, "a shell command")
    _refuse_service(hook)
    return {"command": command, "timeout_s": hook.number("timeout_sec", 60.0), "user": hook.user()}


def _read_separate(levels: list[Table], tests: list[Path], root: Path, environment: Task) -> Task | None:
    """The verifier's own environment; ``None`` where it is the agent's. The last level that says so decides."""
    separate = False
    for table in levels:
        mode = table.choice("environment_mode", "shared", "separate")
        if mode == "shared" and "environment" in table:
            raise table.error("environment_mode", mode, "separate, or no [verifier.environment]")
        if mode or "environment" in table:
            separate = mode != "shared"
    if not separate:
        return None
    own = next((table.table("environment") for table in reversed(levels) if "environment" in table), None)
    directories = {directory.parent: directory for directory in tests}
    places = [root / "steps" / str(table.data.get("name", "")) for table in levels[1:]]
    for level, home in reversed([(levels[0], root), *zip(levels[1:], places, strict=True)]):
        table = level.table("environment")
        directory = directories.get(home, home / "tests")
        if table.data.get("docker_image") or (directory / "Dockerfile").is_file():
            found = read_environment(table if table or own is None else own, directory, root)
            found.metadata["harbor"]["bundled"] = True
            return found
    if own is None or not own:
        return replace(environment, user=None, metadata={"harbor": dict(environment.metadata["harbor"])})
    # Its own limits and variables on the agent's image.
    merged = Table(own.path, {**own.data, "docker_image": environment.image}, own.lines, own.name)
    found = read_environment(merged, root / "environment", root)
    kept = {
        key: environment.metadata["harbor"][key]
        for key in ("dockerfile", "from")
        if key in environment.metadata["harbor"]
    }
    return replace(
        found,
        workdir=found.workdir or environment.workdir,
        env={**environment.env, **found.env},
        metadata={"harbor": {**found.metadata["harbor"], **kept}},
    )


def _read_artifacts(table: Table) -> list[dict[str, Any]]:
    """``artifacts = ["/path", {source =, destination =, exclude = []}]``."""
    entries = table.data.get("artifacts") or []
    if not isinstance(entries, list):
        raise table.error("artifacts", entries, "a list")
    found = []
    for entry in entries:
        given = {"source": entry} if isinstance(entry, str) else entry
        if not isinstance(given, dict) or not isinstance(given.get("source"), str) or not given["source"].strip():
            raise table.error("artifacts", entry, "a path, or {source = …, destination = …}")
        destination, exclude = given.get("destination") or None, given.get("exclude") or []
        for path in filter(None, (given["source"], destination)):
            if not isinstance(path, str) or ".." in PurePosixPath(path).parts or "\0" in path:
                raise table.error("artifacts", path, "a path without '..'")
        if destination and destination.startswith("/"):
            raise table.error("artifacts", destination, "a relative destination")
        if not isinstance(exclude, list) or not all(isinstance(pattern, str) for pattern in exclude):
            raise table.error("artifacts", exclude, "a list of patterns under exclude")
        _refuse_service(Table(table.path, given, table.lines, "artifacts"))
        found.append({"source": given["source"], "destination": destination, "exclude": exclude})
    return found


def _refuse_service(table: Table) -> None:
    if table.data.get("service", "main") not in (None, "main"):
        raise table.error("service", table.data["service"], "main: there are no other services; leave this task out")
