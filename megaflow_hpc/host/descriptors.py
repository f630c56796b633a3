"""Reads and raises this process's limit on open file descriptors (``RLIMIT_NOFILE``)."""

from __future__ import annotations

import resource

MAX_SOFT_LIMIT = 65_536
"""Soft limit for processes with many connections, if the hard limit allows it.

The hard limit may be millions. Child processes inherit the soft limit, and some programs loop over all possible
descriptors.
"""


def limit() -> int:
    """Returns the maximum number of descriptors that this process may open."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return MAX_SOFT_LIMIT if soft == resource.RLIM_INFINITY else soft


def raise_limit() -> int:
    """Raises the soft limit to the smaller of the hard limit and :data:`MAX_SOFT_LIMIT`. Never lowers it.

    Returns:
        The previous soft limit, for :func:`inherited`.
    """
    global _before
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if _before is None:
        _before = limit()
    wanted = MAX_SOFT_LIMIT if hard == resource.RLIM_INFINITY else min(hard, MAX_SOFT_LIMIT)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return _before


def inherited() -> int | None:
    """Returns the soft limit with which this process was started. ``None`` if :func:`raise_limit` has not changed
    it."""
    return _before if _before != limit() else None


_before: int | None = None
