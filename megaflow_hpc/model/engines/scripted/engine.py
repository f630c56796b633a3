"""The scripted engine's HTTP application, from messages to text with token ids.

It serves ``/v1/chat/completions``, ``/v1/completions``, ``/v1/models`` and ``/health`` as engines do, and vLLM's
``/sleep``, ``/wake_up`` and ``/is_sleeping``: asleep it fails what asks for an answer; :mod:`.scale_out` adds vLLM's
render, generate and derender. It runs in the same server as any engine, so a campaign can be driven to a
known end without weights.
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

from megaflow_hpc.model.api import CHAT, COMPLETIONS
from megaflow_hpc.model.engines.scripted.script import Script, ScriptedAnswer
from megaflow_hpc.model.engines.scripted.tokens import END, OTHER, answer_text, logprob, render

SLEEPS = frozenset({"weights", "kv_cache"})
"""What vLLM wakes by these tags."""


class ScriptedEngine:
    """Answers requests from a script.

    Args:
        script: The answers.
        model_name: Name under which it serves.
        max_model_len: Longest sequence in tokens; longer requests are refused as by vLLM.
        slots: Answers given at once; 0 is unlimited.
    """

    def __init__(self, script: Script, model_name: str, max_model_len: int = 1_000_000, slots: int = 0) -> None:
        self.script, self.model_name, self.max_model_len = script, model_name, max_model_len
        self._asleep: set[str] = set()
        self._slots: Any = asyncio.Semaphore(slots) if slots else contextlib.nullcontext()

    def application(self) -> web.Application:
        """Returns the aiohttp application with all endpoints."""
        app = web.Application(client_max_size=256 * 2**20, middlewares=[_refuse_what_is_no_request])
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post(CHAT, self._chat)
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
        self._asleep |= SLEEPS if level != "0" else set()
        return web.json_response({"status": "sleeping", "level": int(level)})

    async def _wake_up(self, request: web.Request) -> web.Response:
        self._asleep -= set(request.query.getall("tags", list(SLEEPS)))
        return web.json_response({"status": "sleeping" if self._asleep else "awake"})

    async def _is_sleeping(self, _: web.Request) -> web.Response:
        return web.json_response({"is_sleeping": bool(self._asleep)})

    async def _chat(self, request: web.Request) -> web.Response:
        body = await body_of(request)
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
            return error(400, "messages: expected a list of at least one message")
        tools = body.get("tools") or []
        prompt = render(messages, tools)
        answer = self.script.answer(messages, [tool["function"]["name"] for tool in tools])
        return await self._reply(body, answer, prompt, chat=True)

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
            text = bytes(t % OTHER for t in sampled if t != END).decode("utf-8", "replace")
            message = {"role": "assistant", "content": text}
        self.on_sampled(prompt, sampled)
        return web.json_response(_response(body, self.model_name, prompt, sampled, message, finish, chat=chat))

    def sample(self, text: str, prompt: Sequence[int]) -> list[int]:
        """Returns the token ids of an answer's text; overridden where sampling drifts."""
        return [*text.encode("utf-8", "replace"), END]

    def on_sampled(self, prompt: Sequence[int], tokens: Sequence[int]) -> None:
        """Called with each answer that is given; overridden where answers are logged."""

    async def refusal(self, answer: ScriptedAnswer, prompt: int, wanted: int) -> web.Response | None:
        """Waits as long as the answer takes, then returns an error to give instead of it, or ``None``.

        Args:
            answer: The scripted answer, which may be an error itself.
            prompt: Tokens of the prompt.
            wanted: Tokens requested for the answer.
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
    """Returns a request's JSON object; raises the answer 400 if it has none."""
    try:
        body = await request.json()
    except (ValueError, RecursionError, web.RequestPayloadError):
        body = None
    if isinstance(body, dict):
        return body
    raise web.HTTPBadRequest(body=error(400, "the body: expected a JSON object").body, content_type="application/json")


@web.middleware
async def _refuse_what_is_no_request(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answers 400, as engines do, where a body's values are of other kinds than they should be."""
    try:
        return await handler(request)
    except (AttributeError, KeyError, OverflowError, RecursionError, TypeError, ValueError) as mistake:
        return error(400, f"the request's body: {type(mistake).__name__}: {str(mistake)[:200]}")


def message_of(answer: ScriptedAnswer) -> dict[str, Any]:
    """Returns a scripted answer as an OpenAI message."""
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
    """Returns an error in OpenAI's shape."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return web.json_response({"error": {"message": message, "type": kind, "code": status}}, status=status)
