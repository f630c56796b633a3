"""Repeats a call at other servers until one answers it.

No part of an answer reaches the agent before the whole is there, so a call whose server is unreachable, breaks off, or
answers 5xx or garbage is repeated, at another server if there is one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from megaflow_hpc.errors import ModelServiceError
from megaflow_hpc.model.gateway import protocols
from megaflow_hpc.model.gateway.connection import Connections
from megaflow_hpc.model.gateway.limits import CallLimits
from megaflow_hpc.model.gateway.open_rollout import OpenRollout
from megaflow_hpc.model.gateway.router import Router, Server

T = TypeVar("T")
Ask = Callable[[protocols.Call], Awaitable[T]]
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
        self, rollout: OpenRollout, policy: str, path: str, body: Mapping[str, Any], ask: Ask[T]
    ) -> Called[T]:
        """Makes one call.

        Raises:
            protocols.Refused: The request is at fault.
            ModelServiceError: No server answered in time; the rollout's ``failure`` says why.
        """
        arrived = time.monotonic()
        try:
            async with self.limits.turn():
                return await self._try(rollout, policy, path, body, ask, arrived)
        except ModelServiceError as error:
            rollout.failure = str(error)
            raise

    async def _try(
        self, rollout: OpenRollout, policy: str, path: str, body: Mapping[str, Any], ask: Ask[T], arrived: float
    ) -> Called[T]:
        deadline = time.monotonic() + self.wait_s  # a turn that was awaited is not the servers' fault
        cause, router, previous, group = "", self.router, rollout.servers.get(policy, ""), rollout.group
        while True:
            server = router.pick(policy, previous, group)
            if server is None:
                # Should the agent's time run out here, it is not its fault.
                rollout.failure = cause or router.describe(policy)
                try:
                    server = await router.acquire(policy, deadline, previous, group)
                except ModelServiceError as error:
                    raise ModelServiceError(f"{error}; last failure: {cause}" if cause else str(error)) from None
            server.outstanding += 1
            began = time.monotonic()
            call = protocols.Call(
                self._connections, server, path, body, self.request_timeout_s, rollout.recorder, policy
            )
            try:
                answer = await ask(call)
            except protocols.Unavailable as error:
                server.failed(began, time.monotonic())
                cause = str(error)
                if time.monotonic() >= deadline:
                    raise ModelServiceError(f"policy {policy!r}: {cause}") from error
                await asyncio.sleep(0)  # a server that fails at once must not hold the loop
                continue
            except protocols.Refused:
                server.succeeded()  # it looked at the request
                raise
            finally:
                server.outstanding -= 1
            server.succeeded()
            return answer, server, time.monotonic() - began, began - arrived
