"""Computes how many engine servers a policy needs from the load that its servers report.

With every heartbeat, a server reports the length of its engine's queue. It also reports how long the last queued
request will wait at the rate of the past half minute. Servers are added when both numbers are high. Idle servers exit
on their own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

QUEUE_LENGTH = 4.0
"""Mean engine queue length above which a server is added, provided that waits are also long."""
QUEUE_WAIT_S = 10.0
"""Mean wait in seconds of the last queued request above which a server is added."""


@dataclass(frozen=True)
class Load:
    """Load of one server since its previous heartbeat."""

    in_flight: int = 0
    waiting: int = 0
    """Number of requests waiting in the engine's queue or, in a pool, at the proxy."""
    wait_s: float = 0.0
    """Seconds until the last queued request starts, at the rate of the past half minute."""


def wanted(least: int, most: int, loads: Iterable[Load], asking: bool) -> int:
    """Returns the desired number of servers for a policy.

    Args:
        least: Number of servers that start with the campaign.
        most: Maximum number of servers.
        loads: Loads of the servers that are currently responding.
        asking: True if rollouts that use the policy are still to run.
    """
    loads = list(loads)
    if not asking:
        return 0
    if not loads:
        return max(1, least)
    waiting = sum(load.waiting for load in loads) / len(loads)
    seconds = sum(load.wait_s for load in loads) / len(loads)
    if waiting >= QUEUE_LENGTH and seconds >= QUEUE_WAIT_S:
        return min(most, len(loads) + max(1, len(loads) // 2))
    return max(len(loads), 1)
