"""What is scheduled: an attempt at a rollout, and what it needs beside a slot."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from megaflow_hpc.types import Rollout


class Demand(NamedTuple):
    """What a rollout needs beside its slot."""

    cpus: float = 0.0
    memory_mb: int = 0


NOTHING = Demand()


@dataclass(slots=True)
class Work:
    """One attempt at a rollout under a claim."""

    rollout: Rollout
    block: int
    epoch: int
    attempt: int = 0
    avoid: int | None = None
    """Worker on which the last attempt failed."""
    expected_s: float = 0.0
    """What is known of its duration; 0: nothing."""
    demand: Demand = NOTHING
    share: str = ""
    causes: tuple[str, ...] = ()
    """Why the attempts before this one ended."""
    later: bool = False
    """Starts only while nothing else can."""
    planned: Any = field(default=None, compare=False, repr=False)
    """The task as whoever starts it needs it; nothing here looks into it. Kept as long as the work is."""
