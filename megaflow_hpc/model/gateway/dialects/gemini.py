"""Gemini's generateContent API.

=====================================  =============================================================================
systemInstruction                      one system message
user: text, inlineData, fileData       a user message; an inline image becomes a ``data:`` URL
user or function: functionResponse     a tool message for the call of the same id, or else of the same function
model: text, thought, functionCall     one assistant message: content, reasoning, tool calls
functionDeclarations                   functions; tools that run on Google's servers (search) are not offered
thinkingConfig, safetySettings, media  ignored: the campaign decides how a model thinks
=====================================  =============================================================================

The model and the kind of response are in the path, so the gateway adds them to the body as ``model`` and ``stream``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from msgspec import Meta, Struct, field

from megaflow_hpc.model.gateway.canonical import arguments_of, raw_reasoning_of
from megaflow_hpc.model.gateway.dialects.base import (
    BadRequest,
    Event,
    bounded,
    content_of,
    function_tool,
    image_part,
    new_id,
    of,
    text_of,
    text_part,
    written_arguments,
)
from megaflow_hpc.model.gateway.dialects.content import MAX_TOOLS_BYTES
from megaflow_hpc.model.gateway.dialects.options import (
    COUNT,
    FLAG,
    MAX_ANSWERS,
    SAMPLING,
    Option,
    StopText,
    allowed,
    dropped,
    refused,
)
from megaflow_hpc.model.images import result_images

PATH = re.compile(r"/v1(?:beta)?/models/([^:]{1,512}):(generateContent|streamGenerateContent|countTokens)")
"""Matches the paths of this API. The groups are the model and the method."""
STATUSES = {400: "INVALID_ARGUMENT", 401: "UNAUTHENTICATED", 403: "PERMISSION_DENIED", 404: "NOT_FOUND"}
STATUSES |= {429: "RESOURCE_EXHAUSTED", 500: "INTERNAL", 503: "UNAVAILABLE"}


# --- the types of a request ------------------------------------------------------------------------------------------


class Blob(Struct, rename="camel"):
    data: str
    mime_type: str = "image/png"


class FileData(Struct, rename="camel"):
    file_uri: str


class FunctionCall(Struct):
    name: str
    id: str | None = None
    args: dict[str, Any] | None = None


class FunctionResponse(Struct):
    name: str = ""
    id: str | None = None
    response: dict[str, Any] | None = None
    parts: list[ResponsePart] = field(default_factory=list)


class ResponsePart(Struct, rename="camel"):
    """An image in the result of a function."""

    inline_data: Blob | None = None


class Part(Struct, rename="camel"):
    """A part of a message. Apart from ``thought``, exactly one field is set."""

    text: str | None = None
    thought: bool | None = None
    inline_data: Blob | None = None
    file_data: FileData | None = None
    function_call: FunctionCall | None = None
    function_response: FunctionResponse | None = None


class Content(Struct):
    parts: list[Part] = field(default_factory=list)
    role: str | None = None


class Declaration(Struct, rename="camel"):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    parameters_json_schema: dict[str, Any] | None = None


class Tool(Struct, rename="camel"):
    """Functions of the agent, or a tool that runs on Google's servers and has no declarations."""

    function_declarations: list[Declaration] | None = None


class FunctionCallingConfig(Struct, rename="camel"):
    mode: str | None = None
    allowed_function_names: list[str] | None = None


class ToolConfig(Struct, rename="camel"):
    function_calling_config: FunctionCallingConfig | None = None


class GenerationConfig(Struct, rename="camel"):
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[float, Meta(ge=-1, le=COUNT)] | None = None
    max_output_tokens: Annotated[int, Meta(ge=1, le=COUNT)] | None = None
    candidate_count: Annotated[int, Meta(ge=1, le=MAX_ANSWERS)] | None = None
    seed: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    stop_sequences: Annotated[list[StopText], Meta(max_length=16)] | None = None
    response_mime_type: str | None = None
    response_schema: dict[str, Any] | None = None
    response_json_schema: dict[str, Any] | None = None


GEMINI: Mapping[str, Option] = {
    "model": SAMPLING["model"],
    "stream": FLAG,
    "contents": Option(of(list[Content]), becomes="messages"),
    "systemInstruction": Option(of(Content), becomes="messages"),
    "tools": Option(of(list[Tool]), becomes="tools"),
    "toolConfig": Option(of(ToolConfig), becomes="tool_choice"),
    "generationConfig": Option(of(GenerationConfig)),
    **dropped("safetySettings labels store"),
    **refused("nothing is kept between requests here; send the whole conversation as contents", "cachedContent"),
}
"""Options of ``/v1beta/models/MODEL:generateContent``. ``model`` and ``stream`` come from the path."""
_NAMES = {"max_output_tokens": "max_tokens", "candidate_count": "n", "stop_sequences": "stop"}
_NAMES |= {name: name for name in ("temperature", "top_p", "seed", "presence_penalty", "frequency_penalty")}
"""Chat option for each field of :class:`GenerationConfig`."""


# --- the request -----------------------------------------------------------------------------------------------------


def request(body: Mapping[str, Any]) -> dict[str, Any]:
    given = allowed(GEMINI, body)
    asked = _conversation(given)
    asked |= {"model": given["model"]} if "model" in given else {}
    config: GenerationConfig = given.get("generationConfig") or GenerationConfig()
    values = ((name, getattr(config, own)) for own, name in _NAMES.items())
    asked |= {name: value for name, value in values if value is not None}
    if config.top_k is not None:
        asked["top_k"] = int(config.top_k)
    if not asked.get("stop", True):
        del asked["stop"]
    schema = config.response_json_schema or config.response_schema
    if schema is not None:
        named = {"name": "output", "schema": _json_schema(schema, "generationConfig.responseSchema")}
        asked["response_format"] = {"type": "json_schema", "json_schema": named}
    elif config.response_mime_type == "application/json":
        asked["response_format"] = {"type": "json_object"}
    tools: ToolConfig | None = given.get("toolConfig")
    if tools and tools.function_calling_config and "tools" in asked:
        asked["tool_choice"] = _tool_choice(tools.function_calling_config)
    return asked


def conversation(body: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the chat messages and tools of a ``countTokens`` request, which determine its prompt.

    Raises:
        BadRequest: A message or tool cannot be converted.
    """
    inner = body.get("generateContentRequest")
    return _conversation(allowed(GEMINI, inner if isinstance(inner, dict) else body))


def _conversation(given: Mapping[str, Any]) -> dict[str, Any]:
    contents: list[Content] = given.get("contents") or []
    if not contents:
        raise BadRequest("contents: expected a list of at least one message")
    system: Content = given.get("systemInstruction") or Content()
    text = "\n\n".join(part.text for part in system.parts if part.text)
    messages = [{"role": "system", "content": text}] if text else []
    pending: dict[str, dict[str, None]] = {}
    """Ids of each function's calls that have no result so far, by function. The ids are in order."""
    for number, content in enumerate(contents):
        if content.role == "model":
            messages.append(_answer_of(content, number, pending))
        elif content.role in (None, "user", "function"):
            messages += _user(content, pending)
        else:
            raise BadRequest(f"contents[{number}].role: expected user or model, found {content.role!r:.100}")
    tools = list(_tools(given.get("tools") or []))
    return {"messages": messages, "tools": tools} if tools else {"messages": messages}


def _user(content: Content, pending: Mapping[str, dict[str, None]]) -> Iterator[dict[str, Any]]:
    results: list[list[dict[str, Any]]] = []
    others: list[dict[str, Any]] = []
    for part in content.parts:
        if result := part.function_response:
            calls = pending.get(result.name, {})
            call_id = result.id or next(iter(calls), "")
            calls.pop(call_id, None)
            yield {"role": "tool", "tool_call_id": call_id, "content": _result(result.response or {})}
            results.append([_image(inner.inline_data) for inner in result.parts if inner.inline_data])
        elif part.inline_data:
            others.append(_image(part.inline_data))
        elif part.file_data:
            others.append(image_part(part.file_data.file_uri))
        elif part.text is not None:
            others.append(text_part(part.text))
    if parts := [*result_images(results), *others]:
        yield {"role": "user", "content": content_of(parts)}


def _image(blob: Blob) -> dict[str, Any]:
    return image_part(f"data:{blob.mime_type};base64,{blob.data}")


def _result(response: Mapping[str, Any]) -> str:
    """Returns a function's result as text. Clients put it into the field ``output`` or ``error``."""
    text = response.get("output", response.get("error"))
    if len(response) == 1 and isinstance(text, str):
        return text
    return written_arguments(response, "functionResponse.response")


def _answer_of(content: Content, turn: int, pending: dict[str, dict[str, None]]) -> dict[str, Any]:
    calls: list[dict[str, Any]] = []
    for number, part in enumerate(content.parts):
        if call := part.function_call:
            call_id = call.id or f"call_{turn}_{number}"
            pending.setdefault(call.name, {})[call_id] = None
            arguments = written_arguments(call.args or {}, f"contents[{turn}].parts[{number}].functionCall.args")
            function = {"name": call.name, "arguments": arguments}
            calls.append({"id": call_id, "type": "function", "function": function})
    texts = [text_part(part.text) for part in content.parts if part.text and not part.thought]
    message: dict[str, Any] = {"role": "assistant", "content": text_of(texts)}
    thoughts = "".join(part.text or "" for part in content.parts if part.thought)
    if thoughts:
        message["reasoning"] = thoughts
    if calls:
        message["tool_calls"] = calls
    return message


def _tools(tools: list[Tool]) -> Iterator[dict[str, Any]]:
    """Yields the functions offered to the model. Omits tools that run on Google's servers."""
    for number, tool in enumerate(tools):
        for inner, declared in enumerate(tool.function_declarations or ()):
            where = f"tools[{number}].functionDeclarations[{inner}].parameters"
            schema = declared.parameters_json_schema or declared.parameters or {"type": "object", "properties": {}}
            yield function_tool(declared.name, declared.description, _json_schema(schema, where))


def _json_schema(schema: Mapping[str, Any], where: str) -> Any:
    """Converts a schema in Gemini's format, whose type names are upper case, to a JSON schema."""
    bounded(schema, where, MAX_TOOLS_BYTES)

    def convert(value: Any) -> Any:
        if isinstance(value, list):
            return [convert(item) for item in value]
        if not isinstance(value, dict):
            return value
        is_type = isinstance(value.get("type"), str)
        return {name: v.lower() if name == "type" and is_type else convert(v) for name, v in value.items()}

    return convert(schema)


def _tool_choice(config: FunctionCallingConfig) -> Any:
    names = config.allowed_function_names or []
    if config.mode == "ANY":
        return {"type": "function", "function": {"name": names[0]}} if len(names) == 1 else "required"
    return "none" if config.mode == "NONE" else "auto"


# --- the answer ------------------------------------------------------------------------------------------------------


def answer(reply: Mapping[str, Any], body: Mapping[str, Any]) -> dict[str, Any]:
    usage = reply.get("usage") or {}
    counts = {"promptTokenCount": "prompt_tokens", "candidatesTokenCount": "completion_tokens"}
    counts["totalTokenCount"] = "total_tokens"
    return {
        "candidates": [_candidate(choice) for choice in reply["choices"]],
        "usageMetadata": {name: usage.get(own) or 0 for name, own in counts.items()},
        "modelVersion": body.get("model") or reply.get("model"),
        "responseId": new_id("resp"),
    }


def _candidate(choice: Mapping[str, Any]) -> dict[str, Any]:
    message, parts = choice["message"], list[dict[str, Any]]()
    if thought := raw_reasoning_of(message):
        parts.append({"text": thought, "thought": True})
    calls = message.get("tool_calls") or ()
    if message.get("content") or not (calls or parts):
        parts.append({"text": message.get("content") or ""})
    for call in calls:
        function = call["function"]
        arguments = arguments_of(function.get("arguments"))
        called = {"id": call.get("id") or new_id("call"), "name": function["name"], "args": arguments}
        parts.append({"functionCall": called})
    reason = {"length": "MAX_TOKENS", "content_filter": "SAFETY"}.get(choice.get("finish_reason") or "", "STOP")
    return {"content": {"role": "model", "parts": parts}, "finishReason": reason, "index": choice["index"]}


def events(answer: Mapping[str, Any], body: Mapping[str, Any]) -> Iterator[Event]:
    yield "", answer


def error(status: int, message: str, kind: str) -> dict[str, Any]:
    """Returns an error body. A 429 names a daily quota, because clients retry after any other quota."""
    name = STATUSES.get(status, "INVALID_ARGUMENT" if status < 500 else "INTERNAL")
    text = message if kind == "invalid_request_error" else f"{kind}: {message}"
    failed: dict[str, Any] = {"code": status, "message": text, "status": name}
    if status == 429:
        violation = {"quotaId": "RolloutBudgetPerDay", "description": message}
        failed["details"] = [{"@type": "type.googleapis.com/google.rpc.QuotaFailure", "violations": [violation]}]
    return {"error": failed}


def error_event(status: int, message: str, kind: str) -> Event:
    return "", json.dumps(error(status, message, kind))
