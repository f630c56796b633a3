"""Counts the planned rollouts that no pod has stored yet. It compares ids, because a rollout may end twice."""

from __future__ import annotations

from collections import Counter

from megaflow_hpc.ledger import read_blocks
from megaflow_hpc.ledger.blocks import numbers
from megaflow_hpc.rundir.event_reader import EventReader
from megaflow_hpc.rundir.events import RolloutEvent
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.summaries import Summary, WantedPods


class Backlog:
    """Tracks the remaining rollouts from the blocks of a run and the events of its pods."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._policies: dict[str, str] = {}
        """Rollout → policy, for rollouts not yet stored."""
        self._read_blocks: set[int] = set()
        self._events = EventReader(run.events, only="rollout", use_summaries=True)
        self._ended: list[str] = []
        """Rollouts that ended in the last poll. They may belong to a block written in the meantime."""

    def look(self) -> Counter[str]:
        """Reads new blocks and events. Returns the number of remaining rollouts per policy."""
        new = set(numbers(self._run)) - self._read_blocks
        for block in read_blocks(self._run, sorted(new)):
            self._policies.update((rollout.id, rollout.policy) for rollout in block.rollouts)
        self._read_blocks |= new
        ended = self._read_ended()
        for rollout in (*self._ended, *ended):
            self._policies.pop(rollout, None)
        self._ended = ended
        return Counter(self._policies.values())

    def _read_ended(self) -> list[str]:
        summaries: list[Summary] = []
        ended: list[str] = []
        for _, events in self._events.read():
            for event in events:
                if isinstance(event, Summary):
                    summaries.append(event)
                elif isinstance(event, RolloutEvent):
                    ended.append(event.id)
        if summaries:
            remaining = WantedPods(self._policies)
            for each in summaries:
                ended += remaining.among(each.digests)
                ended += [rollout.id for rollout in each.ended_badly]
        return ended
