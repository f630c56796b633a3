"""Decides which samples of a group still run. A group is all samples of one task, whose rewards a trainer compares.

*Over-provisioning.* A group with spare samples is closed once it has enough rewards. Its remaining samples are
cancelled, so that nothing waits for a slow or failed sample.

*Groups without signal.* If all samples of a group have the same reward, a trainer learns nothing from the group. After
``signal_after`` equal rewards, the waiting samples are cancelled. For this rule to save work, all samples after the
first ``signal_after`` are deferred, so that some of them are still waiting.

Each sample is *waiting* (queued), running, or ended. This module does no I/O and reads no clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class GroupRules:
    """The campaign's rules for closing groups early."""

    wanted: Mapping[str, int] = field(default_factory=dict)
    """Number of rewards that a group needs, by policy. Empty if the campaign plans no spare samples."""
    signal_after: int = 0
    """A group counts as without signal after this many equal rewards. 0 disables the rule."""

    @property
    def idle(self) -> bool:
        """True if no rule is enabled."""
        return not self.wanted and not self.signal_after


@dataclass(frozen=True)
class GroupStep:
    """Samples of a group to cancel or promote after one of its samples has ended, as rollout ids."""

    cancel: Sequence[str] = ()
    """Waiting or running samples that are no longer needed."""
    promote: Sequence[str] = ()
    """Waiting samples that may now start like any other."""
    why: str = ""


NOTHING_TO_DO = GroupStep()


@dataclass
class _Group:
    wanted: int = 0
    waiting: list[str] = field(default_factory=list)
    running: set[str] = field(default_factory=set)
    rewards: list[float] = field(default_factory=list)
    has_signal: bool = False
    """True if the group's rewards differ, so that all of its samples run."""


class Groups:
    """The groups of one pod that have samples to run. Tracks nothing if no rule is enabled."""

    def __init__(self, rules: GroupRules) -> None:
        self._rules = rules
        self._groups: dict[str, _Group] = {}

    def __len__(self) -> int:
        return len(self._groups)

    def admit(self, name: str, policy: str, rollouts: Sequence[str], rewarded: int = 0) -> set[str]:
        """Registers a group's samples before they are queued. Returns the ids of the samples to defer.

        Args:
            name: Id of the group.
            policy: Policy of the group.
            rollouts: Ids of the samples.
            rewarded: Number of the group's samples that run in other pods. They count as rewarded.
        """
        if self._rules.idle:
            return set()
        group = self._groups.setdefault(name, _Group())
        group.wanted = max(0, self._rules.wanted.get(policy, 0) - rewarded)
        group.waiting += rollouts
        first = self._rules.signal_after
        return set(group.waiting[first:]) & set(rollouts) if first else set()

    def started(self, name: str, rollout: str) -> None:
        """Records that a waiting sample has started."""
        group = self._groups.get(name)
        if group is not None and rollout in group.waiting:
            group.waiting.remove(rollout)
            group.running.add(rollout)

    def requeued(self, name: str, rollout: str) -> None:
        """Records that a sample is queued for another attempt."""
        group = self._groups.get(name)
        if group is not None:
            group.running.discard(rollout)
            group.waiting.insert(0, rollout)

    def ended(self, name: str, rollout: str, reward: float | None) -> GroupStep:
        """Records that a sample has ended and will not be retried. Returns which of the group's other samples to cancel
        or promote.

        Args:
            name: Id of the group.
            rollout: Id of the sample.
            reward: The sample's reward, or ``None`` if it has none.
        """
        group = self._groups.get(name)
        if group is None:
            return NOTHING_TO_DO
        group.running.discard(rollout)
        if rollout in group.waiting:
            group.waiting.remove(rollout)
        if reward is not None:
            group.rewards.append(reward)
        step = self._step(group)
        if not (group.waiting or group.running):
            del self._groups[name]
        return step

    def _step(self, group: _Group) -> GroupStep:
        rewards = group.rewards
        if group.wanted and len(rewards) >= group.wanted:
            unneeded = [*group.waiting, *sorted(group.running)]
            group.waiting, group.running = [], set()
            return GroupStep(cancel=unneeded, why=f"its group has the {group.wanted} rewards that were asked for")
        after = self._rules.signal_after
        if not after or len(rewards) < after or group.has_signal:
            return NOTHING_TO_DO
        if len(set(rewards)) > 1:
            group.has_signal = True
            return GroupStep(promote=list(group.waiting))
        unneeded, group.waiting = group.waiting, []
        return GroupStep(cancel=unneeded, why=f"its group has {len(rewards)} rewards and all are {rewards[0]:g}")
