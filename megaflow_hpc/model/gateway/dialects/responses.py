"""OpenAI's responses API.

=============================================  =====================================================================
instructions, and system or developer          one system message
messages before all others; later ones         user messages: many chat templates reject a second system message
consecutive reasoning, message, function_call  one assistant message
function_call_output                           a tool message; images of all results follow in one user message
function tools                                 functions; ``namespace`` tools are flattened to ``namespace__name``
custom tools (free text)                       functions with the single argument ``input``
computer tools                                 a function (:mod:`~megaflow_hpc.model.computer_tools`)
tools that run on OpenAI's servers             not offered to the model
reasoning effort, include, store, metadata     ignored: the campaign configures reasoning, and nothing is stored
previous_response_id, conversation, background refused: every request must contain the whole input
=============================================  =====================================================================
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, to_builtins

from megaflow_hpc.model.computer_tools import (
    COMPUTER,
    OPENAI_TOOLS,
    openai_actions,
    openai_arguments,
    openai_function,
    safety_checks_of,
)
from megaflow_hpc.model.gateway.canonical import RAW_ARGUMENT, arguments_of, raw_reasoning_of
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
    typed,
    written_arguments,
)
from megaflow_hpc.model.gateway.dialects.chat import error
from megaflow_hpc.model.gateway.dialects.content import AcknowledgedCheck, InputText, OutputText, Refusal, Text
from megaflow_hpc.model.gateway.dialects.options import (
    CONVERTED,
    COUNT,
    FLAG,
    SAMPLING,
    Option,
    allowed,
    dropped,
    integer,
    refused,
)
from megaflow_hpc.model.images import result_images

__all__ = ["answer", "error", "error_event", "events", "request"]
FREE_TEXT = {"type": "object", "properties": {RAW_ARGUMENT: {"type": "string"}}, "required": [RAW_ARGUMENT]}


# --- the types of a request ------------------------------------------------------------------------------------------


class ReasoningText(Text, tag="reasoning_text"):
    """Text of the model's reasoning."""


class SummaryText(Text, tag="summary_text"):
    """A summary of the model's reasoning."""


class InputImage(Struct, tag="input_image"):
    image_url: str


Part = InputText | OutputText | Text | ReasoningText | SummaryText | Refusal | InputImage


class MessageItem(Struct, tag="message"):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[Part]


class ReasoningItem(Struct, tag="reasoning"):
    content: str | list[Part] | None = None


class CallItem(Struct):
    """Fields common to all calls."""

    name: str
    call_id: str | None = None
    namespace: str | None = None


class FunctionCallItem(CallItem, tag="function_call", kw_only=True):
    arguments: str


class CustomCallItem(CallItem, tag="custom_tool_call"):
    input: str | None = None


class ResultItem(Struct, tag="function_call_output"):
    call_id: str | None = None
    output: str | list[Part] | None = None


class CustomResultItem(ResultItem, tag="custom_tool_call_output"):
    """The result of a custom tool call."""


class ComputerCallItem(Struct, tag="computer_call"):
    call_id: str | None = None
    action: dict[str, Any] | None = None
    actions: list[dict[str, Any]] | None = None


class Screenshot(Struct, tag="computer_screenshot"):
    image_url: str


class ComputerResultItem(Struct, tag="computer_call_output"):
    output: Screenshot
    call_id: str | None = None
    acknowledged_safety_checks: list[AcknowledgedCheck] | None = None


AnyCallItem = FunctionCallItem | CustomCallItem | ComputerCallItem
Item = MessageItem | ReasoningItem | AnyCallItem | ResultItem | CustomResultItem | ComputerResultItem


class FunctionTool(Struct, tag="function"):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Grammar(Struct):
    """Input format of a custom tool."""

    definition: str | None = None


class CustomTool(Struct, tag="custom"):
    name: str
    description: str | None = None
    format: Grammar | None = None


class Namespace(Struct, tag="namespace"):
    name: str
    tools: list[dict[str, Any]] | None = None


class ComputerTool(Struct, tag="computer"):
    """The computer tool. It has no screen size, because the model sees the size in screenshots."""


class PreviewTool(Struct, tag="computer_use_preview"):
    display_width: Annotated[int, Meta(ge=1, le=32768)]
    display_height: Annotated[int, Meta(ge=1, le=32768)]
    environment: Literal["windows", "mac", "linux", "ubuntu", "browser"]


SERVED_TOOLS = ("function", "custom", "namespace", *OPENAI_TOOLS)


class FunctionChoice(Struct, tag="function"):
    name: str


class CustomChoice(Struct, tag="custom"):
    name: str


class ComputerChoice(Struct, tag="computer"):
    """Forces a call of the computer tool."""


class PreviewChoice(Struct, tag="computer_use_preview"):
    """Forces a call of the preview's computer tool."""


class AllowedTools(Struct, tag="allowed_tools"):
    mode: str | None = None


NamedChoice = FunctionChoice | CustomChoice | ComputerChoice | PreviewChoice
Choice = Literal["auto", "none", "required"] | NamedChoice | AllowedTools


class TextOptions(Struct):
    format: dict[str, Any] | None = None


def items(value: Any, field: str) -> list[Item]:
    """Validates the items of a conversation. An item without a type is a message."""
    if isinstance(value, str):
        return [MessageItem("user", value)]
    objects = typed(value, list[dict[str, Any]], field)
    with_types = [item if item.get("type") else {**item, "type": "message"} for item in objects]
    return list(typed(with_types, list[Item], field))


RESPONSES_SAMPLING = (
    *("min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed", "stop", "logit_bias"),
    "structured_outputs",
)
"""Chat options that vLLM's responses API also accepts."""

RESPONSES: Mapping[str, Option] = {
    **CONVERTED,
    "input": Option(items),
    "instructions": Option(of(str)),
    "max_output_tokens": Option(integer(1, COUNT), becomes="max_tokens"),
    "text": Option(of(TextOptions), becomes="response_format"),
    "tools": Option(of(list[dict[str, Any]]), becomes="tools"),
    "tool_choice": Option(of(Choice), becomes="tool_choice"),
    "parallel_tool_calls": FLAG,
    **{name: SAMPLING[name] for name in RESPONSES_SAMPLING},
    **dropped("include_reasoning request_id session_id skip_special_tokens include_stop_str_in_output"),
    **dropped("reasoning include store metadata service_tier truncation user safety_identifier"),
    **dropped("client_metadata prompt_cache_key prompt_cache_retention stream_options max_tool_calls"),
    **dropped("top_logprobs context_management enable_response_messages ignore_eos stop_token_ids"),
    **refused(
        "nothing is kept between requests here; send the whole conversation as input",
        "previous_response_id conversation background prompt previous_input_messages",
    ),
}
"""Options of ``/v1/responses``."""


# --- the request -----------------------------------------------------------------------------------------------------


def request(body: Mapping[str, Any]) -> dict[str, Any]:
    given = allowed(RESPONSES, body)
    asked: dict[str, Any] = {"messages": _messages(given)}
    asked |= {k: given[k] for k in ("model", "temperature", "top_p", "top_k", *RESPONSES_SAMPLING) if k in given}
    if "max_output_tokens" in given:
        asked["max_tokens"] = given["max_output_tokens"]
    text: TextOptions | None = given.get("text")
    form = text.format if text and text.format else {}
    if form.get("type") == "json_schema":
        schema = {k: form[k] for k in ("name", "schema", "strict") if k in form}
        asked["response_format"] = {"type": "json_schema", "json_schema": schema}
    elif form.get("type") == "json_object":
        asked["response_format"] = {"type": "json_object"}
    tools = [tool for _, tool in _tools(given)]
    if tools:
        asked["tools"] = tools
        if "tool_choice" in given:
            asked["tool_choice"] = _tool_choice(given["tool_choice"])
        if given.get("parallel_tool_calls") is False:
            asked["parallel_tool_calls"] = False
    return asked


def _messages(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    system: list[str] = []
    if body.get("instructions"):
        system.append(body["instructions"])
    messages: list[dict[str, Any]] = []
    if not body.get("input"):
        raise BadRequest("input: expected a text or a list of at least one item")
    results: list[list[dict[str, Any]]] = []
    for item in [*body["input"], None]:
        if not isinstance(item, ResultItem | ComputerResultItem):
            if images := [*result_images(results)]:
                messages.append({"role": "user", "content": images})
            results = []
        match item:
            case MessageItem("assistant"):
                _answer_of(messages, "content")["content"] = text_of(_parts(item.content))
            case MessageItem("system" | "developer") if not messages:
                system.append(text_of(_parts(item.content)))
            case MessageItem():
                messages.append({"role": "user", "content": content_of(_parts(item.content))})
            case ReasoningItem(content):
                _answer_of(messages, "reasoning")["reasoning"] = text_of(_parts(content or []))
            case FunctionCallItem() | CustomCallItem() | ComputerCallItem():
                _answer_of(messages, "tool_calls").setdefault("tool_calls", []).append(_call(item))
            case ResultItem():
                results.append(_parts(item.output or ""))
                messages.append(_result(item.call_id, text_of(results[-1], "\n")))
            case ComputerResultItem():
                results.append([image_part(item.output.image_url)])
                checks = to_builtins(item.acknowledged_safety_checks or [])
                messages.append(_result(item.call_id) | ({"acknowledged_safety_checks": checks} if checks else {}))
    if system:
        messages.insert(0, {"role": "system", "content": "\n\n".join(system)})
    for message in messages:
        if message["role"] == "assistant":
            message.setdefault("content", "")
            if not message.get("reasoning", True):
                del message["reasoning"]
    if not any(m["role"] != "system" for m in messages):
        raise BadRequest("input: expected at least one user message")
    return messages


ORDER = ("reasoning", "content", "tool_calls")
"""Order of the parts of an answer in a message."""


def _answer_of(messages: list[dict[str, Any]], part: str) -> dict[str, Any]:
    """Returns the assistant message to which an item belongs. Appends a new message if the last message already has
    this part or a later part."""
    last = messages[-1] if messages else {}
    later = ORDER[ORDER.index(part) + (part == "tool_calls") :]
    if last.get("role") != "assistant" or any(name in last for name in later):
        messages.append({"role": "assistant"})
    return messages[-1]


def _call(item: AnyCallItem) -> dict[str, Any]:
    if isinstance(item, ComputerCallItem):
        arguments = written_arguments(openai_arguments(to_builtins(item)), "action")
        return {"id": item.call_id or "", "type": "function", "function": {"name": COMPUTER, "arguments": arguments}}
    if isinstance(item, FunctionCallItem):
        arguments = item.arguments
    else:
        arguments = written_arguments({RAW_ARGUMENT: item.input or ""}, "input")
    name = f"{item.namespace}__{item.name}" if item.namespace else item.name
    return {"id": item.call_id or "", "type": "function", "function": {"name": name, "arguments": arguments}}


def _result(call_id: str | None, text: str = "") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id or "", "content": text}


def _parts(content: str | Sequence[Part]) -> list[dict[str, Any]]:
    return [text_part(content)] if isinstance(content, str) else [_part(part) for part in content]


def _part(part: Part) -> dict[str, Any]:
    if isinstance(part, InputImage):
        return image_part(part.image_url)
    return text_part(part.refusal if isinstance(part, Refusal) else part.text)


Kind = tuple[str, str, str]
"""Item type, namespace and name of a function in this API."""


def _tools(body: Mapping[str, Any]) -> Iterator[tuple[Kind, dict[str, Any]]]:
    """Yields the functions offered to the model. Omits tools that run on OpenAI's servers."""
    for number, given in enumerate(body.get("tools") or ()):
        where = f"tools[{number}]"
        if given.get("type") not in SERVED_TOOLS:
            continue
        match typed(given, FunctionTool | CustomTool | Namespace | ComputerTool | PreviewTool, where):
            case ComputerTool() | PreviewTool():
                yield ("computer_call", "", COMPUTER), {"type": "function", "function": openai_function(given)}
            case FunctionTool() as tool:
                yield _function(tool, "")
            case CustomTool(name, description, form):
                texts = (description, form.definition if form else None)
                described = "\n\n".join(text for text in texts if text)
                yield ("custom_tool_call", "", name), function_tool(name, described, FREE_TEXT)
            case Namespace(name, tools):
                for n, inner in enumerate(tools or ()):
                    if inner.get("type") == "function":
                        yield _function(typed(inner, FunctionTool, f"{where}.tools[{n}]"), name)


def _function(tool: FunctionTool, space: str) -> tuple[Kind, dict[str, Any]]:
    parameters = tool.parameters or {"type": "object", "properties": {}}
    flat = f"{space}__{tool.name}" if space else tool.name
    return ("function_call", space, tool.name), function_tool(flat, tool.description, parameters)


def _tool_choice(choice: Choice) -> Any:
    match choice:
        case str():
            return choice
        case AllowedTools(mode):
            return "required" if mode == "required" else "auto"
        case FunctionChoice(name) | CustomChoice(name):
            return {"type": "function", "function": {"name": name}}
        case ComputerChoice() | PreviewChoice():
            return {"type": "function", "function": {"name": COMPUTER}}


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
    if thought := raw_reasoning_of(message):
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
        if kind == "computer_call":
            actions = openai_actions(arguments_of(arguments))
            if actions is not None:
                checks = safety_checks_of(call)
                yield {"id": new_id("cu"), "pending_safety_checks": checks, **actions, **item}
                continue
            item["type"] = "function_call"  # not a valid action, so the client gets an ordinary call
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
    stream: list[tuple[str, dict[str, Any]]] = [("created", {"response": begun}), ("in_progress", {"response": begun})]
    for index, item in enumerate(answer["output"]):
        stream += _item_events(item, index)
    stream.append((answer["status"], {"response": dict(answer)}))
    for number, (name, data) in enumerate(stream):
        yield f"response.{name}", {"type": f"response.{name}", "sequence_number": number, **data}


def _item_events(item: Mapping[str, Any], index: int) -> Iterator[tuple[str, dict[str, Any]]]:
    at: dict[str, Any] = {"output_index": index}
    inside = {**at, "item_id": item["id"]}
    if item["type"] == "computer_call":
        yield "output_item.added", {**at, "item": {**item, "status": "in_progress"}}
        yield "output_item.done", {**at, "item": dict(item)}
        return
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
