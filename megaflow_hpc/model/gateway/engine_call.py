"""Posts an agent's request to one engine server, and decides who is at fault if it fails."""

from __future__ import annotations

import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple

from megaflow_hpc.model.api import CHAT, RENDER, WEIGHT_VERSION
from megaflow_hpc.model.gateway.engine_client import AnswerTooLong, EngineClient, ExchangeFailed, Gate, GateTimeout
from megaflow_hpc.model.gateway.recorder import Recorder
from megaflow_hpc.model.gateway.router import Server
from megaflow_hpc.model.json_text import ANSWER, TooMuch, decoded, offload, packed
from megaflow_hpc.types import Sampling

_SERVER_AT_FAULT = frozenset({401, 403, 408, 429})
"""HTTP statuses below 500 for which another server is worth trying."""
_FORBIDDEN = frozenset({401, 403})
"""From the engine, these blame the request; from the engine's proxy, they blame the key."""
_MAX_REFUSAL = 64 * 2**10
"""Maximum bytes of a refusal passed on to the agent."""
_MAX_VERSION_DIGITS = 9


class Reply(dict[str, Any]):
    """A JSON object returned by an engine."""

    weight_version: int = 0
    """Version of the weights that sampled the response."""
    size: int = 0
    """Bytes that the server sent."""


class RefusedCall(Exception):
    """The engine rejected a request as invalid (4xx). The agent gets the error unchanged."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(f"HTTP {status}")
        self.status, self.body = status, body


class Unavailable(Exception):
    """The server is at fault, not the request. The call may be retried there or elsewhere."""

    def __init__(self, message: str, wait_s: float = 0.0) -> None:
        super().__init__(message)
        self.wait_s = wait_s
        """Backoff in seconds that the server asks for (``Retry-After``)."""


class UnusableAnswer(Exception):
    """The server sent a complete response that is unusable. The server or the request may be at fault.

    The router does not back off from the server. Otherwise one agent could take it away from all others.
    """

    def __init__(self, message: str, retry: bool = True, by_request: bool = False) -> None:
        super().__init__(message)
        self.retry = retry
        """True if a retry at the same server may succeed."""
        self.by_request = by_request
        """True if the request itself caused the response. Then the service is not at fault."""


class EngineRequest(NamedTuple):
    """A validated request of a rollout, before a server is chosen."""

    policy: str
    path: str
    """Path in the engine's API."""
    body: Mapping[str, Any]
    recorder: Recorder
    size: int = 0
    """Size of the agent's request in bytes."""
    sampling: Sampling = Sampling()
    """The policy's sampling settings."""
    keep_thoughts: bool = False
    """If True, earlier answers stay in the prompt as they were sampled, even if the chat template changes them."""
    free: bool = True
    """True if nothing in the request constrains the policy's choice of tokens."""
    limit: int = 0
    """Token limit per choice imposed by the rollout's budget, if the body has no limit; 0 means no limit."""
    gate: Gate | None = None
    """Awaited before a large response is read."""

    @property
    def chat(self) -> bool:
        """True if the request asks for a chat completion, false for a plain one."""
        return self.path == CHAT

    @property
    def choices(self) -> int:
        """Number of choices requested, over all prompts of a plain completion."""
        prompts, each = self.body.get("prompt"), int(self.body.get("n") or 1)
        if isinstance(prompts, list) and prompts and isinstance(prompts[0], str | list):
            return each * len(prompts)
        return each

    @property
    def may_be_large(self) -> bool:
        """True if the request asks for several choices, or for log-probabilities of tokens that are not sampled."""
        return self.choices > 1 or bool(self.body.get("top_logprobs")) or (self.body.get("logprobs") or 0) > 1


class Call(NamedTuple):
    """A request to one specific server."""

    request: EngineRequest
    server: Server
    client: EngineClient
    timeout_s: float

    async def post(self, path: str, body: Mapping[str, Any], size: int = 0) -> Reply:
        """Posts one of the call's JSON requests and returns the reply.

        Args:
            size: Bytes of an earlier engine response that ``body`` contains.

        Raises:
            RefusedCall: The request is at fault.
            UnusableAnswer: The engine failed on the request, rejects it as forbidden, or exceeds response limits.
            Unavailable: The server is at fault: unreachable, wrong certificate, 5xx, or a response that is not JSON.
        """
        server, by_request = self.server, self.request.may_be_large
        encoded = await offload(max(self.request.size, size), packed, body)
        try:
            response = await self.client.post(
                server.url + path,
                encoded,
                key=server.key,
                fingerprint=server.tls_fingerprint,
                timeout_s=self.timeout_s,
                # A rendered prompt is about as long as the request, which the quota has already admitted.
                gate=None if path == RENDER else self.request.gate,
            )
        except AnswerTooLong as error:
            raise UnusableAnswer(f"{server.name}: {error}", retry=False, by_request=by_request) from error
        except GateTimeout as error:
            raise UnusableAnswer(str(error), retry=False, by_request=True) from error
        except ExchangeFailed as error:
            raise Unavailable(f"{server.name}: {error}") from error
        raw, status = response.body, response.status
        version_header = response.headers.get(WEIGHT_VERSION.lower())
        if status >= 300:
            message = f"{server.name}: HTTP {status}: {bytes(raw[:300]).decode('utf-8', 'replace')}"
            by_engine = version_header is not None  # responses by the proxy itself lack the header
            if status == 500 or (status in _FORBIDDEN and by_engine):
                raise UnusableAnswer(message)
            if status > 501 or status in _SERVER_AT_FAULT or status < 400:
                raise Unavailable(message, retry_after_s(response.headers.get("retry-after", "")))
            raise RefusedCall(status, bytes(raw[:_MAX_REFUSAL]))
        try:
            answer = await offload(len(raw), decoded, raw, ANSWER)
        except TooMuch as error:
            message = f"{server.name}: the answer holds {error}"
            raise UnusableAnswer(message, retry=False, by_request=by_request) from error
        except (ValueError, RecursionError) as error:
            raise Unavailable(f"{server.name}: the answer is not JSON: {bytes(raw[:100])!r}") from error
        if not isinstance(answer, dict):
            raise Unavailable(f"{server.name}: the answer is not a JSON object")
        reply = Reply(answer)
        reply.size = len(raw)
        version = parse_weight_version(version_header)
        reply.weight_version = server.weight_version if version is None else version
        return reply

    async def complete(self, **changes: Any) -> Reply:
        """Posts the request itself with ``changes``. Raises like :meth:`post`.

        Engines reject a token limit that exceeds the context space left after the prompt. In that case the request is
        sent without a limit, because the space left is the lower limit.
        """
        if self.request.limit:
            try:
                return await self.post(self.request.path, self.asked(**changes, max_tokens=self.request.limit))
            except RefusedCall:
                pass
        return await self.post(self.request.path, self.asked(**changes))

    def asked(self, **changes: Any) -> dict[str, Any]:
        """Returns the body to send to the engine, with the engine's model name, no streaming, and ``changes``.

        Sets the policy's sampling settings where the agent has not, because engines have their own defaults, such as
        those in ``generation_config.json``. Engines that report no tokens may support only OpenAI's options, so they
        only get settings that are not neutral.
        """
        sampling = self.request.sampling
        settings = sampling.unusual if self.server.protocol == "text" else sampling.settings
        return {**settings, **self.request.body, "model": self.server.model_name, "stream": False, **changes}


def parse_weight_version(text: Any) -> int | None:
    """Parses a weight version from a string or number; ``None`` if it is invalid."""
    text = str(text)
    return int(text) if len(text) <= _MAX_VERSION_DIGITS and text.isascii() and text.isdecimal() else None


def retry_after_s(value: str) -> float:
    """Parses either form of a ``Retry-After`` header (RFC 9110) as seconds; 0 if it is invalid."""
    try:
        if value.isascii() and value.isdecimal():
            return float(value)
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except (ValueError, OverflowError, TypeError):
        return 0.0
