"""What a pod will run next although it has not claimed it: the tasks of some small blocks that are free.

While blocks are large, a pod's queue says which images come next. The last blocks of a campaign hold a rollout or a
group each, and one is claimed when a slot is free. So a pod picks a few of them, has their images staged, and prefers
them when it claims. Pods pick at different places: what one has staged, another seldom takes.
"""

from __future__ import annotations

import zlib
from contextlib import suppress

from megaflow_hpc.errors import LedgerError
from megaflow_hpc.ledger import Ledger, read_block
from megaflow_hpc.rundir.layout import RunDir

SMALL = 16
"""Rollouts of a block up to which blocks are looked into; of larger ones the queue itself looks far enough ahead."""
SPREAD = 64
"""Free blocks among which pods pick: the order in which blocks are claimed changes by no more."""


class BlockLookahead:
    """Looks into free blocks, so that their images are staged before they are claimed.

    Args:
        count: blocks that are looked into at a time; each is one small file.
    """

    def __init__(self, run: RunDir, ledger: Ledger, count: int) -> None:
        self._run, self._ledger, self._count = run, ledger, count
        self._picked: dict[int, list[str]] = {}
        """Block → its tasks."""
        self.tasks: list[str] = []
        """Tasks of the picked blocks, each once."""

    def claimed(self, rollouts: int) -> None:
        """Picks among the free blocks anew, after a block of so many rollouts was claimed. Raises OSError."""
        free = self._ledger.free if rollouts <= SMALL and self._count else []
        self._picked = {block: tasks for block, tasks in self._picked.items() if block in free}
        for block in self._more(free):
            with suppress(LedgerError):  # not to be read yet: another look will
                self._picked[block] = [rollout.task_id for rollout in read_block(self._run, block).rollouts]
        self._ledger.prefer(self._picked)
        self.tasks = list(dict.fromkeys(task for tasks in self._picked.values() for task in tasks))

    def _more(self, free: list[int]) -> list[int]:
        """Returns as many more blocks as ``count`` lacks, from a place of this pod's own on."""
        near = [block for block in free if block not in self._picked][:SPREAD]
        missing = min(self._count - len(self._picked), len(near))
        if missing <= 0:
            return []
        name = self._ledger.identity.name if self._ledger.identity else ""
        place = zlib.crc32(name.encode()) % (len(near) - missing + 1)
        return near[place : place + missing]
