"""Repeats a call at other servers until one answers it.

No part of an answer reaches the agent before the whole is there, so a call whose server is unreachable, breaks off, or
answers 5xx or garbage is repeated, at another server if there is one.

A server that failed rests, and all calls keep from it meanwhile. Not so one that gave a whole answer which is none
(:class:`~megaflow_hpc.model.gateway.engine_call.Doubtful`): an agent may have found a request at which an engine fails.
Such a call is made at each other server; then it alone pauses and is repeated.

A call that fails for good is followed by a *control*: a short request of the gateway's own. If a server answers that,
the request was at fault, and the agent is told so. If none does, the service is away, and the rollout is tried again.
So no request that an agent makes up can take the verdict from its rollout.
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
from megaflow_hpc.model.gateway.connection import Connections, Place
from megaflow_hpc.model.gateway.engine_call import Call, Doubtful, Refused, Unavailable
from megaflow_hpc.model.gateway.limits import CallLimits
from megaflow_hpc.model.gateway.open_rollout import OpenRollout
from megaflow_hpc.model.gateway.recorder import Recorder
from megaflow_hpc.model.gateway.router import Router, Server
from megaflow_hpc.types import Sampling

T = TypeVar("T")
PAUSE_S = 0.5
"""Seconds before a doubtful call is repeated, doubled each time."""
DOUBTS, PROOFS = 6, 3
"""Doubtful answers after which a call fails: in all, and of one server that answers the control."""
CONTROL_S = 30.0
"""Seconds that a control may take."""
CONTROLLED = 4
"""Servers that are asked at once in a control, the least busy ones."""
Ask = Callable[[Call], Awaitable[T]]
Called = tuple[T, Server, float, float]
"""Answer, the server that gave it, its seconds there, and the seconds of waiting and failed tries before."""


class Caller:
    """Makes the calls of all rollouts of a gateway.

    Args:
        wait_s: Seconds for which a call waits for a server that answers.
        request_timeout_s: Seconds one request may take at a server; then it counts as that server's failure.
        limits: Rates and requests in flight that all calls together keep to.
        keep_thoughts: Policies whose earlier answers stay in the prompt as they were sampled.
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
        keep = policy in self._keep_thoughts

        def at(server: Server) -> Call:
            of_policy = sampling or Sampling()
            return Call(
                *(self._connections, server, path, body, timeout_s, recorder, policy, size, place),
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
                # Should the agent's time run out here, it may not be its fault.
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
                    raise Refused(400, cause.encode()) from error
                if time.monotonic() >= deadline and not (controlled := await control()):
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
            rollout.failed(cause, control)
            doubts[server.name] += 1
            if any(s.available(now) and s.name not in doubts for s in router.servers(policy)):
                continue
            if not doubt.again or doubts[server.name] >= PROOFS:
                by_request = doubt.by_request or await control()
                rollout.failed("" if by_request else cause)
                if by_request or not doubt.again:
                    raise Refused(400, cause.encode()) from doubt
            if doubts.total() >= DOUBTS or now >= deadline:
                raise ModelServiceError(f"policy {policy!r}: {cause}") from doubt
            await asyncio.sleep(PAUSE_S * 2 ** (doubts.total() - 1))

    async def _control(self, policy: str, at: Callable[[Server], Call], ask: Ask[Any]) -> bool:
        """Whether a server answers a request of the gateway's own, asked in the same way as a call that failed."""

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
            except Refused:
                pass  # it looked at the request
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
