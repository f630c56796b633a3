"""Tracks the blocks that this pod holds, and the rollouts in them that are not stored yet.

Only the I/O thread uses this module (:mod:`~megaflow_hpc.pod.master.run_io`).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from megaflow_hpc.errors import LedgerError
from megaflow_hpc.ledger import Claim, Ledger, read_block
from megaflow_hpc.ledger.tasks import PlannedTask
from megaflow_hpc.pod.master.histories import Histories, History
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.trajectories.journal.winners import StoredBlock, StoredRollouts
from megaflow_hpc.types import Rollout

SMALL = 16
"""Blocks are read in advance only if they contain at most this many rollouts. Larger blocks fill the pod's queue early
enough."""
SPREAD = 64
"""Number of free blocks from which a pod picks. It limits how far pods deviate from the claim order."""


@dataclass(frozen=True)
class ClaimedBlock:
    """A block that this pod has just claimed, with the tasks and histories of its rollouts."""

    claim: Claim
    rollouts: tuple[Rollout, ...]
    """Rollouts of the block that are not stored."""
    histories: dict[str, History]
    """History of each rollout in earlier pods, by rollout id. The receiver may modify the mapping."""
    tasks: dict[str, PlannedTask]
    """Tasks of the rollouts to run, by task id. The receiver may modify the mapping."""
    upcoming: tuple[PlannedTask, ...]
    """Tasks of the blocks that this pod plans to claim next."""


@dataclass
class _Held:
    claim: Claim
    missing: set[str]


class ClaimedBlocks:
    """The blocks of one pod, from the claim until they are done or released.

    Args:
        stored: Reads the journals of a block's previous holders.
        tasks: The campaign's tasks. Only tasks of claimed or picked blocks are read.
        ahead: Number of small blocks to read before they are claimed.
    """

    def __init__(
        self,
        run: RunDir,
        ledger: Ledger,
        stored: StoredRollouts,
        tasks: Mapping[str, PlannedTask],
        ahead: int = 0,
    ) -> None:
        self._histories = Histories(run)
        self._tasks = tasks
        self._lookahead = BlockLookahead(run, ledger, tasks, ahead)
        self._run, self._ledger = run, ledger
        self._stored = stored
        self._held: dict[int, _Held] = {}
        self._unread: Claim | None = None

    def __len__(self) -> int:
        return len(self._held)

    def claim(self) -> ClaimedBlock | None:
        """Claims the next block. Returns ``None`` if no block is available now.

        Raises:
            LedgerError: The block is damaged, or the campaign has no task for a rollout.
            OSError: The run directory does not respond. The next call retries the same block.
        """
        claim = self._unread or self._ledger.claim(self._stored.length)
        if claim is None:
            return None
        self._unread = claim  # keep the claim until the block has been read, so that an error does not lose it
        unknown = claim.epoch > 0 and claim.left is None  # the previous holder did not list what is left
        earlier = [StoredBlock(epoch, seal.owner, seal.sealed) for epoch, seal in enumerate(claim.seals)]
        held = earlier if unknown else []
        size, todo = self._to_run(claim, held)
        tasks = planned(self._tasks, todo)
        if claim.epoch:  # in epoch 0, no rollout has a history
            self._histories.look(block.owner for block in earlier)
            self._histories.look_at_events({block.owner for block in held})
        self._unread = None
        self._held[claim.block] = _Held(claim, {rollout.id for rollout in todo})
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
        """Returns the number of rollouts in the claimed block, and those rollouts that are not stored yet."""
        rollouts = read_block(self._run, claim.block).rollouts
        stored: set[str] = set()
        if claim.left is not None:
            rollouts = tuple(rollout for rollout in rollouts if rollout.id in claim.left)
        elif held:
            stored = self._stored.ids(claim.block, held)
        return len(rollouts), tuple(rollout for rollout in rollouts if rollout.id not in stored)

    def settled(self, block: int, rollout_id: str) -> None:
        """Records that a rollout's result is durable. Marks the block done after its last rollout.

        Raises:
            LedgerError: Another pod took over the block.
            OSError: The run directory does not respond.
        """
        held = self._held.get(block)
        if held is not None:
            held.missing.discard(rollout_id)
            if not held.missing:
                self._finish(block)

    def release(self, sealed: int) -> None:
        """Releases every block that is not done.

        Args:
            sealed: Number of durable bytes in this pod's journal.

        Raises:
            OSError: The run directory does not respond.
        """
        for held in self._held.values():
            self._ledger.release(held.claim, sealed, held.missing)
        self._held.clear()

    def _finish(self, block: int) -> None:
        self._ledger.mark_done(self._held[block].claim)
        del self._held[block]


class BlockLookahead:
    """Reads free blocks before the pod claims them, so that their images can be staged in time.

    While blocks are large, a pod's queue shows which images are needed next. The last blocks of a campaign contain one
    rollout or group each. A pod claims them only when a slot is free, and it is then too late to stage their images.
    Therefore each pod picks a few of these blocks in advance, stages their images and claims them first. Pods start
    picking at different positions, so they rarely claim a block that another pod has picked.

    Args:
        count: Number of blocks to pick at a time.
    """

    def __init__(self, run: RunDir, ledger: Ledger, tasks: Mapping[str, PlannedTask], count: int) -> None:
        self._run, self._ledger, self._tasks, self._count = run, ledger, tasks, count
        self._picked: dict[int, dict[str, PlannedTask]] = {}
        """Maps each picked block to its tasks, by task id."""
        self.tasks: list[PlannedTask] = []
        """Tasks of the picked blocks, without duplicates."""

    def claimed(self, rollouts: int) -> None:
        """Updates the picked blocks after the pod has claimed a block with ``rollouts`` rollouts.

        Skips blocks that cannot be read now, because raising an error would lose the claim.
        """
        free = self._ledger.free if rollouts <= SMALL and self._count else []
        self._picked = {block: tasks for block, tasks in self._picked.items() if block in free}
        for block in self._more(free):
            with suppress(LedgerError, OSError):  # not readable yet; a later call retries
                self._picked[block] = planned(self._tasks, read_block(self._run, block).rollouts)
        self._ledger.prefer(self._picked)
        by_id: dict[str, PlannedTask] = {}
        for tasks in self._picked.values():
            by_id |= tasks
        self.tasks = list(by_id.values())

    def _more(self, free: list[int]) -> list[int]:
        """Returns more blocks to pick. Each pod starts at a position derived from its name."""
        near = [block for block in free if block not in self._picked][:SPREAD]
        missing = min(self._count - len(self._picked), len(near))
        if missing <= 0:
            return []
        name = self._ledger.identity.name if self._ledger.identity else ""
        start = zlib.crc32(name.encode()) % (len(near) - missing + 1)
        return near[start : start + missing]


def planned(tasks: Mapping[str, PlannedTask], rollouts: Iterable[Rollout]) -> dict[str, PlannedTask]:
    """Returns the tasks of ``rollouts`` by task id, in order of first use.

    Raises:
        LedgerError: The campaign has no task for a rollout.
        ConfigError: The task file is damaged or missing.
        OSError: The run directory does not respond.
    """
    try:
        return {name: tasks[name] for name in dict.fromkeys(rollout.task_id for rollout in rollouts)}
    except KeyError as error:
        raise LedgerError(f"a block names the task {error}, which the campaign does not have") from None
