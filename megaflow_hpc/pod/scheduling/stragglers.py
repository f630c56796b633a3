"""Stragglers: running rollouts that take unusually long. Pure; the caller brings the time.

At the end of a campaign a few stragglers hold everything up while slots stand idle. A copy elsewhere may get done
first, if what was slow was the node or bad luck in sampling. The first result counts, which favours the short one of
two trajectories: a bias that a campaign has to ask for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from megaflow_hpc.pod.scheduling.estimates import Estimates
from megaflow_hpc.pod.scheduling.work import Work

UNUSUAL = 0.95
"""Quantile of the expected duration behind which a rollout is a straggler."""
AT_LEAST_S = 60.0
"""Nothing that has run for less is worth a second sandbox."""


class Stragglers:
    """Watches the rollouts that run for those that take far longer than expected.

    Args:
        estimates: as they are learned.
        at_least_s: a rollout is no straggler before this; default :data:`AT_LEAST_S`.
    """

    def __init__(self, estimates: Estimates, at_least_s: float | None = None) -> None:
        self._estimates = estimates
        self._at_least_s = AT_LEAST_S if at_least_s is None else at_least_s
        self._since: dict[str, float] = {}

    def started(self, rollout: str, now: float) -> None:
        """Notes the start of a first or further attempt, not of a copy, in seconds of any clock."""
        self._since[rollout] = now

    def overdue(self, running: Iterable[Work], now: float) -> list[str]:
        """Returns the stragglers that run once, by rollout id, the one that is longest overdue first."""
        found: dict[str, float] = {}
        times: Counter[str] = Counter()
        for work in running:
            rollout = work.rollout
            times[rollout.id] += 1
            usual_s = self._estimates.expect(rollout.task_id, rollout.policy, UNUSUAL)
            if usual_s is not None:
                found[rollout.id] = now - self._since.get(rollout.id, now) - max(usual_s, self._at_least_s)
        self._since = {rollout: self._since[rollout] for rollout in times if rollout in self._since}
        return sorted((i for i, late_s in found.items() if late_s > 0 and times[i] == 1), key=lambda i: -found[i])
