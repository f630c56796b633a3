"""Computes how many engine servers a policy needs from the load that its servers report.

With every heartbeat, a server reports how many requests wait in its engine's queue, and how long the last of them will
wait at the rate of the past half minute. Servers are added when both numbers are high. Idle servers leave by
themselves.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

QUEUE_LENGTH = 4.0
"""Mean number of requests in an engine's queue at which a server is added, if they also wait long."""
QUEUE_WAIT_S = 10.0
"""Mean waiting time in seconds of the last queued request at which a server is added."""


@dataclass(frozen=True)
class Load:
    """Load of one server since its previous heartbeat."""

    in_flight: int = 0
    waiting: int = 0
    """Requests that wait in the engine's queue or, in a pool, at the proxy."""
    wait_s: float = 0.0
    """Seconds until the last of them starts, at the rate of the past half minute."""


def wanted(least: int, most: int, loads: Iterable[Load], asking: bool) -> int:
    """Returns the number of servers that a policy should have.

    Args:
        least: Number of servers that start with the campaign.
        most: Maximum number of servers.
        loads: Loads of the servers that answer now.
        asking: True if rollouts of the policy are left to run.
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
