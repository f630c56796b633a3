"""How many files and connections this process may open (``RLIMIT_NOFILE``)."""

from __future__ import annotations

import os
import resource

ENOUGH = 65_536
"""Descriptors that a process with many connections allows itself where the hard limit is no lower. Not a hard limit of
millions: what it starts inherits the soft limit, and some programs go through all descriptors they may have."""


def limit() -> int:
    """Returns the number of descriptors that this process may have now."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return ENOUGH if soft == resource.RLIM_INFINITY else soft


def left() -> int:
    """Returns the number of descriptors that this process may still have, beside those it has."""
    return max(0, limit() - len(os.listdir("/proc/self/fd")))


def raise_limit() -> int:
    """Raises the soft limit to the hard one, or to :data:`ENOUGH`; never lowers it.

    Returns:
        The soft limit from before, for :func:`inherited`.
    """
    global _before
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if _before is None:
        _before = limit()
    wanted = ENOUGH if hard == resource.RLIM_INFINITY else min(hard, ENOUGH)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return _before


def inherited() -> int | None:
    """Returns the soft limit that this process was started with, if :func:`raise_limit` has changed it."""
    return _before if _before != limit() else None


_before: int | None = None
