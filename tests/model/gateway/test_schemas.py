"""Schemas whose references make no progress are refused before an engine compiles them."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from megaflow_hpc.model.gateway.dialects import DIALECTS
from megaflow_hpc.model.gateway.dialects.base import BadRequest
from megaflow_hpc.model.gateway.dialects.options import engine_request
from tests.support.warm import WarmPython

SELF = {"$ref": "#"}
PAIR = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
CIRCLES: list[dict[str, Any]] = [
    SELF,
    PAIR,
    {"allOf": [SELF]},
    {"anyOf": [SELF, {"type": "integer"}]},
    {"oneOf": [{"type": "integer"}, SELF]},
    {"anyOf": [{"type": "integer"}, {"$ref": "#/anyOf/1"}]},
    {"not": SELF},
    {"if": SELF, "then": {"type": "integer"}},
    {"if": {"type": "integer"}, "else": SELF},
    {"dependentSchemas": {"a": SELF}},
    {"type": "object", "properties": {"a": {"$ref": "#/properties/a"}}, "required": ["a"]},
    {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}, "$defs": PAIR["$defs"]},
    {"type": "array", "items": {"allOf": [{"anyOf": [{"$ref": "#/items"}]}]}},
    {"$defs": {"a/b": {"$ref": "#/$defs/a~1b"}}, "type": "object", "properties": {"x": {"$ref": "#/$defs/a~1b"}}},
    {"$ref": "#/$defs/d0", "$defs": {f"d{n}": {"$ref": f"#/$defs/d{(n + 1) % 900}"} for n in range(900)}},
]
NOWHERE: list[dict[str, Any]] = [
    {"$ref": "#/$defs/none"},
    {"$ref": "#name", "$defs": {"a": {"$anchor": "name"}}},
    {"$ref": ""},
    {"$ref": 5},
    {"$ref": "#/type", "type": "object"},
    {"$ref": "#/anyOf/7", "anyOf": [{"type": "integer"}]},
    {"$dynamicRef": "#node"},
    {"type": "object", "properties": {"a": {"$recursiveRef": "#"}}},
]
FINE: list[dict[str, Any]] = [
    {"type": "object", "properties": {"next": {"$ref": "#"}, "value": {"type": "integer"}}},
    {"type": "array", "items": {"anyOf": [{"type": "integer"}, SELF]}},
    {"$ref": "#/$defs/tree", "$defs": {"tree": {"type": "array", "items": {"$ref": "#/$defs/tree"}}}},
    {"allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}], "$defs": {"a": {"type": "object"}}},
    {"type": "object", "properties": {"$ref": {"type": "string"}, "not": {"type": "string"}}},
    {"type": "object", "properties": {"a": {"$ref": "#/$defs/any"}}, "$defs": {"any": True}},
    {
        "$ref": "#/$defs/d0",
        "$defs": {
            **{f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(30)},
            "d30": {"type": "integer"},
        },
    },
]
PATTERNS = (
    *("(", "[", "*", "\\", "a{2,1}", "[]", r"(a)\1", r"\p{L}", "(?=a)b", "(?<!a)b"),
    *(r"[^\s\S]", r"[^\w\W]x|[^\d\D]", r"a[^_\D.\d]+"),
)
MESSAGES = [{"role": "user", "content": "x"}]


def requests(schema: dict[str, Any], forced: bool = True) -> list[tuple[str, dict[str, Any]]]:
    """Every way in which an agent can send a schema that is compiled, or with ``forced`` off, one that is not."""
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    strict = {"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}
    theirs = {"name": "f", "input_schema": schema}
    flat = {"type": "function", "name": "f", "parameters": schema}
    google = {"functionDeclarations": [{"name": "f", "parametersJsonSchema": schema}]}
    named = {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["f"]}}
    if not forced:
        return [
            ("/chat/completions", {"tools": [tool]}),
            ("/messages", {"tools": [theirs]}),
            ("/models/MODEL:generateContent", {"tools": [google]}),
            ("/responses", {"tools": [flat]}),
            ("/responses", {"tools": [{"type": "namespace", "name": "n", "tools": [flat]}]}),
        ]
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    return [
        ("/chat/completions", {"response_format": form}),
        ("/completions", {"response_format": form}),
        ("/chat/completions", {"structured_outputs": {"json": schema}}),
        ("/chat/completions", {"tools": [strict]}),
        ("/chat/completions", {"tools": [tool], "tool_choice": "required"}),
        ("/messages", {"output_config": {"format": {"type": "json_schema", "schema": schema}}}),
        ("/messages", {"output_format": {"type": "json_schema", "schema": schema}}),
        ("/messages", {"tools": [theirs], "tool_choice": {"type": "any"}}),
        ("/responses", {"text": {"format": {"type": "json_schema", "name": "x", "schema": schema}}}),
        ("/responses", {"tools": [flat], "tool_choice": "required"}),
        ("/models/MODEL:generateContent", {"generationConfig": {"responseJsonSchema": schema}}),
        ("/models/MODEL:generateContent", {"tools": [google], "toolConfig": named}),
    ]


def converted(path: str, body: dict[str, Any]) -> dict[str, Any]:
    asks = {"/completions": {"prompt": "x"}, "/responses": {"input": "x"}}
    asks["/models/MODEL:generateContent"] = {"contents": [{"parts": [{"text": "x"}]}]}
    asked = asks.get(path, {"messages": MESSAGES})
    return engine_request(DIALECTS[path].request({"max_tokens": 5, **asked, **body}), path != "/completions")


@pytest.mark.parametrize("schema", [*CIRCLES, *NOWHERE], ids=lambda schema: json.dumps(schema)[:60])
def test_references_without_progress_or_target_are_refused_wherever_a_schema_is_compiled(
    schema: dict[str, Any],
) -> None:
    for path, body in requests(schema):
        with pytest.raises(BadRequest, match=r"(\$ref|Ref)"):
            converted(path, body)


@pytest.mark.parametrize("schema", CIRCLES, ids=lambda schema: json.dumps(schema)[:60])
def test_circles_are_refused_in_tools_that_are_only_offered(schema: dict[str, Any]) -> None:
    for path, body in requests(schema, forced=False):
        with pytest.raises(BadRequest, match=r"refers back to itself without describing a value"):
            converted(path, body)


def test_a_count_of_thousands_of_digits_is_refused() -> None:
    """Python converts no text of more than 4,300 digits to an integer."""
    for path, body in requests({"type": "string", "pattern": "a{" + "9" * 5000 + "}"}):
        with pytest.raises(BadRequest, match="too large to compile"):
            converted(path, body)


def test_a_tool_that_is_only_offered_may_name_what_is_elsewhere() -> None:
    for schema in NOWHERE:
        for path, body in requests(schema, forced=False):
            converted(path, body)


@pytest.mark.parametrize("schema", FINE, ids=lambda schema: json.dumps(schema)[:60])
def test_schemas_that_describe_something_pass(schema: dict[str, Any]) -> None:
    for path, body in [*requests(schema), *requests(schema, forced=False)]:
        converted(path, body)


UNANSWERABLE: list[dict[str, Any]] = [
    *({"type": "string", "pattern": pattern} for pattern in PATTERNS),
    *({"type": "object", "patternProperties": {pattern: {}}} for pattern in PATTERNS),
    {"type": "number", "multipleOf": -1},
    {"type": "integer", "multipleOf": 0},
    {"type": "array", "items": {"enum": []}},
]


@pytest.mark.parametrize("schema", UNANSWERABLE, ids=lambda schema: json.dumps(schema)[:60])
def test_what_a_real_vllm_answers_with_500_is_refused(schema: dict[str, Any]) -> None:
    """Each was tried: its grammar allows nothing, or vLLM's compiler fails at its expression."""
    for path, body in requests(schema):
        with pytest.raises(BadRequest, match=r"expression|allows no value|above 0"):
            converted(path, body)


@pytest.mark.parametrize(
    "pattern",
    ["", "^a$", "(?:a|b)*", "(?P<n>a)", "(?<n>a)", r"\\[\\]", r"\[]", r"[^\s]", r"\d{3}-\w+", "[^]a]", r"a\/b"],
)
def test_ordinary_expressions_pass(pattern: str) -> None:
    for path, body in requests({"type": "object", "patternProperties": {pattern: {"type": "string"}}}):
        converted(path, body)


def test_many_references_are_followed_once() -> None:
    defs: dict[str, Any] = {f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 9} for n in range(200)}
    schema = {"$ref": "#/$defs/d0", "$defs": {**defs, "d200": {"type": "integer"}}}
    began = time.process_time()
    converted("/chat/completions", {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}})
    assert time.process_time() - began < 5


COMPILE = """
import json, sys, xgrammar
names = [bytes([n]) for n in range(256)] + [b"</s>"]
words = xgrammar.TokenizerInfo(names, xgrammar.VocabType.RAW, stop_token_ids=[256])
compiler = xgrammar.GrammarCompiler(words)
allowed = []
for schema in json.loads(sys.argv[1]):
    matcher = xgrammar.GrammarMatcher(compiler.compile_json_schema(json.dumps(schema)))
    mask = xgrammar.allocate_token_bitmask(1, 257)
    matcher.fill_next_token_bitmask(mask)
    allowed.append(any(mask[0].tolist()))
print(json.dumps(allowed))
"""


@pytest.mark.engine
@pytest.mark.timeout(300)
def test_the_installed_engines_compiler_allows_no_token_for_a_circle_and_some_for_what_passes(interpreter: str) -> None:
    with WarmPython("xgrammar", python=interpreter) as python:
        done = python.run(COMPILE, json.dumps([SELF, PAIR, {"allOf": [SELF]}, *FINE]))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [False] * 3 + [True] * len(FINE)
