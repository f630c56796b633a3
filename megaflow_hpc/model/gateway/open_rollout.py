"""A rollout while it is open at its gateway: address, key, budget and recorder."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from megaflow_hpc.model.gateway.http_messages import MAX_BODY
from megaflow_hpc.model.gateway.recorder import Recorder
from megaflow_hpc.model.gateway.rollout_quota import RolloutQuota
from megaflow_hpc.types import CallBudget

SEEDS = 2**31
"""Seeds lie below, which every engine takes."""


class OverBudget(Exception):
    """The rollout's budget leaves no room for a call; the message says which limit."""


@dataclass
class OpenRollout:
    """``token`` is its part of the address, ``key`` what its clients authenticate with."""

    id: str
    policy: str
    token: str
    key: str
    recorder: Recorder
    budget: CallBudget = field(default_factory=CallBudget)
    servers: dict[str, str] = field(default_factory=dict)
    """Policy → name of the server that answered last."""
    failure: str = ""
    """Why the latest call got no answer, or still waits; empty when it was answered."""
    control: Callable[[], Awaitable[bool]] | None = None
    """Checks whether the service answers another request than the failed one; ``None``: it is known not to."""
    listener: socket.socket | None = None
    """The one inside the sandbox, where it has a network of its own."""
    quota: RolloutQuota = field(default_factory=lambda: RolloutQuota(MAX_BODY))
    in_flight: int = 0
    """Calls that have arrived and are not answered."""
    seed: int = -1
    """Seed of the first call; -1 leaves sampling to the engine."""
    suspended: bool = False
    """Further calls are refused: the rollout goes on in another allocation."""
    interrupted: bool = False
    """A call was refused for that reason."""
    ended: bool = False
    """It was closed: what still comes for it is not recorded."""
    waiting: set[asyncio.Task[Any]] = field(default_factory=set)
    """Calls that wait for an engine's answer; nothing of them is recorded yet."""
    held_calls: int = 0
    """Answers that calls in progress have reserved."""
    held_tokens: int = 0
    """Tokens that calls in progress have reserved."""
    returned: asyncio.Condition = field(default_factory=asyncio.Condition)
    """Notified when a call releases its reservation."""

    def failed(self, why: str, control: Callable[[], Awaitable[bool]] | None = None) -> None:
        """Records why the latest call failed, and how to check whether the service is to blame."""
        self.failure, self.control = why, control

    def suspend(self, now: bool) -> None:
        """Refuses further calls; with ``now`` also those that wait for an engine's answer."""
        self.suspended = True
        for task in self.waiting if now else ():
            task.cancel()

    @property
    def group(self) -> str:
        """Name shared by the rollouts of one task under one policy, whose prompts begin alike."""
        return self.id.rpartition("/")[0] or self.id

    def set_seed(self, asked: dict[str, Any]) -> None:
        """Sets the seed of the n-th call (from 0) to the rollout's seed + n, unless the agent chose one itself."""
        if self.seed >= 0 and asked.get("seed") is None:
            asked["seed"] = (self.seed + self.recorder.calls + self.in_flight - 1) % SEEDS

    @asynccontextmanager
    async def reserved(self, asked: dict[str, Any], answers: int) -> AsyncIterator[int]:
        """Reserves a call's share of the budget while the context is open.

        Lowers ``max_tokens`` in ``asked`` to what is left. If calls in progress have reserved all that is left, this
        call waits until one of them ends.

        Args:
            asked: The engine's request.
            answers: Number of answers that it asks for.

        Yields:
            Token limit of each answer, if the request itself has none; 0: no limit.

        Raises:
            OverBudget: The budget is used up, or too small for this call.
        """
        calls = self.budget.calls
        if calls is not None and self.recorder.calls + self.held_calls + answers > calls:
            left = max(0, calls - self.recorder.calls - self.held_calls)
            asks = f", {left} are left, and this call asks for {answers} answers" if answers > 1 else ""
            raise OverBudget(f"this rollout has made its {calls} model calls{asks}")
        each, limit = await self._tokens_left(answers), 0
        if each is not None:
            names = [name for name in ("max_tokens", "max_completion_tokens") if name in asked]
            for name in names:
                asked[name] = min(asked[name], each)
            # If a request has both, engines use max_completion_tokens.
            limit, each = (0, asked[names[-1]]) if names else (each, each)
        tokens = (each or 0) * answers
        self.held_calls += answers
        self.held_tokens += tokens
        try:
            yield limit
        finally:
            self.held_calls -= answers
            self.held_tokens -= tokens
            async with self.returned:
                self.returned.notify_all()

    async def _tokens_left(self, answers: int) -> int | None:
        """Returns the token limit of each answer, at least 1; ``None`` if the budget has no limit."""
        tokens = self.budget.tokens
        if tokens is None:
            return None
        async with self.returned:
            while True:
                if tokens - self.recorder.sampled < answers:
                    raise OverBudget(f"this rollout has sampled its {tokens} tokens")
                if each := max(0, tokens - self.recorder.sampled - self.held_tokens) // answers:
                    return each
                await self.returned.wait()
