"""Holds the state of a rollout that is open at its gateway: address, key, budget, quota and recorder."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from megaflow_hpc.model.gateway.engine_call import Gate
from megaflow_hpc.model.gateway.http_messages import MAX_BODY
from megaflow_hpc.model.gateway.recorder import Recorder
from megaflow_hpc.trajectory import Image
from megaflow_hpc.types import CallBudget

SEEDS = 2**31
"""All engines support seeds below this number."""
MAX_CALLS = 64
"""Maximum number of concurrent calls of one rollout."""


class OverBudget(Exception):
    """A call would exceed the rollout's budget. The message names the limit."""


class RolloutQuota:
    """Limits the gateway resources that one rollout can hold: calls, bytes in their bodies, and one large response.

    A call over the quota waits, in order of arrival. So the gateway remains available to its other rollouts. Use it
    from a single event loop.

    Args:
        size: Maximum total size in bytes of all calls' bodies, and therefore of each body.
        calls: Maximum number of concurrent calls.
    """

    def __init__(self, size: int, calls: int = MAX_CALLS) -> None:
        self._size, self._calls = size, calls
        self._first = asyncio.Lock()
        """Lock of the call whose turn is next. Calls acquire it in order of arrival, because asyncio's locks are
        FIFO."""
        self._freed = asyncio.Condition()
        self._answers = asyncio.Lock()

    @asynccontextmanager
    async def turn(self, size: int) -> AsyncIterator[None]:
        """Waits until a call's body of ``size`` bytes may be read. The call holds its part of the quota until the
        context ends."""
        async with self._first, self._freed:
            await self._freed.wait_for(lambda: self._calls > 0 and size <= self._size)
            self._calls, self._size = self._calls - 1, self._size - size
        try:
            yield
        finally:
            self._calls, self._size = self._calls + 1, self._size + size
            async with self._freed:
                self._freed.notify_all()

    @asynccontextmanager
    async def large_answer(self) -> AsyncIterator[Gate]:
        """Yields a gate to await before a large response is read. The gate opens for one call at a time.

        The call keeps the gate until its context ends.
        """
        held = False

        async def gate() -> None:
            nonlocal held
            if not held:
                await self._answers.acquire()
                held = True

        try:
            yield gate
        finally:
            if held:
                self._answers.release()


@dataclass
class OpenRollout:
    """A rollout and the state of its calls."""

    id: str
    policy: str
    token: str
    """Segment of the URL path that identifies the rollout."""
    key: str
    """Bearer token that the rollout's clients must send."""
    recorder: Recorder
    budget: CallBudget = field(default_factory=CallBudget)
    servers: dict[str, str] = field(default_factory=dict)
    """Name of the server that served each policy's latest call, by policy."""
    failure: str = ""
    """Reason why the latest call failed or is still pending. Empty if it succeeded."""
    unanswered: dict[str, str] = field(default_factory=dict)
    """Reason why a policy's latest call got no answer, by policy. Policies whose latest call got one are missing."""
    control: Callable[[], Awaitable[bool]] | None = None
    """Function that checks whether the service answers another request. ``None`` if the service is known to be down."""
    listener: socket.socket | None = None
    """Listening socket inside the sandbox, if the sandbox has its own network."""
    quota: RolloutQuota = field(default_factory=lambda: RolloutQuota(MAX_BODY))
    in_flight: int = 0
    """Number of pending calls."""
    seed: int = -1
    """Sampling seed of the first call. -1 lets the engine choose."""
    judging: bool = False
    """True if a verifier makes the calls. Its calls may also go to judges."""
    suspended: bool = False
    """True if new calls are refused because the rollout continues in another allocation."""
    interrupted: bool = False
    """True if a call was refused because the rollout is suspended."""
    ended: bool = False
    """True if the rollout was closed. Responses that arrive later are not recorded."""
    waiting: set[asyncio.Task[Any]] = field(default_factory=set)
    """Tasks of calls that wait for an engine's response. Nothing is recorded for them yet."""
    reserved_calls: int = 0
    """Number of choices reserved by calls in progress."""
    reserved_tokens: int = 0
    """Number of tokens reserved by calls in progress."""
    released: asyncio.Condition = field(default_factory=asyncio.Condition)
    """Notified when a call releases its reservation."""

    def failed(self, why: str, control: Callable[[], Awaitable[bool]] | None = None) -> None:
        """Records why the latest call failed, and a function that checks whether the service works otherwise."""
        self.failure, self.control = why, control

    def suspend(self, now: bool) -> None:
        """Refuses new calls. If ``now``, also refuses calls that are waiting for an engine's response."""
        self.suspended = True
        if now:
            for task in self.waiting:
                task.cancel()

    @property
    def group(self) -> str:
        """Name shared by all rollouts of the same task and policy, because their prompts begin with the same tokens."""
        return self.id.rpartition("/")[0] or self.id

    def set_seed(self, asked: dict[str, Any]) -> None:
        """Sets the sampling seed of a call unless the agent has set one. Call n, from 0, gets the rollout's seed +
        n."""
        if self.seed >= 0 and asked.get("seed") is None:
            asked["seed"] = (self.seed + self.recorder.calls + self.in_flight - 1) % SEEDS

    def check_images(self, images: Mapping[str, Image]) -> None:
        """Raises OverBudget if the rollout's images, including this call's, exceed the budget in bytes.

        Each image counts once, however often it is sent.
        """
        most = self.budget.image_bytes
        if most is None or not images:
            return
        total = sum(len(image.data) for image in (self.recorder.recording.images | dict(images)).values())
        if total > most:
            raise OverBudget(f"this rollout's images take {total} bytes; agent.max_image_mb allows {most}")

    @asynccontextmanager
    async def reserved(self, asked: dict[str, Any], answers: int) -> AsyncIterator[int]:
        """Reserves a call's share of the budget for the duration of the context.

        Lowers ``max_tokens`` in ``asked`` to the remaining budget. If calls in progress have reserved the whole
        remaining budget, waits until one of them ends.

        Args:
            asked: The engine's request.
            answers: Number of choices requested.

        Yields:
            Token limit per choice, for a request that sets no limit. 0 means no limit.

        Raises:
            OverBudget: The budget is used up, or too small for this call.
        """
        calls = self.budget.calls
        if calls is not None and self.recorder.calls + self.reserved_calls + answers > calls:
            left = max(0, calls - self.recorder.calls - self.reserved_calls)
            detail = f", {left} are left, and this call asks for {answers} answers" if answers > 1 else ""
            raise OverBudget(f"this rollout has made its {calls} model calls{detail}")
        each, limit = await self._tokens_left(answers), 0
        if each is not None:
            names = [name for name in ("max_tokens", "max_completion_tokens") if name in asked]
            for name in names:
                asked[name] = min(asked[name], each)
            if names:
                each = asked[names[-1]]  # if a request has both, engines use max_completion_tokens
            else:
                limit = each
        tokens = (each or 0) * answers
        self.reserved_calls += answers
        self.reserved_tokens += tokens
        try:
            yield limit
        finally:
            self.reserved_calls -= answers
            self.reserved_tokens -= tokens
            async with self.released:
                self.released.notify_all()

    async def _tokens_left(self, answers: int) -> int | None:
        """Returns the token limit of each choice, at least 1, or ``None`` if the budget has no token limit."""
        tokens = self.budget.tokens
        if tokens is None:
            return None
        async with self.released:
            while True:
                if tokens - self.recorder.sampled < answers:
                    raise OverBudget(f"this rollout has sampled its {tokens} tokens")
                each = max(0, tokens - self.recorder.sampled - self.reserved_tokens) // answers
                if each:
                    return each
                await self.released.wait()
