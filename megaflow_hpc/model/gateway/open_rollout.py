"""A rollout while it is open at its gateway: address, key, budget and recorder."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from megaflow_hpc.model.gateway.http_messages import MAX_BODY
from megaflow_hpc.model.gateway.recorder import Recorder
from megaflow_hpc.model.gateway.share import Share
from megaflow_hpc.types import CallBudget

SEEDS = 2**31
"""Seeds lie below, which every engine takes."""


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
    """Asks whether the service answers another request than that call; ``None``: it is known not to."""
    listener: socket.socket | None = None
    """The one inside the sandbox, where it has a network of its own."""
    share: Share = field(default_factory=lambda: Share(MAX_BODY))
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

    def failed(self, why: str, control: Callable[[], Awaitable[bool]] | None = None) -> None:
        """Notes why the latest call has no answer, and how to find out whether the service is to blame."""
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

    def over_budget(self) -> str:
        """Returns why no further call may be answered, or an empty text; calls in flight count."""
        calls, tokens = self.budget.calls, self.budget.tokens
        if calls is not None and self.recorder.calls + self.in_flight >= calls:
            return f"this rollout has made its {calls} model calls"
        if tokens is not None and self.recorder.sampled >= tokens:
            return f"this rollout has sampled its {tokens} tokens"
        return ""
