"""Repeats a call at other servers until one answers it.

No part of an answer reaches the agent before the whole is there, so a call whose server is unreachable, breaks off, or
answers 5xx or garbage is repeated, at another server if there is one.

A server that failed rests, and all calls keep from it meanwhile. Not so one that gave a whole answer which is none
(:class:`~megaflow_hpc.model.gateway.engine_call.Doubtful`): an agent may have found a request at which an engine fails.
Such a call is made at each other server; then it alone pauses and is repeated. Where a server fails at it three times
and answers other calls in between, the request is at fault, and the agent is told so.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from megaflow_hpc.errors import ModelServiceError
from megaflow_hpc.model.gateway.connection import Connections, Place
from megaflow_hpc.model.gateway.engine_call import Call, Doubtful, Refused, Unavailable
from megaflow_hpc.model.gateway.limits import CallLimits
from megaflow_hpc.model.gateway.open_rollout import OpenRollout
from megaflow_hpc.model.gateway.router import Router, Server
from megaflow_hpc.types import Sampling

T = TypeVar("T")
PAUSE_S = 0.5
"""Seconds before a doubtful call is repeated, doubled each time."""
DOUBTS, PROOFS = 6, 3
"""Doubtful answers after which a call fails: in all, and of one server that answered other calls in between."""
Ask = Callable[[Call], Awaitable[T]]
Called = tuple[T, Server, float, float]
"""Answer, the server that gave it, its seconds there, and the seconds of waiting and failed tries before."""


class Caller:
    """Makes the calls of all rollouts of a gateway.

    Args:
        wait_s: Seconds for which a call waits for a server that answers.
        request_timeout_s: Seconds one request may take at a server; then it counts as that server's failure.
        limits: Rates and requests in flight that all calls together keep to.
    """

    def __init__(self, wait_s: float, request_timeout_s: float, limits: CallLimits | None = None) -> None:
        self.wait_s, self.request_timeout_s = wait_s, request_timeout_s
        self.limits = limits or CallLimits()
        self.router = Router()
        self._connections = Connections()

    def update(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Replaces the list of servers and closes idle connections to others."""
        self.router.update(records)
        self._connections.close_idle(keep={(s.url, s.fingerprint) for s in self.router.all()})

    def close(self) -> None:
        """Closes all idle connections."""
        self._connections.close()

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
            rollout: Whose it is.
            policy: Who answers.
            path: Of the engine's API.
            body: What is asked.
            ask: How.
            size: The bytes that the agent's request was.
            place: Awaited before a large answer is taken in.
            sampling: Of the policy; default neutral.
            limit: Tokens that each answer may have, where the body names no limit; 0: no limit.

        Raises:
            Refused: The request is at fault, or its answer cannot be recorded.
            ModelServiceError: No server answered in time; the rollout's ``failure`` says why.
        """
        arrived, timeout_s, recorder = time.monotonic(), self.request_timeout_s, rollout.recorder

        def at(server: Server) -> Call:
            of_policy = sampling or Sampling()
            return Call(
                self._connections, server, path, body, timeout_s, recorder, policy, size, place, of_policy, limit
            )

        try:
            async with self.limits.turn():
                return await self._try(rollout, policy, at, ask, arrived)
        except ModelServiceError as error:
            rollout.failure = str(error)
            raise

    async def _try(
        self, rollout: OpenRollout, policy: str, at: Callable[[Server], Call], ask: Ask[T], arrived: float
    ) -> Called[T]:
        deadline = time.monotonic() + self.wait_s  # a turn that was awaited is not the servers' fault
        cause, router, previous, group = "", self.router, rollout.servers.get(policy, ""), rollout.group
        doubts = Doubts()
        while True:
            server = router.pick(policy, previous, group, doubts.servers)
            if server is None:
                # Should the agent's time run out here, it is not its fault.
                rollout.failure = cause or router.describe(policy)
                try:
                    server = await router.acquire(policy, deadline, previous, group)
                except ModelServiceError as error:
                    raise ModelServiceError(f"{error}; last failure: {cause}" if cause else str(error)) from None
            server.outstanding += 1
            began = time.monotonic()
            try:
                answer = await ask(at(server))
            except Unavailable as error:
                server.failed(began, time.monotonic(), error.wait_s)
                cause = str(error)
                if time.monotonic() >= deadline:
                    raise ModelServiceError(f"policy {policy!r}: {cause}") from error
                await asyncio.sleep(0)  # a server that fails at once must not hold the loop
                continue
            except Doubtful as error:
                server.succeeded()  # it is there
                doubt = error
            except Refused:
                server.succeeded()  # it looked at the request
                raise
            else:
                server.succeeded()
                server.answered_at = time.monotonic()
                return answer, server, time.monotonic() - began, began - arrived
            finally:
                server.outstanding -= 1
            cause, now = str(doubt), time.monotonic()
            rollout.failure = cause
            doubts.add(server, now)
            if any(s.available(now) and s.name not in doubts.servers for s in router.servers(policy)):
                continue
            if not doubt.again or doubts.proven(server):
                # An answer without ids is no deed of the agent.
                rollout.failure = "" if doubt.again or doubt.by_request else cause
                raise Refused(400, cause.encode()) from doubt
            if doubts.total >= DOUBTS or now >= deadline:
                raise ModelServiceError(f"policy {policy!r}: {cause}") from doubt
            await asyncio.sleep(PAUSE_S * 2 ** (doubts.total - 1))


class Doubts:
    """The doubtful answers to one call."""

    def __init__(self) -> None:
        self.total = 0
        self.servers: dict[str, tuple[int, float]] = {}
        """Server → number of those between which it answered other calls, and the time of the latest."""

    def add(self, server: Server, now: float) -> None:
        """Notes one."""
        count, last = self.servers.get(server.name, (0, 0.0))
        self.total += 1
        self.servers[server.name] = count + (not count or server.answered_at > last), now

    def proven(self, server: Server) -> bool:
        """Returns whether the request is at fault."""
        return self.servers[server.name][0] >= PROOFS
