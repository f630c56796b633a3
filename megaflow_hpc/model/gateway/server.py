"""The gateway: one per worker rank, on loopback; every rollout has an address and a key of its own there.

::

    agent ── http://127.0.0.1:PORT/r/<token>/v1 ──► gateway ── https, fingerprint checked ──► proxy ──► engine
                                                     │
                                                     └── Recorder of the rollout: ids, log-probabilities, weight version

So a call is attributed without the agent's help, and an agent needs to know nothing but an address. It may speak any of
the :mod:`~megaflow_hpc.model.gateway.dialects`; the engine is asked in one. One that runs in a sandbox without a
network is served the same on a socket that listens in the sandbox. The answer is taken from the engine whole and, where
the agent asked for a stream, streamed from here: until the last token is there, a call whose server dies can be made
again elsewhere.

Errors have the shape of the agent's API. 503 with type ``model_service_error`` means that no engine could answer within
``wait_s``; 429 with type ``rollout_budget_exceeded`` that this rollout may call no more; 503 with type
``rollout_suspended`` that it goes on in another allocation, where the same call will be answered: what was answered
here is recorded, what was refused is not. None is worth a client's own retries, and says so in ``x-should-retry``.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import secrets
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import orjson
from aiohttp import web

from megaflow_hpc.errors import MegaflowError, ModelServiceError
from megaflow_hpc.model.api import CHAT, COMPLETIONS
from megaflow_hpc.model.gateway import protocols, stream
from megaflow_hpc.model.gateway.dialects import DIALECTS, BadRequest, dialect_of, messages
from megaflow_hpc.model.gateway.failover import Ask, Called, Caller
from megaflow_hpc.model.gateway.limits import CallLimits
from megaflow_hpc.model.gateway.recorder import Recorder
from megaflow_hpc.model.gateway.replay import Replay, body_of
from megaflow_hpc.model.gateway.session import SEEDS, Session
from megaflow_hpc.types import Budget, ModelEndpoint, Recording

__all__ = ["SEEDS", "ModelGateway"]

LOG = logging.getLogger(__name__)
MODEL_SERVICE_ERROR = "model_service_error"
BUDGET_EXCEEDED = "rollout_budget_exceeded"
SUSPENDED = "rollout_suspended"
MAX_BODY = 256 * 2**20
T = TypeVar("T")


class _Failure(Exception):
    """Ends a call with an error in the agent's dialect."""

    def __init__(self, status: int, message: str, kind: str = "invalid_request_error") -> None:
        super().__init__(message)
        self.status, self.kind = status, kind


class ModelGateway:
    """The :class:`~megaflow_hpc.types.Gateway` of a worker rank; an async context manager, or start and stop it.

    Args:
        wait_s: Seconds a call waits for a server that answers before it fails with 503.
        request_timeout_s: Seconds one request may take at a server; then it counts as that server's failure.
        host: Address to listen on; the port is chosen by the kernel.
        policies: Names that an agent may give as the model to speak with that policy; any other is the rollout's own.
        limits: What this gateway may ask of the engines.
        replays: Policies that are answered from a recorded campaign.
    """

    def __init__(
        self,
        *,
        wait_s: float = 300.0,
        request_timeout_s: float = 1800.0,
        host: str = "127.0.0.1",
        policies: Sequence[str] = (),
        limits: CallLimits | None = None,
        replays: Mapping[str, Replay] | None = None,
    ) -> None:
        self.host, self.port = host, 0
        self._replays = dict(replays or {})
        self.policies = frozenset(policies)
        self._caller = Caller(wait_s, request_timeout_s, limits)
        self._by_id: dict[str, Session] = {}
        self._by_token: dict[str, Session] = {}
        self._runner: web.ServerRunner | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def __aenter__(self) -> ModelGateway:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        self._loop = loop = asyncio.get_running_loop()

        def request(message: Any, payload: Any, protocol: Any, writer: Any, task: Any) -> web.BaseRequest:
            return web.BaseRequest(message, payload, protocol, writer, task, loop, client_max_size=MAX_BODY)

        server = web.Server(self._handle, request_factory=request, handler_cancellation=True, access_log=None)
        self._runner = web.ServerRunner(server)
        await self._runner.setup()
        await web.TCPSite(self._runner, self.host, 0, backlog=1024).start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
        self._caller.close()
        self._runner = self._loop = None

    async def open(
        self,
        rollout_id: str,
        policy: str,
        listener: socket.socket | None = None,
        budget: Budget | None = None,
        seed: int = -1,
        recorded: Mapping[str, Any] | None = None,
    ) -> ModelEndpoint:
        if self._runner is None:
            raise MegaflowError("the gateway is not started; call start() first")
        if rollout_id in self._by_id:
            raise MegaflowError(f"rollout {rollout_id} is open at this gateway already; close it first")
        key = f"sk-{secrets.token_urlsafe(24)}"
        recorder = Recorder(policy=policy) if recorded is None else Recorder.resumed(recorded)
        session = Session(rollout_id, policy, secrets.token_hex(8), key, recorder, budget or Budget(), seed=seed)
        inside = ""
        if listener is not None:
            session.inside = web.SockSite(self._runner, listener, backlog=256)
            await session.inside.start()
            inside = f"http://127.0.0.1:{listener.getsockname()[1]}/r/{session.token}/v1"
        self._by_id[rollout_id] = self._by_token[session.token] = session
        return ModelEndpoint(f"http://{self.host}:{self.port}/r/{session.token}/v1", session.key, policy, inside)

    async def close(self, rollout_id: str) -> Recording:
        session = self._by_id.pop(rollout_id, None)
        if session is None:
            raise MegaflowError(f"rollout {rollout_id} is not open at this gateway")
        del self._by_token[session.token]
        if session.inside is not None:
            await session.inside.stop()
        for replay in self._replays.values():
            replay.end(session.token)
        return session.recorder.finish()

    def trouble(self, rollout_id: str) -> str:
        """Why the latest call of an open rollout got no answer from any engine, or still waits; empty where it got one.

        For agents whose client swallows the 503: the rollout failed by the model service, whatever the agent says.
        """
        return self._by_id[rollout_id].trouble

    def suspend(self, rollout_id: str, now: bool) -> bool:
        """Refuses an open rollout's further calls, and with ``now`` those that no engine has answered yet.

        Returns:
            Whether it is waiting for such a call.
        """
        session = self._by_id[rollout_id]
        session.suspend(now)
        return bool(session.asking)

    def suspended(self, rollout_id: str) -> dict[str, Any] | None:
        """What was recorded of an open rollout, for :meth:`open`, if a call of it was refused by :meth:`suspend`."""
        session = self._by_id[rollout_id]
        return session.recorder.state() if session.refused else None

    def update_endpoints(self, endpoints: Sequence[Mapping[str, Any]]) -> None:
        """Takes over the list; from the gateway's own event loop at once, from another thread as soon as it can."""
        if self._loop is None or self._loop is _running_loop():
            self._caller.update(endpoints)
        else:
            self._loop.call_soon_threadsafe(self._caller.update, endpoints)

    # --- HTTP --------------------------------------------------------------------------------------------------------

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Lets through who has the key of the rollout in the path, and gives every error the API's shape."""
        session: Session | None = None
        parts = request.path.split("/", 3)
        if request.method == "HEAD" and len(parts) < 4:
            return web.Response()  # "is anybody there?", which clients ask without a key and any connection answers
        try:
            session = self._by_token.get(parts[2]) if len(parts) > 3 and parts[1] == "r" else None
            if session is None or not hmac.compare_digest(_key(request).encode(), session.key.encode()):
                raise _Failure(401, "no such rollout, or not its key", "authentication_error")
            return await self._dispatch(session, request, "/" + parts[3])
        except web.HTTPException as refusal:
            failure: Exception = _Failure(refusal.status, f"{request.method} {request.path}: {refusal.reason}")
        except _Failure as error:
            failure = error
        except Exception as error:
            LOG.exception("a call of rollout %s", session.id if session else "?")
            failure = error
        status, message, kind = _said(failure)
        body = dialect_of(request.path, request.headers).error(status, message, kind)
        hopeless = status == 401 or kind in (MODEL_SERVICE_ERROR, BUDGET_EXCEEDED, SUSPENDED)
        return _json(body, status, {"x-should-retry": "false"} if hopeless else None)

    async def _dispatch(self, session: Session, request: web.BaseRequest, path: str) -> web.StreamResponse:
        place = path.removeprefix("/v1")
        if place != path and request.method == "POST":
            if place in DIALECTS:
                return await self._complete(session, request, place)
            if place == "/messages/count_tokens":
                return await self._count(session, request)
        if place != path and request.method == "GET" and (place + "/").startswith("/models/"):
            return self._models(session, place[len("/models/") :])
        known = place in DIALECTS or place in ("/messages/count_tokens", "/models")
        raise _Failure(405 if known else 404, f"{request.method} {path} is not served here")

    def _models(self, session: Session, name: str) -> web.Response:
        def card(name: str) -> dict[str, Any]:
            openai = {"id": name, "object": "model", "created": 0, "owned_by": "megaflow-hpc"}
            return {**openai, "type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"}

        if name:
            return _json(card(name))
        names = [session.policy, *sorted(self.policies - {session.policy})]
        pages = {"has_more": False, "first_id": names[0], "last_id": names[-1]}
        return _json({"object": "list", "data": [card(name) for name in names], **pages})

    async def _complete(self, session: Session, request: web.BaseRequest, place: str) -> web.StreamResponse:
        dialect, body = DIALECTS[place], await _body(request)
        if session.suspended:
            raise self._refusal(session)
        try:
            asked = dialect.request(body)
        except BadRequest as error:
            raise _Failure(400, str(error)) from None
        if over := session.over_budget():
            session.recorder.recording.over_budget = over
            raise _Failure(429, over, BUDGET_EXCEEDED)
        session.recorder.request_arrived()
        path = COMPLETIONS if place == "/completions" else CHAT
        session.in_flight += 1
        try:
            if not body.get("stream"):
                return _json(dialect.answer(await self._answer(session, path, asked), body))
            return await stream.send(
                request,
                self._answer(session, path, asked),
                lambda reply: dialect.events(dialect.answer(reply, body), body),
                lambda error: dialect.error_event(*_said(error)),
            )
        finally:
            session.in_flight -= 1

    async def _count(self, session: Session, request: web.BaseRequest) -> web.Response:
        """How long a prompt is, without an answer to it: nothing is recorded."""
        try:
            asked = messages.conversation(await _body(request))
        except BadRequest as error:
            raise _Failure(400, str(error)) from None
        tokens, *_ = await self._call(session, CHAT, asked, protocols.count)
        return _json({"input_tokens": tokens})

    async def _answer(self, session: Session, path: str, asked: dict[str, Any]) -> dict[str, Any]:
        """The engine's answer to a chat or plain request, recorded."""
        recorder, policy = session.recorder, self._policy(session, asked)
        if path == CHAT:
            with contextlib.suppress(AttributeError, KeyError, TypeError, ValueError):  # malformed: the engine says so
                asked["messages"] = recorder.restore(asked["messages"], policy)
        session.seeded(asked)
        if policy in self._replays:
            return self._replayed(session, policy, path, asked)
        task = asyncio.current_task()
        assert task is not None
        session.asking.add(task)
        try:
            answer, server, model_s, wait_s = await self._call(session, path, asked, protocols.ask)
        except asyncio.CancelledError:
            if not session.suspended:
                raise
            task.uncancel()
            raise self._refusal(session) from None
        finally:
            session.asking.discard(task)
        if self._by_id.get(session.id) is not session:
            raise _Failure(401, "the rollout has ended", "authentication_error")
        session.servers[policy], session.trouble = server.name, ""
        conversation = asked.get("messages") or ()
        for number, sample in enumerate(answer.samples):
            sample.policy = policy
            recorder.add(sample, conversation, model_s=0.0 if number else model_s, wait_s=0.0 if number else wait_s)
            self._caller.limits.charge((0 if number else len(sample.prompt)) + len(sample.tokens))
        if not answer.samples:
            recorder.add_text(conversation, answer.message, policy)
            self._caller.limits.charge(int((answer.body.get("usage") or {}).get("total_tokens") or 0))
        recorder.count(answer.protocol, server.degraded)
        return answer.body

    @staticmethod
    def _refusal(session: Session) -> _Failure:
        session.refused = True
        return _Failure(503, "the allocation ends: this rollout goes on in another one", SUSPENDED)

    def _replayed(self, session: Session, policy: str, path: str, asked: Mapping[str, Any]) -> dict[str, Any]:
        """The recorded answer to a call, recorded again."""
        conversation = asked.get("messages") or ()
        try:
            sample = self._replays[policy].answer(session.token, session.id, conversation)
        except ModelServiceError as error:
            session.trouble = str(error)
            raise _Failure(503, str(error), MODEL_SERVICE_ERROR) from None
        session.trouble = ""
        session.recorder.add(replace(sample, policy=policy), conversation)
        session.recorder.count("replay")
        return body_of(sample, path == CHAT, str(asked.get("model") or policy))

    def _policy(self, session: Session, asked: Mapping[str, Any]) -> str:
        """Who is asked: the policy that the request names as its model, where there is one, else the rollout's own."""
        model = asked.get("model")
        return model if isinstance(model, str) and model in self.policies else session.policy

    async def _call(self, session: Session, path: str, body: Mapping[str, Any], ask: Ask[T]) -> Called[T]:
        try:
            return await self._caller.call(session, self._policy(session, body), path, body, ask)
        except protocols.Refused as refusal:
            raise _Failure(refusal.status, *_reason(refusal.body)) from None
        except ModelServiceError as error:
            raise _Failure(503, str(error), MODEL_SERVICE_ERROR) from None


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _json(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.Response(body=protocols.packed(body), status=status, headers=headers, content_type="application/json")


def _key(request: web.BaseRequest) -> str:
    scheme, _, key = request.headers.get("Authorization", "").partition(" ")
    return key if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")


async def _body(request: web.BaseRequest) -> dict[str, Any]:
    try:
        body = protocols.parsed(await request.read())
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
        said = orjson.loads(body)
        error = said.get("error") or said
        return str(error["message"]), str(error.get("type") or "invalid_request_error")
    except (ValueError, KeyError, TypeError, AttributeError):
        return body[:2000].decode("utf-8", "replace"), "invalid_request_error"
