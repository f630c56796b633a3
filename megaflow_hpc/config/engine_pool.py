"""The ``pool`` section: a campaign with nothing but models is an engine pool, whose servers other campaigns name."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from megaflow_hpc.config.sections import Section


class UserCaps(Section):
    """What one user may ask of each server of an engine pool."""

    in_flight: int | None = Field(None, ge=1)
    """Requests at once."""
    requests_per_s: float | None = Field(None, gt=0)
    """Requests a second."""


class UserShare(UserCaps):
    """One user's caps, those of all where it does not say, and share."""

    weight: float = Field(1.0, gt=0)
    """Time at the engine for one of a user of weight 1, while both ask for more than there is."""


class EnginePoolConfig(UserCaps):
    """Who may use an engine pool and how much; the caps are every user's who is not named."""

    share: Literal["user", "group"] = "user"
    """Campaigns of its owner, or of its owner's group."""
    at_once: int | None = Field(None, ge=1)
    """Requests of all users at once at a server, shared fairly; default: what its engine answers at once, else 256."""
    users: dict[str, UserShare] = Field(default_factory=dict)
    """Caps and shares of single users, by login name."""
