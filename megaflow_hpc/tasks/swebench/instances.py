"""Reads SWE-bench style JSONL, where each line is an instance of any supported dataset.

Each dataset has a class that converts its lines to the fields of :class:`Instance`. After that, values from all
datasets are validated in the same way.
"""

from __future__ import annotations

import ast
import io
import os
import re
import tokenize
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.tasks.formats import Refuse, raise_error
from megaflow_hpc.texts import parse_json

IMAGE = "swebench/sweb.eval.x86_64.{id_1776}:latest"
"""Default image of an instance, which SWE-bench publishes."""
WORKDIR = "/testbed"
RUNNERS = ("", "script", "named")
TEXTS = ("problem_statement", "patch", "test_patch", "bug_patch", "eval_script")
"""Fields that may contain NUL characters, because they are only written to files."""
_IMAGE = re.compile(r"([a-z][a-z-]*://)?[A-Za-z0-9][A-Za-z0-9._/:@+~-]*")
"""Matches an image name, optionally with a registry. Paths are not allowed, because lines are untrusted and image files
are not checked."""
_ADJACENT = re.compile(r"""['"]\s*['"]""")
"""Matches two quotes that no comma separates, as between names in numpy's output."""
_PATH = re.compile(r"(/(?!\.\.?(/|$))[^/\x00-\x1f\x7f]+)+/?")


@dataclass(frozen=True)
class Instance:
    """A problem to solve. Fields have the same names as in SWE-bench, and are empty if missing."""

    instance_id: str
    repo: str
    problem_statement: str
    FAIL_TO_PASS: tuple[str, ...]
    PASS_TO_PASS: tuple[str, ...] = ()
    base_commit: str = "HEAD"
    version: str = ""
    patch: str = ""
    """Patch with the reference solution."""
    test_patch: str = ""
    bug_patch: str = ""
    """Patch that introduces the bug before the agent starts (SWE-smith)."""
    image: str = ""
    workdir: str = WORKDIR
    eval_script: str = ""
    """Script that applies the test patch and runs the tests between SWE-bench's markers."""
    test_cmd: str = ""
    """Command that runs the tests. If the command is pytest without any test names, the files in ``test_patch`` are
    added."""
    test_cmds: str = ""
    """Commands that run the tests. Used unchanged (SWE-bench-Live, SWE-rebench V2)."""
    env: Mapping[str, str] | None = None
    """Environment variables for the tests."""
    log_parser: str = ""
    """Name of a log parser in the ``swebench`` package."""
    eval_type: str = ""
    runner: str = ""
    """``script`` runs ``eval_script`` or ``commands`` and parses the log. ``named`` runs pytest on test ids."""

    def record(self) -> dict[str, Any]:
        """Returns a JSONL record without empty fields. Parsing the record yields an equal instance."""
        return {key: value for key, value in asdict(self).items() if value not in ("", None, ())}

    @property
    def task_id(self) -> str:
        """The instance's id as a task id. Invalid characters are replaced with ``_``."""
        return task_id_of(self.instance_id)

    @property
    def commands(self) -> str:
        """The line's own commands for running the tests. Empty if it has none."""
        return self.test_cmd or self.test_cmds

    def fill_in(self, image: str = "", **defaults: str) -> Instance:
        """Returns a copy with ``image`` expanded (``{id}``, ``{id_1776}``, ``{id_s}``) and defaults filled in."""
        changes: dict[str, Any] = {
            key: value
            for key, value in defaults.items()
            if value and getattr(self, key) in ("", WORKDIR) and not (key == "test_cmd" and self.test_cmds)
        }
        return replace(self, image=image_name(image, self.instance_id) if image else self.image, **changes)


def task_id_of(instance_id: str) -> str:
    """Returns an instance's id as a task id."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", instance_id)


TEXT_FIELDS = tuple(
    field.name for field in fields(Instance) if field.name not in ("FAIL_TO_PASS", "PASS_TO_PASS", "env")
)


def image_name(pattern: str, instance_id: str) -> str:
    """Expands an image name pattern for an instance. Some placeholders replace double underscores, which Docker forbids
    in names."""
    lower = instance_id.lower()
    return pattern.format(id=lower, id_1776=lower.replace("__", "_1776_"), id_s=lower.replace("__", "_s_"))


# --- reading --------------------------------------------------------------------------------------------------------


def read_instances(
    path: str | os.PathLike[str], wanted: Callable[[str], bool] = lambda _: True, refuse: Refuse = raise_error
) -> Iterator[tuple[Line, Instance]]:
    """Yields the instances of a file in order. Skips blank lines, and lines whose id is not wanted.

    Args:
        path: The JSONL file.
        wanted: Returns whether the instance with this id is used.
        refuse: Called for each invalid line, and for each line with the id of an earlier line. By default, raises the
            error.

    Raises:
        ConfigError: The file cannot be read or is empty, or a line is invalid. The message names file, line, field,
            value and the expected form.
    """
    file = Path(path).absolute()
    seen: dict[str, int] = {}
    empty = True
    for line in _lines(file):
        empty = False
        try:
            instance = parse(line)
        except ConfigError as error:
            if wanted(_id_of(line)):
                refuse(error)
            continue
        if not wanted(instance.task_id):
            continue
        if instance.task_id in seen:
            first = seen[instance.task_id]
            refuse(ConfigError(f"{line}: instance_id {instance.instance_id!r} is also on line {first}; remove one"))
            continue
        seen[instance.task_id] = line.number
        yield line, instance
    if empty:
        raise ConfigError(f"{file}: contains no instance; expected one JSON object per line")


def _id_of(line: Line) -> str:
    """Returns the task id of an invalid line. Empty if it cannot be determined."""
    try:
        raw = parse_json(line.data)
    except ValueError:
        return ""
    return task_id_of(str(dataset_of(raw).id_of(raw) or "")) if isinstance(raw, dict) else ""


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
    """Parses a line of any supported dataset.

    Raises:
        ConfigError: The line is invalid. The message names file, line, field, value and the expected form.
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
        raise line.error("problem_statement", fields.get("problem_statement"), "a text that is not empty")
    failing = _names(line, "FAIL_TO_PASS", fields.get("FAIL_TO_PASS"))
    if not failing:
        raise line.error("FAIL_TO_PASS", fields.get("FAIL_TO_PASS"), "at least one test")
    passing = _names(line, "PASS_TO_PASS", fields.get("PASS_TO_PASS") or [])
    values.setdefault("image", image_name(IMAGE, values["instance_id"]))
    _check(line, values)
    stated = {key: value for key, value in values.items() if value}
    return Instance(**stated, FAIL_TO_PASS=failing, PASS_TO_PASS=passing, env=_variables(line, fields.get("env") or {}))


def _check(line: Line, values: Mapping[str, str]) -> None:
    """Rejects values that refer to files outside the checkout, and invalid image names."""
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
    """Returns a string after checking that it can be written to a file. Unless ``nul`` is set, also checks that it can
    be a program's argument."""
    try:
        text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise line.error(key, text, "valid UTF-8, without lone surrogates") from None
    if "\0" in text and not nul:
        raise line.error(key, text, "a text without a zero byte")
    return text


def _quoted(text: str) -> int:
    """Returns the number of quoted strings in a Python literal."""
    with suppress(tokenize.TokenError, SyntaxError):
        return sum(token.type == tokenize.STRING for token in tokenize.generate_tokens(io.StringIO(text).readline))
    return 0


def _names(line: Line, key: str, value: Any) -> tuple[str, ...]:
    """Parses test names from a list, or from a string that encodes a list as JSON or Python."""
    names = literal(value) if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise line.error(key, value, "a list of test names")
    # Without commas, as in numpy's output, Python concatenates the names.
    if isinstance(value, str) and _ADJACENT.search(value) and _quoted(value) > len(names):
        raise line.error(key, value, "a list of test names, separated by commas")
    return tuple(_writable(line, key, name) for name in names)


def _variables(line: Line, value: Any) -> dict[str, str] | None:
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise line.error("env", value, "names and values")
    return {_writable(line, "env", key): _writable(line, "env", str(text)) for key, text in value.items()} or None


# --- datasets ---------------------------------------------------------------------------------------------------------

MAX_LITERAL_BYTES = 2 << 20
"""Maximum size in bytes of a string to parse as a Python literal. The syntax tree takes hundreds of times as much
memory."""
T = TypeVar("T")


@dataclass(frozen=True)
class Line:
    """A line of a file and its position."""

    path: Path
    number: int
    offset: int
    data: bytes

    def __str__(self) -> str:
        return f"{self.path}:{self.number}"

    def error(self, key: str, value: Any, expected: str) -> ConfigError:
        """Creates an error that names file, line, key, value and the expected value."""
        shown = repr(value)
        return ConfigError(f"{self}: {key} {shown if len(shown) < 80 else shown[:80] + '…'}: expected {expected}")


class SweBench:
    """Reads instances of SWE-bench, its variants Verified, Lite and Multilingual, and SWE-Gym."""

    @classmethod
    def recognises(cls, raw: Mapping[str, Any]) -> bool:
        """Returns whether a line belongs to this dataset."""
        return True

    @classmethod
    def id_of(cls, raw: Mapping[str, Any]) -> Any:
        """Returns the id of a line, which may be invalid."""
        return raw.get("instance_id")

    @classmethod
    def convert(cls, line: Line, raw: Mapping[str, Any]) -> dict[str, Any]:
        """Converts a line to the fields of an instance, by name.

        Raises:
            ConfigError: A field has the wrong type. The message names file, line, field and value.
        """
        fields = dict(raw)
        for key in ("FAIL_TO_PASS", "PASS_TO_PASS"):  # some releases use lower-case field names
            if key.lower() in raw:
                fields[key] = raw[key.lower()]
        if image := _image(raw):
            fields["image"] = image
        for key in ("test_cmd", "test_cmds"):
            if isinstance(commands := raw.get(key), list):
                if not all(isinstance(command, str) for command in commands):
                    raise line.error(key, commands, "a text, or a list of texts")
                fields[key] = "\n".join(commands)
        fields["log_parser"] = parser_name(raw.get("log_parser"))
        return fields


class SweRebench(SweBench):
    """SWE-rebench: ``install_config`` contains ``test_cmd``, ``log_parser`` and ``env_vars``.

    In images of SWE-rebench V2, the checkout is in a directory with the repository's name, and commands are used
    unchanged. In the first version, the files in the test patch are added to the command, as in SWE-bench.
    """

    @classmethod
    def recognises(cls, raw: Mapping[str, Any]) -> bool:
        """Returns whether a line belongs to this dataset."""
        return bool(raw.get("install_config"))

    @classmethod
    def convert(cls, line: Line, raw: Mapping[str, Any]) -> dict[str, Any]:
        """Converts a line to the fields of an instance, like :meth:`SweBench.convert`."""
        install = raw["install_config"]
        if isinstance(install, str):
            install = literal(install)
        if not isinstance(install, dict):
            raise line.error("install_config", install, "an object")
        second = "swerebenchv2/" in str(_image(raw))
        parser = raw.get("log_parser") or install.get("log_parser")
        variables = raw.get("env") or install.get("env_vars")
        fields = {**raw, "log_parser": parser, "env": variables}
        if not (raw.get("test_cmd") or raw.get("test_cmds")):
            fields["test_cmds" if second else "test_cmd"] = install.get("test_cmd")
        if not raw.get("workdir") and second:
            fields["workdir"] = f"/{str(raw.get('repo')).rpartition('/')[2]}"
        return super().convert(line, fields)


class SweSmith(SweBench):
    """SWE-smith: ``patch`` introduces the bug, and reverting it is the solution."""

    @classmethod
    def recognises(cls, raw: Mapping[str, Any]) -> bool:
        """Returns whether a line belongs to this dataset."""
        names_smith = str(raw.get("repo")).startswith("swesmith/") or "swesmith" in str(_image(raw))
        return names_smith and not raw.get("test_patch")

    @classmethod
    def convert(cls, line: Line, raw: Mapping[str, Any]) -> dict[str, Any]:
        """Converts a line to the fields of an instance, like :meth:`SweBench.convert`."""
        fields = super().convert(line, raw)
        fields["bug_patch"] = fields.get("bug_patch") or fields.get("patch")
        fields["patch"] = ""
        return fields


class MultiSweBench(SweBench):
    """Multi-SWE-bench: the problem statement consists of issues, and test names are the keys of objects with
    outcomes."""

    KEPT: ClassVar = ("image", "test_cmd", "test_cmds", "log_parser", "runner", "workdir", "test_patch", "env")

    @classmethod
    def recognises(cls, raw: Mapping[str, Any]) -> bool:
        """Returns whether a line belongs to this dataset."""
        return {"org", "number", "fix_patch"} <= raw.keys()

    @classmethod
    def id_of(cls, raw: Mapping[str, Any]) -> Any:
        """Returns the id of a line, which may be invalid."""
        return raw.get("instance_id") or f"{raw.get('org')}__{raw.get('repo')}-{raw.get('number')}"

    @classmethod
    def convert(cls, line: Line, raw: Mapping[str, Any]) -> dict[str, Any]:
        """Converts a line to the fields of an instance, like :meth:`SweBench.convert`."""
        org = _field(line, raw, "org", str, "a text")
        repo = _field(line, raw, "repo", str, "a text")
        number = raw["number"]
        if not isinstance(number, int | str):
            raise line.error("number", number, "a number")
        base = _field(line, raw, "base", dict, "an object with the commit as sha")
        failing = [name for key in ("f2p_tests", "s2p_tests", "n2p_tests") for name in _tests(line, raw, key)]
        fields = {
            "instance_id": cls.id_of(raw),
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


class NemoGym(SweBench):
    """NeMo Gym's ``swe_agents``: ``instance_dict`` in a row's metadata contains a line of another dataset as JSON."""

    @classmethod
    def recognises(cls, raw: Mapping[str, Any]) -> bool:
        """Returns whether a line belongs to this dataset."""
        return "responses_create_params" in raw

    @classmethod
    def id_of(cls, raw: Mapping[str, Any]) -> Any:
        """Returns the id of a line, which may be invalid."""
        try:
            inner = cls._inner(raw)
            return dataset_of(inner).id_of(inner)
        except (LookupError, TypeError, ValueError):
            return None

    @classmethod
    def convert(cls, line: Line, raw: Mapping[str, Any]) -> dict[str, Any]:
        """Converts a line to the fields of an instance, like :meth:`SweBench.convert`."""
        inner = cls._inner(raw)
        return dataset_of(inner).convert(line, inner)

    @staticmethod
    def _inner(raw: Mapping[str, Any]) -> dict[str, Any]:
        inner = raw["responses_create_params"]["metadata"]["instance_dict"]
        inner = parse_json(inner) if isinstance(inner, str) else inner
        if not isinstance(inner, dict) or "responses_create_params" in inner:
            raise ValueError("instance_dict: expected the line of a data set")
        return inner


DATASETS: tuple[type[SweBench], ...] = (NemoGym, MultiSweBench, SweRebench, SweSmith, SweBench)


def dataset_of(raw: Mapping[str, Any]) -> type[SweBench]:
    """Returns the dataset to which a line belongs."""
    return next(dataset for dataset in DATASETS if dataset.recognises(raw))


def parser_name(name: Any) -> str:
    """Converts a log parser's name to the spelling in the ``swebench`` package."""
    text = str(name or "")
    return f"parse_log_{text}" if text and not text.startswith("parse_log_") else text


def _image(raw: Mapping[str, Any]) -> Any:
    """Returns a line's image, for which datasets use different field names."""
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
    """Parses a JSON value or a Python literal. Returns ``None`` if the text is neither."""
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
