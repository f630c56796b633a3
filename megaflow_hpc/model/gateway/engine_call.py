"""Posts an agent's request to one engine server, and decides who is at fault if it fails."""

from __future__ import annotations

import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple

from megaflow_hpc.model.api import CHAT, RENDER, WEIGHT_VERSION
from megaflow_hpc.model.gateway.engine_client import Broken, Crowded, EngineClient, Place, TooLong
from megaflow_hpc.model.gateway.recorder import Recorder
from megaflow_hpc.model.gateway.router import Server
from megaflow_hpc.model.json_text import ANSWER, TooMuch, decoded, packed
from megaflow_hpc.model.offload import offload
from megaflow_hpc.types import Sampling

RETRIED = frozenset({401, 403, 408, 429})
"""HTTP statuses below 500 for which the server is at fault, not the request: another server may answer."""
_MAX_REFUSAL = 64 * 2**10
"""Bytes of a refusal that the agent gets."""
_VERSION_DIGITS = 9
FORBIDDEN = frozenset({401, 403})
"""Statuses of these that blame the request if the engine sent them, and the key if its proxy did."""


class Reply(dict[str, Any]):
    """A JSON object, and the version of the weights that sampled it."""

    weight_version: int = 0
    size: int = 0
    """Bytes that the server sent."""


class RefusedCall(Exception):
    """The engine refused a request as wrong (4xx). The agent gets the refusal unchanged."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(f"HTTP {status}")
        self.status, self.body = status, body


class Unavailable(Exception):
    """The server failed, not the request: the call may be repeated there or elsewhere."""

    def __init__(self, message: str, wait_s: float = 0.0) -> None:
        super().__init__(message)
        self.wait_s = wait_s
        """Seconds for which the server asks to be left alone (``Retry-After``)."""


class Doubtful(Exception):
    """The server gave a whole but unusable answer: the server or the request may be at fault.

    The server must not rest because of it. Otherwise, one agent could keep all others from the server.
    """

    def __init__(self, message: str, again: bool = True, by_request: bool = False) -> None:
        super().__init__(message)
        self.again = again
        """Whether the same server may do better at the same request."""
        self.by_request = by_request
        """True if the request asked for such an answer. Then the service has not failed."""


async def post(
    client: EngineClient,
    server: Server,
    path: str,
    body: Mapping[str, Any],
    timeout_s: float,
    size: int = 0,
    place: Place | None = None,
    by_request: bool = False,
) -> Reply:
    """Posts one JSON request to ``server`` and returns its answer.

    Args:
        size: Bytes of the agent's request, about the size of ``body``.
        place: Awaited before a large answer is read.
        by_request: Whether the agent's request may have answers larger than the limits.

    Raises:
        Refused: The request is at fault.
        Doubtful: The engine failed at the request, refuses it as not allowed, or exceeds the limits on answers.
        Unavailable: The server is at fault: unreachable, wrong certificate, 5xx, or an answer that is not JSON.
    """
    request = await offload(size, packed, body)
    try:
        response = await client.post(
            server.url + path,
            request,
            key=server.key,
            fingerprint=server.fingerprint,
            timeout_s=timeout_s,
            place=place,
        )
    except TooLong as error:
        raise Doubtful(f"{server.name}: {error}", again=False, by_request=by_request) from error
    except Crowded as error:
        raise Doubtful(str(error), again=False, by_request=True) from error
    except Broken as error:
        raise Unavailable(f"{server.name}: {error}") from error
    raw, status = response.body, response.status
    if status >= 300:
        said = f"{server.name}: HTTP {status}: {bytes(raw[:300]).decode('utf-8', 'replace')}"
        by_engine = WEIGHT_VERSION.lower() in response.headers  # the proxy's own answers lack it
        if status == 500 or (status in FORBIDDEN and by_engine):
            raise Doubtful(said)
        if status > 501 or status in RETRIED or status < 400:
            raise Unavailable(said, retry_after_s(response.headers.get("retry-after", "")))
        raise RefusedCall(status, bytes(raw[:_MAX_REFUSAL]))
    try:
        found = await offload(len(raw), decoded, raw, ANSWER)
    except TooMuch as error:
        said = f"{server.name}: the answer holds {error}"
        raise Doubtful(said, again=False, by_request=by_request) from error
    except (ValueError, RecursionError) as error:
        raise Unavailable(f"{server.name}: the answer is not JSON: {bytes(raw[:100])!r}") from error
    if not isinstance(found, dict):
        raise Unavailable(f"{server.name}: the answer is not a JSON object")
    reply = Reply(found)
    reply.size = len(raw)
    told = weight_version(response.headers.get(WEIGHT_VERSION.lower(), ""))
    reply.weight_version = server.weight_version if told is None else told
    return reply


def weight_version(text: Any) -> int | None:
    """Returns the version that a text or number tells; ``None`` where it is none."""
    text = str(text)
    return int(text) if len(text) <= _VERSION_DIGITS and text.isascii() and text.isdecimal() else None


def choices(body: Mapping[str, Any]) -> int:
    """Returns how many answers a request asks for at once: of a plain completion, some to each prompt."""
    prompts, each = body.get("prompt"), body.get("n") or 1
    return each * len(prompts) if isinstance(prompts, list) and prompts and isinstance(prompts[0], str | list) else each


def multiplied(body: Mapping[str, Any]) -> bool:
    """Returns whether a request asks for several answers at once, or for tokens beside those that are sampled."""
    return choices(body) > 1 or bool(body.get("top_logprobs")) or (body.get("logprobs") or 0) > 1


def retry_after_s(value: str) -> float:
    """Returns the seconds that a ``Retry-After`` header asks for, of either form (RFC 9110); 0 for any other text."""
    try:
        if value.isascii() and value.isdecimal():
            return float(value)
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except (ValueError, OverflowError, TypeError):
        return 0.0


class Call(NamedTuple):
    """One request of an agent, at one server."""

    client: EngineClient
    server: Server
    path: str
    body: Mapping[str, Any]
    timeout_s: float
    recorder: Recorder
    policy: str
    size: int = 0
    """Bytes of the agent's request."""
    place: Place | None = None
    """Awaited before a large answer is read."""
    keep_thoughts: bool = False
    """Keep earlier answers in the prompt as they were sampled, even if the chat template changes them."""
    sampling: Sampling = Sampling()
    """The policy's sampling settings."""
    limit: int = 0
    """Token limit of each answer, if the body has none; 0: no limit."""

    @property
    def chat(self) -> bool:
        """True if the call asks for a chat completion, false for a plain one."""
        return self.path == CHAT

    @property
    def choices(self) -> int:
        """Answers that the call asks for."""
        return choices(self.body)

    async def post(self, path: str, body: Mapping[str, Any], size: int = 0) -> Reply:
        """Posts one JSON request of the call, which has ``size`` bytes of an answer; raises as :func:`post` does."""
        place = None if path == RENDER else self.place  # a rendered prompt is as long as the prompt that was let in
        larger, asked = max(self.size, size), multiplied(self.body)
        return await post(self.client, self.server, path, body, self.timeout_s, larger, place, asked)

    async def complete(self, **changes: Any) -> Reply:
        """Posts the request itself with ``changes``; raises as :func:`post` does.

        Engines refuse a limit above the context space that is left after the prompt. That space is then the smaller
        limit, so the request is sent without one.
        """
        if self.limit:
            try:
                return await self.post(self.path, self.asked(**changes, max_tokens=self.limit))
            except RefusedCall:
                pass
        return await self.post(self.path, self.asked(**changes))

    def asked(self, **changes: Any) -> dict[str, Any]:
        """Returns the body to send to the engine, with the engine's model name, no streaming, and ``changes``.

        Fills in the policy's sampling settings where the agent has set none, because engines have defaults of their
        own, such as those of ``generation_config.json``. Engines that report no tokens may support OpenAI's options
        only, so they get only the settings that are not neutral.
        """
        sampling = self.sampling.unusual if self.server.protocol == "text" else self.sampling.settings
        return {**sampling, **self.body, "model": self.server.model_name, "stream": False, **changes}
