"""A call of a rollout, from what its agent asked to the recorded answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from aiohttp import web

from megaflow_hpc.errors import ModelServiceError
from megaflow_hpc.model.api import CHAT, COMPLETIONS
from megaflow_hpc.model.gateway import protocols, stream
from megaflow_hpc.model.gateway.conversations import AskedPrompt
from megaflow_hpc.model.gateway.dialects import DIALECTS, BadRequest, Dialect, messages
from megaflow_hpc.model.gateway.dialects.options import engine_request, is_constrained
from megaflow_hpc.model.gateway.engine_call import RefusedCall, choices
from megaflow_hpc.model.gateway.engine_client import Place
from megaflow_hpc.model.gateway.failover import Ask, Called, Caller
from megaflow_hpc.model.gateway.http_messages import (
    BUDGET_EXCEEDED,
    MODEL_SERVICE_ERROR,
    SUSPENDED,
    CallError,
    error_fields,
    json_response,
    refusal_fields,
    send_json,
)
from megaflow_hpc.model.gateway.meaning import digest
from megaflow_hpc.model.gateway.open_rollout import OpenRollout, OverBudget
from megaflow_hpc.model.gateway.replay import Replay, body_of
from megaflow_hpc.model.offload import offload
from megaflow_hpc.types import Sampling

T = TypeVar("T")


class Admitted(NamedTuple):
    """A call that passed the checks, with the request for the engine."""

    request: dict[str, Any]
    size: int
    """Bytes of the agent's request."""
    free: bool
    """True if nothing in the request constrains the policy's choice of tokens."""
    limit: int
    """Token limit of each answer from the rollout's budget, if the request has no limit of its own; 0: no limit."""


class Calls:
    """Answers the calls of all rollouts of a gateway, and records the answers.

    Args:
        caller: Asks the engines.
        policies: Model names that select a policy. Every other name selects the rollout's own policy.
        replays: Policies that are answered from a recorded campaign.
        media_domains: Policy → hosts from which its engines may fetch images. Default: no host.
        sampling: Policy → how its tokens are sampled. Default: neutral settings.
    """

    def __init__(
        self,
        caller: Caller,
        policies: Sequence[str],
        replays: Mapping[str, Replay],
        media_domains: Mapping[str, Collection[str]],
        sampling: Mapping[str, Sampling],
    ) -> None:
        self._caller, self._replays, self._media_domains = caller, dict(replays), dict(media_domains)
        self._sampling = dict(sampling)
        self.policies = frozenset(policies)
        self.tokens = 0
        """Tokens that engines have sampled."""

    def end(self, rollout: OpenRollout) -> None:
        """Forgets what is kept for a rollout."""
        for replay in self._replays.values():
            replay.end(rollout.token)

    def models(self, rollout: OpenRollout, name: str) -> web.Response:
        """Returns one model, or the list of those that an agent may name."""

        def card(name: str) -> dict[str, Any]:
            openai = {"id": name, "object": "model", "created": 0, "owned_by": "megaflow-hpc"}
            return {**openai, "type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"}

        if name:
            return json_response(card(name))
        names = [rollout.policy, *sorted(self.policies - {rollout.policy})]
        pages = {"has_more": False, "first_id": names[0], "last_id": names[-1]}
        return json_response({"object": "list", "data": [card(name) for name in names], **pages})

    async def complete(
        self, rollout: OpenRollout, request: web.BaseRequest, endpoint: str, body: dict[str, Any], size: int
    ) -> web.StreamResponse:
        """Answers a request for a completion.

        Args:
            rollout: Whose it is.
            request: Where the answer goes.
            endpoint: Its path without ``/v1``, by which its dialect is known.
            body: What was asked.
            size: The bytes that this was.

        Raises:
            CallError: It is refused, or no engine answers.
        """
        dialect = DIALECTS[endpoint]
        if rollout.suspended:
            raise self._refusal(rollout)
        path = COMPLETIONS if endpoint == "/completions" else CHAT
        asked = await offload(size, self._asked, rollout, path, dialect.request, body)
        free = self._is_free(rollout, asked)
        try:
            async with rollout.reserved(asked, choices(asked)) as limit:
                if rollout.suspended:  # while this call waited for budget
                    raise self._refusal(rollout)
                rollout.recorder.request_arrived()
                rollout.in_flight += 1
                try:
                    return await self._respond(
                        rollout, request, dialect, body, path, Admitted(asked, size, free, limit)
                    )
                finally:
                    rollout.in_flight -= 1
        except OverBudget as error:
            rollout.recorder.recording.over_budget = str(error)
            raise CallError(429, str(error), BUDGET_EXCEEDED) from None

    async def _respond(
        self,
        rollout: OpenRollout,
        request: web.BaseRequest,
        dialect: Dialect,
        body: dict[str, Any],
        path: str,
        asked: Admitted,
    ) -> web.StreamResponse:
        """Sends the engine's answer to the agent, whole or as a stream."""
        async with rollout.quota.large_answer() as place:
            if not body.get("stream"):
                reply = await self._answer(rollout, path, asked, place)
                return await send_json(request, reply.size, lambda: dialect.answer(reply.body, body))
            return await stream.send(
                request,
                self._answer(rollout, path, asked, place),
                lambda reply: dialect.events(dialect.answer(reply, body), body),
                lambda error: dialect.error_event(*error_fields(error)),
            )

    async def count(self, rollout: OpenRollout, body: dict[str, Any], size: int) -> web.Response:
        """Counts the tokens of a prompt; nothing is recorded."""
        asked = await offload(size, self._asked, rollout, CHAT, messages.conversation, body)
        async with rollout.quota.large_answer() as place:
            tokens, *_ = await self._call(rollout, CHAT, asked, protocols.count, size, place)
        return json_response({"input_tokens": tokens})

    def _asked(
        self, rollout: OpenRollout, path: str, convert: Callable[[Mapping[str, Any]], dict[str, Any]], body: Any
    ) -> dict[str, Any]:
        """Returns what of an agent's request goes to an engine."""
        try:
            asked = convert(body)
            domains = self._media_domains.get(self._policy(rollout, asked), ())
            return engine_request(asked, path == CHAT, domains)
        except BadRequest as error:
            raise CallError(400, str(error)) from None

    def _is_free(self, rollout: OpenRollout, asked: Mapping[str, Any]) -> bool:
        """Returns whether the call leaves the tokens to the policy."""
        sampling = self._sampling.get(self._policy(rollout, asked), Sampling())
        return not is_constrained(asked, sampling.settings)

    async def _answer(self, rollout: OpenRollout, path: str, call: Admitted, place: Place) -> protocols.Answer:
        """Returns the engine's answer to a chat or plain request, and records it."""
        asked, size, free = call.request, call.size, call.free
        recorder, policy = rollout.recorder, self._policy(rollout, asked)
        conversation = await offload(size, recorder.restore, asked.get("messages") or (), policy)
        if path == CHAT:
            asked["messages"] = list(conversation)
        rollout.set_seed(asked)
        known = await offload(size, digest, list(conversation))
        if policy in self._replays:
            return protocols.Answer(self._replayed(rollout, policy, path, asked, conversation, known))
        task = asyncio.current_task()
        assert task is not None
        rollout.waiting.add(task)
        try:
            answer, server, model_s, wait_s = await self._call(
                rollout, path, asked, protocols.ask, size, place, call.limit
            )
        except asyncio.CancelledError:
            if not rollout.suspended:
                raise
            task.uncancel()
            raise self._refusal(rollout) from None
        finally:
            rollout.waiting.discard(task)
        if rollout.ended:
            raise CallError(401, "the rollout has ended", "authentication_error")
        rollout.servers[policy] = server.name
        rollout.failed("")
        for number, sample in enumerate(answer.samples):
            sample.policy, sample.free = policy, free
            times = {"model_s": 0.0 if number else model_s, "wait_s": 0.0 if number else wait_s}
            recorder.add(sample, conversation, known, **times)
            self._caller.limits.charge((0 if number else len(sample.prompt)) + len(sample.tokens))
            self.tokens += len(sample.tokens)
        if not answer.samples:
            total, sampled = protocols.usage(answer.body)
            for number, sample in enumerate(protocols.texts_of(answer)):
                sample = replace(sample, policy=policy, server=server.name)
                times = {"model_s": 0.0 if number else model_s, "wait_s": 0.0 if number else wait_s}
                recorder.add_text(sample, conversation, known, counted=0 if number else sampled, **times)
            self._caller.limits.charge(total)
            self.tokens += sampled
        recorder.count(answer.protocol, server.degraded, free)
        return answer

    @staticmethod
    def _refusal(rollout: OpenRollout) -> CallError:
        rollout.interrupted = True
        return CallError(503, "the allocation ends: this rollout goes on in another one", SUSPENDED)

    def _replayed(
        self,
        rollout: OpenRollout,
        policy: str,
        path: str,
        asked: Mapping[str, Any],
        conversation: AskedPrompt,
        known: str,
    ) -> dict[str, Any]:
        """Returns the recorded answer to a call, and records it again."""
        try:
            sample = self._replays[policy].answer(rollout.token, rollout.id, known)
        except ModelServiceError as error:
            rollout.failed(str(error))
            raise CallError(503, str(error), MODEL_SERVICE_ERROR) from None
        rollout.failed("")
        sample = replace(sample, policy=policy, message=sample.message if path == CHAT else None)
        if sample.tokens or sample.prompt:
            rollout.recorder.add(sample, conversation, known)
            rollout.recorder.count("replay", free=sample.free)
        else:  # its engine told no tokens
            rollout.recorder.add_text(sample, conversation, known)
            rollout.recorder.count("text")
        return body_of(sample, path == CHAT, str(asked.get("model") or policy))

    def _policy(self, rollout: OpenRollout, asked: Mapping[str, Any]) -> str:
        """Returns the policy that the request names as its model, if there is one, else the rollout's own."""
        model = asked.get("model")
        return model if isinstance(model, str) and model in self.policies else rollout.policy

    async def _call(
        self,
        rollout: OpenRollout,
        path: str,
        body: Mapping[str, Any],
        ask: Ask[T],
        size: int,
        place: Place,
        limit: int = 0,
    ) -> Called[T]:
        try:
            policy = self._policy(rollout, body)
            sampling = self._sampling.get(policy, Sampling())
            return await self._caller.call(rollout, policy, path, body, ask, size, place, sampling, limit)
        except RefusedCall as refusal:
            raise CallError(refusal.status if refusal.status < 500 else 400, *refusal_fields(refusal.body)) from None
        except ModelServiceError as error:
            raise CallError(503, str(error), MODEL_SERVICE_ERROR) from None
