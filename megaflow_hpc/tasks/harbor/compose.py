"""Reads the services of a Harbor task's ``docker-compose.yaml``.

Harbor merges the file over its own definition of ``main``, the agent's container. Here, every other service becomes a
:class:`~megaflow_hpc.types.Service`. Keys that have no effect in a sandbox are ignored. Keys that a sandbox cannot
support are rejected with an error that names the line.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from megaflow_hpc.config.reading import place_of, read_yaml
from megaflow_hpc.config.services import HOST_NAME, RESERVED, order_problem
from megaflow_hpc.environments.images.dockerfile.dockerfile import Dockerfiles, context_digest
from megaflow_hpc.environments.images.layered import tcp_ports
from megaflow_hpc.errors import ConfigError
from megaflow_hpc.types import HealthCheck, Limits, Service

COMPOSE = "docker-compose.yaml"
"""The only file that Harbor reads as a Compose definition. Files with similar names are part of the task's data."""
MAIN = "main"
"""Name of the agent's own container."""

_READ = {
    *("image", "build", "command", "entrypoint", "environment", "healthcheck", "ports", "expose", "depends_on"),
    *("working_dir", "user", "mem_limit", "cpus", "deploy", "volumes"),
}
_IGNORED = {
    *("container_name", "hostname", "init", "labels", "logging", "networks", "platform", "pull_policy", "read_only"),
    *("restart", "shm_size", "stdin_open", "stop_grace_period", "stop_signal", "tmpfs", "tty", "ulimits"),
    *("mem_reservation", "memswap_limit", "oom_score_adj", "pids_limit", "attach", "annotations"),
}
_IGNORED_IN_MAIN = {*_IGNORED, "ports", "expose", "mem_limit", "cpus", "deploy"}
_REASONS = {
    "cap_add": "sandboxes have no capabilities on the host",
    "configs": "copy the file in the service's Dockerfile",
    "devices": "sandboxes have no devices of the host",
    "env_file": "write the variables under environment",
    "extends": "write the service in full",
    "network_mode": "every service has a network of its own",
    "pid": "every service has processes of its own",
    "privileged": "sandboxes have no privileges on the host",
    "profiles": "all services of a task are started",
    "secrets": "services get no secrets",
    "security_opt": "sandboxes have no privileges on the host",
}
_TOP_LEVEL = {"services", "version", "name", "networks", "volumes"}
_VARIABLE = re.compile(r"\$(?:(\$)|\{([A-Za-z_]\w*)(?:(:?[-?+])([^}]*))?\}|([A-Za-z_]\w*))")
_DURATION = re.compile(r"(?:(\d+)h)?(?:(\d+)m(?!s))?(?:(\d+(?:\.\d+)?)s)?(?:(\d+)ms)?")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([bkmg]?)b?", re.IGNORECASE)
_MEGABYTES = {"": 1e-6, "b": 1e-6, "k": 1024e-6, "m": 1024**2 / 1e6, "g": 1024**3 / 1e6}
_MAX_READY_S = 3600.0
"""Maximum seconds for a service to become healthy. Limited because the rollout occupies a slot meanwhile."""
_MIN_READY_S = 60.0
"""Minimum seconds that a service gets to become healthy, because containers start more slowly on a cluster than on a
laptop."""


@dataclass(frozen=True)
class Compose:
    """The services that a file defines, and the variables that it adds to the agent's sandbox."""

    services: tuple[Service, ...] = ()
    main_env: Mapping[str, str] = field(default_factory=dict)


def read_compose(file: Path, root: Path, dockerfiles: Dockerfiles) -> Compose:
    """Reads a ``docker-compose.yaml``.

    Args:
        file: The file, which need not exist.
        root: The task's directory, which build contexts must not leave.
        dockerfiles: Reads the services' Dockerfiles.

    Raises:
        ConfigError: The services need features that sandboxes lack. The message names file, line, key and remedy.
    """
    if not file.is_file():
        return Compose()
    value, node = read_yaml(file)
    top = _Part(file, node, (), value if value is not None else {})
    for key in top.mapping():
        if key not in _TOP_LEVEL and not key.startswith("x-"):
            raise top.error(key, "not supported; leave this task out")
    services = top.part("services").mapping()
    main_env: dict[str, str] = {}
    read = []
    for name in services:
        part = top.part("services").part(name)
        if name == MAIN:
            main_env = _read_main(part)
        else:
            read.append(_read_service(name, part, root, dockerfiles))
    _check_volumes(top, [service.name for service in read])
    if problem := order_problem({service.name: service.after for service in read}):
        raise ConfigError(f"{file}: {problem}")
    return Compose(tuple(read), main_env)


@dataclass(frozen=True)
class _Part:
    """A value in the file, with its location for error messages."""

    file: Path
    node: yaml.Node | None
    path: tuple[Any, ...]
    value: Any

    def error(self, key: Any, problem: str) -> ConfigError:
        """Returns an error located at ``key`` inside this value, or at the value itself if ``key`` is empty."""
        path = (*self.path, key) if key != "" else self.path
        return ConfigError(f"{place_of(self.node, path, str(self.file))}: {'.'.join(map(str, path))}: {problem}")

    def part(self, key: str) -> _Part:
        return _Part(self.file, self.node, (*self.path, key), self.mapping().get(key))

    def mapping(self) -> dict[str, Any]:
        if self.value is None:
            return {}
        if not isinstance(self.value, dict) or not all(isinstance(key, str) for key in self.value):
            raise self.error("", "expected names with their values")
        return self.value

    def items(self) -> list[Any]:
        """Returns the value as a list. A single value becomes a list with one item."""
        if self.value is None:
            return []
        return self.value if isinstance(self.value, list) else [self.value]

    def text(self, value: Any = None) -> str:
        """Returns a value as text, with ``${NAME:-default}`` replaced by the default."""
        value = self.value if value is None else value
        if isinstance(value, bool):
            return str(value).lower()
        if not isinstance(value, str | int | float):
            raise self.error("", "expected a text")
        return _VARIABLE.sub(self._resolve, str(value))

    def _resolve(self, match: re.Match[str]) -> str:
        if match[1]:
            return "$"
        if match[3] in ("-", ":-"):
            return match[4]
        if match[3] in ("+", ":+"):
            return ""
        raise self.error(
            "", f"{match[0]}: services get none of your variables; give a default in the task, or leave this task out"
        )

    def text_or(self, default: str | None) -> str | None:
        """Returns the value as text, or ``default`` if it is missing."""
        return default if self.value is None else self.text()

    def words(self) -> tuple[str, ...]:
        """Returns a command as a list of words. Like Compose, splits a string as a shell would, without running a
        shell."""
        if isinstance(self.value, list):
            return tuple(self.text(word) for word in self.value)
        if self.value is None:
            return ()
        try:
            return tuple(shlex.split(self.text()))
        except ValueError as error:
            raise self.error("", f"{error}; write a list") from None

    def seconds(self, key: str, default: float) -> float:
        part = self.part(key)
        if part.value is None:
            return default
        match = _DURATION.fullmatch(part.text())
        if not match or not match[0]:
            raise self.error(key, f"{part.value!r}: expected a duration such as 1m30s")
        hours, minutes, seconds, thousandths = (float(number or 0) for number in match.groups())
        return min(_MAX_READY_S, 3600 * hours + 60 * minutes + seconds + thousandths / 1000)

    def megabytes(self, key: str) -> int | None:
        part = self.part(key)
        if part.value is None:
            return None
        match = _SIZE.fullmatch(part.text())
        size = float(match[1]) * _MEGABYTES[match[2].lower()] if match else math.inf
        if size == math.inf:
            raise self.error(key, f"{part.value!r}: expected a size such as 512m")
        return max(1, int(size)) if size else None


def _check_keys(part: _Part, known: set[str]) -> None:
    for key, value in part.mapping().items():
        if key in known or key.startswith("x-") or value in (None, False, [], {}):
            continue
        reason = _REASONS.get(key)
        raise part.error(key, f"not supported{f': {reason}' if reason else ''}; leave this task out")


def _read_main(part: _Part) -> dict[str, str]:
    """Reads the variables that the file adds to the agent's container, whose other settings come from Harbor."""
    build, command = part.part("build"), part.part("command")
    context = build.value.get("context", ".") if isinstance(build.value, dict) else build.value
    if context not in (None, ".", "./", "${CONTEXT_DIR}"):
        raise part.error("build", "the agent's image is built from environment/Dockerfile; leave this task out")
    if command.value is not None and "sleep" not in command.words() and "sleep infinity" not in command.words():
        raise part.error("command", "the agent's sandbox runs no program of the task; leave this task out")
    _check_keys(part, {*_IGNORED_IN_MAIN, "environment", "depends_on", "build", "command"})
    return _environment(part.part("environment"))


def _read_service(name: str, part: _Part, root: Path, dockerfiles: Dockerfiles) -> Service:
    if not HOST_NAME.match(name) or name in RESERVED:
        raise part.error("", "expected a host name of lower-case letters, digits, dot, dash or underscore")
    _check_keys(part, {*_READ, *_IGNORED})
    image, dockerfile, base = part.part("image").text_or(""), "", ""
    env = _environment(part.part("environment"))
    entrypoint, command = part.part("entrypoint").words(), part.part("command").words()
    ports = _ports(part)
    workdir, user = part.part("working_dir").text_or(None), part.part("user").text_or(None)
    if part.part("build").value is not None:
        parsed = dockerfiles.read(_dockerfile(part, root))
        base = image = parsed.base
        if parsed.needs_build:
            dockerfile, image = str(parsed.path), f"{parsed.base}+{context_digest(parsed)[:12]}"
        env = {**parsed.environment, **env}
        last = parsed.last
        if not entrypoint:
            command = command or last.command or ()
            entrypoint = last.entrypoint or ()
        ports = ports or tcp_ports(last.ports)
        workdir, user = workdir or parsed.workdir, user or parsed.user
    elif not image:
        raise part.error("", "neither image nor build; name an image")
    limits = part.part("deploy").part("resources").part("limits")
    replicas = part.part("deploy").part("replicas")
    if replicas.value not in (None, 1):
        raise part.error("deploy", f"{replicas.value!r} replicas: each service runs once; leave this task out")
    cpus = part.part("cpus") if part.part("cpus").value is not None else limits.part("cpus")
    try:
        cpus_wanted = float(cpus.text()) if cpus.value is not None else None
        if cpus_wanted is not None and not 0 <= cpus_wanted < math.inf:
            raise ValueError(cpus_wanted)
    except ValueError:
        raise part.error("cpus", f"{cpus.value!r}: expected a number from 0 on") from None
    return Service(
        name=name,
        image=image or "",
        command=command,
        entrypoint=entrypoint,
        env=env,
        workdir=workdir,
        user=user,
        ports=ports,
        health=_health(part.part("healthcheck")),
        after=_after(part.part("depends_on")),
        limits=Limits(memory_mb=part.megabytes("mem_limit") or limits.megabytes("memory"), cpus=cpus_wanted),
        dockerfile=dockerfile,
        base=base,
    )


def _dockerfile(part: _Part, root: Path) -> Path:
    """Returns the Dockerfile of a service's ``build``, which must be in its build context."""
    build = part.part("build")
    options = build.value if isinstance(build.value, dict) else {"context": build.value}
    for key in options:
        if key not in ("context", "dockerfile"):
            raise build.error(key, "not supported; write it into the Dockerfile")
    context = build.text(options.get("context", "."))
    dockerfile = build.text(options.get("dockerfile", "Dockerfile"))
    if "/" in dockerfile.removeprefix("./"):
        raise build.error("dockerfile", f"{dockerfile!r}: expected a file of the context; move it there")
    directory = part.file.parent / context
    path = directory / dockerfile
    if not path.resolve().is_relative_to(root.resolve()):
        raise build.error("context", f"{context!r} leads out of the task; copy the files into it")
    if not path.is_file():
        raise build.error("context", f"{path}: no such file")
    return Path(directory.resolve(), dockerfile.removeprefix("./"))


def _environment(part: _Part) -> dict[str, str]:
    if isinstance(part.value, list):
        pairs = [part.text(entry).partition("=") for entry in part.value]
        given: dict[str, Any] = {name: value if sign else None for name, sign, value in pairs}
    else:
        given = part.mapping()
    env = {}
    for name, value in given.items():
        if value is None:
            raise part.error("", f"{name}: services get none of your variables; write {name}=VALUE")
        if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
            raise part.error("", f"{name!r}: expected a name of letters, digits and _")
        env[name] = value if isinstance(part.value, list) else part.text(value)
    return env


def _ports(part: _Part) -> tuple[int, ...]:
    """Returns the ports inside the container. Ignores the host ports on which Docker would publish them."""
    names = []
    for key in ("ports", "expose"):
        for entry in part.part(key).items():
            inner = entry.get("target") if isinstance(entry, dict) else part.part(key).text(entry).rsplit(":", 1)[-1]
            if not tcp_ports([str(inner)]) and not str(inner).endswith("/udp"):
                raise part.error(key, f"{entry!r}: expected a port")
            names.append(str(inner))
    return tcp_ports(names)


def _health(part: _Part) -> HealthCheck:
    test = part.part("test")
    interval_s, timeout_s = part.seconds("interval", 30.0), part.seconds("timeout", 30.0)
    retries = part.mapping().get("retries", 3)
    if isinstance(retries, bool) or not isinstance(retries, int) or retries < 0:
        raise part.error("retries", f"{retries!r}: expected a whole number")
    wanted_s = part.seconds("start_period", 0.0) + min(retries or 3, _MAX_READY_S) * (interval_s + timeout_s)
    ready_s = min(_MAX_READY_S, max(_MIN_READY_S, wanted_s))
    command: tuple[str, ...] = ()
    if test.value is not None and not part.mapping().get("disable"):
        words = tuple(map(test.text, test.value)) if isinstance(test.value, list) else ("CMD-SHELL", test.text())
        kind, *rest = words or ("",)
        if kind not in ("CMD", "CMD-SHELL", "NONE") or (kind != "NONE" and not rest):
            raise part.error("test", f"{test.value!r}: expected a text, or a list that begins with CMD or CMD-SHELL")
        command = {"CMD": tuple(rest), "CMD-SHELL": ("/bin/sh", "-c", *rest[:1]), "NONE": ()}[kind]
    return HealthCheck(command, max(0.1, interval_s), max(1.0, timeout_s), ready_s)


def _after(part: _Part) -> tuple[str, ...]:
    names = list(part.value) if isinstance(part.value, list | dict) else []
    conditions = part.value if isinstance(part.value, dict) else {}
    for name in names:
        options = conditions.get(name) or {}
        condition = options.get("condition", "service_started") if isinstance(options, dict) else options
        if condition not in ("service_started", "service_healthy"):
            raise part.error(name, f"condition {condition!r}: services here run as long as the rollout; leave it out")
        if name == MAIN:
            raise part.error(name, "services start before the agent's sandbox; leave this task out")
    return tuple(names)


def _check_volumes(top: _Part, names: list[str]) -> None:
    """Rejects bind mounts, and volumes that several services share."""
    owners: dict[str, str] = {}
    for name in names:
        part = top.part("services").part(name).part("volumes")
        for entry in part.items():
            if isinstance(entry, dict):
                kind, source = str(entry.get("type", "volume")), str(entry.get("source", ""))
            else:
                source, colon, _ = part.text(entry).partition(":")
                source = source if colon else ""
                kind = "bind" if source.startswith((".", "/", "~")) else "volume"
            if kind not in ("volume", "tmpfs"):
                raise part.error(
                    "", f"{entry!r}: no directory can be bound; copy its files in the service's Dockerfile"
                )
            if source and owners.setdefault(source, name) != name:
                raise part.error("", f"{source!r}: services share no files, and {owners[source]} has it too")
