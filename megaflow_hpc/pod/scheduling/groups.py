"""Groups: the samples of one task under one policy, compared with one another. Pure, no clock.

*Over-provisioning.* If more samples were planned than are wanted, the group is closed when it has as many rewards as it
wants. Its other samples are cancelled, so nothing waits for the slowest sample or for one that failed.

*Groups without signal.* Samples that all get the same reward teach nothing. After ``signal_after`` equal rewards the
samples that wait are cancelled. So that there is something to cancel, the samples behind the first ``signal_after``
start only while nothing else can.

A sample is *waiting* (queued), running, or ended.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class GroupRules:
    """What the campaign file says of groups."""

    wanted: Mapping[str, int] = field(default_factory=dict)
    """Rewards a group needs, by policy, where more samples than that are planned."""
    signal_after: int = 0
    """Equal rewards after which a group counts as one without signal; 0: never."""

    @property
    def idle(self) -> bool:
        """There are no rules."""
        return not self.wanted and not self.signal_after


@dataclass(frozen=True)
class GroupStep:
    """What follows from the end of a sample, by rollout id."""

    cancel: Sequence[str] = ()
    """Samples that are not needed: waiting or running."""
    promote: Sequence[str] = ()
    """Waiting samples that no longer start behind all others."""
    why: str = ""


NOTHING_TO_DO = GroupStep()


@dataclass
class _Group:
    wanted: int = 0
    waiting: list[str] = field(default_factory=list)
    running: set[str] = field(default_factory=set)
    rewards: list[float] = field(default_factory=list)
    elsewhere: bool = False
    """Some sample of it has ended, or is of another pod."""
    has_signal: bool = False
    """Its rewards differ: all of it runs."""

    @property
    def equal(self) -> bool:
        """Whether all rewards so far are the same; ``False`` while there are none."""
        return len(set(self.rewards)) == 1


class Groups:
    """The groups of one pod that have samples to run.

    Args:
        rules: what the campaign file says; where they are idle no group is kept.
    """

    def __init__(self, rules: GroupRules) -> None:
        self._rules = rules
        self._groups: dict[str, _Group] = {}

    def __len__(self) -> int:
        return len(self._groups)

    def admit(self, group: str, policy: str, rollouts: Sequence[str], ended: int = 0) -> set[str]:
        """Takes in samples of a group that are about to be queued; returns those that may wait.

        Args:
            ended: samples of it that have a reward already, from before this pod had it.
        """
        if self._rules.idle:
            return set()
        known = self._groups.setdefault(group, _Group())
        known.wanted = max(0, self._rules.wanted.get(policy, 0) - ended)
        known.elsewhere |= ended > 0
        known.waiting += rollouts
        first = self._rules.signal_after
        return set(known.waiting[first:]) & set(rollouts) if first else set()

    def started(self, group: str, rollout: str) -> None:
        """Notes that a waiting sample runs."""
        known = self._groups.get(group)
        if known is not None and rollout in known.waiting:
            known.waiting.remove(rollout)
            known.running.add(rollout)

    def hand_off(self, group: str, rollouts: Collection[str]) -> bool:
        """Lets go of a group that goes to another pod; False where its rules must still be kept here.

        Args:
            rollouts: those of it that are queued and were not tried. They must be all of it: the other pod counts
                samples that it did not get as rewarded.
        """
        known = self._groups.get(group)
        if known is None:
            return self._rules.idle
        if known.running or known.rewards or known.elsewhere or set(known.waiting) != set(rollouts):
            return False
        del self._groups[group]
        return True

    def requeued(self, group: str, rollout: str) -> None:
        """Notes that a sample waits for another attempt."""
        known = self._groups.get(group)
        if known is not None:
            known.running.discard(rollout)
            known.waiting.insert(0, rollout)

    def ended(self, group: str, rollout: str, reward: float | None) -> GroupStep:
        """Notes that a sample has ended for good; returns what follows for the others.

        Args:
            reward: ``None`` where it has none.
        """
        known = self._groups.get(group)
        if known is None:
            return NOTHING_TO_DO
        known.running.discard(rollout)
        if rollout in known.waiting:
            known.waiting.remove(rollout)
        known.elsewhere = True
        if reward is not None:
            known.rewards.append(reward)
        step = self._step(known)
        if not (known.waiting or known.running):
            del self._groups[group]
        return step

    def _step(self, known: _Group) -> GroupStep:
        if known.wanted and len(known.rewards) >= known.wanted:
            left = [*known.waiting, *sorted(known.running)]
            known.waiting, known.running = [], set()
            return GroupStep(cancel=left, why=f"its group has the {known.wanted} rewards that were asked for")
        after = self._rules.signal_after
        if not after or len(known.rewards) < after:
            return NOTHING_TO_DO
        if known.equal:
            dropped, known.waiting = known.waiting, []
            why = f"its group has {len(known.rewards)} rewards and all are {known.rewards[0]:g}"
            return GroupStep(cancel=dropped, why=why)
        if known.has_signal:
            return NOTHING_TO_DO
        known.has_signal = True
        return GroupStep(promote=list(known.waiting))
