"""Reads a Harbor task's verification settings: ``[verifier]``, artifacts, and the test and solution directories."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

import msgspec

from megaflow_hpc.environments.images.dockerfile.dockerfile import Dockerfiles
from megaflow_hpc.errors import ConfigError
from megaflow_hpc.tasks.harbor.data import CollectHook, DeclaredArtifact, HarborData, Judging, VerifierRules
from megaflow_hpc.tasks.harbor.environment import inside, read_environment, read_network
from megaflow_hpc.tasks.harbor.ignore import TaskFiles
from megaflow_hpc.tasks.harbor.task_toml import TomlTable
from megaflow_hpc.types import Task

SCRIPT = "test.sh"


def read_judging(
    toml: TomlTable, root: Path, environment: Task, dockerfiles: Dockerfiles, step: TomlTable | None = None
) -> Judging:
    """Reads how a task or step is verified.

    Args:
        toml: the task's root table.
        environment: the agent's environment. A separate verifier without its own image uses the same image.
        step: the step's ``[[steps]]`` table, if reading a step.

    Raises:
        ConfigError: names file, line, value and remedy.
    """
    tests = [root / "tests"]
    solution = root / "solution"
    if step is not None:
        home = root / "steps" / str(step.data["name"])
        tests.append(home / "tests")
        if (home / "solution").is_dir():
            solution = home / "solution"
    tests = [inside(root, directory) for directory in tests if directory.is_dir()]
    levels = [table for table in (toml, step) if table is not None]
    sections = [table.table("verifier") for table in levels]
    passed: set[str] = set()
    separate = _read_separate(sections, tests, root, environment, dockerfiles, passed)
    rules = _read_rules(sections, passed if separate else None)
    if separate is not None:
        own = separate.environment.to_dict()
        rules = msgspec.structs.replace(rules, environment=own, bundled=separate.bundled, secrets=sorted(passed))
    script = next((directory / SCRIPT for directory in reversed(tests) if (directory / SCRIPT).is_file()), None)
    if script is not None and not rules.bundled:
        TaskFiles(root).require(script)
    elif script is None and not rules.bundled:
        expected = (root if step is None else root / "steps" / str(step.data["name"])) / "tests" / SCRIPT
        raise ConfigError(f"{expected}: missing; a Harbor task needs tests for its reward: add tests/test.sh")
    return Judging(
        tests=[str(directory) for directory in tests],
        solution=str(inside(root, solution)),
        solution_env=toml.table("solution").variables("env"),
        artifacts=[entry for table in levels for entry in _read_artifacts(table)],
        verifier=rules,
    )


def _read_rules(sections: list[TomlTable], passed: set[str] | None) -> VerifierRules:
    """Returns the task's ``[verifier]`` values, overridden by the step's."""
    rules = VerifierRules()
    for section in sections:
        network = rules.network
        if "network_mode" in section:
            network = "none" if read_network(section) else ""
        rules = msgspec.structs.replace(
            rules,
            timeout_s=section.number("timeout_sec") or rules.timeout_s,
            user=section.user() or rules.user,
            env={**rules.env, **section.variables("env", passed)},
            network=network,
            collect=[*rules.collect, *map(_read_collect, section.tables("collect"))],
        )
    return rules


def _read_collect(hook: TomlTable) -> CollectHook:
    command = hook.text("command")
    if command is None:
        raise hook.error("command", None, "a shell command")
    _refuse_service(hook)
    return CollectHook(command, hook.number("timeout_sec") or 60.0, hook.user())


@dataclass(frozen=True)
class _Separate:
    """A separate verifier's environment, and whether its image contains the tests."""

    environment: Task
    bundled: bool = False


def _read_separate(
    levels: list[TomlTable],
    tests: list[Path],
    root: Path,
    environment: Task,
    dockerfiles: Dockerfiles,
    passed: set[str],
) -> _Separate | None:
    """Returns the verifier's own environment, or ``None`` if it shares the agent's. The innermost level that sets it
    wins."""
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
            chosen = table if table or own is None else own
            return _Separate(read_environment(chosen, directory, root, dockerfiles, passed), bundled=True)
    if own is None or not own:
        return _Separate(replace(environment, user=None))
    # the agent's image with the verifier's own limits and variables
    merged = TomlTable(own.path, {**own.data, "docker_image": environment.image}, own.lines, own.name)
    verifier = read_environment(merged, root / "environment", root, dockerfiles, passed)
    agents, data = HarborData.of(environment), HarborData.of(verifier)
    data = msgspec.structs.replace(data, dockerfile=agents.dockerfile, base=agents.base)
    workdir, env = verifier.workdir or environment.workdir, {**environment.env, **verifier.env}
    return _Separate(data.put(replace(verifier, workdir=workdir, env=env)))


def _read_artifacts(table: TomlTable) -> list[DeclaredArtifact]:
    """Reads the table's ``artifacts``: paths, or tables with ``source``, ``destination`` and ``exclude``."""
    entries = table.data.get("artifacts") or []
    if not isinstance(entries, list):
        raise table.error("artifacts", entries, "a list")
    artifacts = []
    for entry in entries:
        fields = {"source": entry} if isinstance(entry, str) else entry
        if not isinstance(fields, dict) or not isinstance(fields.get("source"), str) or not fields["source"].strip():
            raise table.error("artifacts", entry, "a path, or {source = …, destination = …}")
        destination, exclude = fields.get("destination") or None, fields.get("exclude") or []
        for path in filter(None, (fields["source"], destination)):
            if not isinstance(path, str) or ".." in PurePosixPath(path).parts or "\0" in path:
                raise table.error("artifacts", path, "a path without '..'")
        if destination and destination.startswith("/"):
            raise table.error("artifacts", destination, "a relative destination")
        if not isinstance(exclude, list) or not all(isinstance(pattern, str) for pattern in exclude):
            raise table.error("artifacts", exclude, "a list of patterns under exclude")
        _refuse_service(TomlTable(table.path, fields, table.lines, "artifacts"))
        artifacts.append(DeclaredArtifact(fields["source"], destination, exclude))
    return artifacts


def _refuse_service(table: TomlTable) -> None:
    if table.data.get("service", "main") not in (None, "main"):
        raise table.error("service", table.data["service"], "main: there are no other services; leave this task out")
