"""An engine that remembers every request as it arrived, and every answer with its tokens.

It provides vLLM's HTTP API and shares no code with the package. An answer is a function of the seed and of the
request's ``max_tokens``, which is unique for each call of a tree, so a tree can be repeated. Words, thoughts, ids of
tool calls and arguments come from small pools, so many answers differ in one of them only.

The log-probabilities of an answer are unique in the tree. So are its token ids at the models ``split`` and ``other``.
At ``plain`` they are bytes, so that a prompt extends the previous sequence.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from megaflow_hpc.model.gateway.server import ModelGateway
from tests.support.serving import listening

MODELS = {"plain": "plain", "split": "split", "other": "plain", "text": "text", "mute": "plain"}
"""Model, which is also the name of its policy → the gateway's protocol for it. ``mute`` reports no tokens."""
END, START, UNIQUE = 256, 257, 1024
"""Ids of markers, and the first id that is unique to an answer."""
TEXTS = ("Done.", "OK.", "")
THOUGHTS = ("Hm.", "Let me see.")
ARGUMENTS: tuple[dict[str, Any], ...] = ({"command": "ls"}, {"command": "ls", "flags": ["-l", None]}, {})
PROMPTS = ("Find the fault.", "Read the log.")
"""Prompts of sub-agents."""


@dataclass(frozen=True)
class EngineAnswer:
    """One answer."""

    call: int
    """The ``max_tokens`` of the request."""
    choice: int
    model: str
    asked: list[dict[str, Any]]
    """The messages as they arrived."""
    message: dict[str, Any]
    prompt: list[int]
    """Token ids of the prompt."""
    tokens: list[int]
    logprobs: list[float]
    finish_reason: str
    id: str
    number: int
    """Number of the answer. Its unique token ids are ``UNIQUE + number * 256 + byte``."""

    @property
    def tells_tokens(self) -> bool:
        """Whether the gateway learns its tokens."""
        return self.model not in ("text", "mute")


@dataclass
class Engine:
    """All models at one address."""

    seed: str = ""
    given: list[EngineAnswer] = field(default_factory=list)
    delays: dict[int, float] = field(default_factory=dict)
    """Call → delay of its answer in seconds."""
    working: int = 0
    _count: int = 0
    _rendered: dict[str, tuple[dict[str, Any], list[int]]] = field(default_factory=dict)
    _sampled: dict[str, EngineAnswer] = field(default_factory=dict)

    def application(self) -> web.Application:
        app = web.Application(client_max_size=2**26)
        app.router.add_post("/v1/chat/completions", self._counted(self._chat))
        app.router.add_post("/v1/chat/completions/render", self._counted(self._render))
        app.router.add_post("/inference/v1/generate", self._counted(self._generate))
        app.router.add_post("/v1/chat/completions/derender", self._counted(self._derender))
        return app

    def begin(self, seed: str) -> None:
        """Forgets everything, for the next tree."""
        self.seed, self.given, self.delays = seed, [], {}
        self._rendered.clear()
        self._sampled.clear()

    def records(self, url: str) -> list[dict[str, Any]]:
        """Returns an endpoint record per model."""
        same = {"url": url, "key": "k", "weight_version": 3}
        return [
            {**same, "server": f"{model}.0", "policy": model, "model_name": model, "protocol": protocol}
            for model, protocol in MODELS.items()
        ]

    def _counted(self, handler: Any) -> Any:
        async def handle(request: web.Request) -> web.Response:
            self.working += 1
            try:
                return web.json_response(await handler(await request.json()))
            finally:
                self.working -= 1

        return handle

    # --- the answers -----------------------------------------------------------------------------------------------

    async def _sample(self, body: Mapping[str, Any], prompt: list[int]) -> list[EngineAnswer]:
        call = body.get("max_completion_tokens") or body["max_tokens"]
        await asyncio.sleep(self.delays.get(call, 0.0))
        choices = range(body.get("n") or 1)
        return [self._draw(call, choice, body, prompt) for choice in choices]

    def _draw(self, call: int, choice: int, body: Mapping[str, Any], prompt: list[int]) -> EngineAnswer:
        draw, model = random.Random(f"{self.seed}/{call}/{choice}"), body["model"]
        number = self._count
        self._count += 1
        unique = f"thought {call} {choice}"
        thought = draw.choice(("", unique, unique, *THOUGHTS))
        text = draw.choice((*TEXTS, *TEXTS, f"Grüße, 世界 {call} {choice}\n"))
        names = [tool["function"]["name"] for tool in body.get("tools") or ()]
        calls = [_call(draw, names, n, f"{call}{choice}") for n in range(draw.choice((0, 1, 1, 2)) if names else 0)]
        finish = "tool_calls" if calls else "stop"
        message: dict[str, Any] = {"role": "assistant", "content": text or (None if calls else "")}
        if thought:
            message["reasoning_content" if model in ("other", "text") else "reasoning"] = thought
        if calls:
            message["tool_calls"] = calls
        tokens = [*written(message), END]
        if not calls and len(tokens) > 1 and draw.random() < 0.1:
            tokens.pop()
            finish = "length"
        if model in ("split", "other"):
            tokens = [UNIQUE + number * 256 + token if token < 256 else token for token in tokens]
        logprobs = [-(len(self.given) * 2**11 + place + 1) / 2**20 for place in range(len(tokens))]
        assert len(tokens) < 2**11
        found = EngineAnswer(
            *(call, choice, model, body["messages"], message, prompt, tokens, logprobs, finish),
            id=f"answer-{call}",
            number=number,
        )
        self.given.append(found)
        return found

    # --- HTTP ------------------------------------------------------------------------------------------------------

    async def _chat(self, body: dict[str, Any]) -> dict[str, Any]:
        prompt = rendered(body["messages"])
        given = await self._sample(body, prompt)
        told = body["model"] != "mute" and body.get("return_token_ids")
        choices = []
        for answer in given:
            choice = {"index": answer.choice, "message": answer.message, "finish_reason": answer.finish_reason}
            if told:
                choice |= {"token_ids": answer.tokens, "logprobs": {"content": _scores(answer)}}
            choices.append(choice)
        reply = {"id": given[0].id, "object": "chat.completion", "created": 1, "model": body["model"]}
        counts = {"prompt_tokens": len(prompt), "completion_tokens": sum(len(answer.tokens) for answer in given)}
        counts["total_tokens"] = sum(counts.values())
        return {**reply, "choices": choices, "usage": counts, **({"prompt_token_ids": prompt} if told else {})}

    async def _render(self, body: dict[str, Any]) -> dict[str, Any]:
        tokens, name = rendered(body["messages"]), f"render-{len(self._rendered)}"
        self._rendered[name] = body, tokens
        sampling = {"max_tokens": body["max_tokens"]}
        return {"request_id": name, "token_ids": tokens, "sampling_params": sampling, "features": None}

    async def _generate(self, body: dict[str, Any]) -> dict[str, Any]:
        asked, _ = self._rendered[body["request_id"]]
        (answer,) = await self._sample(asked, body["token_ids"])
        self._sampled[answer.id] = answer
        finish = "length" if answer.finish_reason == "length" else "stop"
        choice = {"index": 0, "token_ids": answer.tokens, "logprobs": {"content": _scores(answer)}}
        return {"request_id": answer.id, "choices": [{**choice, "finish_reason": finish}]}

    async def _derender(self, body: dict[str, Any]) -> dict[str, Any]:
        answer = self._sampled[body["generate_response"]["request_id"]]
        choice = {"index": 0, "message": answer.message, "finish_reason": answer.finish_reason, "logprobs": None}
        counts = {"prompt_tokens": len(answer.prompt), "completion_tokens": len(answer.tokens)}
        counts["total_tokens"] = sum(counts.values())
        head = {"id": answer.id, "object": "chat.completion", "created": 1, "model": answer.model}
        return {**head, "choices": [choice], "usage": counts}


@contextlib.asynccontextmanager
async def served() -> AsyncIterator[tuple[ModelGateway, Engine]]:
    """Yields a gateway and its engine."""
    engine = Engine()
    async with listening(engine.application()) as port, ModelGateway(wait_s=30, policies=list(MODELS)) as gateway:
        gateway.update_endpoints(engine.records(f"http://127.0.0.1:{port}"))
        yield gateway, engine


def _call(draw: random.Random, names: Sequence[str], number: int, unique: str) -> dict[str, Any]:
    name = draw.choice(names)
    arguments = {"prompt": draw.choice(PROMPTS)} if name == "task" else draw.choice(ARGUMENTS)
    style = draw.random()
    key = f"functions.{name}:{number}" if style < 0.6 else f"call_{number}" if style < 0.8 else f"call_{unique}{number}"
    spacing = draw.choice(((",", ":"), (", ", ": ")))
    written = json.dumps(arguments, separators=spacing, ensure_ascii=False)
    return {"id": key, "type": "function", "function": {"name": name, "arguments": written}}


def _scores(answer: EngineAnswer) -> list[dict[str, Any]]:
    return [{"token": "?", "logprob": score, "top_logprobs": []} for score in answer.logprobs]


def written(message: Mapping[str, Any]) -> list[int]:
    """Returns an answer as the model writes it: thought, text and calls, as bytes."""
    thought = message.get("reasoning") or message.get("reasoning_content")
    calls = [f"<c>{c['function']['name']} {c['function']['arguments']}</c>" for c in message.get("tool_calls") or ()]
    return list(((f"<t>{thought}</t>" if thought else "") + _text(message.get("content")) + "".join(calls)).encode())


def rendered(messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """Returns the prompt of a conversation."""
    tokens: list[int] = []
    for message in messages:
        said = written(message) if message["role"] == "assistant" else list(_text(message.get("content")).encode())
        tokens += [START, *f"{message['role']}\n".encode(), *said, END, 10]
    return [*tokens, START, *b"assistant\n"]


def _text(content: Any) -> str:
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content or ())
