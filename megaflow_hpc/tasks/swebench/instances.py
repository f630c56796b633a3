"""SWE-bench style JSONL: one line is one instance, whichever data set of that family it comes from.

The data sets differ in small things, all of which end here. :class:`Instance` is the one form the rest knows::

    SWE-bench, Verified, Lite, Multilingual   FAIL_TO_PASS as JSON text; version 5 adds image, eval_script, log_parser
    SWE-Gym                                   lists; no image field
    SWE-rebench                               lists; install_config {test_cmd, log_parser, env_vars}, docker_image
    SWE-bench-Live                            lists; test_cmds, log_parser: pytest
    SWE-smith                                 patch puts the bug *in*; no test_patch, no base_commit; image_name
    Multi-SWE-bench                           org, repo, number, base.sha, fix_patch, f2p_tests {name: …}
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.texts import parse_json

IMAGE = "swebench/sweb.eval.x86_64.{id_1776}:latest"
"""Where a line names no image: what SWE-bench publishes for it."""
WORKDIR = "/testbed"
RUNNERS = ("", "script", "named")
TEXTS = ("problem_statement", "patch", "test_patch", "bug_patch", "eval_script")
"""Fields that are only ever put into files."""
T = TypeVar("T")
_IMAGE = re.compile(r"([a-z][a-z-]*://)?[A-Za-z0-9][A-Za-z0-9._/:@+~-]*")
"""A name, perhaps with a registry: a line is somebody else's, and a path in it would be taken as it is."""
_PATH = re.compile(r"(/(?!\.\.?(/|$))[^/\x00-\x1f\x7f]+)+/?")
LITERAL_BYTES = 2 << 20
"""Longest list that is read as Python's: a syntax tree takes hundreds of bytes for each of the text."""


@dataclass(frozen=True)
class Instance:
    """One problem. Field names are SWE-bench's; what an instance does not have is empty."""

    instance_id: str
    repo: str
    problem_statement: str
    FAIL_TO_PASS: tuple[str, ...]
    PASS_TO_PASS: tuple[str, ...] = ()
    base_commit: str = "HEAD"
    version: str = ""
    patch: str = ""
    """The reference solution."""
    test_patch: str = ""
    bug_patch: str = ""
    """Applied before the agent starts (SWE-smith)."""
    image: str = ""
    workdir: str = WORKDIR
    eval_script: str = ""
    """A whole script that applies the test patch and runs the tests between SWE-bench's markers."""
    test_cmd: str = ""
    env: Mapping[str, str] | None = None
    """Set for the tests."""
    log_parser: str = ""
    """Name of a parser of the ``swebench`` package."""
    eval_type: str = ""
    runner: str = ""
    """``script``: run ``eval_script`` or ``test_cmd`` and parse the log. ``named``: pytest, by the ids themselves."""

    def record(self) -> dict[str, Any]:
        """A line for a JSONL file, without what is empty; reading it gives the same instance."""
        return {key: value for key, value in asdict(self).items() if value not in ("", None, ())}

    @property
    def task_id(self) -> str:
        """The instance's id, other characters than a task id may have replaced by ``_``."""
        return re.sub(r"[^A-Za-z0-9._-]", "_", self.instance_id)

    def fill_in(self, image: str = "", **defaults: str) -> Instance:
        """Fills in ``image`` (``{id}``, ``{id_1776}``, ``{id_s}``) and other fields that the line does not state."""
        changes: dict[str, Any] = {
            key: value for key, value in defaults.items() if value and getattr(self, key) in ("", WORKDIR)
        }
        return replace(self, image=image_name(image, self.instance_id) if image else self.image, **changes)


def image_name(pattern: str, instance_id: str) -> str:
    """An image name for an instance: Docker takes no two underscores in a row, which data sets replace."""
    lower = instance_id.lower()
    return pattern.format(id=lower, id_1776=lower.replace("__", "_1776_"), id_s=lower.replace("__", "_s_"))


# --- reading --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Line:
    """Where an instance was read."""

    path: Path
    number: int
    offset: int
    data: bytes

    def __str__(self) -> str:
        return f"{self.path}:{self.number}"

    def error(self, key: str, value: Any, expected: str) -> ConfigError:
        """An error that names file, line, key, value and what was expected."""
        shown = repr(value)
        return ConfigError(f"{self}: {key} {shown if len(shown) < 80 else shown[:80] + '…'}: expected {expected}")


def read_instances(path: str | os.PathLike[str]) -> Iterator[tuple[Line, Instance]]:
    """Yields every instance of a file, in its order; blank lines are left out.

    Raises:
        ConfigError: names file, line, field, value and what was expected; also an id that is there twice.
    """
    file = Path(path).absolute()
    seen: dict[str, int] = {}
    for line in _lines(file):
        instance = parse(line)
        if instance.task_id in seen:
            raise ConfigError(
                f"{line}: instance_id {instance.instance_id!r} is there twice, also on line {seen[instance.task_id]}; "
                "leave one out"
            )
        seen[instance.task_id] = line.number
        yield line, instance
    if not seen:
        raise ConfigError(f"{file}: holds no instance; expected one JSON object a line")


def _lines(file: Path) -> Iterator[Line]:
    offset = 0
    try:
        with file.open("rb") as stream:
            for number, data in enumerate(stream, 1):
                if data.strip():
                    yield Line(file, number, offset, data)
                offset += len(data)
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read ({error.strerror}); correct the path") from None


def parse(line: Line) -> Instance:
    """Reads one line, of whichever data set, into the one form.

    Raises:
        ConfigError: names file, line, field, value and what was expected.
    """
    try:
        raw = parse_json(line.data)
    except ValueError as error:
        raise ConfigError(f"{line}: not JSON ({error}); expected one JSON object a line") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{line}: holds {type(raw).__name__}; expected a JSON object with instance_id, repo, …")
    try:
        return _instance(line, raw)
    except (AttributeError, KeyError, TypeError, ValueError) as error:  # a field that is of another kind inside
        raise ConfigError(
            f"{line}: of no data set that is known ({error!r:.200}); expected SWE-bench's fields"
        ) from None


def _instance(line: Line, raw: dict[str, Any]) -> Instance:
    found = _multi_swe(line, raw) if {"org", "number", "fix_patch"} <= set(raw) else dict(raw)
    # Some data sets write the two lists in small letters.
    found |= {key: raw[key.lower()] for key in ("FAIL_TO_PASS", "PASS_TO_PASS") if key.lower() in raw}
    install = found.get("install_config") or {}
    if isinstance(install, str):
        install = _literal(install)
    if not isinstance(install, dict):
        raise line.error("install_config", install, "an object")
    values: dict[str, Any] = {}
    for field in fields(Instance):
        if field.name in found and field.name not in ("FAIL_TO_PASS", "PASS_TO_PASS", "env"):
            values[field.name] = _text(line, field.name, found[field.name])
    for key in ("instance_id", "repo", "problem_statement"):
        if not values.get(key, "").strip():
            raise line.error(key, found.get(key), "a text that is not empty")
    values["FAIL_TO_PASS"] = _names(line, "FAIL_TO_PASS", found.get("FAIL_TO_PASS"))
    if not values["FAIL_TO_PASS"]:
        raise line.error("FAIL_TO_PASS", found.get("FAIL_TO_PASS"), "at least one test")
    values["PASS_TO_PASS"] = _names(line, "PASS_TO_PASS", found.get("PASS_TO_PASS") or [])
    commands = found.get("test_cmd") or found.get("test_cmds") or install.get("test_cmd") or ""
    values["test_cmd"] = "\n".join(
        _text(line, "test_cmd", command) for command in (commands if isinstance(commands, list) else [commands])
    )
    values["env"] = _variables(line, found.get("env") or install.get("env_vars") or {})
    parser = str(found.get("log_parser") or install.get("log_parser") or "")
    values["log_parser"] = f"parse_log_{parser}" if parser and not parser.startswith("parse_log_") else parser
    values["image"] = next(
        (_text(line, key, found[key]) for key in ("image", "docker_image", "image_name") if found.get(key)),
        image_name(IMAGE, values["instance_id"]),
    )
    if not values.get("test_patch") and (values["repo"].startswith("swesmith/") or "swesmith" in values["image"]):
        # SWE-smith's patch is the bug; taking it back is the solution.
        values["bug_patch"] = values.get("bug_patch") or values.get("patch", "")
        values["patch"] = ""
    if values.get("runner", "") not in RUNNERS:
        raise line.error("runner", values["runner"], "script or named")
    workdir = values.get("workdir") or WORKDIR
    if not _PATH.fullmatch(workdir):
        raise line.error("workdir", workdir, "an absolute path without .. and control characters")
    if not _IMAGE.fullmatch(values["image"]) or ".." in values["image"].split("/"):
        raise line.error("image", values["image"], "the name of an image, not a path")
    if len(values["instance_id"]) > 200 or not values["instance_id"].strip("."):
        raise line.error("instance_id", values["instance_id"], "at most 200 characters, not only dots")
    return Instance(**{key: value for key, value in values.items() if value not in ("", None)})


def _multi_swe(line: Line, raw: Mapping[str, Any]) -> dict[str, Any]:
    """Multi-SWE-bench's form: the issues are the statement, tests are keys of objects with their outcomes."""

    def given(key: str, kind: type[T], expected: str) -> T:
        found = raw.get(key)
        if found is not None and not isinstance(found, kind):
            raise line.error(key, found, expected)
        return found or kind()

    def tests(key: str) -> list[Any]:
        found = raw.get(key) or []
        if not isinstance(found, dict | list):
            raise line.error(key, found, "tests by name")
        return list(found)

    sha = given("base", dict, "an object with the commit as sha").get("sha") or "HEAD"
    issues = [i for i in given("resolved_issues", list, "a list of issues") if isinstance(i, dict)]
    statement = "\n\n".join(f"{i.get('title') or ''}\n\n{i.get('body') or ''}".strip() for i in issues)
    failing = [name for key in ("f2p_tests", "s2p_tests", "n2p_tests") for name in tests(key)]
    org, repo, number = given("org", str, "a text"), given("repo", str, "a text"), raw["number"]
    if not isinstance(number, int | str):
        raise line.error("number", number, "a number")
    kept = {
        key: raw[key] for key in ("image", "test_cmd", "log_parser", "runner", "workdir", "test_patch") if key in raw
    }
    return {
        "instance_id": raw.get("instance_id") or f"{org}__{repo}-{number}",
        "repo": f"{org}/{repo}",
        "base_commit": sha,
        "problem_statement": statement or f"{raw.get('title') or ''}\n\n{raw.get('body') or ''}".strip(),
        "patch": raw["fix_patch"],
        "FAIL_TO_PASS": failing or tests("fixed_tests"),
        "PASS_TO_PASS": tests("p2p_tests"),
        "image": f"mswebench/{org}_m_{repo}:pr-{number}".lower(),
        "workdir": f"/home/{repo}",
        **kept,
    }


def _text(line: Line, key: str, value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, int | float) and not isinstance(value, bool) and key == "version":
        return str(value)
    if not isinstance(value, str):
        raise line.error(key, value, "a text")
    return _writable(line, key, value, nul=key in TEXTS)


def _writable(line: Line, key: str, text: str, *, nul: bool = False) -> str:
    """Returns a text that can be put into a file and, unless it may hold a zero byte, on a command line."""
    try:
        text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise line.error(key, text, "text in UTF-8, without half of a surrogate pair") from None
    if "\0" in text and not nul:
        raise line.error(key, text, "a text without a zero byte")
    return text


def _names(line: Line, key: str, value: Any) -> tuple[str, ...]:
    """Test names: a list, or a list written as JSON or Python."""
    found = _literal(value) if isinstance(value, str) else value
    if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
        raise line.error(key, value, "a list of test names")
    return tuple(_writable(line, key, name) for name in found)


def _variables(line: Line, value: Any) -> dict[str, str] | None:
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise line.error("env", value, "names and values")
    return {_writable(line, "env", key): _writable(line, "env", str(text)) for key, text in value.items()} or None


def _literal(text: str) -> Any:
    try:
        return parse_json(text)
    except ValueError:
        pass
    if len(text) > LITERAL_BYTES:
        return None
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None
