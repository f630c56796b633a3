"""Refuses JSON schemas whose references form a cycle without describing a part of the value.

An example is ``{"$ref": "#"}``. Engines compile it to a grammar that allows no token, and answer 500. Longer cycles
through ``allOf``, ``anyOf`` and other keywords that apply a schema to the same value do the same. A cycle through
``properties`` or ``items`` describes a part of the value, and is valid.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megaflow_hpc.model.gateway.dialects.base import BadRequest

HERE = ("not", "if", "then", "else")
"""Keywords with one schema that applies to the same value, like ``$ref``."""
HERE_EACH = ("allOf", "anyOf", "oneOf", "dependentSchemas", "dependencies")
"""Keywords with a list or map of schemas that apply to the same value."""
MOVING = ("$dynamicRef", "$recursiveRef")
"""References whose target depends on the context. Engines ignore them."""


def check_progress(schema: Mapping[str, Any], field: str, compiled: bool) -> None:
    """Raises :class:`BadRequest` if references form a cycle without describing a part of the value.

    Args:
        schema: The whole schema.
        field: Its name.
        compiled: The engine compiles it to a grammar, so dangling references are refused too.
    """
    left: set[int] = set()
    """Ids of the schemas that are fully checked."""
    for start in _schemas(schema):
        path: list[tuple[int, Iterator[Any]]] = []
        on_path: set[int] = set()
        enter: Any = start
        while True:
            if isinstance(enter, Mapping) and id(enter) not in left:
                if id(enter) in on_path:
                    raise BadRequest(
                        f"{field}: $ref {_reference(schema, enter)} leads back to itself and describes nothing; give "
                        "the schema that is meant"
                    )
                on_path.add(id(enter))
                path.append((id(enter), _applied(schema, enter, field, compiled)))
            while path and (enter := next(path[-1][1], None)) is None:
                done, _ = path.pop()
                on_path.discard(done)
                left.add(done)
            if not path:
                break


def _schemas(schema: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yields every object within a schema."""
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
        elif compiled and name in MOVING and isinstance(value, str):
            raise BadRequest(f"{field}: {name} is not served; give $ref")
        elif name in HERE:
            yield value
        elif name in HERE_EACH:
            yield from value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()


def _target(schema: Mapping[str, Any], reference: Any, field: str, compiled: bool) -> Any:
    """Returns the target of a reference. If it is missing and ``compiled`` is false, returns an empty schema."""
    found: Any = schema
    if isinstance(reference, Mapping):
        return reference  # a property of that name
    start, *steps = str(reference).split("/")
    try:
        for step in steps:
            name = step.replace("~1", "/").replace("~0", "~")
            found = found[int(name)] if isinstance(found, list) else found[name]
        if start == "#" and isinstance(found, Mapping | bool):
            return found
    except (KeyError, ValueError, IndexError, TypeError):
        pass
    if compiled:
        raise BadRequest(f"{field}: $ref {str(reference)[:100]!r} leads to no schema; write #/$defs/NAME")
    return {}


def _reference(schema: Mapping[str, Any], inner: Mapping[str, Any]) -> str:
    value = inner.get("$ref", "#" if inner is schema else "inside it")
    return repr(str(value)[:100])
