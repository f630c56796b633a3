"""Reads YAML with line numbers, and turns validation errors into messages with file, line, expected value and
remedy.

Pydantic's messages are written for programmers ("input should be a valid dictionary or instance of …"). This module
derives the expected values from the JSON Schema of the sections, so messages state a key's bounds and choices.
"""

from __future__ import annotations

import difflib
import functools
import json
import os
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from megaflow_hpc.errors import ConfigError

MAX_VALUES = 100_000
"""Maximum number of values in a file. An alias counts as often as it is used."""
OF_KIND = re.compile(
    r"(int|float|string|bool|dict|mapping|model|list|tuple|named_tuple|finite_number|greater_than|less_than|literal|enum"
    r")(_|\Z)"
)
"""Matches Pydantic error types that are explained from the schema. For other types, the section's own message is
used."""
UNITS = {"s": "seconds", "gb": "GB", "mb": "MB", "hours": "hours"}
"""Suffix of a key → unit of its value."""


class _Loader(yaml.SafeLoader):
    """YAML loader that rejects duplicate keys and parses no numbers to other bases: ``time: 1:00:00`` and
    ``account: 0123`` stay strings."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """Builds the mapping of a node.

        Raises:
            ConstructorError: A key occurs twice.
        """
        seen: set[Any] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key that is not text", key.start_mark)
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key.value!r} is given twice", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in pairs if tag not in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")]
    for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"[-+]?(0|[1-9]\d*)\Z"), list("-+0123456789"))
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"([-+]?(\d+\.\d*|\.\d+)([eE][-+]?\d+)?|[-+]?\d+[eE][-+]?\d+|[-+]?\.inf|\.nan)\Z"),
    list("-+0123456789."),
)


YAML_REMEDIES = {
    "'\\t'": "indent with spaces",
    "mapping values are not allowed here": "write a space after each colon, and one key on each line",
    "<block mapping start>": "start all keys of one level in the same column",
}
"""Maps part of a YAML parser's message to what the user should do."""


def _instead_of(directory: Path) -> str:
    """Returns what to do if a directory was given where a campaign file is expected."""
    if (directory / "run.json").exists():
        return f"it is a run: continue it with megaflow-hpc resume {directory}"
    if (directory / "campaign.yaml").exists():
        return f"name the file in it: {directory / 'campaign.yaml'}"
    if (directory / "task.toml").exists():
        return "it is a task: name it in tasks: of a campaign file, which megaflow-hpc init writes"
    return "name a campaign file, which megaflow-hpc init writes"


def read_yaml(path: str | os.PathLike[str]) -> tuple[Any, yaml.Node | None]:
    """Returns the value of a YAML file, and its nodes, which have line numbers.

    Raises:
        ConfigError: The file cannot be read or is not YAML.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        remedy = "correct the path"
        if isinstance(error, IsADirectoryError):
            remedy = _instead_of(Path(path))
        elif isinstance(error, PermissionError):
            remedy = f"ask its owner, or: chmod u+r {path}"
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); {remedy}") from None
    except UnicodeDecodeError as error:
        problem = f"cannot be read as UTF-8 text ({error.reason} at byte {error.start})"
        raise ConfigError(f"{path}: {problem}; expected YAML in UTF-8") from None
    try:
        loader = _Loader(text)
    except yaml.reader.ReaderError as error:
        number = text.count("\n", 0, error.position) + 1
        raise ConfigError(f"{path}:{number}: contains the character 0x{error.character:02x}; expected YAML") from None
    loader.name = str(path)  # each node's mark names its file, because a campaign may be merged from two files
    try:
        node = loader.get_single_node()
        if node is not None:
            _require_small(node)
        value = None if node is None else loader.construct_document(node)
    except RecursionError:
        raise ConfigError(f"{path}:{loader.line + 1}: not valid YAML: nested too deeply") from None
    except (
        ValueError,
        TypeError,
        ArithmeticError,
    ) as error:  # for example, an impossible date or a number of 5000 digits
        raise ConfigError(f"{path}: not valid YAML: {error}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        problem += next((f"; {remedy}" for part, remedy in YAML_REMEDIES.items() if part in problem), "")
        raise ConfigError(f"{path}{line}: not valid YAML: {problem}") from None
    finally:
        loader.dispose()
    return value, node


def _require_small(root: yaml.Node) -> None:
    """Rejects files whose aliases multiply values excessively or form a cycle.

    Raises:
        ConstructorError: The file has more than :data:`MAX_VALUES` values or contains itself.
    """
    sizes: dict[int, int] = {}
    stack = [(root, False)]
    while stack:
        node, children_done = stack.pop()
        children = [part for pair in node.value for part in pair] if isinstance(node, yaml.MappingNode) else node.value
        children = children if isinstance(node, yaml.CollectionNode) else []
        if not children_done:
            if id(node) not in sizes:
                sizes[id(node)] = 0  # 0 marks a node in progress; meeting it again means that it contains itself
                stack.append((node, True))
                stack += [(child, False) for child in children]
            continue
        if any(not sizes[id(child)] for child in children):
            raise yaml.constructor.ConstructorError(None, None, "a value that holds itself", node.start_mark)
        sizes[id(node)] = 1 + sum(sizes[id(child)] for child in children)
        if sizes[id(node)] > MAX_VALUES:
            problem = f"aliases repeat values until there are more than {MAX_VALUES}"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)


def line_of(node: yaml.Node | None, location: Sequence[Any]) -> int | None:
    """Returns the line number, from 1, of the deepest part of ``location`` that exists in the file."""
    mark = _deepest(node, location)
    return None if mark is None else mark.line + 1


def place_of(node: yaml.Node | None, location: Sequence[Any], path: str) -> str:
    """Returns ``file:line`` of the deepest part of ``location`` that exists in the file. Returns ``path`` if
    ``node`` is ``None``."""
    mark = _deepest(node, location)
    return path if mark is None else f"{path if mark.name.startswith('<') else mark.name}:{mark.line + 1}"


def reached(node: yaml.Node | None, location: Sequence[Any]) -> tuple[Any, ...]:
    """Returns the parts of ``location`` that exist in the file. Drops the type names that Pydantic adds to
    locations."""
    return tuple(part for part, _ in _walk(node, location))


def _deepest(node: yaml.Node | None, location: Sequence[Any]) -> yaml.Mark | None:
    mark = None if node is None else node.start_mark
    for _, deeper in _walk(node, location):
        mark = deeper
    return mark


def _walk(node: yaml.Node | None, location: Sequence[Any]) -> Iterator[tuple[Any, yaml.Mark]]:
    """Yields each part of ``location`` that exists in the file, with its mark."""
    for part in location:
        if isinstance(node, yaml.MappingNode):
            values = {key.value: (key, value) for key, value in node.value}
            if str(part) not in values:
                continue
            key, node = values[str(part)]
            yield part, key.start_mark
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
            node = node.value[part]
            yield part, node.start_mark


# --- explanations of invalid values ---


def explain(error: ValidationError, path: str, node: yaml.Node | None, model: type[BaseModel]) -> str:
    """Formats the first problem of a validation error as one line: file, line, key, value and remedy."""
    return explain_all(error, path, node, model)[0]


def explain_all(error: ValidationError, path: str, node: yaml.Node | None, model: type[BaseModel]) -> list[str]:
    """Formats each problem of a validation error as one line: file, line, key, value and remedy.

    Unknown keys come first, because a misspelt key often explains a missing one. A value that matches none of
    several types is reported once.
    """
    problems: dict[Any, str] = {}
    schema = _schema(model)
    for problem in sorted(error.errors(), key=lambda problem: problem["type"] != "extra_forbidden"):
        location = [part for part in problem["loc"] if not (isinstance(part, str) and part.startswith("function-"))]
        in_file = problem["type"] == "missing" or node is None
        key = tuple(location) if in_file else reached(node, location)
        problems.setdefault(key, f"{place_of(node, location, path)}: {_explained(problem, location, key, schema)}")
    return list(problems.values())


@functools.cache
def _schema(model: type[BaseModel]) -> Mapping[str, Any]:
    """Returns the JSON Schema of a model. Making it takes 0.2 s, which a process should pay once."""
    return model.model_json_schema()


def _explained(problem: Any, location: Sequence[Any], key: Sequence[Any], schema: Mapping[str, Any]) -> str:
    if problem["type"] == "extra_forbidden":
        sections = _at(schema, location[:-1])
        names = sorted({name for section in sections for name in section.get("properties", ())})
        options = [name for section in sections for name in section.get("x-options", ())]
        close = difflib.get_close_matches(str(location[-1]), [*names, *options], 1)
        more = " and options of sbatch" if options else ""
        remedy = f"did you mean {close[0]!r}?" if close else f"known here: {', '.join(names)}{more}"
        return f"unknown key {'.'.join(map(str, location))!r}; {remedy}"
    if problem["type"] == "missing":
        return f"{'.'.join(map(str, location))!r} is missing; add it"
    value = problem.get("input")
    many = ""
    if isinstance(value, list | tuple):
        many = "a list"
    elif isinstance(value, dict):
        many = "keys"
    named = ".".join(map(str, key))
    if not many:
        named += " null" if value is None else f" {value!r}"
    kinds = _expected(_at(schema, location)) if OF_KIND.match(problem["type"]) else []
    if not kinds:
        message = problem["msg"].removeprefix("Value error, ")
        message = message[0].lower() + message[1:]
        return f"{named}: {message}" if key else message
    found = f", found {many}" if many else ""
    return f"{named}: expected {' or '.join(kinds)}{found}{_remedy(value, str(key[-1]) if key else '', kinds)}"


def _remedy(value: Any, key: str, kinds: Sequence[str]) -> str:
    """Returns a remedy for an invalid value, or an empty string if none is obvious."""
    if value is None:
        return ", or no such key"
    if kinds == ["text"] and isinstance(value, int | float):
        return f"; put it in quotes: {json.dumps(str(value))}"
    unit = UNITS.get(key.rpartition("_")[2])
    if unit and isinstance(value, str) and re.match(r"[\d.]+ ?[A-Za-z]+\Z", value):
        return f"; write the number of {unit} alone"
    choices = [word.strip("'") for word in re.findall(r"'[^']*'", " ".join(kinds))]
    close = difflib.get_close_matches(str(value), choices, 1)
    return f"; did you mean {close[0]!r}?" if close else ""


def _at(schema: Mapping[str, Any], location: Iterable[Any]) -> list[Mapping[str, Any]]:
    """Returns the schemas that apply at ``location``. Resolves lists, mappings, sections and optional values."""

    def kinds(value: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
        if "$ref" in value:
            value = schema["$defs"][value["$ref"].rpartition("/")[2]]
        parts = [part for name in ("anyOf", "oneOf", "allOf") for part in value.get(name, ())]
        for part in parts:
            yield from kinds(part)
        if not parts:
            yield value

    here = list(kinds(schema))
    for part in location:
        deeper: list[Any] = []
        for kind in here:
            if isinstance(part, int):
                below = dict(enumerate(kind.get("prefixItems", ()))).get(part, kind.get("items"))
            else:
                below = kind.get("properties", {}).get(part)
            deeper.append(below or kind.get("additionalProperties"))
        here = [kind for below in deeper if isinstance(below, dict) for kind in kinds(below)] or here
    return here


def _expected(kinds: Iterable[Mapping[str, Any]]) -> list[str]:
    """Describes the accepted kinds of values, each with its bounds."""
    kinds_of_value = []
    for kind in kinds:
        if choices := kind.get("enum", [kind["const"]] if "const" in kind else []):
            *others, last = map(repr, choices)
            kinds_of_value.append(f"{', '.join(others)} or {last}" if others else last)
        elif kind.get("type") in ("integer", "number"):
            kinds_of_value.append(f"{'a whole number' if kind['type'] == 'integer' else 'a number'}{_bounds(kind)}")
        elif kind.get("type") == "object" and kind.get("properties"):
            kinds_of_value.append(f"keys such as {' and '.join(f'{name}:' for name in list(kind['properties'])[:2])}")
        elif word := _WORDS.get(str(kind.get("type"))):
            kinds_of_value.append(word)
    return list(dict.fromkeys(kinds_of_value))


_WORDS = {"string": "text", "boolean": "true or false", "array": "a list", "object": "names with their values"}


_BOUNDS = {
    "minimum": "of at least",
    "exclusiveMinimum": "above",
    "maximum": "of at most",
    "exclusiveMaximum": "below",
}


def _bounds(kind: Mapping[str, Any]) -> str:
    return " and".join(f" {words} {kind[name]:.15g}" for name, words in _BOUNDS.items() if name in kind)
