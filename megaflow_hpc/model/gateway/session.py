"""One rollout at its gateway: address, key, budget, and what is recorded of it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from megaflow_hpc.model.gateway.recorder import Recorder
from megaflow_hpc.types import Budget

SEEDS = 2**31
"""Seeds are below: every engine takes them."""


@dataclass
class Session:
    """``token`` is the part of the address that names it, ``key`` what its clients show."""

    id: str
    policy: str
    token: str
    key: str
    recorder: Recorder
    budget: Budget = field(default_factory=Budget)
    servers: dict[str, str] = field(default_factory=dict)
    """By policy, the server that answered last."""
    trouble: str = ""
    """Why the latest call got no answer, or waits for one."""
    inside: web.SockSite | None = None
    """Where the sandbox reaches us, if it does by a socket of its own."""
    in_flight: int = 0
    """Calls that have come in and are not answered."""
    seed: int = -1
    suspended: bool = False
    """No call is answered any more: the rollout goes on in another allocation."""
    refused: bool = False
    """One was refused for that."""
    asking: set[asyncio.Task[Any]] = field(default_factory=set)
    """What waits for an engine's answer, of which nothing is recorded yet."""

    def suspend(self, now: bool) -> None:
        """Refuses further calls; with ``now`` also those that wait for an answer."""
        self.suspended = True
        for task in self.asking if now else ():
            task.cancel()

    @property
    def group(self) -> str:
        """Rollouts of one task under one policy: their prompts begin alike."""
        return self.id.rpartition("/")[0] or self.id

    def seeded(self, asked: dict[str, Any]) -> None:
        """Gives a call in flight, of number n from 0, the rollout's seed + n, unless the agent chose one itself."""
        if self.seed >= 0 and asked.get("seed") is None:
            asked["seed"] = (self.seed + self.recorder.calls + self.in_flight - 1) % SEEDS

    def over_budget(self) -> str:
        """Why no further call may be answered; empty where one may. Calls in flight count."""
        calls, tokens = self.budget.calls, self.budget.tokens
        if calls is not None and self.recorder.calls + self.in_flight >= calls:
            return f"this rollout has made its {calls} model calls"
        if tokens is not None and self.recorder.sampled >= tokens:
            return f"this rollout has sampled its {tokens} tokens"
        return ""
