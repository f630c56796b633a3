"""OpenAI's chat completions and plain completions. Engines use the same APIs, so only streams need conversion.

A streamed chat completion has one chunk each for the role, the message (content, reasoning, tool calls) and the finish
reason. A chunk with the usage follows if requested, and ``[DONE]`` ends the stream.
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
    for chunk in _chunks(answer):
        yield "", chunk
    if (body.get("stream_options") or {}).get("include_usage"):
        yield "", {**_head(answer), "choices": [], "usage": answer.get("usage")}
    yield "", "[DONE]"


def _head(answer: Mapping[str, Any]) -> dict[str, Any]:
    chat = answer.get("object") == "chat.completion"
    head = {k: answer.get(k) for k in ("id", "created", "model")}
    return {**head, "object": "chat.completion.chunk" if chat else "text_completion"}


def _chunks(answer: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    chat, head = answer.get("object") == "chat.completion", _head(answer)
    for choice in answer["choices"]:
        index, logprobs = choice["index"], choice.get("logprobs")
        end = {"index": index, "logprobs": None, "finish_reason": choice.get("finish_reason")}
        if chat:
            message = {k: v for k, v in choice["message"].items() if v is not None and v != []}
            calls = [{"index": n, **c} for n, c in enumerate(message.pop("tool_calls", ()))]
            deltas = [{"role": message.pop("role", "assistant"), "content": ""}]
            # Send text and calls in separate chunks, as engines do: Goose skips text in a chunk with calls.
            deltas += [delta for delta in (message, {"tool_calls": calls}) if any(delta.values())]
            for delta in deltas:
                last = logprobs if delta is deltas[-1] else None
                yield {**head, "choices": [{"index": index, "delta": delta, "logprobs": last, "finish_reason": None}]}
            yield {**head, "choices": [{**end, "delta": {}}]}
        else:
            text = choice.get("text", "")
            yield {**head, "choices": [{"index": index, "text": text, "logprobs": logprobs, "finish_reason": None}]}
            yield {**head, "choices": [{**end, "text": ""}]}
