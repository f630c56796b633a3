"""What state a run is in: the one rule, for who follows it (``status``, ``watch``) and for who glances at a thousand
(``list``)."""

from __future__ import annotations

import msgspec

from megaflow_hpc.ledger.lease import TIMES


class Facts(msgspec.Struct, kw_only=True, frozen=True):
    """What decides the state of a run."""

    finished: bool = False
    cancelled: bool = False
    """As its marks say."""
    serves: bool = False
    """It is an engine pool, and a server has registered."""
    alive: bool = False
    """A pod lives."""
    waits: bool = False
    """All its rollouts are stored, and a trainer may add some."""
    submitted: bool = False
    """It has jobs of Slurm's."""
    queued: bool | None = None
    """Slurm still has one of its jobs; ``None`` where nobody can tell."""
    started: bool = False
    """A pod has started, or could not."""

    @property
    def state(self) -> str:
        """``planned``, ``queued``, ``running``, ``waiting``, ``serving``, ``stopped``, ``cancelled``, ``finished``, or
        ``unknown`` where Slurm, which has its jobs, does not answer."""
        if self.finished:
            return "finished"
        if self.cancelled:
            return "cancelled"
        if self.serves and self.queued is not False:
            return "serving"
        if self.alive:
            return "waiting" if self.waits else "running"
        if self.queued:
            return "queued"
        if self.queued is None and self.submitted:
            return "unknown"
        return "stopped" if self.started or self.submitted else "planned"


def lives(*, ended: bool, runs: bool | None, process: bool | None, silent_s: float) -> bool:
    """Returns whether a pod lives.

    Args:
        ended: it has said its last word.
        runs: whether Slurm runs its job; ``None`` of a pod without one, and where nobody can tell.
        process: whether its process is there; ``None`` of one that is Slurm's, or on another host.
        silent_s: seconds since it was last heard of, which decide where nothing else does.
    """
    if ended:
        return False
    if runs is not None:
        return runs
    return process if process is not None else silent_s < TIMES.lease_s
