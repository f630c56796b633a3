"""Reads Harbor task directories (schema up to 1.4; Harbor 0.25 says which keys there are and what they default to).

::

    TASK/  task.toml  instruction.md  environment/[Dockerfile …]  tests/test.sh …  [solution/solve.sh …]

What only the verifier, the image store or ``prepare`` needs is in ``task.metadata["harbor"]``; the author's own
``[metadata]`` is beside it. Keys that Harbor would ignore are ignored; what a cluster cannot give is refused.
"""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path
from typing import Any

from megaflow_hpc.environments.dockerfile import Dockerfile, context_digest, last_workdir
from megaflow_hpc.errors import ConfigError
from megaflow_hpc.types import Limits, Network, Task

TASK_ID = re.compile(r"[A-Za-z0-9._-]+")
DEFAULT_AGENT_S = 900.0
"""Harbor leaves ``[agent] timeout_sec`` open; a rollout must end."""

_TEMPLATE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")
_SIZES = {"G": 1024.0, "M": 1.0, "K": 1 / 1024}


def read_harbor_task(path: str | os.PathLike[str]) -> Task:
    """One task directory.

    Raises:
        ConfigError: names the file, the line where there is one, the value and the remedy.
    """
    root = Path(path).absolute()
    toml = _Toml.read(root / "task.toml")
    if not TASK_ID.fullmatch(root.name):
        raise ConfigError(
            f"{root}: task id {root.name!r}: expected letters, digits, '.', '_' and '-'; rename the directory"
        )
    instruction = root / "instruction.md"
    tests = root / "tests" / "test.sh"
    _refuse(toml, root)
    if not instruction.is_file():
        raise ConfigError(f"{instruction}: missing; a Harbor task needs its instruction there")
    if not tests.is_file():
        raise ConfigError(f"{tests}: missing; a Harbor task without tests cannot be rewarded: add tests/test.sh")
    dockerfile = root / "environment" / "Dockerfile"
    named = toml.text("environment", "docker_image")
    parsed = Dockerfile.read(dockerfile) if named is None and dockerfile.is_file() else None
    if named is None and parsed is None:
        raise ConfigError(
            f"{toml.path}: neither [environment] docker_image nor environment/Dockerfile; name an image, "
            "and map it in environment.images of the campaign"
        )
    harbor: dict[str, Any] = {
        "verifier_env": toml.variables("verifier", "env"),
        "verifier_user": toml.user("verifier"),
        "upload_environment": named is not None and not dockerfile.is_file() and (root / "environment").is_dir(),
        "healthcheck": toml.table("environment", "healthcheck"),
        "solution_env": toml.variables("solution", "env"),
    }
    env = toml.variables("environment", "env")
    image = named or ""
    if named is None and parsed is not None:
        image = parsed.base
        env = {**parsed.environment, **env}
        if parsed.needs_build:
            image = f"{parsed.base}+{context_digest(parsed)[:12]}"
            harbor["dockerfile"] = str(dockerfile)
            harbor["from"] = parsed.base
    workdir = toml.text("environment", "workdir") or (parsed.workdir if parsed else None)
    if workdir is None and named is not None and dockerfile.is_file():
        workdir = last_workdir(dockerfile)
    if workdir is not None and not workdir.startswith("/"):
        raise toml.error("environment", "workdir", workdir, "an absolute path")
    return Task(
        id=root.name,
        instruction=_read_text(instruction),
        image=image,
        path=str(root),
        workdir=workdir,
        user=toml.user("agent") or (parsed.user if parsed else None),
        env=env,
        agent_timeout_s=toml.number("agent", "timeout_sec", DEFAULT_AGENT_S) or DEFAULT_AGENT_S,
        verifier_timeout_s=toml.number("verifier", "timeout_sec", 600.0) or 600.0,
        limits=Limits(
            memory_mb=toml.size("memory_mb", "memory"),
            cpus=toml.number("environment", "cpus"),
            disk_mb=toml.size("storage_mb", "storage"),
        ),
        network=_network(toml),
        metadata={**toml.table("metadata"), "harbor": harbor},
    )


def _network(toml: _Toml) -> Network | None:
    """``gateway`` where a task forbids or restricts the network: never more than it allows, and its model answers.

    A task that does not is left to the campaign: compute nodes often have no way out.
    """
    mode = toml.text("environment", "network_mode")
    if mode is None:
        return "gateway" if toml.data.get("environment", {}).get("allow_internet") is False else None
    if mode not in ("no-network", "public", "allowlist"):
        raise toml.error("environment", "network_mode", mode, "no-network, public or allowlist")
    return None if mode == "public" else "gateway"


def _refuse(toml: _Toml, root: Path) -> None:
    """What no single container without root can be."""
    for name in ("docker-compose.yaml", "docker-compose.yml"):
        if (root / "environment" / name).is_file():
            raise ConfigError(
                f"{root / 'environment' / name}: tasks of several services cannot run here; leave this task out"
            )
    if toml.data.get("steps"):
        raise toml.error(None, "steps", "[[steps]]", "a single-step task; multi-step tasks are not supported yet")
    environment = toml.table("environment")
    for key in ("gpus", "tpu"):
        if environment.get(key):
            raise toml.error("environment", key, environment[key], "none: sandboxes run on CPU nodes")
    if str(environment.get("os", "linux")).lower() != "linux":
        raise toml.error("environment", "os", environment["os"], "linux")
    verifier = toml.table("verifier")
    if verifier.get("environment_mode") == "separate" or verifier.get("environment"):
        raise toml.error("verifier", "environment_mode", "separate", "shared; a separate verifier is not supported yet")


class _Toml:
    """A parsed ``task.toml`` whose errors know their line."""

    def __init__(self, path: Path, text: str, data: dict[str, Any]) -> None:
        self.path = path
        self.data = data
        self._lines = text.splitlines()

    @classmethod
    def read(cls, path: Path) -> _Toml:
        if not path.is_file():
            raise ConfigError(
                f"{path}: missing; a Harbor task is a directory with task.toml, instruction.md and tests/"
            )
        text = _read_text(path)
        try:
            return cls(path, text, tomllib.loads(text))
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{path}: not valid TOML: {error}") from error

    def error(self, section: str | None, key: str, value: Any, expected: str) -> ConfigError:
        line = self._line(section, key)
        place = f"{self.path}:{line}" if line else str(self.path)
        return ConfigError(f"{place}: {f'[{section}] ' if section else ''}{key} = {value!r}: expected {expected}")

    def _line(self, section: str | None, key: str) -> int | None:
        current: str | None = None
        for number, line in enumerate(self._lines, 1):
            header = re.match(r"\s*\[+\s*([^\]]+?)\s*\]", line)
            if header:
                current = header[1]
                if current in (key, f"{section}.{key}"):
                    return number
            elif current == section and re.match(rf"\s*\"?{re.escape(key)}\"?\s*=", line):
                return number
        if section and "." in section:  # an inline table
            return self._line(*section.rsplit(".", 1))
        return None

    def table(self, section: str, key: str | None = None) -> dict[str, Any]:
        value = self.data.get(section, {})
        if not isinstance(value, dict):
            raise self.error(None, section, value, "a table")
        if key is None:
            return value
        inner = value.get(key, {})
        if not isinstance(inner, dict):
            raise self.error(section, key, inner, "a table")
        return inner

    def text(self, section: str, key: str) -> str | None:
        value = self.table(section).get(key)
        if value is None:
            return None
        if not isinstance(value, str) or not value.strip():
            raise self.error(section, key, value, "a text that is not empty")
        return value

    def number(self, section: str, key: str, default: float | None = None) -> float | None:
        value = self.table(section).get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e12:
            raise self.error(section, key, value, "a number above 0")
        return float(value)

    def user(self, section: str) -> str | None:
        value = self.table(section).get("user")
        if value is None or (isinstance(value, str | int) and not isinstance(value, bool)):
            return None if value is None else str(value)
        raise self.error(section, "user", value, "a name or a uid")

    def size(self, key: str, old_key: str) -> int | None:
        """``memory_mb = 2048``, or the older ``memory = "2G"``."""
        number = self.number("environment", key)
        if number is not None:
            return int(number)
        old = self.table("environment").get(old_key)
        if old is None:
            return None
        match = re.fullmatch(r"\s*([0-9.]+)\s*([GMK])B?\s*", str(old), re.IGNORECASE)
        if not match:
            raise self.error("environment", old_key, old, "a size such as '2G' or '512M'")
        return int(float(match[1]) * _SIZES[match[2].upper()])

    def variables(self, section: str, key: str) -> dict[str, str]:
        """Environment variables; ``${NAME}`` and ``${NAME:-default}`` are taken from this process's environment."""
        found: dict[str, str] = {}
        for name, value in self.table(section, key).items():
            if not isinstance(value, str):
                raise self.error(f"{section}.{key}", name, value, "a text")
            found[name] = self._resolve(value, f"{section}.{key}", name)
        return found

    def _resolve(self, text: str, section: str, name: str) -> str:
        def replace(match: re.Match[str]) -> str:
            value = os.environ.get(match[1], match[2])
            if value is None:
                remedy = f"a variable that is set here: export {match[1]}, or give a default"
                raise self.error(section, name, match[0], remedy)
            return value

        return _TEMPLATE.sub(replace, text)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as UTF-8 text ({error})") from error
