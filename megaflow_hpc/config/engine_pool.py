"""The ``pool`` section: a campaign with nothing but models is an engine pool, whose servers other campaigns name."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from megaflow_hpc.config.sections import Section


class UserCaps(Section):
    """What one user may ask of each server of an engine pool."""

    in_flight: int | None = Field(None, ge=1)
    """Maximum number of concurrent requests. Default: no limit."""
    requests_per_s: float | None = Field(None, gt=0)
    """Maximum number of requests per second. Default: no limit."""


class UserShare(UserCaps):
    """Caps and share of one user; a cap that it does not state is that of all users."""

    weight: float = Field(1.0, gt=0)
    """Relative share of engine time while users ask for more than there is. Default: 1."""


class EnginePoolConfig(UserCaps):
    """Access to an engine pool; its caps apply to every user who is not listed."""

    share: Literal["user", "group"] = "user"
    """Whose campaigns may use the pool: its owner's (``user``), or also those of the owner's ``group``."""
    at_once: int | None = Field(None, ge=1)
    """Maximum number of concurrent requests of all users at one server, shared fairly. Default: what its engine answers
    at once, else 256."""
    users: dict[str, UserShare] = Field(default_factory=dict)
    """Caps and shares of single users, by login name."""
