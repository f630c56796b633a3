"""Reads SWE-bench style JSONL: each line is one instance from any dataset of that family.

:mod:`~megaflow_hpc.tasks.swebench.datasets` converts each dataset's lines. The rest of the package uses
:class:`Instance`.
"""

from __future__ import annotations

import io
import os
import re
import tokenize
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.tasks.swebench.datasets import Line, dataset_of, literal
from megaflow_hpc.texts import parse_json

IMAGE = "swebench/sweb.eval.x86_64.{id_1776}:latest"
"""Default image of an instance, as published by SWE-bench."""
WORKDIR = "/testbed"
RUNNERS = ("", "script", "named")
TEXTS = ("problem_statement", "patch", "test_patch", "bug_patch", "eval_script")
"""Fields whose text is only written to files."""
_IMAGE = re.compile(r"([a-z][a-z-]*://)?[A-Za-z0-9][A-Za-z0-9._/:@+~-]*")
"""Pattern of an image name, optionally with a registry. Lines are untrusted, and an image given as a path would be
used unchecked."""
_PATH = re.compile(r"(/(?!\.\.?(/|$))[^/\x00-\x1f\x7f]+)+/?")


@dataclass(frozen=True)
class Instance:
    """One problem. Field names are those of SWE-bench; missing fields are empty."""

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
    """Patch that introduces the bug before the agent starts (SWE-smith)."""
    image: str = ""
    workdir: str = WORKDIR
    eval_script: str = ""
    """Script that applies the test patch and runs the tests between SWE-bench's markers."""
    test_cmd: str = ""
    env: Mapping[str, str] | None = None
    """Environment variables for the tests."""
    log_parser: str = ""
    """Name of a log parser of the ``swebench`` package."""
    eval_type: str = ""
    runner: str = ""
    """``script``: run ``eval_script`` or ``test_cmd`` and parse the log. ``named``: run the tests by id with pytest."""

    def record(self) -> dict[str, Any]:
        """Returns a JSONL record without empty fields. Parsing it gives an equal instance."""
        return {key: value for key, value in asdict(self).items() if value not in ("", None, ())}

    @property
    def task_id(self) -> str:
        """The instance's id, with characters that are invalid in a task id replaced by ``_``."""
        return re.sub(r"[^A-Za-z0-9._-]", "_", self.instance_id)

    def fill_in(self, image: str = "", **defaults: str) -> Instance:
        """Returns a copy with ``image`` expanded (``{id}``, ``{id_1776}``, ``{id_s}``) and with defaults for missing
        fields."""
        changes: dict[str, Any] = {
            key: value for key, value in defaults.items() if value and getattr(self, key) in ("", WORKDIR)
        }
        return replace(self, image=image_name(image, self.instance_id) if image else self.image, **changes)


TEXT_FIELDS = tuple(
    field.name for field in fields(Instance) if field.name not in ("FAIL_TO_PASS", "PASS_TO_PASS", "env")
)


def image_name(pattern: str, instance_id: str) -> str:
    """Returns the image name of an instance. Docker forbids double underscores, which datasets replace in image
    names."""
    lower = instance_id.lower()
    return pattern.format(id=lower, id_1776=lower.replace("__", "_1776_"), id_s=lower.replace("__", "_s_"))


# --- reading --------------------------------------------------------------------------------------------------------


class NoStatementError(ConfigError):
    """A line has no problem statement. Most lines of SWE-smith have none, so no agent can be given them."""


def read_instances(
    path: str | os.PathLike[str], wanted: Callable[[str], bool] = lambda _: True, skipped: list[Line] | None = None
) -> Iterator[tuple[Line, Instance]]:
    """Yields every instance of a file in order. Skips blank lines, and invalid lines whose id is not wanted.

    Args:
        path: the file.
        wanted: Returns whether the instance of this id is used.
        skipped: Receives the lines without a problem statement. If ``None``, such lines are invalid.

    Raises:
        ConfigError: a line is invalid or an id is duplicated; names file, line, field, value and what was expected.
    """
    file = Path(path).absolute()
    seen: dict[str, int] = {}
    for line in _lines(file):
        try:
            instance = parse(line)
        except ConfigError as error:
            if skipped is not None and isinstance(error, NoStatementError):
                skipped.append(line)
            elif wanted(_id_of(line)):
                raise
            continue
        if instance.task_id in seen:
            raise ConfigError(
                f"{line}: instance_id {instance.instance_id!r} is also on line {seen[instance.task_id]}; "
                "remove one of them"
            )
        seen[instance.task_id] = line.number
        yield line, instance
    if not seen:
        which = "no instance with a problem_statement" if skipped else "no instance"
        raise ConfigError(f"{file}: contains {which}; expected one JSON object per line")


def _id_of(line: Line) -> str:
    """Returns the id from an invalid line, or an empty string."""
    try:
        raw = parse_json(line.data)
    except ValueError:
        return ""
    return str(raw.get("instance_id") or "") if isinstance(raw, dict) else ""


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
    """Parses one line of any dataset.

    Raises:
        ConfigError: the line is invalid; names file, line, field, value and what was expected.
    """
    try:
        raw = parse_json(line.data)
    except ValueError as error:
        raise ConfigError(f"{line}: not JSON ({error}); expected one JSON object per line") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{line}: contains {type(raw).__name__}; expected a JSON object with instance_id, repo, …")
    try:
        return _instance(line, raw)
    except (AttributeError, KeyError, TypeError, ValueError) as error:  # a nested field has the wrong type
        raise ConfigError(
            f"{line}: belongs to no known data set ({error!r:.200}); expected SWE-bench's fields"
        ) from None


def _instance(line: Line, raw: dict[str, Any]) -> Instance:
    fields = dataset_of(raw).convert(line, raw)
    values = {key: _text(line, key, fields[key]) for key in TEXT_FIELDS if key in fields}
    for key in ("instance_id", "repo"):
        if not values.get(key, "").strip():
            raise line.error(key, fields.get(key), "a text that is not empty")
    if not values.get("problem_statement", "").strip():
        found = line.error("problem_statement", fields.get("problem_statement"), "a text that is not empty")
        raise NoStatementError(f"{found}; leave such lines out with: megaflow-hpc tasks import {line.path} -o DIR")
    failing = _names(line, "FAIL_TO_PASS", fields.get("FAIL_TO_PASS"))
    if not failing:
        raise line.error("FAIL_TO_PASS", fields.get("FAIL_TO_PASS"), "at least one test")
    passing = _names(line, "PASS_TO_PASS", fields.get("PASS_TO_PASS") or [])
    values.setdefault("image", image_name(IMAGE, values["instance_id"]))
    _check(line, values)
    stated = {key: value for key, value in values.items() if value}
    return Instance(**stated, FAIL_TO_PASS=failing, PASS_TO_PASS=passing, env=_variables(line, fields.get("env") or {}))


def _check(line: Line, values: Mapping[str, str]) -> None:
    """Rejects values that refer to anything outside the instance."""
    runner, workdir = values.get("runner", ""), values.get("workdir") or WORKDIR
    if runner not in RUNNERS:
        raise line.error("runner", runner, "script or named")
    if not _PATH.fullmatch(workdir):
        raise line.error("workdir", workdir, "an absolute path without .. and control characters")
    image, instance_id = values["image"], values["instance_id"]
    if not _IMAGE.fullmatch(image) or ".." in image.split("/"):
        raise line.error("image", image, "the name of an image, not a path")
    if len(instance_id) > 200 or not instance_id.strip("."):
        raise line.error("instance_id", instance_id, "at most 200 characters, not only dots")


def _text(line: Line, key: str, value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, int | float) and not isinstance(value, bool) and key == "version":
        return str(value)
    if not isinstance(value, str):
        raise line.error(key, value, "a text")
    return _writable(line, key, value, nul=key in TEXTS)


def _writable(line: Line, key: str, text: str, *, nul: bool = False) -> str:
    """Returns a string after checking that it can be written to a file and, unless ``nul``, passed as an argument."""
    try:
        text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise line.error(key, text, "valid UTF-8, without lone surrogates") from None
    if "\0" in text and not nul:
        raise line.error(key, text, "a text without a zero byte")
    return text


def _unseparated(text: str) -> bool:
    """Returns whether two quoted names follow each other without a comma, as in numpy's output. Python would
    concatenate them.
    """
    try:
        parse_json(text)
        return False
    except ValueError:
        pass
    quoted = False
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.STRING and quoted:
                return True
            if token.type not in (tokenize.NL, tokenize.NEWLINE):
                quoted = token.type == tokenize.STRING
    except (tokenize.TokenError, SyntaxError):
        pass
    return False


def _names(line: Line, key: str, value: Any) -> tuple[str, ...]:
    """Returns test names from a list, or from a list encoded as JSON or Python."""
    names = literal(value) if isinstance(value, str) else value
    if isinstance(value, str) and names is not None and _unseparated(value):
        raise line.error(key, value, "a list of test names, separated by commas")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise line.error(key, value, "a list of test names")
    return tuple(_writable(line, key, name) for name in names)


def _variables(line: Line, value: Any) -> dict[str, str] | None:
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise line.error("env", value, "names and values")
    return {_writable(line, "env", key): _writable(line, "env", str(text)) for key, text in value.items()} or None
