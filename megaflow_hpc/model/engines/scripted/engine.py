"""The scripted engine's HTTP application: turns messages into scripted text with token ids.

It serves ``/v1/chat/completions``, ``/v1/completions``, ``/v1/models`` and ``/health``, and vLLM's ``/sleep``,
``/wake_up`` and ``/is_sleeping``. While asleep, it answers completion requests with an error. :class:`SplitEngine` adds
vLLM's render, generate and derender. The engine runs in the same server as any other, so a campaign can run without
weights and with a known outcome.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler

from megaflow_hpc.model.api import CHAT, COMPLETIONS, DERENDER, GENERATE, RENDER, TEXTS
from megaflow_hpc.model.engines.scripted.script import Script, ScriptedAnswer
from megaflow_hpc.model.engines.scripted.tokens import (
    END,
    OTHER,
    answer_text,
    logprob,
    parse_prompt,
    render,
    text_of_tokens,
)

SLEEP_TAGS = frozenset({"weights", "kv_cache"})
"""Tags of the parts that vLLM can wake separately."""


class ScriptedEngine:
    """Answers requests from a script.

    Args:
        script: The scripted answers.
        model_name: Name under which the engine serves.
        max_model_len: Maximum sequence length in tokens. Longer requests are rejected as by vLLM.
        slots: Maximum concurrent answers; 0 means unlimited.
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
        messages, tools = _messages_of(body), body.get("tools") or []
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
            message = {"role": "assistant", "content": text_of_tokens(sampled)}
        self.on_sampled(prompt, sampled)
        return web.json_response(_response(body, self.model_name, prompt, sampled, message, finish, chat=chat))

    def sample(self, text: str, prompt: Sequence[int]) -> list[int]:
        """Returns the token ids for an answer's text. Overridden by engines whose sampling drifts."""
        return [*text.encode("utf-8", "replace"), END]

    def on_sampled(self, prompt: Sequence[int], tokens: Sequence[int]) -> None:
        """Hook called for each answer. Overridden by engines that log their answers."""

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


class SplitEngine(ScriptedEngine):
    """A scripted engine with vLLM's render, generate and derender (``--enable-scale-out``).

    With ``drift``, the text of an answer encodes to different ids than were sampled, as with real tokenizers.

    Args:
        drift: Fraction of an answer's bytes, 0 to 1, that are sampled as alternative ids of the same byte
            (:data:`~megaflow_hpc.model.engines.scripted.tokens.OTHER` and above).
        seed: Random seed for the choice of these bytes.
    """

    def __init__(self, *args: Any, drift: float = 0.0, seed: int = 0, **options: Any) -> None:
        super().__init__(*args, **options)
        self.drift, self._random = drift, random.Random(seed)
        self.log: list[tuple[list[int], list[int]]] = []
        """(prompt ids, sampled ids) of each answer, for tests."""
        self._answers: dict[str, tuple[dict[str, Any], str]] = {}

    def application(self) -> web.Application:
        app = super().application()
        app.router.add_post(RENDER, self._render)
        app.router.add_post(GENERATE, self._generate)
        app.router.add_post(DERENDER, self._derender)
        app.router.add_post(TEXTS, self._texts)
        return app

    def sample(self, text: str, prompt: Sequence[int]) -> list[int]:
        written = [b + OTHER if self._random.random() < self.drift else b for b in text.encode()]
        return [*written, END]

    def on_sampled(self, prompt: Sequence[int], tokens: Sequence[int]) -> None:
        self.log.append((list(prompt), list(tokens)))

    async def _render(self, request: web.Request) -> web.Response:
        body = await body_of(request)
        tokens = render(_messages_of(body), body.get("tools") or [])
        room = self.max_model_len - len(tokens)
        wanted = body.get("max_completion_tokens") or body.get("max_tokens") or room
        return web.json_response({"token_ids": tokens, "sampling_params": {"max_tokens": wanted}, "features": None})

    async def _generate(self, request: web.Request) -> web.Response:
        body = await body_of(request)
        prompt, limit = body["token_ids"], body["sampling_params"]["max_tokens"]
        messages, tools = parse_prompt(prompt)
        answer: ScriptedAnswer = self.script.answer(messages, tools)
        if refused := await self.refusal(answer, len(prompt), limit):
            return refused
        message = message_of(answer)
        tokens, finish = self.sample(answer_text(message), prompt), "stop"
        if len(tokens) > limit:
            tokens, finish = tokens[:limit], "length"
            message = {"role": "assistant", "content": text_of_tokens(tokens)}
        self.on_sampled(prompt, tokens)
        name = f"gen-{uuid.uuid4().hex}"
        self._answers[name] = message, "tool_calls" if finish == "stop" and answer.calls else finish
        scores = [{"logprob": logprob(t, len(prompt) + n)} for n, t in enumerate(tokens)]
        choice = {"index": 0, "token_ids": tokens, "logprobs": {"content": scores}, "finish_reason": finish}
        return web.json_response({"request_id": name, "choices": [choice]})

    async def _derender(self, request: web.Request) -> web.Response:
        body = await body_of(request)
        generated: Mapping[str, Any] = body["generate_response"]
        message, finish = self._answers.pop(generated["request_id"])
        prompt, tokens = len(body["prompt_token_ids"]), len(generated["choices"][0]["token_ids"])
        usage = {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}
        choice = {"index": 0, "message": message, "finish_reason": finish, "logprobs": None}
        head = {"id": generated["request_id"], "object": "chat.completion", "created": 0, "model": self.model_name}
        return web.json_response({**head, "choices": [choice], "usage": usage})

    async def _texts(self, request: web.Request) -> web.Response:
        body = await body_of(request)
        tokens = [response["choices"][0]["token_ids"] for response in body["generate_responses"]]
        choices = [{"index": n, "text": text_of_tokens(ids)} for n, ids in enumerate(tokens)]
        return web.json_response({"object": "text_completion", "choices": choices})


async def body_of(request: web.Request) -> dict[str, Any]:
    """Parses the body of a request. Raises HTTPBadRequest if it is not a JSON object."""
    try:
        body = await request.json()
    except (ValueError, RecursionError, web.RequestPayloadError):
        body = None
    if isinstance(body, dict):
        return body
    raise _bad_request("the body: expected a JSON object")


def _messages_of(body: Mapping[str, Any]) -> list[dict[str, Any]]:
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
