"""What the gateway asks of an engine so that every sampled token is known.

``text``: the OpenAI endpoint as it is. Nothing is known of tokens: only the conversation is kept. For engines that
refuse the parameters below.

``plain``: the OpenAI endpoint, with ``logprobs`` and ``return_token_ids`` switched on (vLLM ≥ 0.10 and the
scripted engine have both). The engine renders the whole history anew, so a history whose text does not encode to the
sampled ids starts a new sequence.

What an agent asked for and what is added are kept apart: the answer it sees is the one it would get from the engine.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from megaflow_hpc.model.recorder import Sample
from megaflow_hpc.model.router import Server

RETRIED = frozenset({401, 403, 408, 429})
"""Answers below 500 that say something of the server and nothing of the request: another one may do better."""


class Refused(Exception):
    """The engine's own verdict on a request (4xx): handed to the agent as it is."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(f"HTTP {status}")
        self.status, self.body = status, body


class Unavailable(Exception):
    """The server did not do its work: another try, there or elsewhere, is right."""


@dataclass
class Answer:
    """What goes back to the agent, and what is recorded."""

    body: dict[str, Any]
    samples: list[Sample] = field(default_factory=list)
    message: dict[str, Any] | None = None
    """The answer where there is no sample."""


async def post(
    session: aiohttp.ClientSession, server: Server, path: str, body: Mapping[str, Any], timeout_s: float
) -> dict[str, Any]:
    """One JSON request to ``server``.

    Raises:
        Refused: The request is at fault.
        Unavailable: The server is: unreachable, wrong certificate, 5xx, no JSON.
    """
    headers = {"Authorization": f"Bearer {server.key}", "Content-Type": "application/json"}
    timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=10)
    try:
        async with session.post(
            server.url + path, data=json.dumps(body), headers=headers, ssl=server.ssl, timeout=timeout
        ) as response:
            raw = await response.read()
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise Unavailable(f"{server.name}: {type(error).__name__}: {error}") from error
    if response.status >= 500 or response.status in RETRIED:
        raise Unavailable(f"{server.name}: HTTP {response.status}: {raw[:300].decode('utf-8', 'replace')}")
    if response.status >= 400:
        raise Refused(response.status, raw)
    try:
        reply = json.loads(raw)
    except ValueError as error:
        raise Unavailable(f"{server.name}: the answer is not JSON: {raw[:100]!r}") from error
    if not isinstance(reply, dict):
        raise Unavailable(f"{server.name}: the answer is not a JSON object")
    return reply


async def ask(
    session: aiohttp.ClientSession, server: Server, path: str, body: Mapping[str, Any], timeout_s: float
) -> Answer:
    """One call in the protocol that the server's engine has; raises as :func:`post` does."""
    return await PROTOCOLS[server.protocol](session, server, path, body, timeout_s)


async def text(
    session: aiohttp.ClientSession, server: Server, path: str, body: Mapping[str, Any], timeout_s: float
) -> Answer:
    """A call of which only the text is kept."""
    asked = {k: v for k, v in body.items() if k != "stream_options"}
    reply = await post(session, server, path, {**asked, "model": server.model_name, "stream": False}, timeout_s)
    if not reply.get("choices"):
        raise Unavailable(f"{server.name}: an answer without choices")
    message = reply["choices"][0].get("message")
    return Answer(reply, message=_brief(message) if message else None)


async def plain(
    session: aiohttp.ClientSession, server: Server, path: str, body: Mapping[str, Any], timeout_s: float
) -> Answer:
    """A call of ``/v1/chat/completions`` or ``/v1/completions`` with ids and log-probabilities switched on."""
    chat = path.endswith("/chat/completions")
    asked = {
        **body,
        "model": server.model_name,
        "stream": False,
        "return_token_ids": True,
        "logprobs": (True if chat else max(1, int(body.get("logprobs") or 0))),
    }
    asked.pop("stream_options", None)
    version = server.weight_version
    reply = await post(session, server, path, asked, timeout_s)
    try:
        samples = [_sample(reply, choice, chat, version, server.name) for choice in reply["choices"]]
    except (KeyError, TypeError, ValueError) as error:
        raise Unavailable(f"{server.name}: no token ids or log-probabilities in the answer ({error!r})") from error
    reply["model"] = body.get("model") or server.model_name
    _strip(reply, body, chat)
    return Answer(reply, samples)


def _sample(reply: Mapping[str, Any], choice: Mapping[str, Any], chat: bool, version: int, server: str) -> Sample:
    message = dict(choice["message"]) if chat else None
    scores = choice["logprobs"]
    logprobs = [t["logprob"] for t in scores["content"]] if chat else list(scores["token_logprobs"])
    prompt = reply["prompt_token_ids"] if chat else choice["prompt_token_ids"]
    tokens = choice["token_ids"]
    if len(tokens) != len(logprobs):
        raise ValueError(f"{len(tokens)} token ids, {len(logprobs)} log-probabilities")
    return Sample(
        prompt=list(prompt),
        tokens=list(tokens),
        logprobs=logprobs,
        text=(message.get("content") or "") if message is not None else choice.get("text", ""),
        finish_reason=choice.get("finish_reason") or "",
        weight_version=version,
        server=server,
        message=_brief(message) if message is not None else None,
        request_id=str(reply.get("id", "")),
    )


def _brief(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message without the fields an engine fills with nothing."""
    return {k: v for k, v in message.items() if v or k in ("role", "content")}


def _strip(reply: dict[str, Any], body: Mapping[str, Any], chat: bool) -> None:
    """Takes out what the agent did not ask for."""
    if not body.get("return_token_ids"):
        reply.pop("prompt_token_ids", None)
        for choice in reply["choices"]:
            choice.pop("token_ids", None)
            choice.pop("prompt_token_ids", None)
    asked = body.get("logprobs")
    if not asked and (chat or asked is None):
        for choice in reply["choices"]:
            choice["logprobs"] = None


Protocol = Callable[[aiohttp.ClientSession, Server, str, Mapping[str, Any], float], Awaitable[Answer]]
PROTOCOLS: Mapping[str, Protocol] = {"text": text, "plain": plain}
