"""The gateway: one per worker rank, on loopback; every rollout has an address and a key of its own there.

::

    agent ── http://127.0.0.1:PORT/r/<token>/v1 ──► gateway ── https, fingerprint checked ──► proxy ──► engine
                                                     │
                                                     └── Recorder of the rollout: ids, log-probabilities, weight version

So a call is attributed without the agent's help, and an agent needs only an address and a key. It may speak any of the
:mod:`~megaflow_hpc.model.gateway.dialects`; engines are asked in one. An agent inside a sandbox without a network is
served on a socket that listens in the sandbox. The engine's answer is taken whole and, if the agent asked for a stream,
streamed from here: until the last token has arrived, a call whose server dies can be repeated at another.

Errors have the shape of the agent's API. 503 with type ``model_service_error`` means that no engine answered within
``wait_s``; 429 with type ``rollout_budget_exceeded`` that this rollout has used up its budget; 503 with type
``rollout_suspended`` that the rollout goes on in another allocation, where the same call will be answered: answered
calls are recorded, refused ones are not. A client's own retries help in none of these cases; ``x-should-retry`` tells.
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

from aiohttp import web

from megaflow_hpc.errors import MegaflowError, ModelServiceError
from megaflow_hpc.host.address import LOOPBACK
from megaflow_hpc.model.api import CHAT, COMPLETIONS
from megaflow_hpc.model.gateway import protocols, stream
from megaflow_hpc.model.gateway.dialects import DIALECTS, BadRequest, dialect_of, messages
from megaflow_hpc.model.gateway.failover import Ask, Called, Caller
from megaflow_hpc.model.gateway.http_messages import (
    BUDGET_EXCEEDED,
    MODEL_SERVICE_ERROR,
    SUSPENDED,
    CallError,
    bearer_key,
    error_fields,
    json_response,
    read_object,
    refusal_fields,
)
from megaflow_hpc.model.gateway.limits import CallLimits
from megaflow_hpc.model.gateway.open_rollout import SEEDS, OpenRollout
from megaflow_hpc.model.gateway.recorder import Recorder
from megaflow_hpc.model.gateway.replay import Replay, body_of
from megaflow_hpc.types import CallBudget, ModelEndpoint, Recording

__all__ = ["SEEDS", "ModelGateway"]

LOG = logging.getLogger(__name__)
MAX_BODY = 256 * 2**20
T = TypeVar("T")


class ModelGateway:
    """Serves, routes and records the model calls of open rollouts. An async context manager, or start and stop it.

    Args:
        wait_s: Seconds for which a call waits for a server that answers before it fails with 503.
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
        host: str = LOOPBACK,
        policies: Sequence[str] = (),
        limits: CallLimits | None = None,
        replays: Mapping[str, Replay] | None = None,
    ) -> None:
        self.host, self.port = host, 0
        self._replays = dict(replays or {})
        self.policies = frozenset(policies)
        self._caller = Caller(wait_s, request_timeout_s, limits)
        self._by_id: dict[str, OpenRollout] = {}
        self._by_token: dict[str, OpenRollout] = {}
        self._runner: web.ServerRunner | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def __aenter__(self) -> ModelGateway:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Listens; sets ``port``."""
        self._loop = loop = asyncio.get_running_loop()

        def request(message: Any, payload: Any, protocol: Any, writer: Any, task: Any) -> web.BaseRequest:
            return web.BaseRequest(message, payload, protocol, writer, task, loop, client_max_size=MAX_BODY)

        server = web.Server(self._handle, request_factory=request, handler_cancellation=True, access_log=None)
        self._runner = web.ServerRunner(server)
        await self._runner.setup()
        await web.TCPSite(self._runner, self.host, 0, backlog=1024).start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Closes the listener and all connections."""
        if self._runner is not None:
            await self._runner.cleanup()
        self._caller.close()
        self._runner = self._loop = None

    async def open(
        self,
        rollout_id: str,
        policy: str,
        listener: socket.socket | None = None,
        budget: CallBudget | None = None,
        seed: int = -1,
        recorded: Mapping[str, Any] | None = None,
    ) -> ModelEndpoint:
        """Gives a rollout an address and a key.

        Args:
            rollout_id: Its id, ``task/policy/sample``.
            policy: Policy that answers its calls.
            listener: A further listening socket, taken over and served until :meth:`close`.
            budget: Calls and sampled tokens that it may use; default unlimited.
            seed: Call n, from 0, is sampled with ``(seed + n) % 2**31``; -1 leaves the seed to the engine.
            recorded: State of a suspended rollout (:meth:`suspended`), whose recording is continued.

        Raises:
            MegaflowError: The gateway is not started, or the rollout is open already.
        """
        if self._runner is None:
            raise MegaflowError("the gateway is not started; call start() first")
        if rollout_id in self._by_id:
            raise MegaflowError(f"rollout {rollout_id} is open at this gateway already; close it first")
        key = f"sk-{secrets.token_urlsafe(24)}"
        recorder = Recorder(policy=policy) if recorded is None else Recorder.resumed(recorded)
        rollout = OpenRollout(
            rollout_id, policy, secrets.token_hex(8), key, recorder, budget or CallBudget(), seed=seed
        )
        sandbox_url = ""
        if listener is not None:
            rollout.sandbox_site = web.SockSite(self._runner, listener, backlog=256)
            await rollout.sandbox_site.start()
            sandbox_url = f"http://{LOOPBACK}:{listener.getsockname()[1]}/r/{rollout.token}/v1"
        self._by_id[rollout_id] = self._by_token[rollout.token] = rollout
        return ModelEndpoint(f"http://{self.host}:{self.port}/r/{rollout.token}/v1", rollout.key, policy, sandbox_url)

    async def close(self, rollout_id: str) -> Recording:
        """Ends an open rollout and returns what was recorded; later calls with its key are refused.

        Raises:
            MegaflowError: The rollout is not open here.
        """
        rollout = self._by_id.pop(rollout_id, None)
        if rollout is None:
            raise MegaflowError(f"rollout {rollout_id} is not open at this gateway")
        del self._by_token[rollout.token]
        if rollout.sandbox_site is not None:
            await rollout.sandbox_site.stop()
        for replay in self._replays.values():
            replay.end(rollout.token)
        return rollout.recorder.finish()

    def call_failure(self, rollout_id: str) -> str:
        """Returns why the latest call of an open rollout got no answer, or still waits; empty if it was answered.

        Some agents' clients swallow the 503; the rollout failed by the model service all the same.
        """
        return self._by_id[rollout_id].failure

    def suspend(self, rollout_id: str, now: bool) -> bool:
        """Refuses an open rollout's further calls, and with ``now`` those that no engine has answered yet.

        Returns:
            Whether it is waiting for such a call.
        """
        rollout = self._by_id[rollout_id]
        rollout.suspend(now)
        return bool(rollout.waiting)

    def suspended(self, rollout_id: str) -> dict[str, Any] | None:
        """Returns the recorded state of an open rollout, for :meth:`open`, if :meth:`suspend` refused a call of it."""
        rollout = self._by_id[rollout_id]
        return rollout.recorder.state() if rollout.interrupted else None

    def update_endpoints(self, endpoints: Sequence[Mapping[str, Any]]) -> None:
        """Replaces the list of engine servers by decoded ``RUN/endpoints/*.json``; callable from any thread."""
        if self._loop is None or self._loop is _running_loop():
            self._caller.update(endpoints)
        else:
            self._loop.call_soon_threadsafe(self._caller.update, endpoints)

    # --- HTTP --------------------------------------------------------------------------------------------------------

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answers a request that has the key of the rollout in its path; errors take the shape of the agent's API."""
        rollout: OpenRollout | None = None
        parts = request.path.split("/", 3)
        if request.method == "HEAD" and len(parts) < 4:
            return web.Response()  # clients probe for a listener without a key
        try:
            rollout = self._by_token.get(parts[2]) if len(parts) > 3 and parts[1] == "r" else None
            if rollout is None or not hmac.compare_digest(bearer_key(request).encode(), rollout.key.encode()):
                raise CallError(401, "no such rollout, or not its key", "authentication_error")
            return await self._dispatch(rollout, request, "/" + parts[3])
        except web.HTTPException as refusal:
            failure: Exception = CallError(refusal.status, f"{request.method} {request.path}: {refusal.reason}")
        except CallError as error:
            failure = error
        except Exception as error:
            LOG.exception("a call of rollout %s", rollout.id if rollout else "?")
            failure = error
        status, message, kind = error_fields(failure)
        body = dialect_of(request.path, request.headers).error(status, message, kind)
        do_not_retry = status == 401 or kind in (MODEL_SERVICE_ERROR, BUDGET_EXCEEDED, SUSPENDED)
        return json_response(body, status, {"x-should-retry": "false"} if do_not_retry else None)

    async def _dispatch(self, rollout: OpenRollout, request: web.BaseRequest, path: str) -> web.StreamResponse:
        endpoint = path.removeprefix("/v1")
        if endpoint != path and request.method == "POST":
            if endpoint in DIALECTS:
                return await self._complete(rollout, request, endpoint)
            if endpoint == "/messages/count_tokens":
                return await self._count(rollout, request)
        if endpoint != path and request.method == "GET" and (endpoint + "/").startswith("/models/"):
            return self._models(rollout, endpoint[len("/models/") :])
        known = endpoint in DIALECTS or endpoint in ("/messages/count_tokens", "/models")
        raise CallError(405 if known else 404, f"{request.method} {path} is not served here")

    def _models(self, rollout: OpenRollout, name: str) -> web.Response:
        def card(name: str) -> dict[str, Any]:
            openai = {"id": name, "object": "model", "created": 0, "owned_by": "megaflow-hpc"}
            return {**openai, "type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"}

        if name:
            return json_response(card(name))
        names = [rollout.policy, *sorted(self.policies - {rollout.policy})]
        pages = {"has_more": False, "first_id": names[0], "last_id": names[-1]}
        return json_response({"object": "list", "data": [card(name) for name in names], **pages})

    async def _complete(self, rollout: OpenRollout, request: web.BaseRequest, endpoint: str) -> web.StreamResponse:
        dialect, body = DIALECTS[endpoint], await read_object(request)
        if rollout.suspended:
            raise self._refusal(rollout)
        try:
            asked = dialect.request(body)
        except BadRequest as error:
            raise CallError(400, str(error)) from None
        if over := rollout.over_budget():
            rollout.recorder.recording.over_budget = over
            raise CallError(429, over, BUDGET_EXCEEDED)
        rollout.recorder.request_arrived()
        path = COMPLETIONS if endpoint == "/completions" else CHAT
        rollout.in_flight += 1
        try:
            if not body.get("stream"):
                return json_response(dialect.answer(await self._answer(rollout, path, asked), body))
            return await stream.send(
                request,
                self._answer(rollout, path, asked),
                lambda reply: dialect.events(dialect.answer(reply, body), body),
                lambda error: dialect.error_event(*error_fields(error)),
            )
        finally:
            rollout.in_flight -= 1

    async def _count(self, rollout: OpenRollout, request: web.BaseRequest) -> web.Response:
        """Counts the tokens of a prompt; nothing is recorded."""
        try:
            asked = messages.conversation(await read_object(request))
        except BadRequest as error:
            raise CallError(400, str(error)) from None
        tokens, *_ = await self._call(rollout, CHAT, asked, protocols.count)
        return json_response({"input_tokens": tokens})

    async def _answer(self, rollout: OpenRollout, path: str, asked: dict[str, Any]) -> dict[str, Any]:
        """Returns the engine's answer to a chat or plain request, and records it."""
        recorder, policy = rollout.recorder, self._policy(rollout, asked)
        if path == CHAT:
            with contextlib.suppress(AttributeError, KeyError, TypeError, ValueError):  # malformed: the engine says so
                asked["messages"] = recorder.restore(asked["messages"], policy)
        rollout.set_seed(asked)
        if policy in self._replays:
            return self._replayed(rollout, policy, path, asked)
        task = asyncio.current_task()
        assert task is not None
        rollout.waiting.add(task)
        try:
            answer, server, model_s, wait_s = await self._call(rollout, path, asked, protocols.ask)
        except asyncio.CancelledError:
            if not rollout.suspended:
                raise
            task.uncancel()
            raise self._refusal(rollout) from None
        finally:
            rollout.waiting.discard(task)
        if self._by_id.get(rollout.id) is not rollout:
            raise CallError(401, "the rollout has ended", "authentication_error")
        rollout.servers[policy], rollout.failure = server.name, ""
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
    def _refusal(rollout: OpenRollout) -> CallError:
        rollout.interrupted = True
        return CallError(503, "the allocation ends: this rollout goes on in another one", SUSPENDED)

    def _replayed(self, rollout: OpenRollout, policy: str, path: str, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the recorded answer to a call, and records it again."""
        conversation = asked.get("messages") or ()
        try:
            sample = self._replays[policy].answer(rollout.token, rollout.id, conversation)
        except ModelServiceError as error:
            rollout.failure = str(error)
            raise CallError(503, str(error), MODEL_SERVICE_ERROR) from None
        rollout.failure = ""
        rollout.recorder.add(replace(sample, policy=policy), conversation)
        rollout.recorder.count("replay")
        return body_of(sample, path == CHAT, str(asked.get("model") or policy))

    def _policy(self, rollout: OpenRollout, asked: Mapping[str, Any]) -> str:
        """Returns the policy that the request names as its model, if there is one, else the rollout's own."""
        model = asked.get("model")
        return model if isinstance(model, str) and model in self.policies else rollout.policy

    async def _call(self, rollout: OpenRollout, path: str, body: Mapping[str, Any], ask: Ask[T]) -> Called[T]:
        try:
            return await self._caller.call(rollout, self._policy(rollout, body), path, body, ask)
        except protocols.Refused as refusal:
            raise CallError(refusal.status, *refusal_fields(refusal.body)) from None
        except ModelServiceError as error:
            raise CallError(503, str(error), MODEL_SERVICE_ERROR) from None


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
