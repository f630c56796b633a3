"""A scripted engine with vLLM's render, generate and derender, whose sampling may drift from its text."""

from __future__ import annotations

import json
import random
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from aiohttp import web

from megaflow_hpc.model.engine_api import DERENDER, GENERATE, TEXTS
from megaflow_hpc.model.engines.scripted.engine import (
    END,
    IMAGE,
    OTHER,
    START,
    ScriptedEngine,
    answer_text,
    body_of,
    image_tokens,
    logprob,
    message_of,
    messages_of,
    render,
    text_of_tokens,
)
from megaflow_hpc.model.engines.scripted.script import ScriptedAnswer
from megaflow_hpc.model.images import read_data_url
from megaflow_hpc.trajectory import Image, ImageSpan


class SplitEngine(ScriptedEngine):
    """A scripted engine with vLLM's render, generate and derender (``--enable-scale-out``).

    With ``drift``, the text of an answer encodes to different ids than were sampled, as with real tokenizers.

    Args:
        drift: Fraction of an answer's bytes, 0 to 1, that are sampled as alternative ids of the same byte
            (:data:`~megaflow_hpc.model.engines.scripted.engine.OTHER` and above).
        seed: Random seed for the choice of these bytes.
    """

    def __init__(self, *args: Any, drift: float = 0.0, seed: int = 0, **options: Any) -> None:
        super().__init__(*args, **options)
        self.drift, self._random = drift, random.Random(seed)
        self.log: list[tuple[list[int], list[int]]] = []
        """(prompt ids, sampled ids) of each answer."""
        self.shown: list[list[ImageSpan]] = []
        """Spans of the images in each of these prompts."""
        self._answers: dict[str, tuple[dict[str, Any], str]] = {}

    def application(self) -> web.Application:
        app = super().application()
        app.router.add_post(GENERATE, self._generate)
        app.router.add_post(DERENDER, self._derender)
        app.router.add_post(TEXTS, self._texts)
        return app

    async def _chat(self, request: web.Request) -> web.Response:
        body = await body_of(request)
        self.shown.append([])
        render(messages_of(body), body.get("tools") or [], self.shown[-1])
        return await super()._chat(request)

    def sample(self, text: str, prompt: Sequence[int]) -> list[int]:
        written = [b + OTHER if self._random.random() < self.drift else b for b in text.encode()]
        self.log.append((list(prompt), [*written, END]))
        return [*written, END]

    async def _generate(self, request: web.Request) -> web.Response:
        body = await body_of(request)
        images = [read_data_url(part["url"]) for part in body.get("content_parts") or ()]
        prompt, spans = expanded(body["token_ids"], images)
        limit = body["sampling_params"]["max_tokens"]
        messages, tools = parse_prompt(prompt)
        answer: ScriptedAnswer = self.script.answer(messages, tools)
        if refused := await self.refusal(answer, len(prompt), limit):
            return refused
        message = message_of(answer)
        tokens, finish = self.sample(answer_text(message), prompt), "stop"
        if len(tokens) > limit:
            tokens, finish = tokens[:limit], "length"
            message = {"role": "assistant", "content": text_of_tokens(tokens)}
        self.log[-1] = prompt, tokens
        self.shown.append(spans)
        name = f"gen-{uuid.uuid4().hex}"
        self._answers[name] = message, "tool_calls" if finish == "stop" and answer.calls else finish
        scores = [{"logprob": logprob(t, len(prompt) + n)} for n, t in enumerate(tokens)]
        choice = {"index": 0, "token_ids": tokens, "logprobs": {"content": scores}, "finish_reason": finish}
        prompt_ids = {"prompt_token_ids": prompt} if body.get("return_token_ids") else {}
        return web.json_response({"request_id": name, "choices": [choice], **prompt_ids})

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


def expanded(tokens: Sequence[int], images: Sequence[Image]) -> tuple[list[int], list[ImageSpan]]:
    """Replaces the placeholder of each image by as many as it takes, as vLLM does."""
    prompt: list[int] = []
    spans = []
    left = list(images)
    for token in tokens:
        if token == IMAGE and left:
            shown = left.pop(0)
            spans.append(ImageSpan(len(prompt), image_tokens(shown), shown.sha256))
            prompt += [IMAGE] * image_tokens(shown)
        else:
            prompt.append(token)
    if left:
        raise ValueError(f"{len(left)} images without a placeholder")
    return prompt, spans


def parse_prompt(tokens: Sequence[int]) -> tuple[list[dict[str, str]], list[str]]:
    """Parses a prompt. Returns its messages, and the names of the tools that it offers."""
    messages, tools = [], []
    part = bytearray()
    for token in tokens:
        if token == START:
            part = bytearray()
        elif token == END:
            head, _, text = part.decode("utf-8", "replace").partition("\n")
            if head == "tools":
                tools = [tool["function"]["name"] for tool in json.loads(text)]
            else:
                messages.append({"role": head, "content": text})
        elif token != IMAGE:
            part.append(token - OTHER if token >= OTHER else token)
    return messages, tools
