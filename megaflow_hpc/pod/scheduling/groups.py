"""Groups: the samples of one task under one policy, which are compared with one another. Pure, no clock.

*Over-provisioning.* If a group has more samples than it needs, it is closed once it has enough rewards. Its other
samples are cancelled, so nothing waits for the slowest sample or for a failed one.

*Groups without signal.* Samples with equal rewards teach nothing. After ``signal_after`` equal rewards, the waiting
samples are cancelled. Samples after the first ``signal_after`` are deferred, so that some are still waiting then.

A sample is *waiting* (queued), running, or ended.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class GroupRules:
    """The rules for groups in the campaign file."""

    wanted: Mapping[str, int] = field(default_factory=dict)
    """Policy → rewards that a group needs, if more samples are planned."""
    signal_after: int = 0
    """Equal rewards after which a group counts as one without signal. 0: never."""

    @property
    def idle(self) -> bool:
        """Whether no rule is set."""
        return not self.wanted and not self.signal_after


@dataclass(frozen=True)
class GroupStep:
    """Consequences of the end of a sample, as rollout ids."""

    cancel: Sequence[str] = ()
    """Waiting or running samples that are no longer needed."""
    promote: Sequence[str] = ()
    """Waiting samples that are no longer deferred."""
    why: str = ""


NOTHING_TO_DO = GroupStep()


@dataclass
class _Group:
    wanted: int = 0
    waiting: list[str] = field(default_factory=list)
    running: set[str] = field(default_factory=set)
    rewards: list[float] = field(default_factory=list)
    incomplete: bool = False
    """Some sample has ended, or belongs to another pod."""
    has_signal: bool = False
    """Its rewards differ, so all of its samples run."""


class Groups:
    """The groups of one pod that have samples to run. Keeps nothing if no rule is set."""

    def __init__(self, rules: GroupRules) -> None:
        self._rules = rules
        self._groups: dict[str, _Group] = {}

    def __len__(self) -> int:
        return len(self._groups)

    def admit(self, group: str, policy: str, rollouts: Sequence[str], rewarded: int = 0) -> set[str]:
        """Adds samples of a group that are about to be queued. Returns those that are deferred.

        Args:
            rewarded: samples of the group that got a reward before this pod had it.
        """
        if self._rules.idle:
            return set()
        known = self._groups.setdefault(group, _Group())
        known.wanted = max(0, self._rules.wanted.get(policy, 0) - rewarded)
        known.incomplete |= rewarded > 0
        known.waiting += rollouts
        first = self._rules.signal_after
        return set(known.waiting[first:]) & set(rollouts) if first else set()

    def started(self, group: str, rollout: str) -> None:
        """Records that a waiting sample runs."""
        known = self._groups.get(group)
        if known is not None and rollout in known.waiting:
            known.waiting.remove(rollout)
            known.running.add(rollout)

    def hand_off(self, group: str, rollouts: Collection[str]) -> bool:
        """Forgets a group that goes to another pod. Returns False if this pod must keep it.

        Args:
            rollouts: samples that are queued and were not tried. They must be the whole group, because the other pod
                counts missing samples as rewarded.
        """
        known = self._groups.get(group)
        if known is None:
            return self._rules.idle
        if known.running or known.rewards or known.incomplete or set(known.waiting) != set(rollouts):
            return False
        del self._groups[group]
        return True

    def requeued(self, group: str, rollout: str) -> None:
        """Records that a sample waits for another attempt."""
        known = self._groups.get(group)
        if known is not None:
            known.running.discard(rollout)
            known.waiting.insert(0, rollout)

    def ended(self, group: str, rollout: str, reward: float | None) -> GroupStep:
        """Records that a sample has ended for good. Returns the consequences for the others.

        Args:
            reward: ``None`` if it has none.
        """
        known = self._groups.get(group)
        if known is None:
            return NOTHING_TO_DO
        known.running.discard(rollout)
        if rollout in known.waiting:
            known.waiting.remove(rollout)
        known.incomplete = True
        if reward is not None:
            known.rewards.append(reward)
        step = self._step(known)
        if not (known.waiting or known.running):
            del self._groups[group]
        return step

    def _step(self, known: _Group) -> GroupStep:
        rewards = known.rewards
        if known.wanted and len(rewards) >= known.wanted:
            unneeded = [*known.waiting, *sorted(known.running)]
            known.waiting, known.running = [], set()
            return GroupStep(cancel=unneeded, why=f"its group has the {known.wanted} rewards that were asked for")
        after = self._rules.signal_after
        if not after or len(rewards) < after or known.has_signal:
            return NOTHING_TO_DO
        if len(set(rewards)) > 1:
            known.has_signal = True
            return GroupStep(promote=list(known.waiting))
        unneeded, known.waiting = known.waiting, []
        return GroupStep(cancel=unneeded, why=f"its group has {len(rewards)} rewards and all are {rewards[0]:g}")
