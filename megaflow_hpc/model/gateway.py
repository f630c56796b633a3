"""The gateway: one per worker rank, on loopback; every rollout has an address and a key of its own there.

::

    agent ── http://127.0.0.1:PORT/r/<token>/v1 ──► gateway ── https, fingerprint checked ──► proxy ──► engine
                                                     │
                                                     └── Recorder of the rollout: ids, log-probabilities, weight version

So a call is attributed without the agent's help, and an agent needs to know nothing but an address. It may speak
any of the :mod:`~megaflow_hpc.model.dialects`; the engine is asked in one. One that runs in a sandbox without a network
is served the same on a socket that listens in the sandbox. The answer is taken from the engine whole and, where the
agent asked for a stream, streamed from here: until the last token is there, a call whose server dies can be made again
elsewhere.

Errors have the shape of the agent's API. 503 with type ``model_service_error`` means that no engine could answer within
``wait_s``; 429 with type ``rollout_budget_exceeded`` that this rollout may call no more. Neither is worth a client's
own retries, and says so in ``x-should-retry``.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import secrets
import socket
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import aiohttp
from aiohttp import web

from megaflow_hpc.errors import MegaflowError, ModelServiceError
from megaflow_hpc.model import backend, stream
from megaflow_hpc.model.dialects import DIALECTS, BadRequest, dialect_of, messages
from megaflow_hpc.model.recorder import Recorder
from megaflow_hpc.model.router import Router, Server
from megaflow_hpc.types import Budget, ModelEndpoint, Recording

LOG = logging.getLogger(__name__)
MODEL_SERVICE_ERROR = "model_service_error"
BUDGET_EXCEEDED = "rollout_budget_exceeded"
CHAT = "/v1/chat/completions"
MAX_BODY = 256 * 2**20
SEEDS = 2**31
"""Seeds are below: every engine takes them."""
T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class _Failure(Exception):
    """Ends a call with an error in the agent's dialect."""

    def __init__(self, status: int, message: str, kind: str = "invalid_request_error") -> None:
        super().__init__(message)
        self.status, self.kind = status, kind


@dataclass
class _Rollout:
    id: str
    policy: str
    token: str
    key: str
    recorder: Recorder
    budget: Budget
    server: str = ""
    trouble: str = ""
    inside: web.SockSite | None = None
    """Where the sandbox reaches us, if it does by a socket of its own."""
    in_flight: int = 0
    seed: int = -1

    def seeded(self, asked: dict[str, Any]) -> None:
        """Gives the next call, of number n from 0, the rollout's seed + n, unless the agent chose one itself."""
        if self.seed >= 0 and asked.get("seed") is None:
            asked["seed"] = (self.seed + self.recorder.calls + self.in_flight) % SEEDS

    def over_budget(self) -> str:
        """Why no further call may be answered; empty where one may. Calls that are in flight count."""
        calls, tokens = self.budget.calls, self.budget.tokens
        if calls is not None and self.recorder.calls + self.in_flight >= calls:
            return f"this rollout has made its {calls} model calls"
        if tokens is not None and self.recorder.sampled >= tokens:
            return f"this rollout has sampled its {tokens} tokens"
        return ""


class ModelGateway:
    """The :class:`~megaflow_hpc.types.Gateway` of a worker rank; an async context manager, or start and stop it.

    Args:
        wait_s: Seconds a call waits for a server that answers before it fails with 503.
        request_timeout_s: Seconds one request may take at a server; then it counts as that server's failure.
        host: Address to listen on; the port is chosen by the kernel.
    """

    def __init__(
        self,
        *,
        wait_s: float = 300.0,
        request_timeout_s: float = 1800.0,
        host: str = "127.0.0.1",
    ) -> None:
        self.wait_s, self.request_timeout_s = wait_s, request_timeout_s
        self.host, self.port = host, 0
        self._router = Router()
        self._by_id: dict[str, _Rollout] = {}
        self._by_token: dict[str, _Rollout] = {}
        self._session: aiohttp.ClientSession | None = None
        self._runner: web.AppRunner | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def __aenter__(self) -> ModelGateway:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        connector = aiohttp.TCPConnector(limit=0, ttl_dns_cache=60)
        self._session = aiohttp.ClientSession(connector=connector, trust_env=False)
        self._runner = web.AppRunner(self._application(), access_log=None, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self.host, 0, backlog=1024)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
        if self._session is not None:
            await self._session.close()
        self._runner = self._session = self._loop = None

    async def open(
        self,
        rollout_id: str,
        policy: str,
        listener: socket.socket | None = None,
        budget: Budget | None = None,
        seed: int = -1,
    ) -> ModelEndpoint:
        if self._runner is None:
            raise MegaflowError("the gateway is not started; call start() first")
        if rollout_id in self._by_id:
            raise MegaflowError(f"rollout {rollout_id} is open at this gateway already; close it first")
        key, recorder = f"sk-{secrets.token_urlsafe(24)}", Recorder(policy=policy)
        rollout = _Rollout(rollout_id, policy, secrets.token_hex(8), key, recorder, budget or Budget(), seed=seed)
        inside = ""
        if listener is not None:
            rollout.inside = web.SockSite(self._runner, listener, backlog=256)
            await rollout.inside.start()
            inside = f"http://127.0.0.1:{listener.getsockname()[1]}/r/{rollout.token}/v1"
        self._by_id[rollout_id] = self._by_token[rollout.token] = rollout
        return ModelEndpoint(f"http://{self.host}:{self.port}/r/{rollout.token}/v1", rollout.key, policy, inside)

    async def close(self, rollout_id: str) -> Recording:
        rollout = self._by_id.pop(rollout_id, None)
        if rollout is None:
            raise MegaflowError(f"rollout {rollout_id} is not open at this gateway")
        del self._by_token[rollout.token]
        if rollout.inside is not None:
            await rollout.inside.stop()
        return rollout.recorder.finish()

    def trouble(self, rollout_id: str) -> str:
        """Why the latest call of an open rollout got no answer from any engine, or still waits; empty where it got one.

        For agents whose client swallows the 503: the rollout failed by the model service, whatever the agent says.
        """
        return self._by_id[rollout_id].trouble

    def update_endpoints(self, endpoints: Sequence[Mapping[str, Any]]) -> None:
        """Takes over the list; from the gateway's own event loop at once, from another thread as soon as it can."""
        if self._loop is None or self._loop is _running_loop():
            self._router.update(endpoints)
        else:
            self._loop.call_soon_threadsafe(self._router.update, endpoints)

    # --- HTTP --------------------------------------------------------------------------------------------------------

    def _application(self) -> web.Application:
        app = web.Application(client_max_size=MAX_BODY, middlewares=[self._guard])
        for path in DIALECTS:
            app.router.add_post(f"/r/{{token}}/v1{path}", self._complete)
        app.router.add_post("/r/{token}/v1/messages/count_tokens", self._count)
        app.router.add_get("/r/{token}/v1/models", self._models)
        app.router.add_get("/r/{token}/v1/models/{name:.+}", self._models)
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Lets through who has the key of the rollout in the path, and gives every error the API's shape."""
        rollout: _Rollout | None = None
        parts = request.path.split("/", 3)
        if request.method == "HEAD" and len(parts) < 4:
            return web.Response()  # "is anybody there?", which clients ask without a key and any connection answers
        try:
            rollout = self._by_token.get(parts[2]) if len(parts) > 3 and parts[1] == "r" else None
            if rollout is None or not hmac.compare_digest(_key(request).encode(), rollout.key.encode()):
                raise _Failure(401, "no such rollout, or not its key", "authentication_error")
            return await handler(request)
        except web.HTTPException as refusal:
            failure: Exception = _Failure(refusal.status, f"{request.method} {request.path}: {refusal.reason}")
        except _Failure as error:
            failure = error
        except Exception as error:
            LOG.exception("a call of rollout %s", rollout.id if rollout else "?")
            failure = error
        status, message, kind = _said(failure)
        body = dialect_of(request.path, request.headers).error(status, message, kind)
        hopeless = status == 401 or kind in (MODEL_SERVICE_ERROR, BUDGET_EXCEEDED)
        return web.json_response(body, status=status, headers={"x-should-retry": "false"} if hopeless else None)

    async def _models(self, request: web.Request) -> web.Response:
        policy = self._by_token[request.match_info["token"]].policy
        name = request.match_info.get("name", policy)
        card = {"id": name, "object": "model", "created": 0, "owned_by": "megaflow-hpc"}
        card |= {"type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"}  # Anthropic's fields
        if "name" in request.match_info:
            return web.json_response(card)
        pages = {"has_more": False, "first_id": policy, "last_id": policy}
        return web.json_response({"object": "list", "data": [card], **pages})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        rollout: _Rollout = self._by_token[request.match_info["token"]]
        path = request.path.partition("/v1")[2]
        dialect, body = DIALECTS[path], await _body(request)
        try:
            asked = dialect.request(body)
        except BadRequest as error:
            raise _Failure(400, str(error)) from None
        if over := rollout.over_budget():
            rollout.recorder.recording.over_budget = over
            raise _Failure(429, over, BUDGET_EXCEEDED)
        rollout.recorder.request_arrived()
        answer = self._answer(rollout, "/v1/completions" if path == "/completions" else CHAT, asked)
        if not body.get("stream"):
            return web.json_response(dialect.answer(await answer, body))
        return await stream.send(
            request,
            answer,
            lambda reply: dialect.events(dialect.answer(reply, body), body),
            lambda error: dialect.error_event(*_said(error)),
        )

    async def _count(self, request: web.Request) -> web.Response:
        """How long a prompt is, without an answer to it: nothing is recorded."""
        rollout = self._by_token[request.match_info["token"]]
        try:
            asked = messages.conversation(await _body(request))
        except BadRequest as error:
            raise _Failure(400, str(error)) from None
        tokens, *_ = await self._ask(rollout, CHAT, asked, backend.count)
        return web.json_response({"input_tokens": tokens})

    async def _answer(self, rollout: _Rollout, path: str, asked: dict[str, Any]) -> dict[str, Any]:
        """The engine's answer to a chat or plain request, recorded."""
        recorder = rollout.recorder
        if path == CHAT:
            with contextlib.suppress(AttributeError, KeyError, TypeError, ValueError):  # malformed: the engine says so
                asked["messages"] = recorder.restore(asked["messages"])
        rollout.seeded(asked)
        rollout.in_flight += 1
        try:
            answer, server, model_s, wait_s = await self._ask(rollout, path, asked, backend.ask)
        finally:
            rollout.in_flight -= 1
        if rollout.id not in self._by_id:
            raise _Failure(401, "the rollout has ended", "authentication_error")
        rollout.server, rollout.trouble = server.name, ""
        messages = asked.get("messages") or ()
        for number, sample in enumerate(answer.samples):
            recorder.add(sample, messages, model_s=0.0 if number else model_s, wait_s=0.0 if number else wait_s)
        if not answer.samples:
            recorder.add_text(messages, answer.message)
        return answer.body

    async def _ask(
        self, rollout: _Rollout, path: str, body: Mapping[str, Any], ask: Callable[[backend.Call], Awaitable[T]]
    ) -> tuple[T, Server, float, float]:
        """One call, at as many servers as it takes; with the seconds the last one needed, and those before it."""
        try:
            return await self._try(rollout, path, body, ask)
        except backend.Refused as refusal:
            raise _Failure(refusal.status, *_reason(refusal.body)) from None
        except ModelServiceError as error:
            rollout.trouble = str(error)
            raise _Failure(503, str(error), MODEL_SERVICE_ERROR) from None

    async def _try(
        self, rollout: _Rollout, path: str, body: Mapping[str, Any], ask: Callable[[backend.Call], Awaitable[T]]
    ) -> tuple[T, Server, float, float]:
        assert self._session is not None
        arrived = time.monotonic()
        deadline = arrived + self.wait_s
        cause = ""
        while True:
            if self._router.pick(rollout.policy) is None:  # should the agent's time run out here, it is not its fault
                rollout.trouble = cause or self._router.describe(rollout.policy)
            try:
                server = await self._router.acquire(rollout.policy, deadline, rollout.server)
            except ModelServiceError as error:
                raise ModelServiceError(f"{error}; last failure: {cause}" if cause else str(error)) from None
            server.outstanding += 1
            began = time.monotonic()
            try:
                answer = await ask(
                    backend.Call(self._session, server, path, body, self.request_timeout_s, rollout.recorder)
                )
            except backend.Unavailable as error:
                server.failed()
                cause = str(error)
                if time.monotonic() >= deadline:
                    raise ModelServiceError(f"policy {rollout.policy!r}: {cause}") from error
                continue
            finally:
                server.outstanding -= 1
            server.succeeded()
            return answer, server, time.monotonic() - began, began - arrived


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _key(request: web.Request) -> str:
    scheme, _, key = request.headers.get("Authorization", "").partition(" ")
    return key if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")


async def _body(request: web.Request) -> dict[str, Any]:
    try:
        body = json.loads(await request.read())
    except (ValueError, RecursionError) as error:
        raise _Failure(400, f"the request's body: {error}") from None
    if not isinstance(body, dict):
        raise _Failure(400, "the request's body: expected a JSON object")
    return body


def _said(error: Exception) -> tuple[int, str, str]:
    """Status, message and type of what ended a call."""
    if isinstance(error, _Failure):
        return error.status, str(error), error.kind
    return 500, f"in the gateway: {type(error).__name__}: {error}", "server_error"


def _reason(body: bytes) -> tuple[str, str]:
    """Message and type of an engine's refusal, or its text."""
    try:
        said = json.loads(body)
        error = said.get("error") or said
        return str(error["message"]), str(error.get("type") or "invalid_request_error")
    except (ValueError, KeyError, TypeError, AttributeError):
        return body[:2000].decode("utf-8", "replace"), "invalid_request_error"
