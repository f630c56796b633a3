"""The end of a campaign: all blocks are done, and no consumer may add some. Pure: no file is touched here.

The finished mark names the number of blocks it is about (:func:`megaflow_hpc.rundir.marks.counts`). So a mark is void
if its pod looked before a block was added and wrote late. Adding blocks withdraws the mark that is there. No process
removes a mark, because it might remove the next one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from megaflow_hpc.ledger.calls import Clock, Names, Publish, Read, Steps
from megaflow_hpc.ledger.lease import TIMES, Lease
from megaflow_hpc.ledger.names import DONE, FIRST_HANDED_OFF, TASKS, all_done, block_numbers, done_blocks
from megaflow_hpc.rundir.marks import FINISHED, OPEN, counts

READ_S = 10.0
"""Pause between two readings of the open leases by one pod. Their names are listed at every look."""


@dataclass
class Consumers:
    """Tracks the consumers, who may add blocks, for one pod. A lease that is new to the pod counts as just renewed."""

    open_s: float = TIMES.open_s
    opened: bool = False
    """After :meth:`look`: some consumer may add blocks."""
    awaited: bool = False
    """After :meth:`look`: the lease of one of them has not expired."""
    _leases: dict[str, Lease] = field(default_factory=dict)
    _read_at: float | None = None

    def look(self) -> Steps[None]:
        """Looks which consumers there are."""
        names = yield Names(OPEN)
        self.opened = bool(names)
        if not names:
            self.awaited, self._leases = False, {}
            return
        self._leases = {name: self._leases.get(name) or Lease(f"{OPEN}/{name}") for name in sorted(names)}
        now: float = yield Clock()
        some_unread = any(lease.unchanged_since is None for lease in self._leases.values())
        if some_unread or self._read_at is None or now - self._read_at >= READ_S:
            self._read_at = now
            for lease in self._leases.values():
                yield from lease.look()
        self.awaited = any(lease.unchanged_s(now) < self.open_s for lease in self._leases.values())


def finish(by: str, known: Iterable[int] = ()) -> Steps[bool]:
    """Writes the finished mark if the campaign is finished. Returns whether it is.

    Args:
        known: blocks that exist, even if an old listing does not show them.
    """
    blocks = set(known)
    while not (yield Names(OPEN)):
        done = done_blocks((yield Names(DONE)))
        blocks.update(done)
        blocks.update(block_numbers((yield Names(TASKS))))  # after the marks: a pod hands off before it is done
        if not all_done(done, blocks):
            return False
        count = sum(block < FIRST_HANDED_OFF for block in blocks)
        if counts((yield Read(FINISHED)), count):
            return True
        yield Publish(FINISHED, {"by": by, "blocks": count})
        before = len(blocks)
        blocks.update(block_numbers((yield Names(TASKS))))
        if len(blocks) == before:
            return True
        # This mark may have replaced one of more blocks, whose pod may have left. So look once more.
    return False
