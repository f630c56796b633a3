"""Retries a call at other servers until one answers it.

The agent gets an answer only once it is complete. So the gateway can retry a call if its server is unreachable, closes
the connection, or replies with 5xx or garbage.

A server that is unreachable enters a backoff, and no call uses it meanwhile. A server that sends a complete but
unusable reply (:class:`~megaflow_hpc.model.gateway.engine_call.Doubtful`) does not: the agent may have sent a request
that makes an engine fail. The gateway tries such a call at each other server. Then it retries that call with a backoff,
and delays no other call.

When a call has failed for good, the gateway sends a short request of its own, the *control*. If a server answers the
control, the agent's request was at fault, and the agent gets an error. Otherwise the service is down, and the rollout
is retried. So an agent cannot avoid its verdict by sending a request that breaks the engine.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from megaflow_hpc.errors import ModelServiceError
from megaflow_hpc.model.api import CHAT
from megaflow_hpc.model.gateway.engine_call import Call, Doubtful, RefusedCall, Unavailable
from megaflow_hpc.model.gateway.engine_client import EngineClient, Place
from megaflow_hpc.model.gateway.limits import CallLimits
from megaflow_hpc.model.gateway.open_rollout import OpenRollout
from megaflow_hpc.model.gateway.recorder import Recorder
from megaflow_hpc.model.gateway.router import Router, Server
from megaflow_hpc.types import Sampling

T = TypeVar("T")
PAUSE_S = 0.5
"""Seconds before a doubtful call is repeated, doubled each time."""
DOUBTS, PROOFS = 6, 3
"""A call fails after this many doubtful replies in total, or from one server that answers the control."""
CONTROL_S = 30.0
"""Timeout of a control in seconds."""
CONTROLLED = 4
"""Number of servers, the least busy ones, that get a control at the same time."""
Ask = Callable[[Call], Awaitable[T]]
Called = tuple[T, Server, float, float]
"""Answer, the server that gave it, its seconds there, and the seconds of waiting and failed tries before."""


class Caller:
    """Makes the calls of all rollouts of a gateway.

    Args:
        wait_s: Seconds for which a call waits for a server that answers.
        request_timeout_s: Seconds one request may take at a server; then it counts as that server's failure.
        limits: Limits on the rate and number of requests in flight, for all calls together.
        keep_thoughts: Policies whose prompts keep earlier answers as they were sampled.
    """

    def __init__(
        self,
        wait_s: float,
        request_timeout_s: float,
        limits: CallLimits | None = None,
        keep_thoughts: Collection[str] = (),
    ) -> None:
        self.wait_s, self.request_timeout_s, self._keep_thoughts = wait_s, request_timeout_s, frozenset(keep_thoughts)
        self.limits = limits or CallLimits()
        self.router = Router()
        self._client = EngineClient()

    def update(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Replaces the list of servers."""
        self.router.update(records)

    async def close(self) -> None:
        """Closes all connections."""
        await self._client.close()

    async def call(
        self,
        rollout: OpenRollout,
        policy: str,
        path: str,
        body: Mapping[str, Any],
        ask: Ask[T],
        size: int = 0,
        place: Place | None = None,
        sampling: Sampling | None = None,
        limit: int = 0,
    ) -> Called[T]:
        """Makes one call.

        Args:
            rollout: The rollout that makes the call.
            policy: The policy that answers.
            path: Path of the engine's API.
            body: The request.
            ask: Protocol function that sends the request to a server.
            size: Bytes of the agent's request.
            place: Awaited before a large answer is read.
            sampling: The policy's sampling settings. Default: neutral.
            limit: Token limit of each answer, if the body has none; 0: no limit.

        Raises:
            Refused: The request is at fault, or its answer cannot be recorded.
            ModelServiceError: No server answered in time; the rollout's ``failure`` says why.
        """
        arrived, timeout_s, recorder = time.monotonic(), self.request_timeout_s, rollout.recorder
        keep = policy in self._keep_thoughts

        def at(server: Server) -> Call:
            of_policy = sampling or Sampling()
            return Call(
                *(self._client, server, path, body, timeout_s, recorder, policy, size, place),
                keep_thoughts=keep,
                sampling=of_policy,
                limit=limit,
            )

        try:
            async with self.limits.turn():
                return await self._try(rollout, policy, at, ask, arrived)
        except ModelServiceError as error:
            rollout.failed(str(error))
            raise

    async def _try(
        self, rollout: OpenRollout, policy: str, at: Callable[[Server], Call], ask: Ask[T], arrived: float
    ) -> Called[T]:
        deadline = time.monotonic() + self.wait_s  # a turn that was awaited is not the servers' fault
        cause, router, previous, group = "", self.router, rollout.servers.get(policy, ""), rollout.group
        doubts = Counter[str]()
        control, controlled = partial(self._control, policy, at, ask), False
        while True:
            server = router.pick(policy, previous, group, doubts)
            if server is None:
                # If the agent times out during this wait, the service may be to blame.
                rollout.failed(cause or router.describe(policy), control)
                try:
                    server = await router.acquire(policy, deadline, previous, group)
                except ModelServiceError as error:
                    if not controlled and (controlled := await control()):
                        continue
                    raise ModelServiceError(f"{error}; last failure: {cause}" if cause else str(error)) from None
            server.outstanding += 1
            began = time.monotonic()
            try:
                answer = await ask(at(server))
            except Unavailable as error:
                server.failed(began, time.monotonic(), error.wait_s)
                cause = str(error)
                rollout.failed(cause, control)
                if controlled:
                    rollout.failed("")
                    raise RefusedCall(400, cause.encode()) from error
                if time.monotonic() >= deadline and not (controlled := await control()):
                    raise ModelServiceError(f"policy {policy!r}: {cause}") from error
                await asyncio.sleep(0)  # a server that fails at once must not hold the loop
                continue
            except Doubtful as error:
                server.succeeded()  # it is there
                doubt = error
            except RefusedCall:
                server.succeeded()  # it looked at the request
                raise
            else:
                server.succeeded()
                server.answered_at = time.monotonic()
                return answer, server, time.monotonic() - began, began - arrived
            finally:
                server.outstanding -= 1
            cause, now = str(doubt), time.monotonic()
            rollout.failed(cause, control)
            doubts[server.name] += 1
            if any(s.available(now) and s.name not in doubts for s in router.servers(policy)):
                continue
            if not doubt.again or doubts[server.name] >= PROOFS:
                by_request = doubt.by_request or await control()
                rollout.failed("" if by_request else cause)
                if by_request or not doubt.again:
                    raise RefusedCall(400, cause.encode()) from doubt
            if doubts.total() >= DOUBTS or now >= deadline:
                raise ModelServiceError(f"policy {policy!r}: {cause}") from doubt
            await asyncio.sleep(PAUSE_S * 2 ** (doubts.total() - 1))

    async def _control(self, policy: str, at: Callable[[Server], Call], ask: Ask[Any]) -> bool:
        """Returns whether a server answers a short request of the gateway, sent in the same way as the failed call."""

        async def answers(server: Server) -> bool:
            call = at(server)
            question = {"messages": [{"role": "user", "content": "."}]} if call.path == CHAT else {"prompt": "."}
            body = {"model": server.model_name, "max_tokens": 1, **question}
            own = call._replace(
                body=body,
                timeout_s=min(CONTROL_S, call.timeout_s),
                recorder=Recorder(policy=policy),
                size=0,
                place=None,
            )
            try:
                await ask(own)
            except RefusedCall:
                pass  # the engine works: it checked the request
            except (Unavailable, Doubtful):
                return False
            server.succeeded()
            return True

        servers = sorted(self.router.servers(policy), key=lambda server: server.busy)[:CONTROLLED]
        asked = [asyncio.ensure_future(answers(server)) for server in servers]
        try:
            for answered in asyncio.as_completed(asked):
                if await answered:
                    return True
            return False
        finally:
            for one in asked:
                one.cancel()
