"""Implements the gateway: one per worker rank, on loopback. Every rollout has its own address and key.

::

    agent ── http://127.0.0.1:PORT/r/<token>/v1 ──► gateway ── https, fingerprint checked ──► proxy ──► engine
                                                     │
                                                     └── Recorder of the rollout: ids, log-probabilities, weight version

The address tells the gateway which rollout a call belongs to, so an agent needs only an address and a key. The agent
may use any of the :mod:`~megaflow_hpc.model.gateway.dialects`, but engines only see one of them. An agent in a sandbox
without network access connects to a socket inside the sandbox. The gateway waits for the complete response before it
sends anything, even if the agent requested a stream. So if a server dies at any time during the response, the call can
be retried elsewhere.

Errors have the format of the agent's API:

=======================================  ============================================================================
503 of type ``model_service_error``      no engine responded within ``wait_s`` 429 of type ``rollout_budget_exceeded``
the rollout has used up its budget 503 of type ``rollout_suspended``        the rollout continues in another allocation,
where the call is made again =======================================
============================================================================

These errors have the header ``x-should-retry: false``. Successful calls are recorded, refused calls are not.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import socket
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from operator import mul
from typing import Any, TypeVar

from aiohttp import web

from megaflow_hpc.errors import MegaflowError, ModelServiceError
from megaflow_hpc.host.address import LOOPBACK
from megaflow_hpc.host.chat import REFUSED
from megaflow_hpc.model.engine_api import CHAT, COMPLETIONS
from megaflow_hpc.model.gateway import protocols
from megaflow_hpc.model.gateway.canonical import conversation_digest
from megaflow_hpc.model.gateway.conversations import AskedPrompt
from megaflow_hpc.model.gateway.dialects import DIALECTS, BadRequest, Dialect, dialect_of, gemini, messages
from megaflow_hpc.model.gateway.dialects.options import engine_request, is_constrained
from megaflow_hpc.model.gateway.engine_call import Call, EngineRequest, RefusedCall
from megaflow_hpc.model.gateway.failover import Answered, Ask, Caller
from megaflow_hpc.model.gateway.http_messages import (
    BUDGET_EXCEEDED,
    MODEL_SERVICE_ERROR,
    SUSPENDED,
    TOO_MANY_CONNECTIONS,
    CallError,
    body_size,
    error_fields,
    json_response,
    read_object,
    refusal_fields,
    send_json,
    send_stream,
)
from megaflow_hpc.model.gateway.limits import CallLimits
from megaflow_hpc.model.gateway.open_rollout import OpenRollout, OverBudget
from megaflow_hpc.model.gateway.recorder import Recorder
from megaflow_hpc.model.gateway.replay import Replay, body_of
from megaflow_hpc.model.http_server import HttpServer, bearer_key
from megaflow_hpc.model.images import named
from megaflow_hpc.model.json_text import offload
from megaflow_hpc.trajectory import Image, Recording, path_to
from megaflow_hpc.types import CALL_HEADER, STARTED_BY_HEADER, CallBudget, ModelEndpoint, Sampling

LOG = logging.getLogger(__name__)
T = TypeVar("T")
NO_IMAGES: Mapping[str, Image] = {}
MAX_CONNECTIONS = 256
"""Maximum number of connections from one rollout to its gateway."""


class ModelGateway:
    """Serves, routes and records the model calls of open rollouts. Use it as an async context manager.

    Args:
        wait_s: Maximum seconds that a call waits for an available server before it fails with 503.
        request_timeout_s: Timeout of one request in seconds. A timeout counts as a failure of the server.
        policies: Names of policies, which agents may use as model names. Any other name selects the rollout's own
            policy.
        roles: For a team, maps each role to its policy. Then only roles are model names, and any other name selects
            ``owner``.
        owner: For a team, the role that answers calls with any other model name.
        learners: Policies that are trained only on their own rollouts.
        judges: Policies of judges. Only verifiers may use them as model names (see :meth:`open`).
        limits: Limits on this gateway's requests to the engines.
        replays: Policies served from a recorded campaign.
        keep_thoughts: Policies whose prompts keep earlier answers as they were sampled, even if the chat template
            changes them.
        sampling: Maps policies to sampling settings. Default: neutral settings.
        prices: Maps policies to the price in US dollars of a prompt token and of a sampled token. Default: calls are
            free.
    """

    def __init__(
        self,
        *,
        wait_s: float = 300.0,
        request_timeout_s: float = 1800.0,
        policies: Sequence[str] = (),
        roles: Mapping[str, str] | None = None,
        owner: str = "",
        learners: Collection[str] = (),
        judges: Sequence[str] = (),
        limits: CallLimits | None = None,
        replays: Mapping[str, Replay] | None = None,
        keep_thoughts: Collection[str] = (),
        sampling: Mapping[str, Sampling] | None = None,
        prices: Mapping[str, tuple[float, float]] | None = None,
    ) -> None:
        self.port = 0
        self.tokens = 0
        """Number of tokens that engines have sampled so far."""
        self.usd = 0.0
        """Total price in US dollars of all answered calls so far. Includes calls of failed rollouts, and calls whose
        agent disconnected."""
        self._paid: set[asyncio.Task[Any]] = set()
        """Requests in flight that have a price."""
        self._caller = Caller(wait_s, request_timeout_s, limits)
        self._roles, self._owner = dict(roles or {}), owner
        self._policies, self._judges, self._learners = frozenset(policies), frozenset(judges), frozenset(learners)
        self._replays, self._keep_thoughts = replays or {}, frozenset(keep_thoughts)
        self._sampling = sampling or {}
        self._prices = prices or {}
        self._by_id: dict[str, OpenRollout] = {}
        self._by_token: dict[str, OpenRollout] = {}
        self._server: HttpServer | None = None

    async def __aenter__(self) -> ModelGateway:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Starts listening and sets ``port``."""
        self._server = HttpServer(self._handle, LOG, max_per_owner=MAX_CONNECTIONS)
        listener = socket.create_server((LOOPBACK, 0))
        self.port = listener.getsockname()[1]
        self._server.listen(listener)

    async def stop(self) -> None:
        """Closes the listener and all connections."""
        if self._server is not None:
            for token in self._by_token:
                self._server.release(token)
            await self._server.stop()
        for attempt in self._paid:
            attempt.cancel()
        await self._caller.close()
        self._server = None

    async def open(
        self,
        rollout_id: str,
        policy: str,
        listener: socket.socket | None = None,
        budget: CallBudget | None = None,
        seed: int = -1,
        recorded: Mapping[str, Any] | None = None,
        judging: bool = False,
    ) -> ModelEndpoint:
        """Gives a rollout an address and a key.

        Args:
            rollout_id: ``task/policy/sample``.
            policy: Policy that answers its calls.
            listener: An additional listening socket. The gateway serves it until :meth:`close`.
            budget: Limits on its calls and sampled tokens. Default: unlimited.
            seed: Call n, counted from 0, uses the sampling seed ``(seed + n) % 2**31``. -1 lets the engine choose.
            recorded: State of a suspended rollout (:meth:`suspended`), to continue its recording.
            judging: Open the rollout for a verifier, which may also call judges.

        Raises:
            MegaflowError: The gateway is not started, or the rollout is already open.
        """
        if self._server is None:
            raise MegaflowError("the gateway is not started; call start() first")
        if rollout_id in self._by_id:
            raise MegaflowError(f"rollout {rollout_id} is open at this gateway already; close it first")
        key = f"sk-{secrets.token_urlsafe(24)}"
        recorder = Recorder(policy=policy) if recorded is None else Recorder.resumed(recorded)
        rollout = OpenRollout(
            rollout_id, policy, secrets.token_hex(8), key, recorder, budget or CallBudget(), seed=seed, judging=judging
        )
        sandbox_url = ""
        if listener is not None:
            rollout.listener = listener
            self._server.listen(listener)
            sandbox_url = f"http://{LOOPBACK}:{listener.getsockname()[1]}/r/{rollout.token}/v1"
        self._by_id[rollout_id] = self._by_token[rollout.token] = rollout
        base_url = f"http://{LOOPBACK}:{self.port}/r/{rollout.token}/v1"
        return ModelEndpoint(base_url, rollout.key, (not judging and self._owner) or policy, sandbox_url)

    async def close(self, rollout_id: str) -> Recording:
        """Closes a rollout and returns its recording. Later calls with its key are refused.

        Raises:
            MegaflowError: The rollout is not open at this gateway.
        """
        rollout = self._by_id.pop(rollout_id, None)
        if rollout is None:
            raise MegaflowError(f"rollout {rollout_id} is not open at this gateway")
        del self._by_token[rollout.token]
        if self._server is not None:
            if rollout.listener is not None:
                self._server.unlisten(rollout.listener)
            self._server.release(rollout.token)
        rollout.ended = True
        for replay in self._replays.values():
            replay.end(rollout.token)
        return rollout.recorder.finish()

    async def outage(self, rollout_id: str) -> str:
        """Returns the reason why the latest call of an open rollout failed, if the service fails on other requests too.

        Returns an empty string if the call succeeded, or if a server answers the gateway's own request. In the latter
        case, the rollout's request was at fault. This check is needed because the clients of some agents swallow the
        503. Call this method after the agent has ended, because it cancels the rollout's calls and refuses new ones.
        """
        rollout = self._by_id[rollout_id]
        failure, control = rollout.failure, rollout.control
        rollout.suspend(now=True)  # so that the control does not wait for the rollout's own calls
        if failure and control is not None and await control():
            failure = ""
        # Check each judge, because one may have answered after another failed.
        return failure or (next(iter(rollout.unanswered.values()), "") if rollout.judging else "")

    def suspend(self, rollout_id: str, now: bool) -> bool:
        """Refuses an open rollout's new calls. If ``now``, also refuses those still waiting for an engine's response.

        Returns:
            True if the agent is still waiting for the response to a call.
        """
        rollout = self._by_id[rollout_id]
        rollout.suspend(now)
        return bool(rollout.waiting)

    def suspended(self, rollout_id: str) -> dict[str, Any] | None:
        """Returns the recorded state of an open rollout, to pass to :meth:`open`. Returns ``None`` unless
        :meth:`suspend` caused a call to be refused."""
        rollout = self._by_id[rollout_id]
        return rollout.recorder.state() if rollout.interrupted else None

    def in_sandbox(self, rollout_id: str) -> AbstractContextManager[None]:
        """Returns a context manager that adds the time inside it to the sandbox time of a rollout's latest turn."""
        rollout = self._by_id.get(rollout_id)
        return rollout.recorder.in_sandbox() if rollout else nullcontext()

    def activity(self) -> dict[str, tuple[int, int, bool]]:
        """Returns (number of answered calls, number of sampled tokens, whether a call is pending) of each open rollout,
        by id."""
        return {
            rollout.id: (rollout.recorder.calls, rollout.recorder.sampled, rollout.in_flight > 0)
            for rollout in self._by_id.values()
            if not rollout.judging
        }

    def conversation(self, rollout_id: str) -> Sequence[Mapping[str, Any]]:
        """Returns the conversation of a rollout's latest answered call, or an empty sequence if the rollout is not
        open."""
        rollout = self._by_id.get(rollout_id)
        if rollout is None:
            return ()
        recording = rollout.recorder.recording
        last = next((turn.message for turn in reversed(recording.turns) if turn.message >= 0), -1)
        return [recording.messages[node] for node in path_to(recording.parents, last)]

    def image_labels(self, rollout_id: str) -> dict[str, str]:
        """Returns a short description of each image of an open rollout, by SHA-256."""
        rollout = self._by_id.get(rollout_id)
        images = rollout.recorder.recording.images if rollout else {}
        return {name: image.label for name, image in images.items()}

    def update_endpoints(self, endpoints: Sequence[Mapping[str, Any]]) -> None:
        """Replaces the list of engine servers with decoded ``RUN/endpoints/*.json`` records."""
        self._caller.router.update(endpoints)

    # --- HTTP --------------------------------------------------------------------------------------------------------

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Handles a request to a rollout's address if it carries the rollout's key."""
        assert self._server is not None
        rollout: OpenRollout | None = None
        parts = request.path.split("/", 3)
        if request.method == "HEAD" and len(parts) < 4:
            return web.Response()  # clients check without a key whether the gateway is listening
        try:
            rollout = self._by_token.get(parts[2]) if len(parts) > 3 and parts[1] == "r" else None
            if rollout is None or not hmac.compare_digest(bearer_key(request), rollout.key.encode()):
                raise CallError(401, "unknown rollout, or wrong key", "authentication_error")
            if not self._server.admit(request, rollout.token):
                raise CallError(429, f"this rollout has {MAX_CONNECTIONS} connections in use", TOO_MANY_CONNECTIONS)
            return await self._dispatch(rollout, request, "/" + parts[3])
        except (CallError, RecursionError) as error:
            failure: Exception = error
        except Exception as error:
            self._server.log.exception("a call of rollout %s", rollout.id if rollout else "?")
            failure = error
        status, message, kind = error_fields(failure)
        body = dialect_of(request.path, request.headers).error(status, message, kind)
        do_not_retry = status == 401 or kind in (MODEL_SERVICE_ERROR, BUDGET_EXCEEDED, SUSPENDED)
        answer = json_response(body, status, {"x-should-retry": "false"} if do_not_retry else None)
        if kind == TOO_MANY_CONNECTIONS:
            answer.force_close()
        return answer

    async def _dispatch(self, rollout: OpenRollout, request: web.BaseRequest, path: str) -> web.StreamResponse:
        if google := gemini.PATH.fullmatch(path):
            return await self._google(rollout, request, *google.groups())
        endpoint = path.removeprefix("/v1")
        completes, counts = endpoint in DIALECTS, endpoint == "/messages/count_tokens"
        if endpoint != path and request.method == "POST" and (completes or counts):
            size = body_size(request)
            async with rollout.quota.turn(size):
                body, size = await read_object(request, size)
                if counts:
                    tokens = await self._count(rollout, body, size, messages.conversation)
                    return json_response({"input_tokens": tokens})
                return await self._complete(rollout, request, endpoint, body, size)
        if endpoint != path and request.method == "GET" and (endpoint + "/").startswith("/models/"):
            return self._models(rollout, endpoint[len("/models/") :])
        raise CallError(
            405 if completes or counts or endpoint == "/models" else 404, f"{request.method} {path} is not served here"
        )

    async def _google(
        self, rollout: OpenRollout, request: web.BaseRequest, model: str, method: str
    ) -> web.StreamResponse:
        """Handles a request of Gemini's API."""
        streams = method == "streamGenerateContent"
        if request.method != "POST":
            raise CallError(405, f"{request.method} {request.path}: expected POST")
        if streams and request.query.get("alt") != "sse":
            raise CallError(400, "streamGenerateContent: expected ?alt=sse; other streams are not served")
        size = body_size(request)
        async with rollout.quota.turn(size):
            body, size = await read_object(request, size)
            if method == "countTokens":
                return json_response({"totalTokens": await self._count(rollout, body, size, gemini.conversation)})
            body |= {"model": model, "stream": streams}
            return await self._complete(rollout, request, "/models/MODEL:generateContent", body, size)

    # --- model calls -------------------------------------------------------------------------------------------------

    def _models(self, rollout: OpenRollout, name: str) -> web.Response:
        """Returns the model called ``name``. If ``name`` is empty, lists the models that the agent may request."""

        def card(name: str) -> dict[str, Any]:
            openai = {"id": name, "object": "model", "created": 0, "owned_by": "megaflow-hpc"}
            return {**openai, "type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"}

        if name:
            return json_response(card(name))
        own, others = (self._owner, self._roles.keys()) if self._roles else (rollout.policy, self._policies)
        names = [own, *sorted(others - {own})]
        pages = {"has_more": False, "first_id": names[0], "last_id": names[-1]}
        return json_response({"object": "list", "data": [card(name) for name in names], **pages})

    async def _complete(
        self, rollout: OpenRollout, http: web.BaseRequest, endpoint: str, body: dict[str, Any], size: int
    ) -> web.StreamResponse:
        """Handles a completion request.

        Args:
            rollout: The rollout that makes the call.
            http: The HTTP request.
            endpoint: Request path without ``/v1``, which selects the dialect.
            body: Decoded request body.
            size: Size of the body in bytes.

        Raises:
            CallError: The request is refused, or no engine responds.
        """
        dialect = DIALECTS[endpoint]
        if rollout.suspended:
            raise _suspension(rollout)
        path = COMPLETIONS if endpoint == "/completions" else CHAT
        asked, images = await offload(size, self._convert, path, dialect.request, body)
        request = self._engine_request(rollout, path, asked, size, images)
        free = not is_constrained(request.body, request.sampling.settings)
        request = request._replace(free=free, api=endpoint, started_by=_named_call(http, rollout))
        try:
            rollout.check_images(images)
            async with rollout.reserved(asked, request.choices) as limit:
                if rollout.suspended:  # the rollout was suspended while this call waited for budget
                    raise _suspension(rollout)
                rollout.recorder.request_arrived()
                rollout.in_flight += 1
                try:
                    return await self._respond(rollout, http, dialect, body, request._replace(limit=limit))
                finally:
                    rollout.in_flight -= 1
        except OverBudget as error:
            rollout.recorder.recording.over_budget = str(error)
            raise CallError(429, str(error), BUDGET_EXCEEDED) from None

    async def _count(
        self, rollout: OpenRollout, body: dict[str, Any], size: int, convert: Callable[[Any], dict[str, Any]]
    ) -> int:
        """Returns the number of tokens in a prompt. Records nothing."""
        asked, images = await offload(size, self._convert, CHAT, convert, body)
        request = self._engine_request(rollout, CHAT, asked, size, images)
        async with rollout.quota.large_answer() as gate:
            answered = await self._call(rollout, request._replace(gate=gate), protocols.count)
        return answered.answer

    def _convert(
        self, path: str, convert: Callable[[Mapping[str, Any]], dict[str, Any]], body: Any
    ) -> tuple[dict[str, Any], dict[str, Image]]:
        """Converts and checks an agent's request. Returns the request for the engine, and its images by SHA-256.

        The request's messages refer to images by this hash.
        """
        try:
            asked = engine_request(convert(body), path == CHAT)
        except BadRequest as error:
            raise CallError(400, str(error)) from None
        images: dict[str, Image] = {}
        try:
            if path == CHAT:
                asked["messages"], images = named(asked["messages"])
        except ValueError as error:
            raise CallError(400, str(error)) from None
        return asked, images

    def _speaker(self, rollout: OpenRollout, asked: Mapping[str, Any]) -> tuple[str, str]:
        """Returns (policy, role) that the request's model name selects. By default, this is the rollout's own policy
        and no role.

        Raises:
            CallError: The policy is trained, but would not be trained on its answer to this request.
        """
        model = asked.get("model")
        named = model if isinstance(model, str) else ""
        if self._roles and not rollout.judging:
            role = named if named in self._roles else self._owner
            return self._roles[role], role
        if named in self._learners and named != rollout.policy and not rollout.judging:
            raise CallError(
                400,
                f"model {named!r} is trained on rollouts of its own alone, and would not learn from this call; name "
                "both models' roles in the section team of the campaign",
            )
        known = self._policies | self._judges if rollout.judging else self._policies
        return named if named in known else rollout.policy, ""

    def _engine_request(
        self, rollout: OpenRollout, path: str, asked: dict[str, Any], size: int, images: Mapping[str, Image] = NO_IMAGES
    ) -> EngineRequest:
        policy, role = self._speaker(rollout, asked)
        sampling, keep = self._sampling.get(policy, Sampling()), policy in self._keep_thoughts
        return EngineRequest(policy, path, asked, rollout.recorder, size, sampling, keep, role=role, images=images)

    async def _respond(
        self,
        rollout: OpenRollout,
        http: web.BaseRequest,
        dialect: Dialect,
        body: dict[str, Any],
        request: EngineRequest,
    ) -> web.StreamResponse:
        """Sends the engine's response to the agent, as JSON or as a stream."""
        async with rollout.quota.large_answer() as gate:
            answer = self._answer(rollout, request._replace(gate=gate))
            if not body.get("stream"):
                reply = await answer
                number = {CALL_HEADER: str(rollout.recorder.calls - (len(reply.samples) or 1))}
                return await send_json(http, reply.size, lambda: dialect.answer(reply.body, body), number)
            return await send_stream(
                http,
                answer,
                lambda reply: dialect.events(dialect.answer(reply, body), body),
                lambda error: dialect.error_event(*error_fields(error)),
            )

    async def _answer(self, rollout: OpenRollout, request: EngineRequest) -> protocols.Answer:
        """Gets a response from an engine or a recorded campaign, records it and returns it."""
        asked = dict(request.body)
        conversation = await offload(
            request.size, rollout.recorder.restore, asked.get("messages") or (), request.policy
        )
        if request.chat:
            asked["messages"] = list(conversation)
        if request.started_by is not None:
            conversation.started_by = request.started_by
        rollout.set_seed(asked)
        request = request._replace(body=asked)
        digest = await offload(request.size, conversation_digest, list(conversation))
        if request.policy in self._replays:
            return self._replayed(rollout, request, conversation, digest)
        answer, server, model_s, wait_s = await self._call_unless_suspended(rollout, request)
        if rollout.ended:
            raise CallError(401, "the rollout has ended", "authentication_error")
        rollout.servers[request.policy] = server.name
        rollout.failed("")
        rollout.unanswered.pop(request.policy, None)
        for number, sample in enumerate(answer.samples):
            sample.policy, sample.role, sample.free = request.policy, request.role, request.free
            times = {} if number else {"model_s": model_s, "wait_s": wait_s}
            rollout.recorder.add(sample, conversation, digest, **times, images=request.images)
            rollout.recorder.recording.calls[-1]["api"] = request.api
        rollout.recorder.count(answer.protocol, server.degraded, request.free)
        self._caller.limits.charge(answer.total_tokens)
        self.tokens += _used(answer)[1]
        return answer

    async def _pay(self, rollout: OpenRollout, ask: Ask[T], call: Call) -> T:
        """Sends a request that has a price. If the agent disconnects, still waits for the answer, because the endpoint
        charges for it.

        Until then, the call counts towards the rollout's quota.
        """
        attempt = asyncio.ensure_future(ask(call))
        self._paid.add(attempt)
        attempt.add_done_callback(partial(self._spend, call.request.policy))
        try:
            return await asyncio.shield(attempt)
        except asyncio.CancelledError:
            if not rollout.suspended:
                rollout.waiting.discard(asyncio.current_task())
                await asyncio.wait({attempt})
            raise

    def _spend(self, policy: str, attempt: asyncio.Task[Any]) -> None:
        self._paid.discard(attempt)
        if not attempt.cancelled() and attempt.exception() is None:
            self.usd += sum(map(mul, self._prices[policy], _used(attempt.result())))

    async def _call_unless_suspended(self, rollout: OpenRollout, request: EngineRequest) -> Answered[protocols.Answer]:
        task = asyncio.current_task()
        assert task is not None
        rollout.waiting.add(task)
        try:
            return await self._call(rollout, request, protocols.ask)
        except asyncio.CancelledError:
            if not rollout.suspended:
                raise
            task.uncancel()
            raise _suspension(rollout) from None
        finally:
            rollout.waiting.discard(task)

    async def _call(self, rollout: OpenRollout, request: EngineRequest, ask: Ask[T]) -> Answered[T]:
        if request.policy in self._prices:
            ask = partial(self._pay, rollout, ask)
        try:
            return await self._caller.call(rollout, request, ask)
        except RefusedCall as refusal:
            if refusal.status not in REFUSED:
                rollout.unanswered[request.policy] = f"HTTP {refusal.status} of {request.policy}"
            raise CallError(refusal.status if refusal.status < 500 else 400, *refusal_fields(refusal.body)) from None
        except ModelServiceError as error:
            rollout.unanswered[request.policy] = str(error)
            raise CallError(503, str(error), MODEL_SERVICE_ERROR) from None

    def _replayed(
        self, rollout: OpenRollout, request: EngineRequest, conversation: AskedPrompt, digest: str
    ) -> protocols.Answer:
        """Returns the recorded response to a call, and records it again."""
        try:
            speaker = request.role, request.policy
            sample = self._replays[request.policy].answer(rollout.token, rollout.id, digest, speaker)
        except ModelServiceError as error:
            rollout.failed(str(error))
            raise CallError(503, str(error), MODEL_SERVICE_ERROR) from None
        rollout.failed("")
        message = sample.message if request.chat else None
        sample = replace(sample, policy=request.policy, role=request.role, message=message)
        rollout.recorder.add(sample, conversation, digest, images=request.images)
        if sample.counted is None:
            rollout.recorder.count("replay", free=sample.free)
        else:
            rollout.recorder.count("text")
        return protocols.Answer(body_of(sample, request.chat, str(request.body.get("model") or request.policy)))


def _used(answer: protocols.Answer | int) -> tuple[int, int]:
    """Returns (number of prompt tokens, number of sampled tokens) of a call. ``answer`` is an integer if only a prompt
    was counted."""
    if isinstance(answer, int):
        return answer, 1
    sampled = sum(len(sample.tokens) if sample.counted is None else sample.counted for sample in answer.samples)
    return answer.total_tokens - sampled, sampled


def _named_call(http: web.BaseRequest, rollout: OpenRollout) -> int | None:
    """Returns the number of the earlier call that a request names as its cause. Returns ``None`` if it names none.

    Raises:
        CallError: The rollout has no such call.
    """
    named, calls = http.headers.get(STARTED_BY_HEADER), rollout.recorder.calls
    if named is None or rollout.judging:
        return None
    if not (named.isascii() and named.isdigit() and len(named) < 10 and int(named) < calls):
        raise CallError(400, f"{STARTED_BY_HEADER}: {named!r:.40}: this rollout has calls 0 to {calls - 1}")
    return int(named)


def _suspension(rollout: OpenRollout) -> CallError:
    rollout.interrupted = True
    return CallError(503, "the allocation ends: this rollout continues in another one", SUSPENDED)
