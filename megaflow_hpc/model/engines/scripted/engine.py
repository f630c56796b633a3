"""The scripted engine's HTTP application and its tokenizer.

It serves ``/v1/chat/completions``, ``/v1/completions``, ``/v1/models`` and ``/health``, and vLLM's render, ``/sleep``,
``/wake_up`` and ``/is_sleeping``. While asleep, it answers completion requests with an error. The engine server runs it
like any other engine, so a campaign can run without weights and with a known outcome.

Tokens are UTF-8 bytes (ids 0 to 255), the end of a turn (256), the start of a turn (257) and an image placeholder
(258), one for each 64x64 pixels of an image. Log-probabilities are a function of id and position. Reasoning and tool
calls are tagged text, as models write them. So each prompt of a conversation extends the previous prompt, and a
conversation is recorded as a single sequence.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler

from megaflow_hpc.model.engine_api import CHAT, COMPLETIONS, RENDER
from megaflow_hpc.model.engines.scripted.script import Script, ScriptedAnswer, text_of
from megaflow_hpc.model.images import read_data_url
from megaflow_hpc.trajectory import Image, ImageSpan, image_parts

END, START, IMAGE, OTHER = 256, 257, 258, 512
"""Token ids: end of a turn, start of a turn, image placeholder, and first alternative id.

An engine with drift reports an alternative id for some bytes.
"""
PATCH = 64
"""Width and height in pixels of the part of an image that one placeholder represents."""
SLEEP_TAGS = frozenset({"weights", "kv_cache"})
"""vLLM's tags for the parts of an engine that can be woken separately."""


class ScriptedEngine:
    """Answers requests from a script.

    Args:
        script: The scripted answers.
        model_name: Name under which the engine serves its answers.
        max_model_len: Maximum sequence length in tokens. Longer requests are rejected with vLLM's error.
        slots: Maximum number of concurrent answers. 0 means unlimited.
    """

    def __init__(self, script: Script, model_name: str, max_model_len: int = 1_000_000, slots: int = 0) -> None:
        self.script, self.model_name, self.max_model_len = script, model_name, max_model_len
        self._asleep: set[str] = set()
        self._slots: Any = asyncio.Semaphore(slots) if slots else contextlib.nullcontext()

    def application(self) -> web.Application:
        """Returns the aiohttp application with all endpoints."""
        app = web.Application(client_max_size=256 * 2**20, middlewares=[_refuse_malformed])
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post(CHAT, self._chat)
        app.router.add_post(RENDER, self._render)
        app.router.add_post(COMPLETIONS, self._complete)
        app.router.add_post("/sleep", self._sleep)
        app.router.add_post("/wake_up", self._wake_up)
        app.router.add_get("/is_sleeping", self._is_sleeping)
        return app

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _models(self, _: web.Request) -> web.Response:
        card = {"id": self.model_name, "object": "model", "owned_by": "script", "max_model_len": self.max_model_len}
        return web.json_response({"object": "list", "data": [card]})

    async def _sleep(self, request: web.Request) -> web.Response:
        if (level := request.query.get("level", "1")) not in ("0", "1", "2"):
            return error(422, f"level {level}: expected 0, 1 or 2")
        self._asleep |= SLEEP_TAGS if level != "0" else set()
        return web.json_response({"status": "sleeping", "level": int(level)})

    async def _wake_up(self, request: web.Request) -> web.Response:
        self._asleep -= set(request.query.getall("tags", list(SLEEP_TAGS)))
        return web.json_response({"status": "sleeping" if self._asleep else "awake"})

    async def _is_sleeping(self, _: web.Request) -> web.Response:
        return web.json_response({"is_sleeping": bool(self._asleep)})

    async def _chat(self, request: web.Request) -> web.Response:
        body = await body_of(request)
        messages, tools = messages_of(body), body.get("tools") or []
        prompt = render(messages, tools)
        answer = self.script.answer(messages, [tool["function"]["name"] for tool in tools])
        return await self._reply(body, answer, prompt, chat=True)

    async def _render(self, request: web.Request) -> web.Response:
        body = await body_of(request)
        spans: list[ImageSpan] = []
        tokens = render(messages_of(body), body.get("tools") or [], spans)
        room = self.max_model_len - len(tokens)
        wanted = body.get("max_completion_tokens") or body.get("max_tokens") or room
        found = {"token_ids": tokens, "sampling_params": {"max_tokens": wanted}, "features": features_of(spans)}
        return web.json_response(found)

    async def _complete(self, request: web.Request) -> web.Response:
        body = await body_of(request)
        prompt = body.get("prompt")
        if not isinstance(prompt, str) and not (isinstance(prompt, list) and all(isinstance(t, int) for t in prompt)):
            return error(400, "prompt: expected a text or a list of token ids")
        tokens = list(prompt.encode()) if isinstance(prompt, str) else prompt
        text = bytes(t for t in tokens if t < 256).decode("utf-8", "replace")
        return await self._reply(body, self.script.answer([{"role": "user", "content": text}]), tokens, chat=False)

    async def _reply(
        self, body: Mapping[str, Any], answer: ScriptedAnswer, prompt: list[int], *, chat: bool
    ) -> web.Response:
        wanted = body.get("max_completion_tokens") or body.get("max_tokens") or 0
        if refused := await self.refusal(answer, len(prompt), wanted):
            return refused
        room = self.max_model_len - len(prompt)
        message = message_of(answer)
        sampled = self.sample(answer_text(message), prompt)
        limit = min(wanted or room, room)
        finish = "tool_calls" if answer.calls else "stop"
        if len(sampled) > limit:
            sampled, finish = sampled[:limit], "length"
            message = {"role": "assistant", "content": text_of_tokens(sampled)}
        return web.json_response(_response(body, self.model_name, prompt, sampled, message, finish, chat=chat))

    def sample(self, text: str, prompt: Sequence[int]) -> list[int]:
        """Returns the token ids that the engine reports for an answer's text."""
        return [*text.encode("utf-8", "replace"), END]

    async def refusal(self, answer: ScriptedAnswer, prompt: int, wanted: int) -> web.Response | None:
        """Waits for the answer's delay. Returns an error response to send instead of the answer, or ``None``.

        Args:
            answer: The scripted answer, which may itself be an error.
            prompt: Number of prompt tokens.
            wanted: Number of tokens requested for the answer.
        """
        async with self._slots:
            await asyncio.sleep(answer.delay_s)
        if self._asleep:
            return error(500, "the engine is asleep")
        if answer.status != 200:
            return error(answer.status, answer.text or "scripted error")
        room = self.max_model_len - prompt
        if room > 0 and wanted <= room:
            return None
        return error(
            400,
            f"This model's maximum context length is {self.max_model_len} tokens. However, you requested "
            f"{wanted} output tokens and your prompt contains {prompt} input tokens.",
        )


async def body_of(request: web.Request) -> dict[str, Any]:
    """Parses the body of a request. Raises HTTPBadRequest if it is not a JSON object."""
    try:
        body = await request.json()
    except (ValueError, RecursionError, web.RequestPayloadError):
        body = None
    if isinstance(body, dict):
        return body
    raise _bad_request("the body: expected a JSON object")


def messages_of(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
        raise _bad_request("messages: expected a list of at least one message")
    return messages


def _bad_request(message: str) -> web.HTTPBadRequest:
    return web.HTTPBadRequest(body=error(400, message).body, content_type="application/json")


@web.middleware
async def _refuse_malformed(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Responds with 400 to a body with values of the wrong type, as real engines do."""
    try:
        return await handler(request)
    except (AttributeError, KeyError, OverflowError, RecursionError, TypeError, ValueError) as mistake:
        return error(400, f"the request's body: {type(mistake).__name__}: {str(mistake)[:200]}")


def message_of(answer: ScriptedAnswer) -> dict[str, Any]:
    """Converts a scripted answer to an OpenAI message."""
    message: dict[str, Any] = {"role": "assistant", "content": answer.text}
    if answer.reasoning:
        message["reasoning"] = answer.reasoning
    if answer.calls:
        message["tool_calls"] = [
            {
                "id": f"call_{uuid.uuid4().hex[:24]}",
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
            }
            for call in answer.calls
        ]
    return message


def _response(
    body: Mapping[str, Any],
    model: str,
    prompt: list[int],
    sampled: list[int],
    message: Mapping[str, Any],
    finish: str,
    *,
    chat: bool,
) -> dict[str, Any]:
    scores = [logprob(t, len(prompt) + i) for i, t in enumerate(sampled)]
    choice: dict[str, Any] = {"index": 0, "finish_reason": finish}
    if chat:
        choice["message"] = message
    else:
        choice["text"] = message["content"]
    if body.get("logprobs"):
        names = [f"token_id:{t}" for t in sampled]
        choice["logprobs"] = (
            {"content": [{"token": n, "logprob": s, "top_logprobs": []} for n, s in zip(names, scores, strict=True)]}
            if chat
            else {"tokens": names, "token_logprobs": scores, "top_logprobs": None, "text_offset": []}
        )
    reply: dict[str, Any] = {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}",
        "object": "chat.completion" if chat else "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": [choice],
        "usage": {
            "prompt_tokens": len(prompt),
            "completion_tokens": len(sampled),
            "total_tokens": len(prompt) + len(sampled),
        },
    }
    if body.get("return_token_ids"):
        choice["token_ids"] = sampled
        (reply if chat else choice)["prompt_token_ids"] = prompt
    return reply


def error(status: int, message: str) -> web.Response:
    """Returns an error response in OpenAI's format."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return web.json_response({"error": {"message": message, "type": kind, "code": status}}, status=status)


# --- tokens ----------------------------------------------------------------------------------------------------------


def answer_text(message: Mapping[str, Any]) -> str:
    """Returns an assistant message as the text that a model would generate."""
    thought = message.get("reasoning")
    calls = [
        f"\n<tool_call>{call['function']['name']} {call['function']['arguments']}</tool_call>"
        for call in message.get("tool_calls") or ()
    ]
    return (f"<think>{thought}</think>\n" if thought else "") + text_of(message) + "".join(calls)


def render(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] = (), spans: list[ImageSpan] | None = None
) -> list[int]:
    """Renders a prompt: ``START role NEWLINE content END NEWLINE`` per message, then the beginning of the answer's
    turn.

    Tools come first, as in most chat templates, so a changed tool list changes the prompt from its start.

    Args:
        spans: List to which the placeholder span of each image is appended.
    """
    tokens: list[int] = [START, *f"tools\n{json.dumps(tools)}".encode(), END, 10] if tools else []
    for message in messages:
        text = answer_text(message) if message.get("role") == "assistant" else text_of(message)
        tokens += [START, *f"{message.get('role', 'user')}\n".encode()]
        for part in image_parts(message):
            span = _span(len(tokens), part["image_url"]["url"])
            tokens += [IMAGE] * span.length
            if spans is not None:
                spans.append(span)
        tokens += [*text.encode("utf-8", "replace"), END, 10]
    return [*tokens, START, *b"assistant\n"]


def _span(start: int, url: str) -> ImageSpan:
    """Returns the span of an image's placeholders. An image on another host is not fetched and gets a single
    placeholder."""
    if not url.startswith("data:"):
        return ImageSpan(start, 1, url)
    image = read_data_url(url)
    return ImageSpan(start, image_tokens(image), image.sha256)


def image_tokens(image: Image) -> int:
    """Returns the number of an image's placeholders."""
    return -(-image.width // PATCH) * -(-image.height // PATCH)


def features_of(spans: Sequence[ImageSpan]) -> dict[str, Any] | None:
    """Returns the images of a prompt in the form in which vLLM's render reports them."""
    if not spans:
        return None
    ranges = [{"offset": span.start, "length": span.length} for span in spans]
    return {"mm_hashes": {"image": [span.image for span in spans]}, "mm_placeholders": {"image": ranges}}


def logprob(token: int, position: int) -> float:
    """Returns an invented log-probability in (-2, 0), which is a function of id and position."""
    return -(1 + (token * 31 + position * 17) % 199) / 100


def text_of_tokens(tokens: Sequence[int]) -> str:
    """Decodes token ids to text. Turn markers have no text."""
    return bytes(t % OTHER for t in tokens if t not in (END, START, IMAGE)).decode("utf-8", "replace")
