"""OpenAI's chat completions and plain completions, which engines speak too: only streams are made here.

A chat answer becomes a chunk with the role, one with the message (content, reasoning, tool calls), one with the finish
reason, one with the usage if requested, and ``[DONE]``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megaflow_hpc.model.gateway.dialects.base import Event


def request(body: Mapping[str, Any]) -> dict[str, Any]:
    return dict(body)


def answer(reply: Mapping[str, Any], body: Mapping[str, Any]) -> dict[str, Any]:
    return dict(reply)


def error(status: int, message: str, kind: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


def error_event(status: int, message: str, kind: str) -> Event:
    return "", error(status, message, kind)


def events(answer: Mapping[str, Any], body: Mapping[str, Any]) -> Iterator[Event]:
    for chunk in chunks(answer, bool((body.get("stream_options") or {}).get("include_usage"))):
        yield "", chunk
    yield "", "[DONE]"


def chunks(answer: Mapping[str, Any], usage: bool) -> Iterator[dict[str, Any]]:
    """Yields an answer as the chunks of a stream; the last has the usage if ``usage``."""
    chat = answer.get("object") == "chat.completion"
    head = {k: answer.get(k) for k in ("id", "created", "model")}
    head["object"] = "chat.completion.chunk" if chat else "text_completion"
    for choice in answer["choices"]:
        index, logprobs = choice["index"], choice.get("logprobs")
        end = {"index": index, "logprobs": None, "finish_reason": choice.get("finish_reason")}
        if chat:
            message = {k: v for k, v in choice["message"].items() if v is not None and v != []}
            calls = [{"index": n, **c} for n, c in enumerate(message.pop("tool_calls", ()))]
            first = {"role": message.pop("role", "assistant"), "content": ""}
            body = {**message, "tool_calls": calls} if calls else message
            yield {**head, "choices": [{"index": index, "delta": first, "logprobs": None, "finish_reason": None}]}
            yield {**head, "choices": [{"index": index, "delta": body, "logprobs": logprobs, "finish_reason": None}]}
            yield {**head, "choices": [{**end, "delta": {}}]}
        else:
            text = choice.get("text", "")
            yield {**head, "choices": [{"index": index, "text": text, "logprobs": logprobs, "finish_reason": None}]}
            yield {**head, "choices": [{**end, "text": ""}]}
    if usage:
        yield {**head, "choices": [], "usage": answer.get("usage")}
