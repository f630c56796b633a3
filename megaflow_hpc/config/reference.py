"""Generates the reference of all campaign-file keys from the sections' JSON Schema, with type, default and meaning.

The docstring below a field documents its key. docs/reference/campaign-file.md contains the output of :func:`markdown`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from megaflow_hpc.config.campaign import schema


@dataclass(frozen=True)
class Key:
    """Documentation of a key in a section."""

    name: str
    type: str
    """Type of the value, such as ``text``, ``number``, ``list of text`` or ``one of fifo, longest``. For a section,
    a link to its table."""
    default: str
    """Default value as YAML. ``required`` if the key has no default, empty for a section."""
    text: str


@dataclass
class Table:
    """Documentation of a section. It has the first path that leads to the section."""

    path: str
    """Path of the section, such as ``slurm.pods``; ``models.NAME`` for named sections, ``tasks[]`` for list entries."""
    text: str
    keys: list[Key] = field(default_factory=list)


def tables() -> list[Table]:
    """Returns the tables of the top level and of each section, in the order of the keys."""
    root_schema = schema()
    definitions = root_schema.get("$defs", {})
    paths: dict[str, str] = {}
    result = [Table("", "")]
    waiting = [(result[0], root_schema)]
    while waiting:
        table, section = waiting.pop(0)
        required = set(section.get("required", ()))
        for name, value in section["properties"].items():
            path = f"{table.path}.{name}".lstrip(".")
            for reference, place in _sections(value, path, definitions):
                if reference not in paths and definitions[reference].get("properties"):
                    paths[reference] = place
                    result.append(Table(place, _plain(definitions[reference].get("description", ""))))
                    waiting.append((result[-1], definitions[reference]))
            default = "required" if name in required else _default(value)
            key = Key(name, _type(value, definitions, paths), default, _plain(value.get("description", "")))
            table.keys.append(key)
    return result


def markdown() -> str:
    """Returns all tables as Markdown lists, each under a heading."""
    lines: list[str] = []
    seen: dict[str, str] = {}
    for table in tables():
        lines += [f"## `{table.path}`" if table.path else "## The file", ""]
        if details := _without_summary(table.text):
            lines += [details, ""]
        for key in table.keys:
            default, text = _default_and_meaning(key)
            kind = f"{key.type}, required" if default == "required" else key.type
            kind += f"; default: {default}" if default not in ("", "required", *_UNSET) else ""
            path = f"{table.path}.{key.name}".lstrip(".")
            first = seen.setdefault(text, path) if len(text.split()) > 5 else path
            lines.append(f"- **`{key.name}`** ({kind}): {text if first == path else f'as `{first}`.'}")
        lines.append("")
    return "\n".join(lines)


_UNSET = ("none", "`null`", "`{}`", "`[]`")
_DEFAULT_SENTENCE = re.compile(r" *\bDefault: (.+?)\.$")


def _without_summary(text: str) -> str:
    """Returns the description of a section without its first sentence, because the section's key says the same."""
    return "".join(re.split(r"(?<=[.)])\s+(?=[A-Z])", text, maxsplit=1)[1:])


def _default_and_meaning(key: Key) -> tuple[str, str]:
    """Returns default and meaning of a key. A trailing sentence "Default: …" becomes the default."""
    default = f"`{key.default}`" if key.default not in ("", "required") else key.default
    sentence = _DEFAULT_SENTENCE.search(key.text)
    if not sentence:
        return default, key.text
    if sentence[1].strip("`") != key.default.strip('"').removesuffix(".0"):
        default = sentence[1]
    return default, _DEFAULT_SENTENCE.sub("", key.text)


def _plain(text: str) -> str:
    """Converts text to one line of Markdown, with single backticks and without Sphinx roles."""
    text = re.sub(r":\w+:`~?([^`]+)`", lambda role: f"`{role[1].rpartition('.')[2]}`", text)
    return " ".join(text.replace("``", "`").split())


def _sections(value: Mapping[str, Any], path: str, definitions: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields the name and path of each section that a schema value references."""
    if "$ref" in value:
        name = value["$ref"].rpartition("/")[2]
        yield name, path
        if not definitions[name].get("properties"):  # names with sections
            yield from _sections(definitions[name], path, definitions)
    for part in (*value.get("anyOf", ()), *value.get("allOf", ())):
        yield from _sections(part, path, definitions)
    if isinstance(value.get("items"), Mapping):
        yield from _sections(value["items"], f"{path}[]", definitions)
    if isinstance(value.get("additionalProperties"), Mapping):
        yield from _sections(value["additionalProperties"], f"{path}.NAME", definitions)


_WORDS = {"string": "text", "integer": "integer", "number": "number", "boolean": "boolean", "null": "null"}


def _type(value: Mapping[str, Any], definitions: Mapping[str, Any], paths: Mapping[str, str]) -> str:
    if "$ref" in value:
        name = value["$ref"].rpartition("/")[2]
        if name in paths:
            return f"[{paths[name]}](#{_anchor(paths[name])})"
        return _type(definitions[name], definitions, paths)
    choices = value.get("anyOf") or value.get("oneOf") or ()
    if choices or "allOf" in value:
        kinds = [_type(part, definitions, paths) for part in choices or value["allOf"]]
        return " or ".join(dict.fromkeys(kind for kind in kinds if kind != "null")) or "null"
    if "enum" in value or "const" in value:
        return ", ".join(f"`{choice}`" for choice in value.get("enum", [value.get("const")]))
    if value.get("type") == "array":
        items = value.get("items")
        return f"list of {_type(items, definitions, paths)}" if items else "list"
    if value.get("type") == "object":
        values = value.get("additionalProperties")
        return f"names to {_type(values, definitions, paths)}" if isinstance(values, Mapping) and values else "mapping"
    return _WORDS.get(str(value.get("type")), "any")


def _default(value: Mapping[str, Any]) -> str:
    default = value.get("default", {"object": {}, "array": []}.get(str(value.get("type"))))
    return "" if isinstance(default, dict) and default else json.dumps(default)  # sections have their own table


def _anchor(path: str) -> str:
    """Returns the anchor of a heading, as generated by GitHub and Markdown's ``toc``."""
    return re.sub(r"[^a-z0-9_-]", "", path.lower())
