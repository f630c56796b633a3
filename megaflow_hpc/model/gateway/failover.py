"""Retries a call at other servers until one of them serves it.

The agent gets a response only once the response is complete. So the gateway can retry a call at another server if a
server is unreachable, closes the connection, or replies with 5xx or garbage.

A server that is unreachable enters a backoff, during which no call uses it. A server that sends a complete but unusable
response (:class:`~megaflow_hpc.model.gateway.engine_call.UnusableAnswer`) does not, because the agent's request may
have made the engine fail. The gateway tries such a call at each of the other servers. Then it retries the call with a
backoff, without delaying other calls.

An endpoint with a rate limit may refuse a call only because that call is long. So if a server refuses the same call
twice but answers a short one, only this call waits, and the server does not enter a backoff.

When a call has finally failed, the gateway sends a short request of its own, the *control*. If a server answers the
control, the agent's request was at fault, and the agent gets an error. Otherwise the service is down, and the rollout
is retried. So an agent cannot have its rollout retried by sending a request that breaks the engine.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

from megaflow_hpc.errors import ModelServiceError
from megaflow_hpc.model.gateway.engine_call import (
    Call,
    EngineClient,
    EngineRequest,
    RefusedCall,
    Unavailable,
    UnusableAnswer,
)
from megaflow_hpc.model.gateway.limits import CallLimits
from megaflow_hpc.model.gateway.open_rollout import OpenRollout
from megaflow_hpc.model.gateway.protocols import control_prompt
from megaflow_hpc.model.gateway.recorder import Recorder
from megaflow_hpc.model.gateway.router import MAX_RETRY_AFTER_S, Router, Server

T = TypeVar("T")
RETRY_S = 0.5
"""Seconds before a call is retried after an unusable response. The pause doubles each time."""
MAX_UNUSABLE, MAX_UNUSABLE_OF_ONE = 6, 3
"""Maximum numbers of unusable responses to a call. The first is for all servers together. The second is for one server
that still answers the control request."""
CONTROL_TIMEOUT_S = 30.0
CONTROL_SERVERS = 4
"""Maximum number of servers that get the control request. The least busy servers get it, all at the same time."""
Ask = Callable[[Call], Awaitable[T]]


class Answered(NamedTuple, Generic[T]):
    """Result of a successful call, with its times."""

    answer: T
    server: Server
    model_s: float
    """Seconds that the successful attempt took."""
    wait_s: float
    """Seconds from the call to the successful attempt, spent waiting and on failed attempts."""


class Caller:
    """Makes the engine calls of all rollouts of a gateway.

    Args:
        wait_s: Maximum seconds that a call waits for an available server.
        request_timeout_s: Timeout of one request in seconds. A timeout counts as a failure of the server.
        limits: Limits on the rate of requests and on requests in flight, for all calls together.
    """

    def __init__(self, wait_s: float, request_timeout_s: float, limits: CallLimits | None = None) -> None:
        self._wait_s, self._request_timeout_s = wait_s, request_timeout_s
        self.limits = limits or CallLimits()
        self.router = Router()
        self._client = EngineClient()

    async def close(self) -> None:
        """Closes all connections."""
        await self._client.close()

    async def call(self, rollout: OpenRollout, request: EngineRequest, ask: Ask[T]) -> Answered[T]:
        """Makes one call.

        Args:
            rollout: The rollout that makes the call.
            request: The request to send.
            ask: Protocol function that sends the request to a server.

        Raises:
            RefusedCall: The request is at fault, or the response cannot be recorded.
            ModelServiceError: No server responded in time. The cause is in the rollout's ``failure``.
        """
        arrived = time.monotonic()
        try:
            async with self.limits.turn():
                return await self._try(rollout, request, ask, arrived)
        except ModelServiceError as error:
            rollout.failed(str(error))
            raise

    async def _try(self, rollout: OpenRollout, request: EngineRequest, ask: Ask[T], arrived: float) -> Answered[T]:
        router, policy, group = self.router, request.policy, rollout.group
        previous = rollout.servers.get(policy, "")
        deadline = time.monotonic() + self._wait_s  # excludes the time spent waiting for a turn
        cause, unusable, refused, pause_s = "", Counter[str](), Counter[str](), 0.0
        alone = False
        control, control_succeeded = partial(self._control, request, ask), False
        while True:
            server = router.pick(policy, previous, group, unusable)
            if server is None:
                # Record the reason now: if the agent times out during the wait, the service may be at fault.
                rollout.failed(cause or router.describe(policy), control)
                try:
                    server = await router.acquire(policy, deadline, previous, group)
                except ModelServiceError as error:
                    if not control_succeeded:
                        control_succeeded = await control()
                        if control_succeeded:
                            continue
                    raise ModelServiceError(f"{error}; last failure: {cause}" if cause else str(error)) from None
            server.outstanding += 1
            began = time.monotonic()
            problem: UnusableAnswer | None
            try:
                answer = await ask(self._at(server, request))
            except Unavailable as error:
                cause = str(error)
                rollout.failed(cause, control)
                refused[server.name] += error.refused
                alone = error.refused and (alone or (refused[server.name] > 1 and await control()))
                if not alone:
                    server.failed(began, time.monotonic(), error.wait_s)
                if control_succeeded:
                    rollout.failed("")
                    raise RefusedCall(400, cause.encode()) from error
                if time.monotonic() >= deadline:
                    control_succeeded = await control()
                    if not control_succeeded:
                        raise ModelServiceError(f"policy {policy!r}: {cause}") from error
                if alone:
                    pause_s = max(error.wait_s, RETRY_S * 2 ** (refused.total() - 1))
                    pause_s = min(pause_s, MAX_RETRY_AFTER_S, deadline - time.monotonic())
                problem = None
            except UnusableAnswer as error:
                server.succeeded()  # the server is reachable
                problem = error
            except RefusedCall:
                server.succeeded()  # the engine validated the request, so it works
                raise
            else:
                server.succeeded()
                return Answered(answer, server, time.monotonic() - began, began - arrived)
            finally:
                server.outstanding -= 1
            if problem is None:
                await asyncio.sleep(max(0.0, pause_s))  # a server that fails immediately must not block the event loop
                pause_s = 0.0
                continue
            cause, now = str(problem), time.monotonic()
            rollout.failed(cause, control)
            unusable[server.name] += 1
            if any(s.available(now) and s.name not in unusable for s in router.servers(policy)):
                continue
            if not problem.retry or unusable[server.name] >= MAX_UNUSABLE_OF_ONE:
                by_request = problem.by_request or await control()
                rollout.failed("" if by_request else cause)
                if by_request or not problem.retry:
                    raise RefusedCall(400, cause.encode()) from problem
            if unusable.total() >= MAX_UNUSABLE or now >= deadline:
                raise ModelServiceError(f"policy {policy!r}: {cause}") from problem
            await asyncio.sleep(RETRY_S * 2 ** (unusable.total() - 1))

    def _at(self, server: Server, request: EngineRequest) -> Call:
        return Call(request, server, self._client, self._request_timeout_s)

    async def _control(self, request: EngineRequest, ask: Ask[Any]) -> bool:
        """Returns whether any server answers a short request of the gateway, sent in the same way as the failed
        call."""
        timeout_s = min(CONTROL_TIMEOUT_S, self._request_timeout_s)

        async def answers(server: Server) -> bool:
            body = {"model": server.model_name, "max_tokens": 1, **control_prompt(request.path)}
            own = request._replace(body=body, recorder=Recorder(policy=request.policy), size=0, gate=None)
            try:
                await ask(self._at(server, own)._replace(timeout_s=timeout_s))
            except RefusedCall:
                pass  # the engine validated the request, so it works
            except (Unavailable, UnusableAnswer):
                return False
            server.succeeded()
            return True

        servers = sorted(self.router.servers(request.policy), key=lambda server: server.load)[:CONTROL_SERVERS]
        tasks = [asyncio.ensure_future(answers(server)) for server in servers]
        try:
            for answered in asyncio.as_completed(tasks):
                if await answered:
                    return True
            return False
        finally:
            for task in tasks:
                task.cancel()
