"""Checks of the options of a model call: each takes a value and its field's name, and returns what is passed on.

A check raises :class:`BadRequest`, which names the field, what was expected and what was found. Nothing that is not a
number passes for one: ``NaN`` and infinity fail every range.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Callable, Mapping
from typing import Any

import orjson

from megaflow_hpc.model.gateway.dialects.base import BadRequest, expect_list, expect_object, expect_text
from megaflow_hpc.model.gateway.dialects.schemas import check_progress
from megaflow_hpc.model.json_text import LARGE, brackets
from megaflow_hpc.texts import containers_at

Check = Callable[[Any, str], Any]

NESTING = 64
"""Levels of objects and lists: engines decode and print them by recursion, and fail with 500 where it ends."""
SCHEMA_BYTES, TOOLS_BYTES = 2**16, 2**21
"""Largest schema that an answer is held to, and largest list of tools, as JSON."""
PATTERN_LENGTH, PATTERN_COUNT, PATTERN_GROUPS = 512, 1000, 100
"""Of a regular expression that an engine compiles: characters, largest ``{count}``, product of counts of groups."""
SCHEMA_COUNT = 100_000
"""Largest ``maxLength``, ``minItems`` and the like."""
ARGUMENTS_LENGTH, ARGUMENTS_BRACKETS, ARGUMENTS_VALUES = 2**22, 10_000, 100_000
"""Of a tool call's arguments: characters, objects and lists, and values."""
_UNKNOWN = re.compile(r"\(\?(?:[=!]|<[=!])|\\[1-9]")
"""Lookahead, lookbehind and backreferences, which engines do not support."""
_KINDS = (r"\s", r"\S"), (r"\d", r"\D"), (r"\w", r"\W")
_EXCLUDED = [rf"\[\^[^\]]*\{a}[^\]]*\{b}" for one in _KINDS for a, b in (one, one[::-1])]
_NOTHING = re.compile("|".join([*_EXCLUDED, r"(?<!\\)\[\]"]))
"""Character classes that match nothing, such as ``[^\\s\\S]`` and ``[]``."""
_COUNTED = re.compile(r"(\)?)\{(\d*)(?:,(\d*))?\}")
_COUNTS = frozenset(f"{end}{of}" for end in ("min", "max") for of in ("Items", "Length", "Properties", "Contains"))


def flag(value: Any, field: str) -> bool:
    """Passes ``true`` and ``false``."""
    if not isinstance(value, bool):
        raise BadRequest(f"{field}: expected true or false, found {_shown(value)}")
    return value


def integer(low: int, high: int) -> Check:
    """Returns a check for an integer from ``low`` to ``high``."""

    def check(value: Any, field: str) -> int:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if type(value) is not int or not low <= value <= high:
            kind = "a positive integer" if low == 1 else f"an integer from {low}"
            raise BadRequest(f"{field}: expected {kind} up to {high}, found {_shown(value)}")
        return value

    return check


def number(low: float, high: float) -> Check:
    """Returns a check for a number from ``low`` to ``high``."""

    def check(value: Any, field: str) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise BadRequest(f"{field}: expected a number from {low:g} to {high:g}, found {_shown(value)}")
        return value

    return check


def one_of(*choices: str) -> Check:
    """Returns a check for one of several words."""

    def check(value: Any, field: str) -> str:
        if not isinstance(value, str) or value not in choices:
            raise BadRequest(f"{field}: expected one of {', '.join(choices)}, found {_shown(value)}")
        return value

    return check


def text(longest: int) -> Check:
    """Returns a check for a text of at most ``longest`` characters."""

    def check(value: Any, field: str) -> str:
        if len(expect_text(value, field)) > longest:
            raise BadRequest(f"{field}: {len(value)} characters; {longest} are allowed")
        return str(value)

    return check


def texts(most: int, longest: int) -> Check:
    """Returns a check for one text or a list of at most ``most`` texts, each of 1 to ``longest`` characters."""
    one = text(longest)

    def check(value: Any, field: str) -> Any:
        if isinstance(value, str):
            return one(value, field)
        if len(expect_list(value, field)) > most:
            raise BadRequest(f"{field}: {len(value)} texts; {most} are allowed")
        return [one(item, f"{field}[{n}]") for n, item in enumerate(value)]

    return check


def logit_bias(value: Any, field: str) -> dict[str, float]:
    """Passes up to 1,024 token ids, each with a number from -100 to 100."""
    if len(expect_object(value, field)) > 1024:
        raise BadRequest(f"{field}: {len(value)} tokens; 1024 are allowed")
    for token in value:
        if not re.fullmatch(r"\d{1,9}", token, re.ASCII):
            raise BadRequest(f"{field}: expected token ids, found {_shown(token)}")
    bias = number(-100, 100)
    return {token: bias(given, f"{field}.{token}") for token, given in value.items()}


def prompt(value: Any, field: str) -> Any:
    """Passes a text or a list of token ids, or a list of up to 16 of either."""
    if isinstance(value, str):
        return value
    if expect_list(value, field) and isinstance(value[0], str | list):
        if len(value) > 16:
            raise BadRequest(f"{field}: {len(value)} prompts; 16 are allowed")
        for number_, item in enumerate(value):
            if not isinstance(item, str):
                _token_ids(item, f"{field}[{number_}]")
        return value
    return _token_ids(value, field)


def _token_ids(value: Any, field: str) -> list[int]:
    try:
        if value and min(array("i", value)) >= 0:
            return list(value)
    except (TypeError, OverflowError):
        pass
    raise BadRequest(f"{field}: expected a text or a list of token ids")


def thinking(value: Any, field: str) -> dict[str, Any]:
    """Passes the switches of chat templates for reasoning; a template's other variables are the campaign's."""
    found = {name: given for name, given in expect_object(value, field).items() if given is not None}
    for name, given in found.items():
        if name not in THINKING:
            known = ", ".join(THINKING)
            raise BadRequest(
                f"{field}.{name}: not passed on, {known} are; a campaign sets others for all calls by "
                "model.args: {default-chat-template-kwargs: {…}}"
            )
        THINKING[name](given, f"{field}.{name}")
    return found


THINKING: Mapping[str, Check] = {
    "enable_thinking": flag,
    "thinking": flag,
    "preserve_thinking": flag,
    "clear_thinking": flag,
    "thinking_budget": integer(0, 2**31 - 1),
    "reasoning_effort": text(32),
}


def response_format(value: Any, field: str) -> dict[str, Any]:
    """Passes ``text``, ``json_object``, and ``json_schema`` with a schema that :func:`compiled_schema` passes."""
    kind = one_of("text", "json_object", "json_schema")(expect_object(value, field).get("type"), f"{field}.type")
    if kind != "json_schema":
        return {"type": kind}
    given = expect_object(value.get("json_schema"), f"{field}.json_schema")
    schema = compiled_schema(given.get("schema"), f"{field}.json_schema.schema")
    found = {"name": text(256)(given.get("name") or "output", f"{field}.json_schema.name"), "schema": schema}
    if given.get("strict") is not None:
        found["strict"] = flag(given["strict"], f"{field}.json_schema.strict")
    return {"type": "json_schema", "json_schema": found}


def structured_outputs(value: Any, field: str) -> dict[str, Any]:
    """Passes vLLM's ``json``, ``json_object`` and ``choice``; expressions and grammars are not for agents to give."""
    found = {name: given for name, given in expect_object(value, field).items() if given not in (None, False)}
    if set(found) == {"json"}:
        return {"json": compiled_schema(found["json"], f"{field}.json")}
    if set(found) == {"json_object"}:
        return {"json_object": flag(found["json_object"], f"{field}.json_object")}
    if set(found) == {"choice"}:
        return {"choice": texts(256, 1024)(expect_list(found["choice"], f"{field}.choice"), f"{field}.choice")}
    raise BadRequest(f"{field}: expected one of json, json_object and choice, found {', '.join(found) or 'none'}")


def compiled_schema(value: Any, field: str) -> Mapping[str, Any]:
    """Checks a JSON schema that an engine may compile to a grammar: its size, depth, counts, expressions and
    references are bounded."""
    bounded(expect_object(value, field), field, SCHEMA_BYTES)
    rest: list[Any] = [value]
    while rest:
        found = rest.pop()
        if isinstance(found, list):
            rest += found
        elif isinstance(found, Mapping):
            rest += found.values()
            for name, given in found.items():
                if name == "pattern" and isinstance(given, str):
                    _pattern(given, f"{field}: pattern")
                elif name == "patternProperties" and isinstance(given, Mapping):
                    for pattern in given:
                        _pattern(pattern, f"{field}: patternProperties")
                elif name == "$ref" and isinstance(given, str) and not given.startswith("#"):
                    raise BadRequest(f"{field}: $ref {_shown(given)} leads out of the schema")
                elif name == "enum" and given == []:
                    raise BadRequest(f"{field}: enum [] allows no value")
                elif name == "multipleOf" and isinstance(given, int | float) and not given > 0:
                    raise BadRequest(f"{field}: multipleOf {_shown(given)}: expected a number above 0")
                elif name in _COUNTS and not isinstance(given, Mapping):
                    integer(0, SCHEMA_COUNT)(given, f"{field}: {name}")
    check_progress(value, field, compiled=True)
    return dict(value)


def shallow(value: Any, field: str) -> None:
    """Raises :class:`BadRequest` if objects and lists nest deeper than :data:`NESTING`."""
    if too_deep(value):
        raise BadRequest(f"{field}: nested deeper than {NESTING} levels")


def bounded(value: Any, field: str, most: int) -> None:
    """Raises :class:`BadRequest` if ``value`` as JSON is longer than ``most`` bytes or too deep."""
    shallow(value, field)
    values, characters = _weight(value, most // 2, most)
    if 2 * values + characters <= most:  # else what is longer in any case is not encoded to see how long it is
        try:
            encoded = orjson.dumps(value)
        except TypeError:  # half a surrogate pair
            encoded = json.dumps(value).encode()
        if len(encoded) <= most:
            return
    raise BadRequest(f"{field}: more than the {most} bytes of JSON that are allowed")


def _weight(value: Any, values: int, characters: int) -> tuple[int, int]:
    """Returns how many values are in a value, and characters in its texts; no more is looked at than is asked about."""
    rest, found, length = [value], 0, 0
    while rest and found <= values and length <= characters:
        item = rest.pop()
        if isinstance(item, str):
            length += len(item)
        elif isinstance(item, list):
            found += len(item)
            rest += item
        elif isinstance(item, Mapping):
            found += len(item)
            length += sum(map(len, item))
            rest += item.values()
    return found, length


def too_deep(value: Any) -> bool:
    """Returns whether objects and lists nest deeper than :data:`NESTING`."""
    return any(containers_at(value, NESTING))  # what is empty holds nothing deeper


def arguments(value: Any, field: str) -> str:
    """Passes a tool call's arguments, which an engine decodes; they need not be JSON, since a model wrote them."""
    if len(expect_text(value, field)) > ARGUMENTS_LENGTH:
        raise BadRequest(f"{field}: {len(value)} characters; {ARGUMENTS_LENGTH} are allowed")
    opened = deepest = found = values = 0
    for part, commas in brackets(value.encode("utf-8", "surrogatepass")):
        values += commas
        for bracket in part:
            opened += 1 if bracket in b"[{" else -1
            found += bracket in b"[{"
            deepest = max(deepest, opened)
        if found > ARGUMENTS_BRACKETS or values > ARGUMENTS_VALUES:
            raise BadRequest(f"{field}: over {ARGUMENTS_BRACKETS} objects and lists, or {ARGUMENTS_VALUES} values")
    if deepest > NESTING and (len(value) > LARGE or _decodes_deep(value)):
        raise BadRequest(f"{field}: nested deeper than {NESTING} levels")
    return str(value)


def written_arguments(value: Any, field: str) -> str:
    """Returns the arguments of a tool call that an agent hands back as values, as JSON."""
    shallow(value, field)
    values, characters = _weight(value, ARGUMENTS_VALUES, ARGUMENTS_LENGTH)
    if values > ARGUMENTS_VALUES or characters > ARGUMENTS_LENGTH:
        raise BadRequest(f"{field}: over {ARGUMENTS_VALUES} values, or {ARGUMENTS_LENGTH} characters")
    return json.dumps(value, ensure_ascii=False)


def _decodes_deep(encoded: str) -> bool:
    try:
        return too_deep(orjson.loads(encoded))
    except ValueError:  # so it is for orjson, which reads no half of a surrogate pair, and no more than 1,024 levels
        pass
    try:
        return too_deep(json.loads(encoded))
    except RecursionError:
        return True
    except ValueError:
        return False  # an engine's decoder ends at the mistake too


def _pattern(pattern: str, field: str) -> None:
    counts = [(bool(group), max(int(n or 0) for n in (low, high))) for group, low, high in _COUNTED.findall(pattern)]
    groups = 1
    for group, count in counts:
        groups *= max(count, 1) if group else 1
    if len(pattern) > PATTERN_LENGTH or groups > PATTERN_GROUPS or any(n > PATTERN_COUNT for _, n in counts):
        raise BadRequest(
            f"{field}: {_shown(pattern)} is too large to compile; {PATTERN_LENGTH} characters, counts up to "
            f"{PATTERN_COUNT}, and counts of groups that multiply to {PATTERN_GROUPS} are allowed"
        )
    if _UNKNOWN.search(pattern) or _NOTHING.search(pattern) or not _parses(pattern):
        raise BadRequest(
            f"{field}: engines cannot compile the expression {_shown(pattern)}: it does not parse, or has a "
            "lookaround, a backreference or an empty character class"
        )


def _parses(pattern: str) -> bool:
    """Returns whether an expression parses in Python, which has another syntax for named groups."""
    try:
        re.compile(pattern.replace("(?<", "(?P<"))
    except (re.error, RecursionError, OverflowError):
        return False
    return True


def _shown(value: Any) -> str:
    """Returns a value for a message, not longer than a line; a large one by its type."""
    if isinstance(value, str | bool | float) or value is None:
        return repr(value[:100] if isinstance(value, str) else value)
    if isinstance(value, int) and abs(value) < 2**70:
        return str(value)
    return f"a value of type {type(value).__name__}"
