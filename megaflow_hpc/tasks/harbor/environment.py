"""Reads ``[environment]`` of a Harbor task and ``[verifier.environment]`` of a separate verifier.

Both have the same keys and specify an image in the same way: ``docker_image``, or a Dockerfile in their directory.
Settings that a single rootless container cannot provide are rejected, naming the line.
"""

from __future__ import annotations

from pathlib import Path

from megaflow_hpc.environments.images.dockerfile.dockerfile import (
    Dockerfiles,
    context_digest,
    last_workdir,
)
from megaflow_hpc.errors import ConfigError
from megaflow_hpc.tasks.harbor.data import HarborData
from megaflow_hpc.tasks.harbor.task_toml import TomlTable
from megaflow_hpc.types import Limits, Network, Task

COMPOSE = "docker-compose.yaml"
"""The only file name that Harbor reads as a Compose definition. Files with similar names are data of the task."""


def read_environment(
    table: TomlTable, directory: Path, root: Path, dockerfiles: Dockerfiles, passed: set[str] | None = None
) -> Task:
    """Reads an environment. Returns a task with its image, directory, user, variables, limits and network.

    Args:
        table: the environment's TOML table; may be empty.
        directory: the directory of the environment's Dockerfile, which is the build context.
        root: the task's directory.
        dockerfiles: reads the Dockerfile.
        passed: set that collects the values of the user's variables that are used. ``None`` for an agent's environment,
            which may not use them.

    Raises:
        ConfigError: names file, line, value and remedy.
    """
    _refuse(table, directory)
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

    If the task forbids or restricts network access, it is ``gateway``: only the agent's model is reachable. Otherwise
    it is ``None``: the campaign decides, because compute nodes often have no internet access.
    """
    mode = table.choice("network_mode", "no-network", "public", "allowlist")
    if mode is None:
        return "gateway" if table.data.get("allow_internet") is False else None
    return None if mode == "public" else "gateway"


def inside(root: Path, path: Path) -> Path:
    """Returns ``path`` after checking that it resolves to a location inside the task.

    Raises:
        ConfigError: a symlink points outside the task.
    """
    if not path.resolve().is_relative_to(root.resolve()):
        raise ConfigError(f"{path}: is a link out of the task, to {path.resolve()}; copy the file into the task")
    return path


def _refuse(table: TomlTable, directory: Path) -> None:
    """Rejects settings that a single rootless container cannot provide."""
    if (directory / COMPOSE).is_file():
        raise ConfigError(f"{directory / COMPOSE}: tasks of several services cannot run here; leave this task out")
    for key in ("gpus", "tpu"):
        if table.data.get(key):
            raise table.error(key, table.data[key], "none: sandboxes run on CPU nodes; leave this task out")
    if str(table.data.get("os", "linux")).lower() != "linux":
        raise table.error("os", table.data["os"], "linux; leave this task out")
    if table.data.get("mcp_servers"):
        names = [str(server.data.get("name", "?")) for server in table.tables("mcp_servers")]
        raise table.error("mcp_servers", names, "none: MCP servers are not supported; leave this task out")
