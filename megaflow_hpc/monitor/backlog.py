"""Which planned rollouts no pod has stored yet, by their ids: one that ended twice stands for no other."""

from __future__ import annotations

from collections import Counter

from megaflow_hpc.ledger import read_blocks
from megaflow_hpc.ledger.blocks import numbers
from megaflow_hpc.rundir.events import EventReader, RolloutEvent
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.pods import summary
from megaflow_hpc.rundir.pods.summary import Summary, WantedPods


class Backlog:
    """Follows the blocks of a run and the events of its pods."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._policy_of: dict[str, str] = {}
        """Of those that are left in the blocks that were read."""
        self._read: set[int] = set()
        self._events: EventReader[Summary] = EventReader(run.events, only="rollout", begin=summary.begin)
        self._ended: list[str] = []
        """Those that the last look found; a block that was written meanwhile may have them."""

    def look(self) -> Counter[str]:
        """Reads the blocks and events that are new; returns how many are left, by policy."""
        new = set(numbers(self._run)) - self._read
        for block in read_blocks(self._run, sorted(new)):
            self._policy_of.update((rollout.id, rollout.policy) for rollout in block.rollouts)
        self._read |= new
        told: list[Summary] = []
        ended: list[str] = []
        for _, events in self._events.read():
            told += [event for event in events if isinstance(event, Summary)]
            ended += [event.id for event in events if isinstance(event, RolloutEvent)]
        if told:
            wanted = WantedPods(self._policy_of)
            for one in told:
                ended += [*wanted.among(one.digests), *(rollout.id for rollout in one.ended_badly)]
        for rollout in (*self._ended, *ended):
            self._policy_of.pop(rollout, None)
        self._ended = ended
        return Counter(self._policy_of.values())
