"""Converts calls to the APIs of external endpoints: OpenAI's own API, Anthropic's messages and Gemini's
generateContent.

The engine server's proxy makes the conversion. So the gateway and its dialects are the same for every endpoint, and the
key stays in the server's process::

    gateway ── chat request ──► proxy ── request() ──► endpoint ── its reply ──► answer() ── chat reply ──► gateway

Endpoints sign a model's reasoning, and some refuse a tool result if the signed reasoning before it is missing. An
answer carries the signatures in fields that agents need not know (``thinking_blocks``, ``extra_content``). The gateway
records the answer and inserts it into later prompts, so the endpoint gets its own signatures back.
"""

from __future__ import annotations

import json
import re
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from megaflow_hpc.model.computer_tools import (
    BETAS,
    COMPUTER,
    anthropic_tool,
    is_toolset,
    openai_actions,
    openai_arguments,
    openai_tool,
    safety_checks_of,
)
from megaflow_hpc.model.engine_api import CHAT, MODELS
from megaflow_hpc.model.engines.launch import Launch
from megaflow_hpc.model.images import separated_results

ANTHROPIC_VERSION = "2023-06-01"
MAX_TOKENS = 8192
"""Default token limit of requests to Anthropic, whose API requires a limit."""
UNSIGNED = "skip_thought_signature_validator"
"""Gemini accepts this string instead of a signature if another model made the function call."""
_DATA_URL = re.compile(r"data:(image/[a-z0-9.+-]+);base64,", re.IGNORECASE)
_RETRY_DELAY = re.compile(rb'"retryDelay"\s*:\s*"(\d{1,6})(?:\.\d+)?s"')


class Unsupported(ValueError):
    """The endpoint's API cannot express a request. The message names the option and the remedy."""


class Upstream(Protocol):
    """Conversion to and from an endpoint's API."""

    defaults: Mapping[str, Any]
    """Default values of request fields that neither the agent nor the campaign sets."""

    def headers(self, key: str, body: Mapping[str, Any]) -> dict[str, str]:
        """Returns the headers for a chat request, including the key."""

    def path(self, path: str, model: str, body: Mapping[str, Any]) -> str:
        """Returns the path below the endpoint's base URL that corresponds to a path of OpenAI's API, given the chat
        request.

        Raises:
            Unsupported: The API has no such path.
        """

    def request(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Converts a chat request. Raises Unsupported."""

    def answer(self, path: str, reply: Any) -> dict[str, Any]:
        """Converts the endpoint's reply to a reply of OpenAI's API.

        Raises:
            KeyError, TypeError, ValueError, AttributeError: The reply is malformed.
        """


_NOTHING: Mapping[str, Any] = {}


def headers_of(engine: Launch, body: Mapping[str, Any] = _NOTHING) -> dict[str, str]:
    """Returns the headers for a chat request to an engine, including its key."""
    if not engine.key:
        return {}
    if not engine.api:
        return {"Authorization": f"Bearer {engine.key}"}
    return UPSTREAMS[engine.api].headers(engine.key, body)


def url_of(engine: Launch, path: str, body: Mapping[str, Any] = _NOTHING) -> str:
    """Returns an engine's URL for a path of OpenAI's API, given the chat request. Raises Unsupported."""
    if not engine.api:
        return engine.url(path)
    return engine.api_url + UPSTREAMS[engine.api].path(path, engine.model_name, body)


def request_of(engine: Launch, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """Converts a request to the engine's API and adds the campaign's own options. Raises Unsupported."""
    if not engine.api or path != CHAT:
        return {**engine.options, **body}
    upstream = UPSTREAMS[engine.api]
    return {**upstream.defaults, **engine.options, **upstream.request(body)}


def answer_of(engine: Launch, path: str, reply: Any) -> dict[str, Any]:
    """Converts a reply of the engine's API. Raises the same errors as :meth:`Upstream.answer`."""
    return UPSTREAMS[engine.api].answer(path, reply) if engine.api else reply


def retry_after(body: bytes) -> str:
    """Returns the retry delay in seconds from the body of an error response, as Gemini reports it. Returns an empty
    string if there is none."""
    match = _RETRY_DELAY.search(body)
    return str(int(match[1]) + 1) if match else ""


def without_key(body: bytes, key: str) -> bytes:
    """Removes an endpoint's key from an error text, because agents may see the text."""
    return body.replace(key.encode(), b"[key]") if key else body


# --- shared conversions ----------------------------------------------------------------------------------------------


def _refuse(body: Mapping[str, Any], api: str, *names: str) -> None:
    for name in names:
        if body.get(name) and (name, body[name]) != ("n", 1):
            raise Unsupported(f"{name}: {api} does not support it; leave it out, or use another endpoint")


def _parts(content: Any) -> list[dict[str, Any]]:
    """Returns the non-empty parts of a message's content."""
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    return [part for part in content or () if part.get("type") != "text" or part["text"]]


def _text(content: Any) -> str:
    return "\n".join(part["text"] for part in _parts(content) if part["type"] == "text")


def _arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    """Decodes a tool call's arguments. Text that is not a JSON object becomes the argument ``input``."""
    text = call["function"].get("arguments") or "{}"
    try:
        arguments = json.loads(text)
    except (ValueError, RecursionError):
        arguments = None
    return arguments if isinstance(arguments, dict) else {"input": text}


def _functions(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [tool["function"] for tool in body.get("tools") or ()]


def _schema_of(body: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the schema that constrains the answer, or ``None``."""
    form = body.get("response_format") or {}
    if form.get("type") == "json_schema":
        schema: dict[str, Any] = form["json_schema"]["schema"]
        return schema
    return {"type": "object"} if form.get("type") == "json_object" else None


def _grouped(turns: Iterator[tuple[str, list[dict[str, Any]]]], name: str) -> list[dict[str, Any]]:
    """Joins consecutive turns of the same role, because the results of parallel tool calls must form one turn.

    Args:
        turns: Pairs of role and parts.
        name: Name of the field with the parts.
    """
    grouped: list[dict[str, Any]] = []
    for role, parts in turns:
        if not parts:
            continue
        if grouped and grouped[-1]["role"] == role:
            grouped[-1][name] += parts
        else:
            grouped.append({"role": role, name: [*parts]})
    return grouped


def _system(messages: Sequence[Mapping[str, Any]]) -> tuple[str, Sequence[Mapping[str, Any]]]:
    """Splits off the leading system messages. Returns (their text, the other messages)."""
    count = next((n for n, message in enumerate(messages) if message["role"] != "system"), len(messages))
    return "\n\n".join(filter(None, (_text(message.get("content")) for message in messages[:count]))), messages[count:]


def _reply(
    name: Any, model: Any, message: dict[str, Any], finish_reason: str, prompt: int, sampled: int, cached: int
) -> dict[str, Any]:
    usage = {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}
    return {
        "id": name if isinstance(name, str) else f"chatcmpl-{uuid.uuid4().hex[:24]}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model if isinstance(model, str) else "",
        "choices": [{"index": 0, "message": message, "finish_reason": finish_reason}],
        "usage": {**usage, "prompt_tokens_details": {"cached_tokens": cached}},
    }


# --- OpenAI ----------------------------------------------------------------------------------------------------------


class OpenAi:
    """OpenAI's own API. Newer models refuse ``max_tokens``, and all models refuse options of other engines.

    Only the responses API has a computer tool, so requests with this tool go there. The answer carries the items of the
    responses API in ``extra_content``, and later requests send them back.
    """

    defaults: Mapping[str, Any] = {}
    _MESSAGE = ("role", "content", "name", "tool_calls", "tool_call_id")
    _DROPPED = ("top_k", "min_p", "repetition_penalty", "chat_template_kwargs", "structured_outputs", "stream")
    _CALL = ("id", "type", "function")

    def headers(self, key: str, body: Mapping[str, Any]) -> dict[str, str]:
        return {"Authorization": f"Bearer {key}"}

    def path(self, path: str, model: str, body: Mapping[str, Any]) -> str:
        return "/responses" if path == CHAT and self._computer(body) else path.removeprefix("/v1")

    def request(self, body: Mapping[str, Any]) -> dict[str, Any]:
        if computer := self._computer(body):
            return self._response_request(body, computer)
        passed = {name: value for name, value in body.items() if name not in self._DROPPED}
        if limit := passed.pop("max_tokens", None):
            passed.setdefault("max_completion_tokens", limit)
        passed["messages"] = [self._message(message) for message in body["messages"]]
        return passed

    def _message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        kept = {name: message[name] for name in self._MESSAGE if name in message}
        if calls := kept.get("tool_calls"):
            kept["tool_calls"] = [{name: call[name] for name in self._CALL if name in call} for call in calls]
        return kept

    def answer(self, path: str, reply: Any) -> dict[str, Any]:
        return self._chat_reply(reply) if reply.get("object") == "response" else {**reply}

    def _computer(self, body: Mapping[str, Any]) -> dict[str, Any] | None:
        """Returns the request's computer tool, or ``None``."""
        return next(filter(None, map(openai_tool, _functions(body))), None)

    def _response_request(self, body: Mapping[str, Any], computer: Mapping[str, Any]) -> dict[str, Any]:
        _refuse(body, "OpenAI's responses API", "n", "logprobs", "logit_bias", "structured_outputs", "stop")
        asked: dict[str, Any] = {"model": body["model"], "input": list(self._items(body["messages"])), "store": False}
        asked["include"] = ["reasoning.encrypted_content"]  # nothing is stored, so requests repeat it
        asked["tools"] = [openai_tool(function) or {"type": "function", **function} for function in _functions(body)]
        asked |= {name: body[name] for name in ("temperature", "top_p", "parallel_tool_calls") if name in body}
        if limit := body.get("max_completion_tokens") or body.get("max_tokens"):
            asked["max_output_tokens"] = limit
        if computer["type"] == "computer_use_preview":
            asked["truncation"] = "auto"  # the tool's model requires it
        if schema := _schema_of(body):
            asked["text"] = {"format": {"type": "json_schema", "name": "output", "schema": schema}}
        if effort := body.get("reasoning_effort"):
            asked["reasoning"] = {"effort": effort}
        choice = body.get("tool_choice")
        if isinstance(choice, Mapping):
            name = choice["function"]["name"]
            choice = {"type": computer["type"]} if name == COMPUTER else {"type": "function", "name": name}
        return {**asked, **({"tool_choice": choice} if choice else {})}

    def _items(self, messages: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
        """Yields the items of a conversation. The chat messages contain a computer call's screenshot in the next user
        message."""
        screens: dict[str, Mapping[str, Any]] = {}
        for message in separated_results(messages):
            content = message.get("content")
            if message["role"] == "assistant":
                own = ((message.get("extra_content") or {}).get("openai") or {}).get("output")
                yield from own or self._own_items(message)
                calls = [call for call in message.get("tool_calls") or () if call["function"]["name"] == COMPUTER]
                screens = {call.get("id") or "": {} for call in calls}
            elif message["role"] == "tool" and message.get("tool_call_id") in screens:
                screens[message["tool_call_id"]] = message
            elif message["role"] == "tool":
                yield {
                    "type": "function_call_output",
                    "call_id": message.get("tool_call_id"),
                    "output": _text(content),
                }
            else:
                parts = [self._part(part) for part in _parts(content)]
                answered = [name for name, result in screens.items() if result]
                if answered:
                    pictures = [part for part in parts if part["type"] == "input_image"]
                    for name, picture in zip(answered, pictures, strict=False):
                        checks = screens.pop(name).get("acknowledged_safety_checks")
                        yield {
                            "type": "computer_call_output",
                            "call_id": name,
                            "output": {"type": "computer_screenshot", "image_url": picture["image_url"]},
                            **({"acknowledged_safety_checks": checks} if checks else {}),
                        }
                        parts.remove(picture)
                if parts:
                    yield {"role": message["role"], "content": parts}

    def _own_items(self, message: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Yields the items of an answer that another model gave."""
        if text := _text(message.get("content")):
            yield {"role": "assistant", "content": text}
        for call in message.get("tool_calls") or ():
            item = {"call_id": call.get("id"), "status": "completed"}
            actions = openai_actions(_arguments(call)) if call["function"]["name"] == COMPUTER else None
            if actions is not None:
                yield {"type": "computer_call", **item, **actions, "pending_safety_checks": safety_checks_of(call)}
            else:
                yield {"type": "function_call", **item, **call["function"]}

    def _part(self, part: Mapping[str, Any]) -> dict[str, Any]:
        if part["type"] == "text":
            return {"type": "input_text", "text": part["text"]}
        return {"type": "input_image", "image_url": part["image_url"]["url"]}

    def _chat_reply(self, reply: Mapping[str, Any]) -> dict[str, Any]:
        texts, thoughts, calls = [], [], []
        for item in reply["output"]:
            if item["type"] == "message":
                texts += [part.get("text") or part.get("refusal") or "" for part in item["content"]]
            elif item["type"] == "reasoning":
                thoughts += [part["text"] for part in item.get("summary") or ()]
            elif item["type"] == "function_call":
                calls.append(_tool_call(item["call_id"], item["name"], json.loads(item["arguments"])))
            elif item["type"] == "computer_call":
                call = _tool_call(item["call_id"], COMPUTER, openai_arguments(item))
                if checks := item.get("pending_safety_checks"):
                    call["extra_content"] = {"openai": {"pending_safety_checks": checks}}
                calls.append(call)
        message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
        message["extra_content"] = {"openai": {"output": reply["output"]}}
        if thoughts:
            message["reasoning_content"] = "\n".join(thoughts)
        reason = "length" if reply.get("status") == "incomplete" else "stop"
        if calls:
            message["tool_calls"] = calls
            reason = "tool_calls"
        usage = reply["usage"]
        cached = (usage.get("input_tokens_details") or {}).get("cached_tokens") or 0
        prompt, sampled = usage["input_tokens"], usage["output_tokens"]
        return _reply(reply.get("id"), reply.get("model"), message, reason, prompt, sampled, cached)


# --- Anthropic -------------------------------------------------------------------------------------------------------


class Anthropic:
    """Anthropic's messages API."""

    defaults: Mapping[str, Any] = {"max_tokens": MAX_TOKENS}
    _REASONS: Mapping[str, str] = {
        "max_tokens": "length",
        "model_context_window_exceeded": "length",
        "tool_use": "tool_calls",
        "refusal": "content_filter",
    }
    _CHOICES: Mapping[str, str] = {"none": "none", "auto": "auto", "required": "any"}

    def headers(self, key: str, body: Mapping[str, Any]) -> dict[str, str]:
        kinds = [tool["type"] for tool in filter(None, map(anthropic_tool, _functions(body)))]
        betas = sorted({BETAS[kind] for kind in kinds if kind in BETAS})
        headers = {"x-api-key": key, "anthropic-version": ANTHROPIC_VERSION}
        return {**headers, **({"anthropic-beta": ",".join(betas)} if betas else {})}

    def path(self, path: str, model: str, body: Mapping[str, Any]) -> str:
        if path not in (CHAT, MODELS):
            raise Unsupported("Anthropic's API has no plain completions; use chat completions")
        return "/messages" if path == CHAT else "/models"

    def request(self, body: Mapping[str, Any]) -> dict[str, Any]:
        _refuse(body, "Anthropic's API", "n", "logprobs", "logit_bias", "structured_outputs")
        system, messages = _system(body["messages"])
        limit = body.get("max_completion_tokens") or body.get("max_tokens")
        turns = self._turns(messages, list(filter(None, map(anthropic_tool, _functions(body)))))
        asked: dict[str, Any] = {"model": body["model"], "messages": _grouped(turns, "content")}
        asked |= {"max_tokens": limit} if limit else {}
        asked |= {"system": system} if system else {}
        asked |= {name: body[name] for name in ("temperature", "top_p", "top_k") if body.get(name) is not None}
        if stop := body.get("stop"):
            asked["stop_sequences"] = [stop] if isinstance(stop, str) else stop
        if schema := _schema_of(body):
            asked["output_config"] = {"format": {"type": "json_schema", "schema": schema}}
        if functions := _functions(body):
            asked["tools"] = [self._tool(function) for function in functions]
            asked |= self._choice(body)
        return asked

    def _turns(
        self, messages: Sequence[Mapping[str, Any]], own_tools: Sequence[Mapping[str, Any]]
    ) -> Iterator[tuple[str, list[dict[str, Any]]]]:
        """Yields (role, blocks) of each turn. Results of Anthropic's own tools contain their screenshots."""
        result: dict[str, Any] | None = None
        for message in separated_results(messages) if own_tools else messages:
            blocks, before, result = self._blocks(message), result, None
            if message["role"] == "assistant":
                uses = self._uses(message, any(map(is_toolset, own_tools)))
                yield "assistant", [*message.get("thinking_blocks", ()), *blocks, *uses]
            elif message["role"] == "tool":
                result = {"type": "tool_result", "tool_use_id": _anthropic_id(message.get("tool_call_id"))}
                result["content"] = blocks
                yield "user", [result]
            elif own_tools and before and all(block["type"] == "image" for block in blocks):
                before["content"] += blocks
            else:  # this API has no system messages inside a conversation
                yield "user", blocks

    def _blocks(self, message: Mapping[str, Any]) -> list[dict[str, Any]]:
        blocks = []
        for part in _parts(message.get("content")):
            if part["type"] == "text":
                blocks.append({"type": "text", "text": part["text"]})
                continue
            url = part["image_url"]["url"]
            source: dict[str, Any] = {"type": "url", "url": url}
            if match := _DATA_URL.match(url):
                source = {"type": "base64", "media_type": match[1].lower(), "data": url[match.end() :]}
            blocks.append({"type": "image", "source": source})
        return blocks

    def _uses(self, message: Mapping[str, Any], toolset: bool) -> Iterator[dict[str, Any]]:
        for call in message.get("tool_calls") or ():
            name = call["function"]["name"]
            use = {"type": "tool_use", "id": _anthropic_id(call.get("id")), "name": name, "input": _arguments(call)}
            if toolset and name == COMPUTER and "action" in use["input"]:
                use |= {"toolset_name": name, "name": use["input"].pop("action")}
            yield use

    def _tool(self, function: Mapping[str, Any]) -> dict[str, Any]:
        if own := anthropic_tool(function):
            return own
        described = {"description": function["description"]} if function.get("description") else {}
        schema = function.get("parameters") or {"type": "object", "properties": {}}
        return {"name": function["name"], **described, "input_schema": {"type": "object", **schema}}

    def _choice(self, body: Mapping[str, Any]) -> dict[str, Any]:
        choice, parallel = body.get("tool_choice") or "auto", body.get("parallel_tool_calls")
        if isinstance(choice, str):
            chosen: dict[str, Any] = {"type": self._CHOICES[choice]}
        else:
            chosen = {"type": "tool", "name": choice["function"]["name"]}
        if parallel is False and chosen["type"] != "none":
            chosen["disable_parallel_tool_use"] = True
        return {} if chosen == {"type": "auto"} else {"tool_choice": chosen}

    def answer(self, path: str, reply: Any) -> dict[str, Any]:
        if path != CHAT:
            return {"data": reply["data"]}
        blocks, usage = reply["content"], reply["usage"]
        message: dict[str, Any] = {"role": "assistant"}
        message["content"] = "".join(block["text"] for block in blocks if block["type"] == "text")
        if thoughts := [block for block in blocks if block["type"] in ("thinking", "redacted_thinking")]:
            message["reasoning_content"] = "".join(block.get("thinking") or "" for block in thoughts)
            message["thinking_blocks"] = thoughts
        calls = [block for block in blocks if block["type"] == "tool_use"]
        if calls:
            message["tool_calls"] = [self._call(call) for call in calls]
        cached = usage.get("cache_read_input_tokens") or 0
        prompt = usage["input_tokens"] + cached + (usage.get("cache_creation_input_tokens") or 0)
        reason = self._REASONS.get(str(reply.get("stop_reason")), "stop")
        return _reply(reply.get("id"), reply.get("model"), message, reason, prompt, usage["output_tokens"], cached)

    def _call(self, block: Mapping[str, Any]) -> dict[str, Any]:
        name, given = block["name"], block["input"]
        if toolset := block.get("toolset_name"):
            name, given = toolset, {"action": name, **given}
        return _tool_call(block["id"], name, given)


def _anthropic_id(call_id: str | None) -> str:
    """Replaces the characters of a tool call's id that Anthropic refuses. Ids from other models may contain them."""
    return re.sub(r"[^a-zA-Z0-9_-]", "_", call_id or "_")


def _tool_call(name: Any, function: str, arguments: Any) -> dict[str, Any]:
    encoded = json.dumps(arguments or {}, ensure_ascii=False)
    call_id = name if isinstance(name, str) and name else f"call_{uuid.uuid4().hex[:24]}"
    return {"id": call_id, "type": "function", "function": {"name": function, "arguments": encoded}}


# --- Gemini ----------------------------------------------------------------------------------------------------------


class Gemini:
    """Gemini's generateContent API."""

    defaults: Mapping[str, Any] = {}
    _OPTIONS: Mapping[str, str] = {
        "temperature": "temperature",
        "top_p": "topP",
        "top_k": "topK",
        "max_tokens": "maxOutputTokens",
        "max_completion_tokens": "maxOutputTokens",
        "seed": "seed",
        "presence_penalty": "presencePenalty",
        "frequency_penalty": "frequencyPenalty",
    }
    _FILTERED = ("SAFETY", "RECITATION", "BLOCKLIST", "PROHIBITED_CONTENT", "SPII", "LANGUAGE", "IMAGE_SAFETY")
    _MODES: Mapping[str, str] = {"none": "NONE", "auto": "AUTO", "required": "ANY"}

    def headers(self, key: str, body: Mapping[str, Any]) -> dict[str, str]:
        return {"x-goog-api-key": key}

    def path(self, path: str, model: str, body: Mapping[str, Any]) -> str:
        if path not in (CHAT, MODELS):
            raise Unsupported("Gemini's API has no plain completions; use chat completions")
        return f"/models/{model.removeprefix('models/')}:generateContent" if path == CHAT else "/models?pageSize=1000"

    def request(self, body: Mapping[str, Any]) -> dict[str, Any]:
        _refuse(body, "Gemini's API", "n", "logprobs", "logit_bias", "structured_outputs")
        system, messages = _system(body["messages"])
        asked: dict[str, Any] = {"contents": _grouped(self._turns(messages), "parts")}
        if system:
            asked["systemInstruction"] = {"parts": [{"text": system}]}
        options = {new: body[name] for name, new in self._OPTIONS.items() if body.get(name) is not None}
        if stop := body.get("stop"):
            options["stopSequences"] = [stop] if isinstance(stop, str) else stop
        if schema := _schema_of(body):
            options |= {"responseMimeType": "application/json", "responseJsonSchema": schema}
        if options:
            asked["generationConfig"] = options
        if functions := _functions(body):
            asked["tools"] = [{"functionDeclarations": [self._tool(function) for function in functions]}]
            choice = body.get("tool_choice") or "auto"
            named = {} if isinstance(choice, str) else {"allowedFunctionNames": [choice["function"]["name"]]}
            mode = self._MODES[choice] if isinstance(choice, str) else "ANY"
            asked["toolConfig"] = {"functionCallingConfig": {"mode": mode, **named}}
        return asked

    def _turns(self, messages: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
        names: dict[str, str] = {}
        """Name of the function that each tool call names, by the call's id."""
        for message in messages:
            if message["role"] == "assistant":
                calls = message.get("tool_calls") or ()
                names |= {call.get("id") or "": call["function"]["name"] for call in calls}
                yield "model", [*self._blocks(message), *(self._call(call, not n) for n, call in enumerate(calls))]
            elif message["role"] == "tool":
                name = names.get(message.get("tool_call_id") or "", "unknown")
                response = {"name": name, "response": {"output": _text(message.get("content"))}}
                images = [part for part in self._blocks(message) if "text" not in part]
                yield "user", [{"functionResponse": response}, *images]
            else:
                yield "user", self._blocks(message)

    def _blocks(self, message: Mapping[str, Any]) -> list[dict[str, Any]]:
        blocks: list[dict[str, Any]] = []
        for part in _parts(message.get("content")):
            if part["type"] == "text":
                blocks.append({"text": part["text"]})
                continue
            url = part["image_url"]["url"]
            if match := _DATA_URL.match(url):
                blocks.append({"inlineData": {"mimeType": match[1].lower(), "data": url[match.end() :]}})
            else:
                blocks.append({"fileData": {"fileUri": url}})
        signature = _signature(message)
        if blocks and signature:
            blocks[-1]["thoughtSignature"] = signature
        return blocks

    def _call(self, call: Mapping[str, Any], first: bool) -> dict[str, Any]:
        """Converts a tool call. Gemini signs only the ``first`` of several parallel calls."""
        function = {"name": call["function"]["name"], "args": _arguments(call)}
        signature = _signature(call) or (UNSIGNED if first else "")
        return {"functionCall": function, **({"thoughtSignature": signature} if signature else {})}

    def _tool(self, function: Mapping[str, Any]) -> dict[str, Any]:
        described = {"description": function["description"]} if function.get("description") else {}
        schema = {"parametersJsonSchema": function["parameters"]} if function.get("parameters") else {}
        return {"name": function["name"], **described, **schema}

    def answer(self, path: str, reply: Any) -> dict[str, Any]:
        if path != CHAT:
            return {"data": [{"id": model["name"].removeprefix("models/")} for model in reply["models"]]}
        candidate = (reply.get("candidates") or [{"finishReason": "SAFETY"}])[0]  # refused prompts have none
        parts = (candidate.get("content") or {}).get("parts") or []
        message: dict[str, Any] = {"role": "assistant"}
        message["content"] = "".join(part["text"] for part in parts if "text" in part and not part.get("thought"))
        thoughts = [part["text"] for part in parts if part.get("thought") and "text" in part]
        if thoughts:
            message["reasoning_content"] = "".join(thoughts)
        calls = []
        for part in parts:
            signature = part.get("thoughtSignature")
            signed = {"extra_content": {"google": {"thought_signature": signature}}} if signature else {}
            if function := part.get("functionCall"):
                calls.append({**_tool_call(function.get("id"), function["name"], function.get("args")), **signed})
            elif signed:
                message |= signed
        if calls:
            message["tool_calls"] = calls
        usage, why = reply.get("usageMetadata") or {}, candidate.get("finishReason")
        reason = "stop"
        if calls:
            reason = "tool_calls"
        elif why == "MAX_TOKENS":
            reason = "length"
        elif why in self._FILTERED:
            reason = "content_filter"
        sampled = (usage.get("candidatesTokenCount") or 0) + (usage.get("thoughtsTokenCount") or 0)
        prompt = (usage.get("promptTokenCount") or 0) + (usage.get("toolUsePromptTokenCount") or 0)
        cached = usage.get("cachedContentTokenCount") or 0
        name, model = reply.get("responseId"), reply.get("modelVersion")
        return _reply(name, model, message, reason, prompt, sampled, cached)


def _signature(message: Mapping[str, Any]) -> str:
    google = (message.get("extra_content") or {}).get("google") or {}
    return str(google.get("thought_signature") or "")


UPSTREAMS: Mapping[str, Upstream] = {"openai": OpenAi(), "anthropic": Anthropic(), "gemini": Gemini()}
"""Conversion for each value of ``model.api``."""
