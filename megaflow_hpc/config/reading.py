"""YAML with line numbers, for error messages."""

from __future__ import annotations

import os
import re
from collections.abc import Hashable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from megaflow_hpc.errors import ConfigError


class _Loader(yaml.SafeLoader):
    """YAML loader without base-60 numbers (``time: 1:00:00`` stays a string) that rejects duplicate keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """Builds the mapping of a node.

        Raises:
            ConstructorError: A key occurs twice.
        """
        seen: set[Any] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key that is no text", key.start_mark)
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key.value!r} is given twice", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in pairs if tag not in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")]
    for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"[-+]?\d+\Z"), list("-+0123456789"))
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"([-+]?(\d+\.\d*|\.\d+)([eE][-+]?\d+)?|[-+]?\d+[eE][-+]?\d+|[-+]?\.inf|\.nan)\Z"),
    list("-+0123456789."),
)


def read_yaml(path: str | os.PathLike[str]) -> tuple[Any, yaml.Node | None]:
    """Returns the value and the node tree of a YAML file. The nodes have line numbers.

    Raises:
        ConfigError: The file cannot be read or is not YAML.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); correct the path") from None
    except UnicodeDecodeError as error:
        problem = f"cannot be read as UTF-8 text ({error.reason} at byte {error.start})"
        raise ConfigError(f"{path}: {problem}; expected YAML in UTF-8") from None
    try:
        loader = _Loader(text)
    except yaml.reader.ReaderError as error:
        number = text.count("\n", 0, error.position) + 1
        raise ConfigError(f"{path}:{number}: holds the character 0x{error.character:02x}; expected YAML") from None
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
        problem += "; indent with spaces" if "'\\t'" in problem else ""
        raise ConfigError(f"{path}{line}: not valid YAML: {problem}") from None
    finally:
        loader.dispose()
    return value, node


MAX_VALUES = 100_000
"""Maximum number of values in a file. Values behind an alias count at each use."""


def _require_small(root: yaml.Node) -> None:
    """Rejects files whose aliases repeat values excessively or endlessly.

    Raises:
        ConstructorError: The file has too many values or contains itself.
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
    """Returns the line, from 1, of the deepest part of ``location`` that exists in the file."""
    mark = _deepest(node, location)
    return None if mark is None else mark.line + 1


def place_of(node: yaml.Node | None, location: Sequence[Any], path: str) -> str:
    """Returns ``file:line`` of the deepest part of ``location`` that exists in the file, or ``path`` without a node."""
    mark = _deepest(node, location)
    return path if mark is None else f"{path if mark.name.startswith('<') else mark.name}:{mark.line + 1}"


def reached(node: yaml.Node | None, location: Sequence[Any]) -> tuple[Any, ...]:
    """Returns the parts of ``location`` that exist in the file. Pydantic also lists the names of types that it
    tried."""
    return tuple(part for part, _ in _walk(node, location))


def _deepest(node: yaml.Node | None, location: Sequence[Any]) -> yaml.Mark | None:
    mark = None if node is None else node.start_mark
    for _, deeper in _walk(node, location):
        mark = deeper
    return mark


def _walk(node: yaml.Node | None, location: Sequence[Any]) -> Iterator[tuple[Any, yaml.Mark]]:
    """Yields each part of ``location`` that exists in the file, with its position."""
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
