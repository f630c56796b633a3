"""Checks JSON schemas and formats that constrain an answer. Engines compile them to grammars.

A schema's size, nesting, counts and regular expressions are limited. Cyclic references are refused if the cycle never
descends into the value, as in ``{"$ref": "#"}``: engines compile it to a grammar that allows no token, and respond with
500. The same happens with longer cycles through ``allOf``, ``anyOf`` and other keywords that apply a schema to the same
value. A cycle through ``properties`` or ``items`` descends into the value, so it is valid.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from megaflow_hpc.model.gateway.dialects.base import BadRequest, bounded, of, shown, typed

MAX_SCHEMA_BYTES = 2**16
"""Maximum size of a schema that constrains an answer, as JSON, in bytes."""
MAX_SCHEMA_COUNT = 100_000
"""Maximum value of ``maxLength``, ``minItems`` and similar keywords."""
MAX_PATTERN_LENGTH = 512
"""Maximum length of a regular expression, in characters."""
MAX_PATTERN_COUNT = 1000
"""Maximum repeat count, as in ``{count}``, in a regular expression."""
MAX_PATTERN_GROUPS = 100
"""Maximum product of the groups' repeat counts in a regular expression."""
SAME_VALUE = ("not", "if", "then", "else")
"""Keywords that apply one schema to the same value, like ``$ref``."""
SAME_VALUE_LISTS = ("allOf", "anyOf", "oneOf", "dependentSchemas", "dependencies")
"""Keywords that apply a list or map of schemas to the same value."""
DYNAMIC_REFS = ("$dynamicRef", "$recursiveRef")
"""References whose target depends on the context. Engines ignore them."""
_COUNTS = frozenset(f"{end}{of}" for end in ("min", "max") for of in ("Items", "Length", "Properties", "Contains"))
_UNKNOWN = re.compile(r"\(\?(?:[=!]|<[=!])|\\[1-9]")
"""Matches lookahead, lookbehind and backreferences, which engines do not support."""
_KINDS = (r"\s", r"\S"), (r"\d", r"\D"), (r"\w", r"\W")
_EXCLUDED = [rf"\[\^[^\]]*\{a}[^\]]*\{b}" for one in _KINDS for a, b in (one, one[::-1])]
_NOTHING = re.compile("|".join([*_EXCLUDED, r"(?<!\\)\[\]"]))
"""Matches character classes that match no character, such as ``[^\\s\\S]`` and ``[]``."""
_COUNTED = re.compile(r"(\)?)\{(\d*)(?:,(\d*))?\}")
_count = of(Annotated[int, Meta(ge=0, le=MAX_SCHEMA_COUNT)])


# --- options that constrain an answer --------------------------------------------------------------------------------


class TextFormat(msgspec.Struct, tag="text"):
    """A response format that allows any text."""


class ObjectFormat(msgspec.Struct, tag="json_object"):
    """A response format that allows any JSON object."""


class NamedSchema(msgspec.Struct, omit_defaults=True):
    """A schema and its name, as in the chat API's ``json_schema`` response format."""

    schema: dict[str, Any]
    name: Annotated[str, Meta(max_length=256)] | None = None
    strict: bool | None = None

    def __post_init__(self) -> None:
        self.name = self.name or "output"


class SchemaFormat(msgspec.Struct, tag="json_schema"):
    """A response format that allows only JSON that matches a schema."""

    json_schema: NamedSchema


def response_format(value: Any, field: str) -> dict[str, Any]:
    """Accepts ``text``, ``json_object``, and ``json_schema`` with a schema that :func:`compiled_schema` accepts."""
    given = typed(value, TextFormat | ObjectFormat | SchemaFormat, field)
    if isinstance(given, SchemaFormat):
        compiled_schema(given.json_schema.schema, f"{field}.json_schema.schema")
    return dict(msgspec.to_builtins(given))


class StructuredOutputs(msgspec.Struct, omit_defaults=True):
    """vLLM's constraints on an answer. A request may set only one of them. Regular expressions and grammars are not
    allowed."""

    json: dict[str, Any] | None = None
    json_object: bool | None = None
    choice: Annotated[list[Annotated[str, Meta(max_length=1024)]], Meta(max_length=256)] | None = None


def structured_outputs(value: Any, field: str) -> dict[str, Any]:
    """Accepts exactly one of vLLM's ``json``, ``json_object`` and ``choice``."""
    options = typed(value, dict[str, Any], field)
    chosen = {name: given for name, given in options.items() if given not in (None, False)}
    if len(chosen) != 1 or not chosen.keys() <= {"json", "json_object", "choice"}:
        given_names = ", ".join(chosen) or "nothing"
        raise BadRequest(f"{field}: expected one of json, json_object and choice, found {given_names:.200}")
    given = typed(chosen, StructuredOutputs, field)
    if given.json is not None:
        compiled_schema(given.json, f"{field}.json")
    return dict(msgspec.to_builtins(given))


# --- schemas ---------------------------------------------------------------------------------------------------------


def compiled_schema(schema: Mapping[str, Any], field: str) -> None:
    """Raises :class:`BadRequest` if a schema is too expensive to compile, or matches nothing."""
    bounded(schema, field, MAX_SCHEMA_BYTES)
    for inner in _schemas(schema):
        for name, value in inner.items():
            _check_keyword(name, value, field)
    check_progress(schema, field, compiled=True)


def _check_keyword(name: str, value: Any, field: str) -> None:
    if name == "pattern" and isinstance(value, str):
        _check_pattern(value, f"{field}: pattern")
    elif name == "patternProperties" and isinstance(value, Mapping):
        for pattern in value:
            _check_pattern(pattern, f"{field}: patternProperties")
    elif name == "$ref" and isinstance(value, str) and not value.startswith("#"):
        raise BadRequest(f"{field}: $ref {shown(value)} refers outside the schema")
    elif name == "enum" and value == []:
        raise BadRequest(f"{field}: enum [] allows no value")
    elif name == "multipleOf" and isinstance(value, int | float) and not value > 0:
        raise BadRequest(f"{field}: multipleOf {shown(value)}: expected a number above 0")
    elif name in _COUNTS and not isinstance(value, Mapping):  # a map would be the schema of a property with that name
        _count(int(value) if isinstance(value, float) and value.is_integer() else value, f"{field}: {name}")


def _check_pattern(pattern: str, field: str) -> None:
    if _too_large(pattern):
        raise BadRequest(
            f"{field}: {shown(pattern)} is too large to compile; {MAX_PATTERN_LENGTH} characters, counts up to "
            f"{MAX_PATTERN_COUNT}, and counts of groups that multiply to {MAX_PATTERN_GROUPS} are allowed"
        )
    if _UNKNOWN.search(pattern) or _NOTHING.search(pattern) or not _parses(pattern):
        raise BadRequest(
            f"{field}: engines cannot compile the expression {shown(pattern)}: it does not parse, or has a "
            "lookaround, a backreference or an empty character class"
        )


def _too_large(pattern: str) -> bool:
    if len(pattern) > MAX_PATTERN_LENGTH:
        return True
    groups = 1
    for group, *counts in _COUNTED.findall(pattern):
        count = max(int(digits or 0) for digits in counts)
        if count > MAX_PATTERN_COUNT:
            return True
        if group:
            groups *= max(count, 1)
    return groups > MAX_PATTERN_GROUPS


def _parses(pattern: str) -> bool:
    """Returns whether Python can parse a regular expression, after adapting the syntax of named groups."""
    try:
        re.compile(pattern.replace("(?<", "(?P<"))
    except (re.error, RecursionError, OverflowError):
        return False
    return True


# --- references ------------------------------------------------------------------------------------------------------


def check_progress(schema: Mapping[str, Any], field: str, compiled: bool) -> None:
    """Raises :class:`BadRequest` if references form a cycle that never descends into the value.

    Args:
        schema: The whole schema.
        field: Name of the field that contains it.
        compiled: True if the engine compiles the schema to a grammar. Dangling references are then refused too.
    """
    schemas: dict[int, Mapping[str, Any]] = {}
    """Schemas that apply others to the same value, by their ``id()``."""
    applied: dict[int, list[int]] = {}
    for inner in _schemas(schema):
        if others := list(_applied(schema, inner, field, compiled)):
            schemas[id(inner)] = inner
            applied[id(inner)] = [id(other) for other in others]
    try:
        TopologicalSorter(applied).prepare()
    except CycleError as error:
        first = schemas[error.args[1][0]]
        raise BadRequest(
            f"{field}: $ref {_reference(schema, first)} refers back to itself without describing a value; "
            "give the intended schema"
        ) from None


def _schemas(schema: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yields every JSON object inside a schema."""
    rest: list[Any] = [schema]
    while rest:
        item = rest.pop()
        if isinstance(item, Mapping):
            yield item
            rest += item.values()
        elif isinstance(item, list):
            rest += item


def _applied(schema: Mapping[str, Any], inner: Mapping[str, Any], field: str, compiled: bool) -> Iterator[Any]:
    """Yields the schemas that apply to the same value as ``inner``."""
    for name, value in inner.items():
        if name == "$ref":
            yield _target(schema, value, field, compiled)
        elif compiled and name in DYNAMIC_REFS and isinstance(value, str):
            raise BadRequest(f"{field}: {name} is not served; give $ref")
        elif name in SAME_VALUE:
            yield value
        elif name in SAME_VALUE_LISTS and isinstance(value, Mapping):
            yield from value.values()
        elif name in SAME_VALUE_LISTS and isinstance(value, list):
            yield from value


def _target(schema: Mapping[str, Any], reference: Any, field: str, compiled: bool) -> Any:
    """Resolves a reference. If the target is missing and ``compiled`` is false, returns an empty schema."""
    target: Any = schema
    if isinstance(reference, Mapping):
        return reference  # a property with this name, not a reference
    start, *steps = str(reference).split("/")
    try:
        for step in steps:
            name = step.replace("~1", "/").replace("~0", "~")
            target = target[int(name)] if isinstance(target, list) else target[name]
        if start == "#" and isinstance(target, Mapping | bool):
            return target
    except (KeyError, ValueError, IndexError, TypeError):
        pass
    if compiled:
        raise BadRequest(f"{field}: $ref {str(reference)[:100]!r} does not refer to a schema; write #/$defs/NAME")
    return {}


def _reference(schema: Mapping[str, Any], inner: Mapping[str, Any]) -> str:
    value = inner.get("$ref", "#" if inner is schema else "inside it")
    return repr(str(value)[:100])
