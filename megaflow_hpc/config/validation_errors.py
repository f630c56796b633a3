"""Explains invalid values in a campaign file: position, value and what is expected.

Pydantic's messages are written for programmers ("input should be a valid dictionary or instance of …"). Here the
expectation is read from the JSON Schema of the sections, so that messages state the bounds and choices of the key.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from megaflow_hpc.config.reading import place_of, reached

OF_KIND = re.compile(
    r"(int|float|string|bool|dict|mapping|model|list|tuple|set|frozen_set|finite_number|greater_than|less_than|literal|enum"
    r")(_|\Z)"
)
"""Pydantic error types that are better explained from the schema. Others carry messages of the sections."""
REMOVED_KEYS = {
    "environment.limits.cpu_s": "limit CPUs and time with cpus and wall_s",
    "environment.mode": "every rollout gets a new sandbox; leave it out",
    "evaluation": "write the reward of a passed rollout as pass_threshold: 0.5; pass@k needs no key",
    "model.name": "write the model's name at the endpoint as path",
    "importance.level": "write importance: token",
    "pool.share": "write share: group at the top of the file",
    "pool.users": "write the users' weights as pool.weights: {alice: 2}; pool.in_flight holds for every user",
    "quotas.slots": "limit rollouts with slurm.pods: count, ranks_per_node and slots_per_rank",
    "prompts.greso": "write prompts.filter_solved, or order: curriculum, which prefers tasks that are sometimes solved",
    "scheduling.cuts": "a rollout fails after 16 interruptions; leave it out",
    "slurm.pods.throttle": "start fewer pods (slurm.pods.count); each is requeued until the work is done",
    "trainer.cpus_per_gpu": "write slurm.servers.cpus_per_gpu, or slurm.trainer.extra: {cpus-per-gpu: 8}",
    "training.constrained": "such calls are answered, and their tokens get loss mask 0; leave it out",
    "training.data.replay": "write loss.epochs, or a function such as megaflow_hpc.training.recipes:past_successes",
    "training.mode": "write training.staleness: 0 for synchronous, null for asynchronous, or the bound",
    "training.nonfinite": "training ends after 3 steps without a finite gradient; leave it out",
    "weights.poll_s": "servers poll often for trained policies; leave it out",
}
"""Removed key, or its last parts → what to use instead."""
UNITS = {"s": "seconds", "gb": "GB", "mb": "MB", "hours": "hours"}
"""Suffix of a key → its unit."""


def explain(error: ValidationError, path: str, node: yaml.Node | None, model: type[BaseModel]) -> str:
    """Formats the first problem of a validation error as one line: file, line, key, value and remedy."""
    return explain_all(error, path, node, model)[0]


def explain_all(error: ValidationError, path: str, node: yaml.Node | None, model: type[BaseModel]) -> list[str]:
    """Formats each problem of a validation error as one line: file, line, key, value and remedy.

    Unknown keys come first, because they are often the reason why others are missing. A value that matches none of
    several types is reported once.
    """
    problems: dict[Any, str] = {}
    schema = model.model_json_schema()
    for problem in sorted(error.errors(), key=lambda problem: problem["type"] != "extra_forbidden"):
        location = [part for part in problem["loc"] if not (isinstance(part, str) and part.startswith("function-"))]
        in_file = problem["type"] == "missing" or node is None
        key = tuple(location) if in_file else reached(node, location)
        problems.setdefault(key, f"{place_of(node, location, path)}: {_explained(problem, location, key, schema)}")
    return list(problems.values())


def _explained(problem: Any, location: Sequence[Any], key: Sequence[Any], schema: Mapping[str, Any]) -> str:
    if problem["type"] == "extra_forbidden":
        name = ".".join(str(part) for part in location if not isinstance(part, int))
        for removed, remedy in REMOVED_KEYS.items():
            if f".{name}".endswith(f".{removed}"):
                return f"{name}: this key was removed: {remedy}"
        names = sorted({name for kind in _at(schema, location[:-1]) for name in kind.get("properties", ())})
        close = difflib.get_close_matches(str(location[-1]), names, 1)
        remedy = f"did you mean {close[0]!r}?" if close else f"known here: {', '.join(names)}"
        return f"unknown key {'.'.join(map(str, location))!r}; {remedy}"
    if problem["type"] == "missing":
        return f"{'.'.join(map(str, location))!r} is missing; add it"
    value = problem.get("input")
    many = "a list" if isinstance(value, list | tuple) else "keys" if isinstance(value, dict) else ""
    named = ".".join(map(str, key)) + ("" if many else f" {json.dumps(value) if value is None else repr(value)}")
    kinds = _expected(_at(schema, location)) if OF_KIND.match(problem["type"]) else []
    if not kinds:
        message = problem["msg"].removeprefix("Value error, ")
        message = message[0].lower() + message[1:]
        return f"{named}: {message}" if key else message
    found = f", found {many}" if many else ""
    return f"{named}: expected {' or '.join(kinds)}{found}{_remedy(value, str(key[-1]) if key else '', kinds)}"


def _remedy(value: Any, key: str, kinds: Sequence[str]) -> str:
    """Returns the remedy for a value, or an empty string if none is obvious."""
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
    """Returns the schemas of the value at ``location``, resolved through lists, mappings, sections and optional
    values."""

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
    """Returns a description of each accepted kind of value, with its bounds."""
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
