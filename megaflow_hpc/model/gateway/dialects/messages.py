"""Anthropic's messages API.

=====================================  =============================================================================
system (text or blocks)                one system message; blocks that contain a hash of the request are omitted
user: text, image, tool_result         a tool message per result, then one user message with the rest
assistant: text, thinking, tool_use    one assistant message: content, reasoning, tool calls
system or developer in the messages    a user message: many chat templates reject a second system message, and moving
                                       it to the front would change the prompt of every earlier call
tools with an ``input_schema``         functions; tools that run on Anthropic's servers (web search) are not offered
computer, bash, text_editor            functions (:mod:`~megaflow_hpc.model.computer_tools`); the calls of a computer
                                       toolset are named after their actions
thinking, effort, cache_control        ignored: the campaign decides how a model thinks
=====================================  =============================================================================
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, to_builtins

from megaflow_hpc.model.computer_tools import BETAS, COMPUTER, anthropic_function, toolset_actions
from megaflow_hpc.model.gateway.canonical import arguments_of, raw_reasoning_of
from megaflow_hpc.model.gateway.dialects.base import (
    BadRequest,
    Event,
    content_of,
    function_tool,
    image_part,
    new_id,
    of,
    text_of,
    text_part,
    written_arguments,
)
from megaflow_hpc.model.gateway.dialects.content import Text
from megaflow_hpc.model.gateway.dialects.options import (
    CONVERTED,
    COUNT,
    Option,
    Stop,
    allowed,
    dropped,
    integer,
)
from megaflow_hpc.model.images import result_images

BILLING = "x-anthropic-billing-header"
"""Prefix of a system block in which Claude Code puts a hash of the request. This block would make every prompt
different."""
HOSTED = ("web_search", "web_fetch", "code_execution", "tool_search", "advisor", "mcp_toolset")
KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large"}
KINDS |= {429: "rate_limit_error", 503: "overloaded_error"}


# --- the types of a request ------------------------------------------------------------------------------------------


class UrlSource(Struct, tag="url"):
    url: str


class Base64Source(Struct, tag="base64"):
    data: str
    media_type: str = "image/png"


class TextSource(Struct, tag="text"):
    data: str


class ImageBlock(Struct, tag="image"):
    source: UrlSource | Base64Source


class DocumentBlock(Struct, tag="document"):
    source: TextSource


class ToolReference(Struct, tag="tool_reference"):
    tool_name: str


Part = Text | ImageBlock | DocumentBlock | ToolReference


class ToolResult(Struct, tag="tool_result"):
    tool_use_id: str | None = None
    content: str | list[Part] | None = None


class Thinking(Struct, tag="thinking"):
    thinking: str | None = None


class RedactedThinking(Struct, tag="redacted_thinking"):
    """Reasoning that only Anthropic can read."""


class ToolUse(Struct, tag="tool_use"):
    name: str
    id: str | None = None
    input: Any = None
    toolset_name: str | None = None


class SystemBlock(Struct):
    text: str | None = None


class UserTurn(Struct, tag_field="role", tag="user"):
    content: str | list[Part | ToolResult]


class AssistantTurn(Struct, tag_field="role", tag="assistant"):
    content: str | list[Text | Thinking | RedactedThinking | ToolUse]


class SystemTurn(Struct, tag_field="role", tag="system"):
    content: str | list[SystemBlock]


class DeveloperTurn(SystemTurn, tag_field="role", tag="developer"):
    """Instructions in the middle of the conversation, with the newer role ``developer``."""


Turn = UserTurn | AssistantTurn | SystemTurn | DeveloperTurn


Pixels = Annotated[int, Meta(ge=1, le=32768)]


class MemberConfig(Struct):
    enabled: bool | None = None


class MessagesTool(Struct):
    """A tool of the agent. Anthropic's own tools have no ``input_schema``."""

    type: str | None = None
    name: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    display_width_px: Pixels | None = None
    display_height_px: Pixels | None = None
    enable_zoom: bool | None = None
    configs: dict[str, MemberConfig | None] | None = None


class MessagesToolChoice(Struct):
    """Restricts which tools the model may call."""

    type: Literal["auto", "any", "none", "tool"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputFormat(Struct):
    type: str | None = None
    schema: Any = None


class OutputConfig(Struct):
    format: OutputFormat | None = None


MESSAGES: Mapping[str, Option] = {
    **CONVERTED,
    "max_tokens": Option(integer(1, COUNT)),
    "messages": Option(of(list[Turn])),
    "system": Option(of(str | list[SystemBlock])),
    "stop_sequences": Option(of(Stop), becomes="stop"),
    "tools": Option(of(list[MessagesTool]), becomes="tools"),
    "tool_choice": Option(of(MessagesToolChoice), becomes="tool_choice"),
    "output_config": Option(of(OutputConfig), becomes="response_format"),
    "output_format": Option(of(OutputFormat), becomes="response_format"),
    **dropped("metadata service_tier thinking context_management cache_control betas speed inference_geo"),
    # Tools that run on Anthropic's servers are not offered to the model.
    **dropped("container mcp_servers"),
}
"""Options of ``/v1/messages`` and ``/v1/messages/count_tokens``. The campaign decides how a model thinks."""


# --- the request -----------------------------------------------------------------------------------------------------


def request(body: Mapping[str, Any]) -> dict[str, Any]:
    given = allowed(MESSAGES, body)
    if "max_tokens" not in given:
        raise BadRequest("max_tokens: expected a positive integer, found nothing")
    asked = _conversation(given)
    asked |= {k: given[k] for k in ("model", "max_tokens", "temperature", "top_p", "top_k") if k in given}
    if given.get("stop_sequences"):
        asked["stop"] = given["stop_sequences"]
    config: OutputConfig | None = given.get("output_config")
    form: OutputFormat | None = given.get("output_format")
    if config and config.format:
        form = config.format
    if form and form.type == "json_schema":
        schema = {"name": "output", "schema": form.schema}
        asked["response_format"] = {"type": "json_schema", "json_schema": schema}
    if "tool_choice" in given and "tools" in asked:
        asked |= _tool_choice(given["tool_choice"])
    return asked


def conversation(body: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the chat messages and tools of a request, which determine its prompt.

    Raises:
        BadRequest: A message or tool cannot be converted.
    """
    return _conversation(allowed(MESSAGES, body))


def _conversation(given: Mapping[str, Any]) -> dict[str, Any]:
    turns: list[Turn] = given.get("messages", [])
    if not turns:
        raise BadRequest("messages: expected a list of at least one message")
    chat: list[dict[str, Any]] = []
    if system := _system(given.get("system", "")):
        chat.append({"role": "system", "content": system})
    for number, turn in enumerate(turns):
        if isinstance(turn, UserTurn):
            chat += _user([Text(turn.content)] if isinstance(turn.content, str) else turn.content)
        elif isinstance(turn, AssistantTurn):
            chat.append(_assistant(turn, f"messages[{number}].content"))
        elif text := _system(turn.content):
            chat.append({"role": "user", "content": text})
    tools = _tools(given.get("tools", []))
    return {"messages": chat, "tools": tools} if tools else {"messages": chat}


def _system(content: str | list[SystemBlock]) -> str:
    texts = [content] if isinstance(content, str) else [block.text or "" for block in content]
    return "\n\n".join(text for text in texts if text and not text.startswith(BILLING))


def _user(blocks: list[Part | ToolResult]) -> Iterator[dict[str, Any]]:
    results: list[list[dict[str, Any]]] = []
    others: list[dict[str, Any]] = []
    for block in blocks:
        if not isinstance(block, ToolResult):
            others.append(_part(block))
            continue
        content = block.content or ""
        results.append([text_part(content)] if isinstance(content, str) else [_part(part) for part in content])
        yield {"role": "tool", "tool_call_id": block.tool_use_id or "", "content": text_of(results[-1], "\n")}
    if parts := [*result_images(results), *others]:
        yield {"role": "user", "content": content_of(parts)}


def _part(part: Part) -> dict[str, Any]:
    match part:
        case Text(text):
            return text_part(text)
        case ToolReference(name):
            return text_part(f"tool {name} is available")
        case DocumentBlock(TextSource(text)):
            return text_part(text)
        case ImageBlock(UrlSource(url)):
            return image_part(url)
        case ImageBlock(Base64Source(data, media_type)):
            return image_part(f"data:{media_type};base64,{data}")
    raise AssertionError(part)


def _assistant(turn: AssistantTurn, where: str) -> dict[str, Any]:
    if isinstance(turn.content, str):
        return {"role": "assistant", "content": turn.content}
    texts, thoughts, calls = [], [], []
    for number, block in enumerate(turn.content):
        match block:
            case Text(text):
                texts.append(text)
            case Thinking(thought):
                thoughts.append(thought or "")
            case ToolUse(name, call_id, given, toolset):
                given = given or {}
                if toolset and isinstance(given, dict):
                    name, given = toolset, given if name == toolset else {"action": name, **given}
                arguments = written_arguments(given, f"{where}[{number}].input")
                function = {"name": name, "arguments": arguments}
                calls.append({"id": call_id or "", "type": "function", "function": function})
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _tools(tools: list[MessagesTool]) -> list[dict[str, Any]]:
    """Returns the tools offered to the model. Omits tools that run on Anthropic's servers."""
    offered = []
    for number, tool in enumerate(tools):
        if tool.input_schema is not None:
            if tool.name is None:
                raise BadRequest(f"tools[{number}].name: expected a text, found nothing")
            offered.append(function_tool(tool.name, tool.description, tool.input_schema))
        elif function := anthropic_function(to_builtins(tool)):
            for side in ("display_width_px", "display_height_px") if (tool.type or "") in BETAS else ():
                if not getattr(tool, side):
                    raise BadRequest(f"tools[{number}].{side}: expected a number of pixels, found nothing")
            offered.append({"type": "function", "function": function})
        elif not (tool.type or "custom").startswith(HOSTED):
            raise BadRequest(f"tools[{number}]: a tool of type {tool.type!r} needs an input_schema here")
    return offered


def _tool_choice(choice: MessagesToolChoice) -> dict[str, Any]:
    asked: dict[str, Any] = {}
    if choice.type == "tool":
        asked["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    else:
        asked["tool_choice"] = "required" if choice.type == "any" else choice.type
    if choice.disable_parallel_tool_use:
        asked["parallel_tool_calls"] = False
    return asked


# --- the answer ------------------------------------------------------------------------------------------------------


def answer(reply: Mapping[str, Any], body: Mapping[str, Any]) -> dict[str, Any]:
    choice = reply["choices"][0]
    message, usage = choice["message"], reply.get("usage") or {}
    calls = message.get("tool_calls") or ()
    actions = toolset_actions(body.get("tools") or ())
    blocks: list[dict[str, Any]] = []
    if thought := raw_reasoning_of(message):
        blocks.append({"type": "thinking", "thinking": thought, "signature": new_id("sig")})
    if message.get("content") or not (calls or blocks):
        blocks.append({"type": "text", "text": message.get("content") or ""})
    for call in calls:
        function = call["function"]
        given = arguments_of(function.get("arguments"))
        block = {"type": "tool_use", "id": call.get("id"), "name": function["name"], "input": given}
        if actions is not None and block["name"] == COMPUTER:
            block["toolset_name"] = COMPUTER
            if given.get("action") in actions:  # any other action could be the name of another tool
                block["name"] = given.pop("action")
        blocks.append(block)
    stop = choice.get("stop_reason") if isinstance(choice.get("stop_reason"), str) else None
    if choice.get("finish_reason") == "length":
        reason, stop = "max_tokens", None
    elif calls:
        reason, stop = "tool_use", None
    else:
        reason = "stop_sequence" if stop is not None else "end_turn"
    return {
        "id": new_id("msg"),
        "type": "message",
        "role": "assistant",
        "model": body.get("model") or reply.get("model"),
        "content": blocks,
        "stop_reason": reason,
        "stop_sequence": stop,
        "usage": {
            "input_tokens": usage.get("prompt_tokens") or 0,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": usage.get("completion_tokens") or 0,
        },
    }


def events(answer: Mapping[str, Any], body: Mapping[str, Any]) -> Iterator[Event]:
    usage = answer["usage"]
    start = {
        **answer,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {**usage, "output_tokens": 0},
    }
    yield _event("message_start", message=start)
    for index, block in enumerate(answer["content"]):
        opening, deltas = _deltas(block)
        yield _event("content_block_start", index=index, content_block=opening)
        for delta in deltas:
            yield _event("content_block_delta", index=index, delta=delta)
        yield _event("content_block_stop", index=index)
    end = {"stop_reason": answer["stop_reason"], "stop_sequence": answer["stop_sequence"]}
    yield _event("message_delta", delta=end, usage=usage)
    yield _event("message_stop")


def _deltas(block: Mapping[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Returns the initial form of a content block in a stream, and the deltas that complete it."""
    if block["type"] == "thinking":
        thought = {"type": "thinking_delta", "thinking": block["thinking"]}
        signature = {"type": "signature_delta", "signature": block["signature"]}
        return {"type": "thinking", "thinking": "", "signature": ""}, [thought, signature]
    if block["type"] == "tool_use":
        text = json.dumps(block["input"], ensure_ascii=False)
        return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": text}]
    return {"type": "text", "text": ""}, [{"type": "text_delta", "text": block["text"]}] if block["text"] else []


def _event(name: str, **data: Any) -> Event:
    return name, {"type": name, **data}


def error(status: int, message: str, kind: str) -> dict[str, Any]:
    """Returns an error body. The status determines the error type, which clients check. ``kind`` is prefixed to the
    message."""
    name = KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
    text = message if kind in ("invalid_request_error", name) else f"{kind}: {message}"
    return {"type": "error", "error": {"type": name, "message": text}}


def error_event(status: int, message: str, kind: str) -> Event:
    return "error", error(status, message, kind)
