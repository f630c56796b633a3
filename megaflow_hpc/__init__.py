"""LLM agent rollouts at scale on Slurm.

>>> from megaflow_hpc import Campaign, Run, open_trajectories       # doctest: +SKIP
>>> run = Campaign.from_yaml("campaign.yaml").submit()              # doctest: +SKIP
>>> run = Run("runs/fix-bugs")                                      # doctest: +SKIP

Names are imported on first use, so that ``import megaflow_hpc`` takes milliseconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megaflow_hpc.resources import __version__

__all__ = ["Campaign", "Run", "__version__", "open_trajectories"]

if TYPE_CHECKING:
    from megaflow_hpc.campaign.facade import Campaign as Campaign
    from megaflow_hpc.campaign.facade import Run as Run
    from megaflow_hpc.trajectories import open_trajectories as open_trajectories


def __getattr__(name: str) -> Any:
    if name in ("Campaign", "Run"):
        from megaflow_hpc.campaign import facade

        return getattr(facade, name)
    if name == "open_trajectories":
        from megaflow_hpc.trajectories import open_trajectories

        return open_trajectories
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
