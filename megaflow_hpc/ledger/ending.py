"""Detect the end of a campaign: all blocks are done, and no consumer may add more. Pure: no file is touched here.

The finished mark records the number of blocks that it covers (:func:`megaflow_hpc.rundir.marks.counts`). A mark is
therefore void if its pod listed the blocks before one was added but wrote the mark afterwards. Adding blocks
invalidates the current mark. No process deletes a mark, because it might delete a newer one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from megaflow_hpc.ledger.calls import Clock, Names, Publish, Read, Steps
from megaflow_hpc.ledger.lease import TIMES, Lease
from megaflow_hpc.ledger.names import DONE, FIRST_HANDED_OFF, TASKS, all_done, block_numbers, done_blocks
from megaflow_hpc.rundir.marks import FINISHED, OPEN, counts

READ_S = 10.0
"""Seconds between a pod's reads of the open leases. Their names are listed at every poll."""


@dataclass
class Consumers:
    """Tracks the consumers that may add blocks, for one pod. A lease that the pod sees for the first time counts as
    fresh."""

    open_s: float = TIMES.open_s
    opened: bool = False
    """True if some consumer may add blocks, as of the last :meth:`look`."""
    awaited: bool = False
    """True if some consumer's lease has not expired, as of the last :meth:`look`."""
    _leases: dict[str, Lease] = field(default_factory=dict)
    _read_at: float | None = None

    def look(self) -> Steps[None]:
        """Updates the list of consumers and reads their leases."""
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
    """Writes the finished mark if the campaign is finished. Returns whether it is finished.

    Args:
        known: Blocks known to exist, even if a stale listing does not show them.
    """
    blocks = set(known)
    while not (yield Names(OPEN)):
        done = done_blocks((yield Names(DONE)))
        blocks.update(done)
        blocks.update(block_numbers((yield Names(TASKS))))  # after the marks, which are written after any hand-offs
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
        # This mark may have replaced one that covers more blocks, and the pod that wrote that one may have exited. So
        # check again.
    return False
