"""What became of a run's rollouts: counts by status and policy, those that ended badly, and those that are listed.

One that ended badly may be run again, by another pod, and end well there; so those are kept by their ids. Of those that
ended well (``completed``, ``truncated``) counts are kept, however many they are. One that ended well in two pods, as
where the node of a living pod was taken for lost, is counted twice; what is shown is never more than there are.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterable
from typing import Any

from megaflow_hpc.monitor.evaluation import evaluate
from megaflow_hpc.rundir.events import RolloutEvent
from megaflow_hpc.rundir.pods.summary import RECENT_S, Summary, WantedPods, policy_of
from megaflow_hpc.types import VERIFIED, without_round


class Outcomes:
    """Hears of every rollout that is stored: each pod's in their order, and pods in any.

    Args:
        listed: Of those that ended well the last so many are kept too; ``None``: all.
    """

    def __init__(self, listed: int | None = 0) -> None:
        self.lists_all = listed is None
        self._kept: dict[str, RolloutEvent] = {}
        """Those that ended badly; where all are listed, all."""
        self._latest: deque[RolloutEvent] = deque(maxlen=listed or 0)
        self._well: dict[str, Counter[str]] = {}
        """Policy → status → rollouts that ended well and are not in :attr:`_kept`."""
        self._inexact: Counter[str] = Counter()
        """Of these: policy → turns."""
        self._constrained: Counter[str] = Counter()
        self._recent: Counter[int] = Counter()
        """Second → rollouts that were stored then, of the last minutes."""
        self._ended: list[str] = []
        """Those that ended well since :meth:`between_pods`."""
        self._digests: list[bytes] = []

    def apply(self, event: RolloutEvent) -> None:
        """Takes in one that is stored."""
        self._recent[int(event.t)] += 1
        if event.status not in VERIFIED or self.lists_all:
            self._keep(event)
            return
        policy = policy_of(event.id)
        self._well.setdefault(policy, Counter())[event.status] += 1
        self._inexact[policy] += event.inexact
        self._constrained[policy] += event.constrained
        self._latest.append(event)
        self._ended.append(event.id)

    def adopt(self, told: Summary) -> None:
        """Takes in what the first events of a pod amount to."""
        for policy, statuses in told.ended_well.items():
            self._well.setdefault(policy, Counter()).update(statuses)
        self._inexact.update(told.inexact)
        self._constrained.update(told.constrained)
        self._recent.update(told.recent)
        self._digests.append(told.digests)
        for ended in told.ended_badly:
            self._keep(ended.to_event())

    def _keep(self, event: RolloutEvent) -> None:
        before = self._kept.get(event.id)
        # A later success replaces a failure (resume --failed); otherwise the first stored result stands.
        if before is None or before.status not in VERIFIED:
            self._kept[event.id] = event

    def between_pods(self, running: Iterable[str]) -> list[str]:
        """Notes, after each look, which rollouts that one pod failed at ended well in another, read before or after.

        Args:
            running: those that pods have begun and said no end of.

        Returns:
            Of both those that ended well meanwhile.
        """
        ended, self._ended = self._ended, []
        if self._digests:
            doubtful = WantedPods((*running, *self._kept))
            ended += [rollout for digests in self._digests for rollout in doubtful.among(digests)]
            self._digests = []
        for rollout in ended:
            self._kept.pop(rollout, None)
        return ended

    def settle(self, stored: Iterable[RolloutEvent]) -> None:
        """Replaces what the events say of rollouts by what is stored of them."""
        known, self._kept = self._kept, {}
        self.lists_all, self._well = True, {}
        self._latest.clear()
        for rollout in stored:
            if before := known.get(rollout.id):
                rollout.inexact, rollout.constrained, rollout.t = before.inexact, before.constrained, before.t
            self._kept[rollout.id] = rollout

    @property
    def listed(self) -> dict[str, RolloutEvent]:
        """Those that are listed, by id: all that ended badly, and of the others as many as were asked for."""
        return {**self._kept, **{event.id: event for event in self._latest}} if self._latest else self._kept

    def by_status(self, planned: int) -> Counter[str]:
        """Returns rollouts by status: of as many as are planned, if any are, what is beyond has ended well twice."""
        found = sum(self._well.values(), Counter(event.status for event in self._kept.values()))
        for status in VERIFIED if planned else ():
            found[status] -= min(found[status], max(0, found.total() - planned))
        return found

    @property
    def failures(self) -> list[RolloutEvent]:
        """Those that failed; of some, that were read in a summary, without the error."""
        return [event for event in self._kept.values() if event.status == "failed"]

    def rate(self) -> float:
        """Returns rollouts that were stored a second, in the last minutes."""
        now = time.time()
        self._recent = Counter({at: count for at, count in self._recent.items() if at >= now - RECENT_S})
        stored = self._recent.total()
        return stored / max(1.0, now - min(self._recent)) if stored >= 2 else 0.0

    def policies(self, pass_threshold: float) -> dict[str, dict[str, Any]]:
        """Returns, by policy: rollouts, statuses, mean reward, how many were solved, and what an evaluation says.

        Of those that are listed: to be asked where all are.
        """
        rows: dict[str, dict[str, Any]] = {}
        known = {"inexact": self._inexact, "constrained": self._constrained}
        for rollout_id, event in self._kept.items():
            name, policy, _ = rollout_id.rsplit("/", 2)
            task, _ = without_round(name)
            start = {"rollouts": 0, "statuses": Counter[str](), "rewards": {}, "turns": 0, "seconds": 0.0}
            row = rows.setdefault(policy, {**start, **{name: counts[policy] for name, counts in known.items()}})
            row["rewards"].setdefault(task, []).append(event.reward)
            row["inexact"] += event.inexact
            row["constrained"] += event.constrained
            row["rollouts"] += 1
            row["statuses"][event.status] += 1
            row["turns"] += event.turns
            row["seconds"] += event.seconds
        for row in rows.values():
            by_task = row.pop("rewards")
            row["evaluation"] = evaluate(by_task, threshold=pass_threshold)
            rewards = [reward for given in by_task.values() for reward in given if reward is not None]
            row["statuses"] = dict(row["statuses"])
            row["solved"] = row["evaluation"]["passed"] if row["evaluation"] else 0
            row["mean_reward"] = round(sum(rewards) / len(rewards), 4) if rewards else None
        return dict(sorted(rows.items()))
