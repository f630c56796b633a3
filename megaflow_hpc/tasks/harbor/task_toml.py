"""Reads a ``task.toml`` table by table. Errors include the line number.

Also expands references such as ``${NAME}`` in environment variables. Tasks are untrusted, so they can only read
variables that the user has allowed, but not, for example, cloud credentials. The values are only passed to verifiers in
separate sandboxes, because in a shared sandbox the agent's programs could read the tests' environment.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megaflow_hpc.errors import ConfigError

ALLOWED_VARIABLES = "MEGAFLOW_TASK_ENV"
"""Environment variable with a comma-separated list of the variables that ``${NAME}`` in a task may read."""

JUDGE_KEYS = ("OPENAI_API_KEY", "ANTHROPIC_API_KEY")
"""Variables of ``[verifier.env]`` that stand for the key of the campaign's judges. If the user allows tasks to read the
user's own variable of the same name, that variable is used instead."""

_TEMPLATE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")
_SIZES = {"G": 1024.0, "M": 1.0, "K": 1 / 1024}


def read_text(path: Path) -> str:
    """Reads a file as UTF-8.

    Raises:
        ConfigError: The file cannot be read. The message names the file.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as UTF-8 text ({error})") from error


def read_toml(path: Path) -> TomlTable:
    """Reads the root table of a file.

    Raises:
        ConfigError: The file is missing or is not valid TOML.
    """
    if not path.is_file():
        raise ConfigError(f"{path}: missing; a Harbor task is a directory with task.toml, instruction.md and tests/")
    text = read_text(path)
    try:
        data = tomllib.loads(text)
    except RecursionError:
        raise ConfigError(f"{path}: not valid TOML: nested too deeply") from None
    except ValueError as error:  # also raised for integers with thousands of digits
        raise ConfigError(f"{path}: not valid TOML: {error}") from None
    return TomlTable(path, data, text.splitlines())


@dataclass(frozen=True)
class TomlTable:
    """A table that spans the lines ``begin`` to ``end``. ``name`` is its dotted key, which is empty for the root
    table."""

    path: Path
    data: dict[str, Any]
    lines: Sequence[str] = field(repr=False)
    name: str = ""
    begin: int = 0
    end: int | None = None

    def __bool__(self) -> bool:
        return bool(self.data)

    def __contains__(self, key: str) -> bool:
        return key in self.data

    def error(self, key: str, value: Any, expected: str) -> ConfigError:
        """Creates an error that names the file, the line of ``key``, its value and the expected value."""
        line = self._line(self.name, key)
        location = f"{self.path}:{line}" if line else str(self.path)
        return ConfigError(
            f"{location}: {f'[{self.name}] ' if self.name else ''}{key} = {value!r}: expected {expected}"
        )

    def _line(self, section: str, key: str) -> int | None:
        current = section if self.begin else ""
        dotted = f"{section}.{key}" if section else key
        for number, line in enumerate(self.lines[self.begin : self.end], self.begin + 1):
            header = re.match(r"\s*\[+\s*([^\]]+?)\s*\]", line)
            if header:
                current = header[1]
                if current == dotted:
                    return number
            elif current == section and re.match(rf"\s*\"?{re.escape(key)}\"?\s*[=.]", line):
                return number
        if "." in section:  # an inline table
            return self._line(*section.rsplit(".", 1))
        return self._line("", section) if section else None

    # --- tables -------------------------------------------------------------------------------------------------

    def table(self, key: str) -> TomlTable:
        """Returns the table at ``key``, or an empty table if it is missing."""
        value = self.data.get(key, {})
        if not isinstance(value, dict):
            raise self.error(key, value, "a table")
        return TomlTable(self.path, value, self.lines, self._dotted(key), self.begin, self.end)

    def tables(self, key: str) -> list[TomlTable]:
        """Returns the array of tables at ``key``, each with its own line range."""
        values = self.data.get(key) or []
        if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
            raise self.error(key, values, f"[[{self._dotted(key)}]] tables")
        header = re.compile(rf"\s*\[\[\s*{re.escape(self._dotted(key))}\s*\]\]")
        starts = [n for n, line in enumerate(self.lines[: self.end]) if n >= self.begin and header.match(line)]
        if len(starts) != len(values):  # inline tables
            return [
                TomlTable(self.path, value, self.lines, self._dotted(key), self.begin, self.end) for value in values
            ]
        ends = [*starts, self.end][1:]
        return [
            TomlTable(self.path, value, self.lines, self._dotted(key), begin, end)
            for value, begin, end in zip(values, starts, ends, strict=True)
        ]

    def _dotted(self, key: str) -> str:
        return f"{self.name}.{key}" if self.name else key

    # --- values -------------------------------------------------------------------------------------------------

    def text(self, key: str) -> str | None:
        """Returns a non-empty string. Like the following methods, returns ``None`` if the key is missing."""
        value = self.data.get(key)
        if value is None:
            return None
        if not isinstance(value, str) or not value.strip() or "\0" in value:
            raise self.error(key, value, "a text that is not empty")
        return value

    def choice(self, key: str, *options: str) -> str | None:
        """Returns a string, which must be one of ``options``."""
        value = self.text(key)
        if value is not None and value not in options:
            raise self.error(key, value, f"{', '.join(options[:-1])} or {options[-1]}")
        return value

    def number(self, key: str, default: float | None = None) -> float | None:
        """Returns a positive number. The key's name states the unit."""
        value = self.data.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e12:
            raise self.error(key, value, "a number above 0")
        return float(value)

    def user(self, key: str = "user") -> str | None:
        """Returns a user name or uid as a string."""
        value = self.data.get(key)
        if value is None or (isinstance(value, str | int) and not isinstance(value, bool)):
            return None if value is None else str(value)
        raise self.error(key, value, "a name or a uid")

    def path_inside(self, key: str) -> str | None:
        """Returns an absolute path in the container."""
        value = self.text(key)
        if value is not None and not value.startswith("/"):
            raise self.error(key, value, "an absolute path")
        return value

    def size_mb(self, key: str, old_key: str) -> int | None:
        """Returns a size in MB, given as ``memory_mb = 2048`` or in the legacy form ``memory = "2G"``."""
        number = self.number(key)
        if number is not None:
            return int(number)
        old = self.data.get(old_key)
        if old is None:
            return None
        match = re.fullmatch(r"\s*([0-9]{1,12}(?:\.[0-9]*)?)\s*([GMK])B?\s*", str(old), re.IGNORECASE)
        if not match:
            raise self.error(old_key, old, "a size such as '2G' or '512M'")
        return int(float(match[1]) * _SIZES[match[2].upper()])

    def variables(self, key: str, passed: set[str] | None = None) -> dict[str, str]:
        """Returns environment variables with ``${NAME}`` and ``${NAME:-default}`` expanded.

        Args:
            passed: Set to which the values of the user's variables in use are added. ``None`` forbids using them.
        """
        table = self.table(key)
        values: dict[str, str] = {}
        for name, value in table.data.items():
            if not isinstance(value, str):
                raise table.error(name, value, "a text")
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) or "\0" in value:
                raise table.error(name, value, "a name of letters, digits and _, and a value without a zero byte")
            values[name] = _TEMPLATE.sub(lambda match, name=name: table._resolve(name, match, passed), value)  # type: ignore[misc]
        return values

    def asks_judge(self, key: str) -> list[str]:
        """Returns the names of a table's variables whose value is the key of a judge, as in ``NAME =
        "${OPENAI_API_KEY}"``."""
        allowed = {word.strip() for word in os.environ.get(ALLOWED_VARIABLES, "").split(",")}
        keys = {f"${{{name}}}" for name in JUDGE_KEYS if name not in allowed}
        return [name for name, value in self.table(key).data.items() if isinstance(value, str) and value in keys]

    def without(self, key: str, names: Collection[str]) -> TomlTable:
        """Returns a copy of this table, with ``names`` removed from the table at ``key``."""
        kept = {name: value for name, value in self.table(key).data.items() if name not in names}
        return replace(self, data={**self.data, key: kept}) if names else self

    def _resolve(self, name: str, match: re.Match[str], passed: set[str] | None) -> str:
        allowed = {word.strip() for word in os.environ.get(ALLOWED_VARIABLES, "").split(",")}
        value = os.environ.get(match[1]) if match[1] in allowed else None
        if passed is None and (value is not None or match[2] is None):
            remedy = "give a default in the task"
            if value is not None:
                remedy = f"remove {match[1]} from {ALLOWED_VARIABLES}"
            raise self.error(
                name,
                match[0],
                "none of your variables, because agents could read them here. Only a verifier in its own sandbox "
                'gets them: move it to [verifier.env] of a task with [verifier] environment_mode = "separate", '
                f"or {remedy}",
            )
        if value and passed is not None:
            passed.add(value)
        if value is None:
            value = match[2]
        if value is None:
            why = f"{match[1]} to be set" if match[1] in allowed else f"{match[1]} to be allowed"
            remedy = f"export {match[1]}=… and {ALLOWED_VARIABLES}={match[1]}, or give a default in the task"
            raise self.error(name, match[0], f"{why}: {remedy}")
        return value
