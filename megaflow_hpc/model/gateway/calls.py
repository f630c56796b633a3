"""Handles a rollout's model call, from the agent's request to the recorded response."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from aiohttp import web

from megaflow_hpc.errors import ModelServiceError
from megaflow_hpc.model.api import CHAT, COMPLETIONS
from megaflow_hpc.model.gateway import protocols
from megaflow_hpc.model.gateway.canonical import conversation_digest
from megaflow_hpc.model.gateway.conversations import AskedPrompt
from megaflow_hpc.model.gateway.dialects import DIALECTS, BadRequest, Dialect, messages
from megaflow_hpc.model.gateway.dialects.options import engine_request, is_constrained
from megaflow_hpc.model.gateway.engine_call import EngineRequest, RefusedCall
from megaflow_hpc.model.gateway.failover import Answered, Ask, Caller
from megaflow_hpc.model.gateway.http_messages import (
    BUDGET_EXCEEDED,
    MODEL_SERVICE_ERROR,
    SUSPENDED,
    CallError,
    error_fields,
    json_response,
    refusal_fields,
    send_json,
    send_stream,
)
from megaflow_hpc.model.gateway.open_rollout import OpenRollout, OverBudget
from megaflow_hpc.model.gateway.replay import Replay, body_of
from megaflow_hpc.model.json_text import offload
from megaflow_hpc.types import Sampling

T = TypeVar("T")


class Calls:
    """Handles and records the model calls of all rollouts of a gateway.

    Args:
        caller: Calls the engines.
        policies: Model names that select a policy. Any other name selects the rollout's own policy.
        judges: Further such names, for verifiers only.
        replays: Policies served from a recorded campaign.
        media_domains: Policy → hosts from which its engines may fetch images. Default: none.
        sampling: Policy → its sampling settings. Default: neutral settings.
        keep_thoughts: Policies whose prompts keep earlier answers as they were sampled.
    """

    def __init__(
        self,
        caller: Caller,
        policies: Sequence[str],
        judges: Sequence[str],
        replays: Mapping[str, Replay],
        media_domains: Mapping[str, Collection[str]],
        sampling: Mapping[str, Sampling],
        keep_thoughts: Collection[str],
    ) -> None:
        self._caller, self._replays = caller, replays
        self._policies, self._judges = frozenset(policies), frozenset(judges)
        self._media_domains, self._sampling, self._keep_thoughts = media_domains, sampling, keep_thoughts
        self.tokens = 0
        """Tokens sampled by engines so far."""

    def end(self, rollout: OpenRollout) -> None:
        """Ends a rollout's replay sessions."""
        for replay in self._replays.values():
            replay.end(rollout.token)

    def models(self, rollout: OpenRollout, name: str) -> web.Response:
        """Returns the model called ``name``. If ``name`` is empty, lists the models that the agent may request."""

        def card(name: str) -> dict[str, Any]:
            openai = {"id": name, "object": "model", "created": 0, "owned_by": "megaflow-hpc"}
            return {**openai, "type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"}

        if name:
            return json_response(card(name))
        names = [rollout.policy, *sorted(self._policies - {rollout.policy})]
        pages = {"has_more": False, "first_id": names[0], "last_id": names[-1]}
        return json_response({"object": "list", "data": [card(name) for name in names], **pages})

    async def complete(
        self, rollout: OpenRollout, http: web.BaseRequest, endpoint: str, body: dict[str, Any], size: int
    ) -> web.StreamResponse:
        """Handles a completion request.

        Args:
            rollout: The rollout that makes the call.
            http: The HTTP request.
            endpoint: Request path without ``/v1``; selects the dialect.
            body: Decoded request body.
            size: Size of the body in bytes.

        Raises:
            CallError: The request is refused, or no engine responds.
        """
        dialect = DIALECTS[endpoint]
        if rollout.suspended:
            raise _suspension(rollout)
        path = COMPLETIONS if endpoint == "/completions" else CHAT
        asked = await offload(size, self._convert, rollout, path, dialect.request, body)
        request = self._engine_request(rollout, path, asked, size)
        request = request._replace(free=not is_constrained(request.body, request.sampling.settings))
        try:
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

    async def count(self, rollout: OpenRollout, body: dict[str, Any], size: int) -> web.Response:
        """Counts the tokens of a prompt. Nothing is recorded."""
        asked = await offload(size, self._convert, rollout, CHAT, messages.conversation, body)
        request = self._engine_request(rollout, CHAT, asked, size)
        async with rollout.quota.large_answer() as gate:
            answered = await self._call(rollout, request._replace(gate=gate), protocols.count)
        return json_response({"input_tokens": answered.answer})

    def _convert(
        self, rollout: OpenRollout, path: str, convert: Callable[[Mapping[str, Any]], dict[str, Any]], body: Any
    ) -> dict[str, Any]:
        """Converts and checks an agent's request. Returns the request for the engine."""
        try:
            asked = convert(body)
            domains = self._media_domains.get(self._policy(rollout, asked), ())
            return engine_request(asked, path == CHAT, domains)
        except BadRequest as error:
            raise CallError(400, str(error)) from None

    def _policy(self, rollout: OpenRollout, asked: Mapping[str, Any]) -> str:
        """Returns the policy that the request names as its model, or else the rollout's own policy."""
        model = asked.get("model")
        known = self._policies | self._judges if rollout.judging else self._policies
        return model if isinstance(model, str) and model in known else rollout.policy

    def _engine_request(self, rollout: OpenRollout, path: str, asked: dict[str, Any], size: int) -> EngineRequest:
        policy = self._policy(rollout, asked)
        sampling, keep = self._sampling.get(policy, Sampling()), policy in self._keep_thoughts
        return EngineRequest(policy, path, asked, rollout.recorder, size, sampling, keep)

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
                return await send_json(http, reply.size, lambda: dialect.answer(reply.body, body))
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
        sampled = rollout.recorder.sampled
        for number, sample in enumerate(answer.samples):
            sample.policy, sample.free = request.policy, request.free
            times = {} if number else {"model_s": model_s, "wait_s": wait_s}
            rollout.recorder.add(sample, conversation, digest, **times)
        rollout.recorder.count(answer.protocol, server.degraded, request.free)
        self._caller.limits.charge(answer.total_tokens)
        self.tokens += rollout.recorder.sampled - sampled
        return answer

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
        try:
            return await self._caller.call(rollout, request, ask)
        except RefusedCall as refusal:
            raise CallError(refusal.status if refusal.status < 500 else 400, *refusal_fields(refusal.body)) from None
        except ModelServiceError as error:
            raise CallError(503, str(error), MODEL_SERVICE_ERROR) from None

    def _replayed(
        self, rollout: OpenRollout, request: EngineRequest, conversation: AskedPrompt, digest: str
    ) -> protocols.Answer:
        """Returns the recorded response to a call, and records it again."""
        try:
            sample = self._replays[request.policy].answer(rollout.token, rollout.id, digest)
        except ModelServiceError as error:
            rollout.failed(str(error))
            raise CallError(503, str(error), MODEL_SERVICE_ERROR) from None
        rollout.failed("")
        sample = replace(sample, policy=request.policy, message=sample.message if request.chat else None)
        rollout.recorder.add(sample, conversation, digest)
        if sample.counted is None:
            rollout.recorder.count("replay", free=sample.free)
        else:
            rollout.recorder.count("text")
        return protocols.Answer(body_of(sample, request.chat, str(request.body.get("model") or request.policy)))


def _suspension(rollout: OpenRollout) -> CallError:
    rollout.interrupted = True
    return CallError(503, "the allocation ends: this rollout goes on in another one", SUSPENDED)
