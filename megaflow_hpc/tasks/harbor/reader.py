"""Reads Harbor task directories (schema up to 1.4, with the keys and defaults of Harbor 0.25).

::

    TASK/  task.toml  instruction.md  environment/[Dockerfile …]  tests/test.sh …  [solution/solve.sh …]
           or, with [[steps]], steps/NAME/{instruction.md, tests/, solution/, workdir/}

Fields that only the verifier, the image store, ``prepare`` or the oracle need are in :class:`.data.HarborData`. The
author's ``[metadata]`` becomes the task's metadata. Keys that Harbor ignores are ignored here too. Settings that a
cluster cannot support are rejected.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import cast
from urllib.parse import urlsplit

import msgspec

from megaflow_hpc.environments.images.dockerfile.dockerfile import (
    Dockerfiles,
    context_digest,
    last_workdir,
)
from megaflow_hpc.errors import ConfigError
from megaflow_hpc.tasks.formats import TASK_ID
from megaflow_hpc.tasks.harbor.compose import COMPOSE, read_compose
from megaflow_hpc.tasks.harbor.data import (
    CollectHook,
    DeclaredArtifact,
    HarborData,
    HarborStep,
    Healthcheck,
    Judging,
    VerifierRules,
    fields_of,
)
from megaflow_hpc.tasks.harbor.ignore import TaskFiles
from megaflow_hpc.tasks.harbor.task_toml import TomlTable, read_text, read_toml
from megaflow_hpc.types import Limits, McpServer, Network, Task

NEWEST_SCHEMA = (1, 4)
"""Newest supported schema version of task.toml."""
DEFAULT_AGENT_TIMEOUT_S = 900.0
"""Default agent timeout in seconds. Harbor has no default, but every rollout needs a limit."""

_CANARY = re.compile(r"(<!--.*canary.*-->|#.*canary.*)", re.IGNORECASE)
_MCP_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_STEP = re.compile(r"[^<>:\"/\\|?*\x00-\x1f\x7f]{0,254}[^<>:\"/\\|?*\x00-\x1f\x7f. ]")


def read_harbor_task(path: str | os.PathLike[str], dockerfiles: Dockerfiles | None = None) -> Task:
    """Reads a task directory.

    Args:
        path: The task directory.
        dockerfiles: Reads and caches the task's Dockerfiles.

    Raises:
        ConfigError: The task is invalid. The message names the file, the line if known, the value and the remedy.
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
    environment = _with_services(environment, table, root, dockerfiles)
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
    """Reads ``instruction.md`` without its leading canary lines, which serve to detect benchmarks in training data."""
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
    """Reads the table ``[healthcheck]``. If it is missing, the result has an empty command."""
    check = table.table("healthcheck")
    if not check:
        return Healthcheck()
    command = check.text("command")
    if command is None:
        raise check.error("command", None, "a shell command that exits 0 when the environment is healthy")
    times = {key: check.number(key) for key in ("interval_sec", "timeout_sec", "start_interval_sec")}
    if check.data.get("start_period_sec"):
        times["start_period_sec"] = check.number("start_period_sec")
    given = {key: seconds for key, seconds in times.items() if seconds is not None}
    return Healthcheck(command, int(check.number("retries") or 3), **given)


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
    """Reads the fields of each step. :func:`~megaflow_hpc.tasks.harbor.format.steps_of` converts them to tasks."""
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
    """Reads minimum rewards by name. A bare number applies to the reward named ``reward``."""
    value = step.data.get("min_reward")
    if value is None:
        return {}
    named = value if isinstance(value, dict) else {"reward": value}
    if not all(isinstance(number, int | float) and not isinstance(number, bool) for number in named.values()):
        raise step.error("min_reward", value, "a number, or a table of numbers by reward")
    return {str(name): float(number) for name, number in named.items()}


# --- environments -----------------------------------------------------------------------------------------------------


def read_environment(
    table: TomlTable, directory: Path, root: Path, dockerfiles: Dockerfiles, passed: set[str] | None = None
) -> Task:
    """Reads an environment. Returns it as a task with image, directory, user, variables, limits and network.

    Args:
        table: The environment's TOML table, which may be empty.
        directory: Directory of the environment's Dockerfile, which is also the build context.
        root: The task's directory.
        dockerfiles: Reads the Dockerfile.
        passed: Set to which the values of the user's variables in use are added. ``None`` for an agent's environment,
            which must not use these variables.

    Raises:
        ConfigError: A value is invalid. The message names file, line, value and remedy.
    """
    _reject_unsupported(table)
    dockerfile = inside(root, directory / "Dockerfile")
    named = table.text("docker_image")
    parsed = dockerfiles.read(dockerfile) if named is None and dockerfile.is_file() else None
    if named is None and parsed is None:
        raise ConfigError(
            f"{table.path}: neither [{table.name}] docker_image nor {directory.relative_to(root)}/Dockerfile; name an "
            "image, and map it in environment.images of the campaign"
        )
    data = HarborData()
    env = table.variables("env", passed)
    image = named or ""
    if parsed is not None:
        image = parsed.base
        env = {**parsed.environment, **env}
        if parsed.needs_build:
            image = f"{parsed.base}+{context_digest(parsed)[:12]}"
            seconds = table.number("build_timeout_sec")
            data = HarborData(dockerfile=str(dockerfile), base=parsed.base, build_timeout_s=seconds)
    workdir = table.path_inside("workdir") or (parsed.workdir if parsed else None)
    if workdir is None and named is not None and dockerfile.is_file():
        workdir = last_workdir(dockerfile)
    if workdir is not None and not workdir.startswith("/"):
        raise ConfigError(f"{dockerfile}: WORKDIR {workdir!r}: expected an absolute path")
    if skills := table.path_inside("skills_dir"):
        env.setdefault("MEGAFLOW_SKILLS_DIR", skills)
    task = Task(
        id="environment",
        instruction="",
        image=image,
        path=str(root),
        workdir=workdir,
        user=parsed.user if parsed else None,
        env=env,
        limits=Limits(
            memory_mb=table.size_mb("memory_mb", "memory"),
            cpus=table.number("cpus"),
            disk_mb=table.size_mb("storage_mb", "storage"),
        ),
        network=read_network(table),
    )
    return data.put(task)


def read_network(table: TomlTable) -> Network | None:
    """Returns the network of a task.

    If the task forbids or restricts network access, this is ``gateway``, with which only the agent's model is
    reachable. Otherwise it is ``None``, which leaves the decision to the campaign, because compute nodes often have no
    internet access.
    """
    mode = table.choice("network_mode", "no-network", "public", "allowlist")
    if mode is None:
        return "gateway" if table.data.get("allow_internet") is False else None
    return None if mode == "public" else "gateway"


def inside(root: Path, path: Path) -> Path:
    """Returns ``path`` after checking that it resolves to a location inside the task.

    Raises:
        ConfigError: A symlink points outside the task.
    """
    if not path.resolve().is_relative_to(root.resolve()):
        raise ConfigError(f"{path}: is a link out of the task, to {path.resolve()}; copy the file into the task")
    return path


def _reject_unsupported(table: TomlTable) -> None:
    """Rejects settings that a single rootless container cannot support."""
    for key in ("gpus", "tpu"):
        if table.data.get(key):
            raise table.error(key, table.data[key], "none: sandboxes run on CPU nodes; leave this task out")
    if str(table.data.get("os", "linux")).lower() != "linux":
        raise table.error("os", table.data["os"], "linux; leave this task out")


# --- services ---------------------------------------------------------------------------------------------------------


def _with_services(environment: Task, table: TomlTable, root: Path, dockerfiles: Dockerfiles) -> Task:
    """Adds the services of ``environment/docker-compose.yaml`` and the MCP servers of task.toml."""
    compose = read_compose(inside(root, root / "environment" / COMPOSE), root, dockerfiles)
    servers = tuple(map(_read_mcp_server, table.tables("mcp_servers")))
    services = {service.name: service for service in compose.services}
    for section, server in zip(table.tables("mcp_servers"), servers, strict=True):
        if server.url:
            address = urlsplit(server.url)
            service = services.get(address.hostname or "")
            if service is None:
                names = ", ".join(services) or "there is none"
                raise section.error("url", server.url, f"the name of a service of {COMPOSE} ({names})")
            port = address.port or (443 if address.scheme == "https" else 80)
            services[service.name] = replace(service, ports=tuple(sorted({*service.ports, port})))
    return replace(
        environment,
        env={**environment.env, **compose.main_env},
        services=tuple(services.values()),
        mcp_servers=servers,
    )


def _read_mcp_server(table: TomlTable) -> McpServer:
    name = table.text("name")
    if name is None or not _MCP_NAME.fullmatch(name):
        raise table.error("name", name, "letters, digits, dash and underscore")
    if table.data.get("headers"):
        raise table.error("headers", table.data["headers"], "none: MCP servers get no credentials; leave this task out")
    transport = table.choice("transport", "sse", "streamable-http", "http", "stdio") or "sse"
    if transport == "stdio":
        command, args = table.text("command"), table.data.get("args") or []
        if command is None:
            raise table.error("command", None, "the program that serves by its standard streams")
        if not isinstance(args, list) or not all(isinstance(word, str) for word in args):
            raise table.error("args", args, "a list of texts")
        return McpServer(name, transport="stdio", command=(command, *args))
    url = table.text("url")
    try:
        valid = url is not None and urlsplit(url).scheme in ("http", "https") and urlsplit(url).port != 0
    except ValueError:
        valid = False
    if url is None or not valid:
        raise table.error("url", url, "an address such as http://NAME:8000/mcp, with the name of a service")
    return McpServer(name, url, "sse" if transport == "sse" else "streamable-http")


# --- verification -----------------------------------------------------------------------------------------------------

SCRIPT = "test.sh"
SOLUTION = "solve.sh"


def _check_lines(script: Path) -> None:
    """Checks that the first line of a script does not end in CRLF. Linux would treat the CR as a part of the
    interpreter's name.

    Raises:
        ConfigError: The first line ends in CRLF.
    """
    with open(script, "rb") as file:
        first = file.readline(4096)
    if first.endswith(b"\r\n"):
        raise ConfigError(
            f"{script}:1: lines end in CRLF, which no shell reads; convert it: sed -i 's/\\r$//' {script}"
        )


def read_judging(
    toml: TomlTable, root: Path, environment: Task, dockerfiles: Dockerfiles, step: TomlTable | None = None
) -> Judging:
    """Reads how a task or step is verified.

    Args:
        toml: The task's root table.
        environment: The agent's environment. A separate verifier that has no image of its own uses the same image.
        step: The step's ``[[steps]]`` table, when reading a step.

    Raises:
        ConfigError: A value is invalid. The message names file, line, value and remedy.
    """
    homes = [root]
    if step is not None:
        homes.append(root / "steps" / str(step.data["name"]))
    tests = [inside(root, home / "tests") for home in homes if (home / "tests").is_dir()]
    solution = root / "solution"
    if (homes[-1] / "solution").is_dir():
        solution = homes[-1] / "solution"
    levels = [table for table in (toml, step) if table is not None]
    sections = [table.table("verifier") for table in levels]
    passed: set[str] = set()
    separate = _read_separate(sections, homes, root, environment, dockerfiles, passed)
    rules = _read_rules(sections, passed if separate else None)
    if separate is not None:
        own = separate.environment.to_dict()
        rules = msgspec.structs.replace(rules, environment=own, bundled=separate.bundled, secrets=sorted(passed))
    script = next((directory / SCRIPT for directory in reversed(tests) if (directory / SCRIPT).is_file()), None)
    if script is not None and not rules.bundled:
        _check_lines(TaskFiles(root).require(script))
    elif script is None and not rules.bundled:
        raise ConfigError(
            f"{homes[-1] / 'tests' / SCRIPT}: missing; a Harbor task needs tests for its reward: add tests/test.sh"
        )
    if (solution / SOLUTION).is_file():
        _check_lines(solution / SOLUTION)
    return Judging(
        tests=[str(directory) for directory in tests],
        solution=str(inside(root, solution)),
        solution_env=toml.table("solution").variables("env"),
        artifacts=[entry for table in levels for entry in _read_artifacts(table)],
        verifier=rules,
    )


def _read_rules(sections: list[TomlTable], passed: set[str] | None) -> VerifierRules:
    """Reads the task's ``[verifier]`` values. A step's values override them."""
    rules = VerifierRules()
    for section in sections:
        network, judge = rules.network, section.asks_judge("env")
        if "network_mode" in section:
            network = "none" if read_network(section) else ""
        rules = msgspec.structs.replace(
            rules,
            timeout_s=section.number("timeout_sec") or rules.timeout_s,
            user=section.user() or rules.user,
            env={**rules.env, **section.without("env", judge).variables("env", passed)},
            judge=[*rules.judge, *judge],
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
    """The environment of a separate verifier, and whether its image contains the tests."""

    environment: Task
    bundled: bool = False


def _read_separate(
    sections: list[TomlTable],
    homes: list[Path],
    root: Path,
    environment: Task,
    dockerfiles: Dockerfiles,
    passed: set[str],
) -> _Separate | None:
    """Reads the environment of a separate verifier. Returns ``None`` if the verifier shares the agent's environment.

    Args:
        sections: ``[verifier]`` of the task and, when reading a step, of the step. The last section that sets a value
            wins.
        homes: Directories of the task and the step, whose ``tests/`` may contain the image's Dockerfile.
    """
    separate = False
    for section in sections:
        mode = section.choice("environment_mode", "shared", "separate")
        if mode == "shared" and "environment" in section:
            raise section.error("environment_mode", mode, "separate, or no [verifier.environment]")
        if mode or "environment" in section:
            separate = mode != "shared"
    if not separate:
        return None
    environment = replace(environment, services=(), mcp_servers=())
    for home in homes:
        if (home / "tests" / COMPOSE).is_file():
            raise ConfigError(f"{home / 'tests' / COMPOSE}: a verifier has no services of its own; leave this task out")
    own = next((section.table("environment") for section in reversed(sections) if "environment" in section), None)
    for section, home in reversed([*zip(sections, homes, strict=True)]):
        table = section.table("environment")
        if table.data.get("docker_image") or (home / "tests" / "Dockerfile").is_file():
            chosen = table if table or own is None else own
            return _Separate(read_environment(chosen, home / "tests", root, dockerfiles, passed), bundled=True)
    if own is None or not own:
        return _Separate(replace(environment, user=None))
    # Use the agent's image with the verifier's own limits and variables.
    merged = TomlTable(own.path, {**own.data, "docker_image": environment.image}, own.lines, own.name)
    verifier = read_environment(merged, root / "environment", root, dockerfiles, passed)
    agents, data = HarborData.of(environment), HarborData.of(verifier)
    data = msgspec.structs.replace(data, dockerfile=agents.dockerfile, base=agents.base)
    workdir, env = verifier.workdir or environment.workdir, {**environment.env, **verifier.env}
    return _Separate(data.put(replace(verifier, workdir=workdir, env=env)))


def _read_artifacts(table: TomlTable) -> list[DeclaredArtifact]:
    """Reads the list ``artifacts``, whose entries are paths, or tables with ``source``, ``destination`` and
    ``exclude``."""
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
        raise table.error("service", table.data["service"], "main: files of services are not kept; leave this task out")
