"""A whole OpenAI answer, sent to the agent as server-sent events.

A chat answer becomes a chunk with the role, one with the message (content, reasoning, tool calls), one with the finish
reason, on request one with the usage, and ``[DONE]``: what every client that can read a stream accepts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from aiohttp import web


async def send(request: web.Request, answer: Mapping[str, Any], body: Mapping[str, Any]) -> web.StreamResponse:
    """Streams ``answer`` in reply to ``request``, whose decoded JSON is ``body``."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    usage = bool((body.get("stream_options") or {}).get("include_usage"))
    for chunk in chunks(answer, usage):
        await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
    await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response


def chunks(answer: Mapping[str, Any], usage: bool) -> Iterator[dict[str, Any]]:
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
