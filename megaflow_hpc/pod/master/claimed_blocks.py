"""The blocks that this pod has claimed, and the rollouts that each still lacks.

Used by one thread: the one that touches the run directory (:mod:`~megaflow_hpc.pod.master.run_io_thread`).
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
from megaflow_hpc.trajectories.journal.stored import Holding, StoredRollouts
from megaflow_hpc.types import Rollout

SMALL = 16
"""Rollouts of a block up to which blocks are looked into; of larger ones the queue itself looks far enough ahead."""
SPREAD = 64
"""Free blocks among which pods pick: the order in which blocks are claimed changes by no more."""


@dataclass(frozen=True)
class ClaimedBlock:
    """A block as it was claimed."""

    claim: Claim
    rollouts: tuple[Rollout, ...]
    """Those that have to run."""
    histories: dict[str, History]
    """What earlier pods wrote of them, by rollout id. The receiver owns it."""
    tasks: dict[str, PlannedTask]
    """Their tasks by id. The receiver owns it."""
    upcoming: tuple[PlannedTask, ...]
    """Tasks of blocks that this pod will claim next, as far as it looks ahead."""


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
        tasks: of the campaign; those of the blocks that are claimed are looked up.
        ahead: blocks of few rollouts that are looked into before they are claimed.
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
        """Kept until they are known to be in the ledger."""
        self._hand_offs_made = 0

    def __len__(self) -> int:
        return len(self._held)

    def claim(self) -> ClaimedBlock | None:
        """Claims the next block; ``None`` while there is none.

        Raises:
            LedgerError: the block is no block.
            OSError: the run directory does not answer; the next call goes on with the same block.
        """
        claim = self._unread or self._ledger.claim(self._stored.length)
        if claim is None:
            return None
        self._unread = claim  # until it has been read: an error in between must not lose it
        unknown = claim.epoch > 0 and claim.left is None  # the holder before could not say what is left
        held = [Holding(*each) for each in self._ledger.earlier(claim)] if unknown else []
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
        found = {rollout.id: self._histories.take(rollout.id) for rollout in todo}
        histories = {rollout: history for rollout, history in found.items() if history is not None}
        return ClaimedBlock(claim, todo, histories, tasks, tuple(self._lookahead.tasks))

    def _to_run(self, claim: Claim, held: Sequence[Holding]) -> tuple[int, tuple[Rollout, ...]]:
        """Returns how many rollouts the claim covers, and those of them that are not stored or handed off."""
        rollouts = read_block(self._run, claim.block).rollouts
        stored: set[str] = set()
        if claim.left is not None:
            rollouts = tuple(rollout for rollout in rollouts if rollout.id in claim.left)
        elif held:
            stored = self._stored.ids(claim.block, held)
        todo = (rollout for rollout in rollouts if rollout.id not in stored and rollout.id not in claim.without)
        return len(rollouts), tuple(todo)

    def settled(self, block: int, rollout_id: str) -> None:
        """Notes that a rollout is durable; with its last one the block is marked done.

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
        """Hands rollouts that were not started, with the blocks they are of, to other pods.

        Args:
            each: most rollouts of a new block; those of a group stay together.

        Raises:
            OSError: the run directory does not answer; :meth:`retry_hand_offs` goes on.
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
                return  # fenced: whoever takes over runs them
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
    """Looks into free blocks, so that their images are staged before they are claimed.

    While blocks are large, a pod's queue says which images come next. The last blocks of a campaign hold a rollout or a
    group each, and one is claimed when a slot is free. So a pod picks a few of them, has their images staged, and
    prefers them when it claims. Pods pick at different places: what one has staged, another seldom takes.

    Args:
        count: blocks that are looked into at a time; each is one small file.
    """

    def __init__(self, run: RunDir, ledger: Ledger, tasks: Mapping[str, PlannedTask], count: int) -> None:
        self._run, self._ledger, self._tasks, self._count = run, ledger, tasks, count
        self._picked: dict[int, dict[str, PlannedTask]] = {}
        """Block → its tasks."""
        self.tasks: list[PlannedTask] = []
        """Tasks of the picked blocks, each once."""

    def claimed(self, rollouts: int) -> None:
        """Picks among the free blocks anew, after a block of so many rollouts was claimed.

        A block of which something cannot be read now is left out: an error would cost the claim.
        """
        free = self._ledger.free if rollouts <= SMALL and self._count else []
        self._picked = {block: tasks for block, tasks in self._picked.items() if block in free}
        for block in self._more(free):
            with suppress(LedgerError, OSError):  # not to be read yet: another look will
                self._picked[block] = planned(self._tasks, read_block(self._run, block).rollouts)
        self._ledger.prefer(self._picked)
        self.tasks = list({name: task for tasks in self._picked.values() for name, task in tasks.items()}.values())

    def _more(self, free: list[int]) -> list[int]:
        """Returns as many more blocks as ``count`` lacks, from a place of this pod's own on."""
        near = [block for block in free if block not in self._picked][:SPREAD]
        missing = min(self._count - len(self._picked), len(near))
        if missing <= 0:
            return []
        name = self._ledger.identity.name if self._ledger.identity else ""
        place = zlib.crc32(name.encode()) % (len(near) - missing + 1)
        return near[place : place + missing]


def planned(tasks: Mapping[str, PlannedTask], rollouts: Iterable[Rollout]) -> dict[str, PlannedTask]:
    """Looks up the tasks of some rollouts, in their order.

    Raises:
        LedgerError: a rollout is of no task of the campaign.
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
