"""Datasets of the SWE-bench family, one class each. A class converts its dataset's lines to the fields of ``Instance``.

Values are validated afterwards, in the same way for all datasets.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.texts import parse_json

MAX_LITERAL_BYTES = 2 << 20
"""Maximum size of a string to parse as a Python literal. The syntax tree needs hundreds of bytes per byte of input."""
T = TypeVar("T")


@dataclass(frozen=True)
class Line:
    """One line of a file and its position."""

    path: Path
    number: int
    offset: int
    data: bytes

    def __str__(self) -> str:
        return f"{self.path}:{self.number}"

    def error(self, key: str, value: Any, expected: str) -> ConfigError:
        """Returns an error that names file, line, key, value and what was expected."""
        shown = repr(value)
        return ConfigError(f"{self}: {key} {shown if len(shown) < 80 else shown[:80] + '…'}: expected {expected}")


class SweBench:
    """SWE-bench, Verified, Lite, Multilingual and SWE-Gym, whose field names ``Instance`` uses."""

    @classmethod
    def recognises(cls, raw: Mapping[str, Any]) -> bool:
        """Returns whether a line belongs to this dataset."""
        return True

    @classmethod
    def convert(cls, line: Line, raw: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the fields of an instance, by name.

        Raises:
            ConfigError: a field has the wrong type; names file, line, field and value.
        """
        fields = dict(raw)
        for key in ("FAIL_TO_PASS", "PASS_TO_PASS"):  # some releases use lower-case field names
            if key.lower() in raw:
                fields[key] = raw[key.lower()]
        if image := _image(raw):
            fields["image"] = image
        commands = raw.get("test_cmd") or raw.get("test_cmds")
        if isinstance(commands, list):
            if not all(isinstance(command, str) for command in commands):
                raise line.error("test_cmd", commands, "a text, or a list of texts")
            commands = "\n".join(commands)
        fields["test_cmd"] = commands
        fields["log_parser"] = parser_name(raw.get("log_parser"))
        return fields


class SweRebench(SweBench):
    """SWE-rebench: ``install_config`` contains ``test_cmd``, ``log_parser`` and ``env_vars``."""

    @classmethod
    def recognises(cls, raw: Mapping[str, Any]) -> bool:
        """Returns whether a line belongs to this dataset."""
        return bool(raw.get("install_config"))

    @classmethod
    def convert(cls, line: Line, raw: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the fields of an instance, as :meth:`SweBench.convert` does."""
        install = raw["install_config"]
        if isinstance(install, str):
            install = literal(install)
        if not isinstance(install, dict):
            raise line.error("install_config", install, "an object")
        commands = raw.get("test_cmd") or raw.get("test_cmds") or install.get("test_cmd")
        parser = raw.get("log_parser") or install.get("log_parser")
        variables = raw.get("env") or install.get("env_vars")
        return super().convert(line, {**raw, "test_cmd": commands, "log_parser": parser, "env": variables})


class SweSmith(SweBench):
    """SWE-smith: ``patch`` introduces the bug, and reverting it is the solution."""

    @classmethod
    def recognises(cls, raw: Mapping[str, Any]) -> bool:
        """Returns whether a line belongs to this dataset."""
        names_smith = str(raw.get("repo")).startswith("swesmith/") or "swesmith" in str(_image(raw))
        return names_smith and not raw.get("test_patch")

    @classmethod
    def convert(cls, line: Line, raw: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the fields of an instance, as :meth:`SweBench.convert` does."""
        fields = super().convert(line, raw)
        fields["bug_patch"] = fields.get("bug_patch") or fields.get("patch")
        fields["patch"] = ""
        return fields


class MultiSweBench(SweBench):
    """Multi-SWE-bench: the issues are the problem statement, and tests are the keys of objects with outcomes."""

    KEPT: ClassVar = ("image", "test_cmd", "log_parser", "runner", "workdir", "test_patch", "env")

    @classmethod
    def recognises(cls, raw: Mapping[str, Any]) -> bool:
        """Returns whether a line belongs to this dataset."""
        return {"org", "number", "fix_patch"} <= raw.keys()

    @classmethod
    def convert(cls, line: Line, raw: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the fields of an instance, as :meth:`SweBench.convert` does."""
        org = _field(line, raw, "org", str, "a text")
        repo = _field(line, raw, "repo", str, "a text")
        number = raw["number"]
        if not isinstance(number, int | str):
            raise line.error("number", number, "a number")
        base = _field(line, raw, "base", dict, "an object with the commit as sha")
        failing = [name for key in ("f2p_tests", "s2p_tests", "n2p_tests") for name in _tests(line, raw, key)]
        fields = {
            "instance_id": raw.get("instance_id") or f"{org}__{repo}-{number}",
            "repo": f"{org}/{repo}",
            "base_commit": base.get("sha") or "HEAD",
            "problem_statement": cls._statement(line, raw),
            "patch": raw["fix_patch"],
            "FAIL_TO_PASS": failing or _tests(line, raw, "fixed_tests"),
            "PASS_TO_PASS": _tests(line, raw, "p2p_tests"),
            "image": f"mswebench/{org}_m_{repo}:pr-{number}".lower(),
            "workdir": f"/home/{repo}",
        }
        fields |= {key: raw[key] for key in cls.KEPT if key in raw}
        return super().convert(line, fields)

    @staticmethod
    def _statement(line: Line, raw: Mapping[str, Any]) -> str:
        """Returns the title and body of every issue, or of the pull request if there is no issue."""
        listed = _field(line, raw, "resolved_issues", list, "a list of issues")
        issues = [issue for issue in listed if isinstance(issue, dict)]
        return "\n\n".join(map(_title_and_body, issues)) or _title_and_body(raw)


DATASETS: tuple[type[SweBench], ...] = (MultiSweBench, SweRebench, SweSmith, SweBench)


def dataset_of(raw: Mapping[str, Any]) -> type[SweBench]:
    """Returns the dataset that a line belongs to."""
    return next(dataset for dataset in DATASETS if dataset.recognises(raw))


def parser_name(name: Any) -> str:
    """Returns the name of a log parser in the ``swebench`` package's spelling."""
    text = str(name or "")
    return f"parse_log_{text}" if text and not text.startswith("parse_log_") else text


def _image(raw: Mapping[str, Any]) -> Any:
    """Returns the image of a line. The field's name differs between datasets."""
    return raw.get("image") or raw.get("docker_image") or raw.get("image_name")


def _field(line: Line, raw: Mapping[str, Any], key: str, kind: type[T], expected: str) -> T:
    value = raw.get(key)
    if value is None:
        return kind()
    if not isinstance(value, kind):
        raise line.error(key, value, expected)
    return value


def _title_and_body(issue: Mapping[str, Any]) -> str:
    return f"{issue.get('title') or ''}\n\n{issue.get('body') or ''}".strip()


def _tests(line: Line, raw: Mapping[str, Any], key: str) -> list[Any]:
    tests = raw.get(key) or []
    if not isinstance(tests, dict | list):
        raise line.error(key, tests, "tests by name")
    return list(tests)


def literal(text: str) -> Any:
    """Parses a JSON value or Python literal. Returns ``None`` if the text is neither."""
    try:
        return parse_json(text)
    except ValueError:
        pass
    if len(text) > MAX_LITERAL_BYTES:
        return None
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None
