"""OpenAI's responses API.

=============================================  =====================================================================
instructions, and system or developer          one system message
messages before all others; later ones         user messages: many chat templates refuse a second system message
reasoning, message, function_call in a row     one assistant message
function_call_output                           a tool message; images in it follow as the user's
function tools                                 functions; ``namespace`` tools are flattened to ``namespace__name``
custom tools (free text)                       functions with the one argument ``input``
tools that run at OpenAI (web search)          not offered to the model
reasoning effort, include, store, metadata     ignored: how a model thinks is the campaign's matter; nothing is stored
previous_response_id, conversation, background refused: the whole input is to be sent with every request
=============================================  =====================================================================
"""

from __future__ import annotations

import time
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
from megaflow_hpc.model.gateway.dialects.chat import error
from megaflow_hpc.model.gateway.dialects.checks import written_arguments
from megaflow_hpc.model.gateway.dialects.options import RESPONSES, RESPONSES_SAMPLING, allowed
from megaflow_hpc.model.gateway.meaning import RAW_ARGUMENT, arguments_of

__all__ = ["answer", "error", "error_event", "events", "request"]
FREE_TEXT = {"type": "object", "properties": {RAW_ARGUMENT: {"type": "string"}}, "required": [RAW_ARGUMENT]}
TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


# --- the request -----------------------------------------------------------------------------------------------------


def request(body: Mapping[str, Any]) -> dict[str, Any]:
    given = allowed(RESPONSES, body)
    asked: dict[str, Any] = {"messages": _messages(given)}
    asked |= {k: given[k] for k in ("model", "temperature", "top_p", "top_k", *RESPONSES_SAMPLING) if k in given}
    if "max_output_tokens" in given:
        asked["max_tokens"] = given["max_output_tokens"]
    form = expect_object(given.get("text", {}).get("format") or {}, "text.format")
    if form.get("type") == "json_schema":
        schema = {k: form[k] for k in ("name", "schema", "strict") if k in form}
        asked["response_format"] = {"type": "json_schema", "json_schema": schema}
    elif form.get("type") == "json_object":
        asked["response_format"] = {"type": "json_object"}
    tools = [tool for _, tool in _tools(given)]
    if tools:
        asked["tools"] = tools
        if given.get("tool_choice"):
            asked["tool_choice"] = _tool_choice(given["tool_choice"])
        if given.get("parallel_tool_calls") is False:
            asked["parallel_tool_calls"] = False
    return asked


def _messages(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    system: list[str] = []
    if body.get("instructions"):
        system.append(expect_text(body["instructions"], "instructions"))
    given = body.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(items, list) or not items:
        raise BadRequest("input: expected a text or a list of at least one item")
    messages: list[dict[str, Any]] = []
    for number, item in enumerate(items):
        where = f"input[{number}]"
        kind = expect_object(item, where).get("type") or "message"
        if kind == "message":
            _add_message(messages, system, item, where)
        elif kind == "reasoning":
            _answer_of(messages, "reasoning")["reasoning"] = _texts(item.get("content") or [], f"{where}.content")
        elif kind in ("function_call", "custom_tool_call"):
            _answer_of(messages, "tool_calls").setdefault("tool_calls", []).append(_call(item, kind, where))
        elif kind in ("function_call_output", "custom_tool_call_output"):
            messages += _result(item, where)
        else:
            raise BadRequest(f"{where}: an item of type {kind!r} is not served; messages, reasoning and calls are")
    if system:
        messages.insert(0, {"role": "system", "content": "\n\n".join(system)})
    for message in messages:
        if message["role"] == "assistant":
            message.setdefault("content", "")
            if not message.get("reasoning", True):
                del message["reasoning"]
    if not any(m["role"] != "system" for m in messages):
        raise BadRequest("input: expected at least one message of the user")
    return messages


def _add_message(messages: list[dict[str, Any]], system: list[str], item: Mapping[str, Any], where: str) -> None:
    role, content = item.get("role"), item.get("content")
    if role == "assistant":
        _answer_of(messages, "content")["content"] = _texts(content, f"{where}.content")
    elif role in ("system", "developer") and not messages:
        system.append(_texts(content, f"{where}.content"))
    elif role in ("system", "developer", "user"):
        messages.append({"role": "user", "content": content_of(_parts(content, f"{where}.content"))})
    else:
        raise BadRequest(f"{where}.role: expected user, assistant, system or developer, found {role!r}")


ORDER = ("reasoning", "content", "tool_calls")
"""Order of the parts of one answer."""


def _answer_of(messages: list[dict[str, Any]], part: str) -> dict[str, Any]:
    """Returns the assistant message that an item belongs to: the last, unless it has such a part or a later one."""
    last = messages[-1] if messages else {}
    later = ORDER[ORDER.index(part) + (part == "tool_calls") :]
    if last.get("role") != "assistant" or any(name in last for name in later):
        messages.append({"role": "assistant"})
    return messages[-1]


def _call(item: Mapping[str, Any], kind: str, where: str) -> dict[str, Any]:
    name = expect_text(item.get("name"), f"{where}.name")
    if kind == "custom_tool_call":
        arguments = written_arguments({RAW_ARGUMENT: item.get("input") or ""}, where)
    else:
        arguments = expect_text(item.get("arguments"), f"{where}.arguments")
    name = f"{item['namespace']}__{name}" if item.get("namespace") else name
    return {"id": item.get("call_id") or "", "type": "function", "function": {"name": name, "arguments": arguments}}


def _result(item: Mapping[str, Any], where: str) -> Iterator[dict[str, Any]]:
    parts = _parts(item.get("output") or "", f"{where}.output")
    text = "\n".join(part["text"] for part in parts if part["type"] == "text")
    yield {"role": "tool", "tool_call_id": item.get("call_id") or "", "content": text}
    if images := [part for part in parts if part["type"] != "text"]:
        yield {"role": "user", "content": images}


def _parts(content: Any, where: str) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [text_part(content)]
    parts = []
    for number, part in enumerate(expect_list(content, where)):
        kind = expect_object(part, f"{where}[{number}]").get("type")
        if kind in TEXTS:
            parts.append(text_part(expect_text(part.get("text"), f"{where}[{number}].text")))
        elif kind == "refusal":
            parts.append(text_part(str(part.get("refusal") or "")))
        elif kind == "input_image" and isinstance(part.get("image_url"), str):
            parts.append(image_part(part["image_url"]))
        else:
            raise BadRequest(f"{where}[{number}]: content of type {kind!r} is not served; text and image_url are")
    return parts


def _texts(content: Any, where: str) -> str:
    return "".join(part["text"] for part in _parts(content, where) if part["type"] == "text")


Kind = tuple[str, str, str]
"""Item type, namespace and name by which a function is called in this API."""


def _tools(body: Mapping[str, Any]) -> Iterator[tuple[Kind, dict[str, Any]]]:
    """Yields the functions that are offered to the model."""
    for number, tool in enumerate(expect_list(body.get("tools") or [], "tools")):
        where = f"tools[{number}]"
        kind = expect_object(tool, where).get("type")
        if kind == "function":
            yield _function(tool, "", where)
        elif kind == "namespace":
            space = expect_text(tool.get("name"), f"{where}.name")
            for n, inner in enumerate(expect_list(tool.get("tools") or [], f"{where}.tools")):
                if expect_object(inner, f"{where}.tools[{n}]").get("type") == "function":
                    yield _function(inner, space, f"{where}.tools[{n}]")
        elif kind == "custom":
            name = expect_text(tool.get("name"), f"{where}.name")
            form = expect_object(tool.get("format") or {}, f"{where}.format")
            texts = [
                expect_text(tool.get("description") or "", f"{where}.description"),
                expect_text(form.get("definition") or "", f"{where}.format.definition"),
            ]
            described = "\n\n".join(text for text in texts if text)
            yield ("custom_tool_call", "", name), function_tool(name, described, FREE_TEXT)


def _function(tool: Mapping[str, Any], space: str, where: str) -> tuple[Kind, dict[str, Any]]:
    name = expect_text(tool.get("name"), f"{where}.name")
    parameters = tool.get("parameters") or {"type": "object", "properties": {}}
    flat = f"{space}__{name}" if space else name
    return ("function_call", space, name), function_tool(flat, tool.get("description"), parameters)


def _tool_choice(choice: Any) -> Any:
    if isinstance(choice, str) and choice in ("auto", "none", "required"):
        return choice
    kind = expect_object(choice, "tool_choice").get("type")
    if kind in ("function", "custom"):
        return {"type": "function", "function": {"name": choice.get("name")}}
    if kind == "allowed_tools":
        return "required" if choice.get("mode") == "required" else "auto"
    raise BadRequest(f"tool_choice: {choice!r} is not served; auto, none, required or a function is")


# --- the answer ------------------------------------------------------------------------------------------------------


def answer(reply: Mapping[str, Any], body: Mapping[str, Any]) -> dict[str, Any]:
    choice, usage = reply["choices"][0], reply.get("usage") or {}
    cut = choice.get("finish_reason") == "length"
    status = "incomplete" if cut else "completed"
    echoed = ("instructions", "temperature", "top_p", "max_output_tokens", "metadata", "text", "reasoning", "user")
    return {
        "id": new_id("resp"),
        "object": "response",
        "created_at": reply.get("created") or int(time.time()),
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "model": body.get("model") or reply.get("model"),
        "output": list(_output(choice["message"], body, status)),
        "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "previous_response_id": None,
        "store": False,
        **{name: body.get(name) for name in echoed},
        "usage": {
            "input_tokens": usage.get("prompt_tokens") or 0,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": usage.get("completion_tokens") or 0,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.get("total_tokens") or 0,
        },
    }


def _output(message: Mapping[str, Any], body: Mapping[str, Any], status: str) -> Iterator[dict[str, Any]]:
    calls = message.get("tool_calls") or ()
    if thought := reasoning_of(message):
        content = [{"type": "reasoning_text", "text": thought}]
        yield {"id": new_id("rs"), "type": "reasoning", "summary": [], "content": content, "status": status}
    if message.get("content") or not (calls or thought):
        part: dict[str, Any] = {
            "type": "output_text",
            "text": message.get("content") or "",
            "annotations": [],
            "logprobs": [],
        }
        yield {"id": new_id("msg"), "type": "message", "role": "assistant", "status": status, "content": [part]}
    kinds = {tool["function"]["name"]: kind for kind, tool in _tools(body)} if calls else {}
    for call in calls:
        name, arguments = call["function"]["name"], call["function"].get("arguments") or "{}"
        kind, space, short = kinds.get(name, ("function_call", "", name))
        item = {"type": kind, "call_id": call.get("id") or new_id("call"), "name": short, "status": status}
        if kind == "custom_tool_call":
            yield {"id": new_id("ctc"), **item, "input": _free_text(arguments)}
        else:
            yield {"id": new_id("fc"), **item, "arguments": arguments, **({"namespace": space} if space else {})}


def _free_text(arguments: str) -> str:
    given = arguments_of(arguments)
    value = given.get(RAW_ARGUMENT)
    return value if len(given) == 1 and isinstance(value, str) else arguments


def events(answer: Mapping[str, Any], body: Mapping[str, Any]) -> Iterator[Event]:
    begun = {**answer, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    found: list[tuple[str, dict[str, Any]]] = [("created", {"response": begun}), ("in_progress", {"response": begun})]
    for index, item in enumerate(answer["output"]):
        found += _item_events(item, index)
    found.append((answer["status"], {"response": dict(answer)}))
    for number, (name, data) in enumerate(found):
        yield f"response.{name}", {"type": f"response.{name}", "sequence_number": number, **data}


def _item_events(item: Mapping[str, Any], index: int) -> Iterator[tuple[str, dict[str, Any]]]:
    at: dict[str, Any] = {"output_index": index}
    inside = {**at, "item_id": item["id"]}
    field = {"custom_tool_call": "input", "function_call": "arguments"}.get(item["type"], "content")
    empty: Any = [] if field == "content" else ""
    yield "output_item.added", {**at, "item": {**item, "status": "in_progress", field: empty}}
    if field != "content":
        name = "custom_tool_call_input" if field == "input" else "function_call_arguments"
        yield f"{name}.delta", {**inside, "delta": item[field]}
        yield f"{name}.done", {**inside, field: item[field], **({"name": item["name"]} if field == "arguments" else {})}
    else:
        name = "output_text" if item["type"] == "message" else "reasoning_text"
        scores: dict[str, Any] = {"logprobs": []} if item["type"] == "message" else {}
        for number, part in enumerate(item["content"]):
            here = {**inside, "content_index": number}
            yield "content_part.added", {**here, "part": {**part, "text": ""}}
            yield f"{name}.delta", {**here, "delta": part["text"], **scores}
            yield f"{name}.done", {**here, "text": part["text"], **scores}
            yield "content_part.done", {**here, "part": part}
    yield "output_item.done", {**at, "item": dict(item)}


def error_event(status: int, message: str, kind: str) -> Event:
    failed = {"id": new_id("resp"), "object": "response", "status": "failed", "output": [], "model": ""}
    cause = {"code": "server_error" if status >= 500 else kind, "message": message}
    return "response.failed", {
        "type": "response.failed",
        "sequence_number": 0,
        "response": {**failed, "created_at": int(time.time()), "error": cause},
    }
