"""Anthropic's messages API.

=====================================  =============================================================================
system (text or blocks)                one system message; blocks that carry a hash of the request are left out
user: text, image, tool_result         a tool message per result, then one user message with the rest
assistant: text, thinking, tool_use    one assistant message: content, reasoning, tool calls
system or developer in the messages    a user message: many chat templates refuse a second system message, and moving
                                       it to the front would change the prompt of every earlier call
tools with an ``input_schema``         functions; those that run at Anthropic (web search) are not offered to the model
thinking, effort, cache_control        ignored: the campaign decides how a model thinks
=====================================  =============================================================================
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from megaflow_hpc.model.gateway.dialects.base import (
    BadRequest,
    Event,
    content_of,
    expect_list,
    expect_object,
    expect_text,
    function_tool,
    image_part,
    new_id,
    reasoning_of,
    text_part,
)
from megaflow_hpc.model.gateway.dialects.checks import written_arguments
from megaflow_hpc.model.gateway.dialects.options import MESSAGES, allowed
from megaflow_hpc.model.gateway.meaning import arguments_of

BILLING = "x-anthropic-billing-header"
"""First words of a system block in which Claude Code hashes the request, which would make every prompt differ."""
HOSTED = ("web_search", "web_fetch", "code_execution", "tool_search", "advisor", "mcp_toolset")
KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large"}
KINDS |= {429: "rate_limit_error", 503: "overloaded_error"}


# --- the request -----------------------------------------------------------------------------------------------------


def request(body: Mapping[str, Any]) -> dict[str, Any]:
    given = allowed(MESSAGES, body)
    if "max_tokens" not in given:
        raise BadRequest("max_tokens: expected a positive integer, found nothing")
    asked = _conversation(given)
    asked |= {k: given[k] for k in ("model", "max_tokens", "temperature", "top_p", "top_k") if k in given}
    if given.get("stop_sequences"):
        asked["stop"] = given["stop_sequences"]
    output = given.get("output_config", {}).get("format") or given.get("output_format")
    if output and expect_object(output, "output_config.format").get("type") == "json_schema":
        asked["response_format"] = {
            "type": "json_schema",
            "json_schema": {"name": "output", "schema": output.get("schema")},
        }
    if given.get("tool_choice") and "tools" in asked:
        asked |= _tool_choice(given["tool_choice"])
    return asked


def conversation(body: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the chat messages and tools of a request, the part that makes its prompt.

    Raises:
        BadRequest: A message or tool cannot be converted.
    """
    return _conversation(allowed(MESSAGES, body))


def _conversation(given: Mapping[str, Any]) -> dict[str, Any]:
    if not given.get("messages"):
        raise BadRequest("messages: expected a list of at least one message")
    chat: list[dict[str, Any]] = []
    system = _system(given.get("system") or "", "system")
    if system:
        chat.append({"role": "system", "content": system})
    for number, message in enumerate(given["messages"]):
        where = f"messages[{number}]"
        role, content = expect_object(message, where).get("role"), message.get("content")
        if role in ("system", "developer"):
            chat += [{"role": "user", "content": text} for text in (_system(content, f"{where}.content"),) if text]
            continue
        if role not in ("user", "assistant"):
            raise BadRequest(f"{where}.role: expected user, assistant or system, found {role!r}")
        blocks = [text_part(content)] if isinstance(content, str) else expect_list(content, f"{where}.content")
        chat += (_user if role == "user" else _assistant)(blocks, f"{where}.content")
    tools = [_tool(tool, f"tools[{n}]") for n, tool in enumerate(given.get("tools", ()))]
    offered = [tool for tool in tools if tool]
    return {"messages": chat, "tools": offered} if offered else {"messages": chat}


def _system(content: Any, where: str) -> str:
    if isinstance(content, str):
        return "" if content.startswith(BILLING) else content
    texts = [expect_text(expect_object(b, where).get("text") or "", where) for b in expect_list(content, where)]
    return "\n\n".join(text for text in texts if text and not text.startswith(BILLING))


def _user(blocks: list[Any], where: str) -> Iterator[dict[str, Any]]:
    parts: list[dict[str, Any]] = []
    for number, block in enumerate(blocks):
        here = f"{where}[{number}]"
        if expect_object(block, here).get("type") != "tool_result":
            parts.append(_part(block, here))
            continue
        content = block.get("content") or ""
        items = [text_part(content)] if isinstance(content, str) else expect_list(content, f"{here}.content")
        results = [_part(item, f"{here}.content[{n}]") for n, item in enumerate(items)]
        text = "\n".join(r["text"] for r in results if r["type"] == "text")
        # A tool message is text by the API; an image that a tool returned follows it as the user's.
        parts += [r for r in results if r["type"] != "text"]
        yield {"role": "tool", "tool_call_id": block.get("tool_use_id") or "", "content": text}
    if parts:
        yield {"role": "user", "content": content_of(parts)}


def _part(block: Any, where: str) -> dict[str, Any]:
    kind = expect_object(block, where).get("type")
    source = expect_object(block.get("source") or {}, f"{where}.source")
    if kind == "text":
        return text_part(expect_text(block.get("text"), f"{where}.text"))
    if kind == "image":
        url = source.get("url") if source.get("type") == "url" else None
        return image_part(url or f"data:{source.get('media_type', 'image/png')};base64,{source.get('data', '')}")
    if kind == "document" and source.get("type") == "text":
        return text_part(expect_text(source.get("data"), f"{where}.source.data"))
    if kind == "tool_reference":
        return text_part(f"tool {expect_text(block.get('tool_name'), f'{where}.tool_name')} is available")
    raise BadRequest(f"{where}: content of type {kind!r} is not served; text, images and tool results are")


def _assistant(blocks: list[Any], where: str) -> Iterator[dict[str, Any]]:
    texts, thoughts, calls = [], [], []
    for number, block in enumerate(blocks):
        here = f"{where}[{number}]"
        kind = expect_object(block, here).get("type")
        if kind == "text":
            texts.append(expect_text(block.get("text"), f"{here}.text"))
        elif kind == "thinking":
            thoughts.append(expect_text(block.get("thinking") or "", f"{here}.thinking"))
        elif kind == "tool_use":
            given = block.get("input") or {}
            arguments = written_arguments(given, f"{here}.input")
            function = {"name": expect_text(block.get("name"), f"{here}.name"), "arguments": arguments}
            calls.append({"id": block.get("id") or "", "type": "function", "function": function})
        elif kind != "redacted_thinking":
            raise BadRequest(f"{here}: content of type {kind!r} is not served; text, thinking and tool_use are")
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    yield message


def _tool(tool: Any, where: str) -> dict[str, Any] | None:
    kind = str(expect_object(tool, where).get("type") or "custom")
    if isinstance(tool.get("input_schema"), Mapping):
        return function_tool(
            expect_text(tool.get("name"), f"{where}.name"), tool.get("description"), tool["input_schema"]
        )
    if kind.startswith(HOSTED):
        return None
    raise BadRequest(f"{where}: a tool of type {kind!r} needs an input_schema here")


def _tool_choice(choice: Mapping[str, Any]) -> dict[str, Any]:
    kind = choice.get("type")
    if kind == "tool":
        chosen: Any = {"type": "function", "function": {"name": choice.get("name")}}
    elif kind in ("auto", "any", "none"):
        chosen = {"auto": "auto", "any": "required", "none": "none"}[kind]
    else:
        raise BadRequest(f"tool_choice.type: expected auto, any, tool or none, found {kind!r}")
    return {
        "tool_choice": chosen,
        **({"parallel_tool_calls": False} if choice.get("disable_parallel_tool_use") else {}),
    }


# --- the answer ------------------------------------------------------------------------------------------------------


def answer(reply: Mapping[str, Any], body: Mapping[str, Any]) -> dict[str, Any]:
    choice = reply["choices"][0]
    message, usage = choice["message"], reply.get("usage") or {}
    calls = message.get("tool_calls") or ()
    blocks: list[dict[str, Any]] = []
    if thought := reasoning_of(message):
        blocks.append({"type": "thinking", "thinking": thought, "signature": new_id("sig")})
    if message.get("content") or not (calls or blocks):
        blocks.append({"type": "text", "text": message.get("content") or ""})
    for call in calls:
        function = call["function"]
        given = arguments_of(function.get("arguments"))
        blocks.append({"type": "tool_use", "id": call.get("id"), "name": function["name"], "input": given})
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
    """Returns a block as it opens in a stream, and the deltas that complete it."""
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
    """Returns an error body; the status decides the type, which clients know, and ``kind`` precedes the message."""
    known = KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
    text = message if kind in ("invalid_request_error", known) else f"{kind}: {message}"
    return {"type": "error", "error": {"type": known, "message": text}}


def error_event(status: int, message: str, kind: str) -> Event:
    return "error", error(status, message, kind)
