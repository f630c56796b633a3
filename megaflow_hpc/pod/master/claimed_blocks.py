"""The blocks that this pod has claimed, with the rollouts of each that are not stored.

Only the I/O thread uses this module (:mod:`~megaflow_hpc.pod.master.run_io`).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby

from megaflow_hpc.errors import LedgerError
from megaflow_hpc.ledger import Claim, Ledger, read_block
from megaflow_hpc.ledger.names import FIRST_HANDED_OFF
from megaflow_hpc.ledger.tasks import PlannedTask
from megaflow_hpc.pod.master.histories import Histories, History
from megaflow_hpc.rundir.events import ClaimEvent, EventWriter
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.trajectories.journal.stored import StoredBlock, StoredRollouts
from megaflow_hpc.types import Rollout

SMALL = 16
"""Largest block that is read before it is claimed. With larger blocks the queue itself reaches far enough ahead."""
SPREAD = 64
"""Number of free blocks among which pods pick. The order in which blocks are claimed changes by no more."""


@dataclass(frozen=True)
class ClaimedBlock:
    """A block as it was claimed."""

    claim: Claim
    rollouts: tuple[Rollout, ...]
    """The rollouts to run."""
    histories: dict[str, History]
    """Their histories in earlier pods, by rollout id. The receiver owns it."""
    tasks: dict[str, PlannedTask]
    """Their tasks by id. The receiver owns it."""
    upcoming: tuple[PlannedTask, ...]
    """Tasks of the blocks that this pod will claim next, as far as it looks ahead."""


@dataclass
class _Held:
    claim: Claim
    missing: set[str]


@dataclass(frozen=True)
class _HandOff:
    """Rollouts of one block that become a new block."""

    block: int
    rollouts: tuple[Rollout, ...]
    token: str


class ClaimedBlocks:
    """The blocks of one pod, from claim to done mark, release or hand-off.

    Args:
        stored: reads the journals of a block's earlier holders.
        tasks: tasks of the campaign. Those of claimed blocks are looked up.
        ahead: number of small blocks that are read before they are claimed.
    """

    def __init__(
        self,
        run: RunDir,
        ledger: Ledger,
        events: EventWriter,
        stored: StoredRollouts,
        tasks: Mapping[str, PlannedTask],
        ahead: int = 0,
    ) -> None:
        self._histories = Histories(run)
        self._tasks = tasks
        self._lookahead = BlockLookahead(run, ledger, tasks, ahead)
        self._run, self._ledger, self._events = run, ledger, events
        self._stored = stored
        self._held: dict[int, _Held] = {}
        self._unread: Claim | None = None
        self._hand_offs: list[_HandOff] = []
        """Hand-offs that may not be in the ledger yet."""
        self._hand_offs_made = 0

    def __len__(self) -> int:
        return len(self._held)

    def claim(self) -> ClaimedBlock | None:
        """Claims the next block. ``None`` while no block is available.

        Raises:
            LedgerError: the block is damaged.
            OSError: the run directory does not answer. The next call continues with the same block.
        """
        claim = self._unread or self._ledger.claim(self._stored.length)
        if claim is None:
            return None
        self._unread = claim  # until it has been read: an error in between must not lose it
        unknown = claim.epoch > 0 and claim.left is None  # the holder before could not say what is left
        held = [StoredBlock(*each) for each in self._ledger.earlier(claim)] if unknown else []
        size, todo = self._to_run(claim, held)
        tasks = planned(self._tasks, todo)
        if claim.epoch or claim.block >= FIRST_HANDED_OFF:
            self._histories.look()
            self._histories.look_at_events({each.owner for each in held})
        self._unread = None
        self._held[claim.block] = _Held(claim, {rollout.id for rollout in todo})
        self._write_event(claim, "claimed", rollouts=len(todo))
        self._lookahead.claimed(size)
        if not todo:
            self._finish(claim.block)
        histories = {}
        for rollout in todo:
            history = self._histories.take(rollout.id)
            if history is not None:
                histories[rollout.id] = history
        return ClaimedBlock(claim, todo, histories, tasks, tuple(self._lookahead.tasks))

    def _to_run(self, claim: Claim, held: Sequence[StoredBlock]) -> tuple[int, tuple[Rollout, ...]]:
        """Returns the number of rollouts of the claim, and the rollouts that are neither stored nor handed off."""
        rollouts = read_block(self._run, claim.block).rollouts
        stored: set[str] = set()
        if claim.left is not None:
            rollouts = tuple(rollout for rollout in rollouts if rollout.id in claim.left)
        elif held:
            stored = self._stored.ids(claim.block, held)
        todo = (rollout for rollout in rollouts if rollout.id not in stored and rollout.id not in claim.without)
        return len(rollouts), tuple(todo)

    def settled(self, block: int, rollout_id: str) -> None:
        """Records that a rollout is durable. Marks the block done with its last rollout.

        Raises:
            LedgerError: the block was taken over.
            OSError: the run directory does not answer.
        """
        held = self._held.get(block)
        if held is not None:
            held.missing.discard(rollout_id)
            if not held.missing:
                self._finish(block)

    def hand_off(self, rollouts: Iterable[tuple[int, Rollout]], each: int) -> None:
        """Hands rollouts that were not started, with their blocks, to other pods.

        Args:
            each: most rollouts of a new block. The rollouts of a group stay together.

        Raises:
            OSError: the run directory does not answer. :meth:`retry_hand_offs` continues.
        """
        for block, of_block in groupby(sorted(rollouts, key=lambda pair: pair[0]), key=lambda pair: pair[0]):
            for part in _parts([rollout for _, rollout in of_block], each):
                self._hand_offs_made += 1
                self._hand_offs.append(_HandOff(block, tuple(part), f"hand-off.{self._hand_offs_made}"))
        self.retry_hand_offs()

    @property
    def handing_off(self) -> bool:
        """Some hand-off is not in the ledger yet."""
        return bool(self._hand_offs)

    def retry_hand_offs(self) -> None:
        """Writes the hand-offs that are not in the ledger yet. Raises OSError."""
        while self._hand_offs:
            one = self._hand_offs[0]
            held = self._held[one.block]
            if not self._ledger.hand_off(held.claim, one.rollouts, one.token):
                return  # the fence is closed: the pod that takes over runs them
            self._hand_offs.pop(0)
            self._write_event(held.claim, "gave", rollouts=len(one.rollouts))
            for rollout in one.rollouts:
                self.settled(one.block, rollout.id)

    def release(self, sealed: int) -> None:
        """Gives back every block that is not done.

        Args:
            sealed: durable bytes of this pod's journal.

        Raises:
            OSError: the run directory does not answer.
        """
        self.retry_hand_offs()
        for held in self._held.values():
            self._ledger.release(held.claim, sealed, held.missing)
            self._write_event(held.claim, "released", rollouts=len(held.missing))
        self._held.clear()

    def _finish(self, block: int) -> None:
        claim = self._held[block].claim
        self._ledger.mark_done(claim)
        del self._held[block]
        self._write_event(claim, "done")

    def _write_event(self, claim: Claim, state: str, rollouts: int | None = None) -> None:
        self._events.write(ClaimEvent(block=claim.block, epoch=claim.epoch, state=state, rollouts=rollouts))


class BlockLookahead:
    """Reads free blocks before they are claimed, so that their images are staged in time.

    While blocks are large, a pod's queue shows which images come next. The last blocks of a campaign hold a rollout or
    a group each, and a block is claimed when a slot is free. So a pod picks a few of them, stages their images, and
    claims them first. Pods pick at different places, so another pod seldom takes what this pod has staged.

    Args:
        count: blocks that are picked at a time. Each is one small file.
    """

    def __init__(self, run: RunDir, ledger: Ledger, tasks: Mapping[str, PlannedTask], count: int) -> None:
        self._run, self._ledger, self._tasks, self._count = run, ledger, tasks, count
        self._picked: dict[int, dict[str, PlannedTask]] = {}
        """Block → its tasks."""
        self.tasks: list[PlannedTask] = []
        """Tasks of the picked blocks, each once."""

    def claimed(self, rollouts: int) -> None:
        """Picks among the free blocks again, after a block of ``rollouts`` rollouts was claimed.

        Leaves out a block that cannot be read now, because an error would cost the claim.
        """
        free = self._ledger.free if rollouts <= SMALL and self._count else []
        self._picked = {block: tasks for block, tasks in self._picked.items() if block in free}
        for block in self._more(free):
            with suppress(LedgerError, OSError):  # not readable yet; a later look reads it
                self._picked[block] = planned(self._tasks, read_block(self._run, block).rollouts)
        self._ledger.prefer(self._picked)
        self.tasks = list({name: task for tasks in self._picked.values() for name, task in tasks.items()}.values())

    def _more(self, free: list[int]) -> list[int]:
        """Returns the blocks that ``count`` lacks, starting at this pod's own place."""
        near = [block for block in free if block not in self._picked][:SPREAD]
        missing = min(self._count - len(self._picked), len(near))
        if missing <= 0:
            return []
        name = self._ledger.identity.name if self._ledger.identity else ""
        start = zlib.crc32(name.encode()) % (len(near) - missing + 1)
        return near[start : start + missing]


def planned(tasks: Mapping[str, PlannedTask], rollouts: Iterable[Rollout]) -> dict[str, PlannedTask]:
    """Looks up the tasks of some rollouts, in their order.

    Raises:
        LedgerError: the campaign does not have the task of a rollout.
        ConfigError: the file of tasks is damaged or gone.
        OSError: the run directory does not answer.
    """
    try:
        return {name: tasks[name] for name in dict.fromkeys(rollout.task_id for rollout in rollouts)}
    except KeyError as error:
        raise LedgerError(f"a block names the task {error}, which the campaign does not have") from None


def _parts(rollouts: list[Rollout], each: int) -> Iterator[list[Rollout]]:
    """Cuts rollouts between groups, at most ``each`` to a part unless one group has more."""
    part: list[Rollout] = []
    for _, samples in groupby(rollouts, key=lambda rollout: rollout.group_id):
        group = list(samples)
        if part and len(part) + len(group) > each:
            yield part
            part = []
        part += group
    yield part
