"""When a campaign is finished, whoever finds it out: all blocks are done, and nobody may yet add some. Pure.

The mark says of how many blocks it speaks (:func:`megaflow_hpc.rundir.marks.counts`). So one that comes late, from a
pod that looked before a block was added and was slow to write, is void from the beginning; and whoever adds blocks has
thereby withdrawn the mark that there is. Nobody removes one: it might be the next.
"""

from __future__ import annotations

from collections.abc import Iterable

from megaflow_hpc.ledger.calls import Clock, Names, Publish, Read, Steps
from megaflow_hpc.ledger.names import DONE, FIRST_HANDED_OFF, TASKS, all_done, block_numbers, done_blocks
from megaflow_hpc.rundir.marks import FINISHED, OPEN, counts

OPEN_S = 900.0
"""For so long after its last renewal pods wait for what a consumer may add: a trainer that starts anew, or changes its
allocation, is back by then. One that Slurm lets wait for longer is no reason to hold nodes."""
READ_S = 10.0
"""Between two readings of an open lease by one pod; its name is listed at every look."""


class Consumers:
    """What a pod knows of those who may add blocks. A lease that it has not seen before counts as renewed just now."""

    def __init__(self, open_s: float = OPEN_S) -> None:
        self._open_s = open_s
        self._seen: dict[str, tuple[object, float]] = {}
        """Counter of each lease, and when it was seen to change, by this machine's clock."""
        self._read_at: float | None = None
        self.opened = False
        """After :meth:`look`: some consumer may add blocks."""
        self.awaited = False
        """After :meth:`look`: one of them has renewed its lease not long ago."""

    def look(self) -> Steps[None]:
        """Looks who there is."""
        names = yield Names(OPEN)
        self.opened = bool(names)
        if not names:
            self.awaited, self._seen = False, {}
            return
        now: float = yield Clock()
        if self._read_at is None or now - self._read_at >= READ_S or not self._seen.keys() >= set(names):
            self._read_at = now
            for name in sorted(names):
                yield from self._read(name)
        self.awaited = any(now - at < self._open_s for name, (_, at) in self._seen.items() if name in names)

    def _read(self, name: str) -> Steps[None]:
        try:
            lease = yield Read(f"{OPEN}/{name}")
        except ValueError:
            lease = None  # half written: it tells nothing
        counter = lease.get("counter") if lease else self._seen.get(name, ("", 0.0))[0]
        if name not in self._seen or self._seen[name][0] != counter:
            self._seen[name] = counter, (yield Clock())


def finish(by: str, known: Iterable[int] = ()) -> Steps[bool]:
    """Writes the finished mark if the campaign is finished; tells whether it is.

    Args:
        known: blocks that there are, whatever an old listing says.
    """
    blocks = set(known)
    while not (yield Names(OPEN)):
        done = done_blocks((yield Names(DONE)))
        blocks.update(done)
        blocks.update(block_numbers((yield Names(TASKS))))  # after the marks: whoever is done has given before
        if not all_done(done, blocks):
            return False
        count = sum(block < FIRST_HANDED_OFF for block in blocks)
        if counts((yield from mark()), count):
            return True
        yield Publish(FINISHED, {"by": by, "blocks": count})
        before = len(blocks)
        blocks.update(block_numbers((yield Names(TASKS))))
        if len(blocks) == before:
            return True
        # In the place of a mark of more blocks, it may be; whoever wrote that one may have left.
    return False


def mark() -> Steps[dict[str, object] | None]:
    """Returns what the finished mark says, if there is one."""
    try:
        found: dict[str, object] | None = yield Read(FINISHED)
    except ValueError:
        return {}  # an empty one, as runs of before may have
    return found
