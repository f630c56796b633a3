"""The blocks that this pod has claimed, and what is still missing of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megaflow_hpc.ledger import Claim, Ledger, read_block
from megaflow_hpc.pod.events import Events
from megaflow_hpc.rundir import RunDir
from megaflow_hpc.types import Rollout


@dataclass
class _Held:
    claim: Claim
    missing: set[str]


class Holdings:
    """
    Args:
        journal_length: of the journal of a pod (``<pod>.<start>``) whose block is taken over.
        stored: ids of the rollouts that are stored and did not fail; asked once, when a block is first taken over.
    """

    def __init__(
        self,
        run: RunDir,
        ledger: Ledger,
        events: Events,
        journal_length: Callable[[str], int],
        stored: Callable[[], set[str]],
    ) -> None:
        self._run, self._ledger, self._events = run, ledger, events
        self._journal_length, self._stored = journal_length, stored
        self._held: dict[int, _Held] = {}
        self._stored_ids: set[str] | None = None

    def __len__(self) -> int:
        return len(self._held)

    def claim(self) -> tuple[Claim, list[Rollout]] | None:
        """Claims the next block; with what of it has to run. ``None`` while there is none to be had."""
        claim = self._ledger.claim(self._journal_length)
        if claim is None:
            return None
        stored: set[str] = set()
        if claim.epoch:
            # Asked once: what is stored meanwhile is run again at worst, and counts once all the same.
            self._stored_ids = stored = self._stored() if self._stored_ids is None else self._stored_ids
        todo = [rollout for rollout in read_block(self._run, claim.block).rollouts if rollout.id not in stored]
        self._held[claim.block] = _Held(claim, {rollout.id for rollout in todo})
        self._say(claim, "claimed", rollouts=len(todo))
        if not todo:
            self._finish(claim.block)
        return claim, todo

    def settled(self, block: int, rollout_id: str) -> None:
        """A rollout is durable; with its last one the block is marked done."""
        held = self._held.get(block)
        if held is not None:
            held.missing.discard(rollout_id)
            if not held.missing:
                self._finish(block)

    def release(self) -> None:
        """Gives back every block that is not done."""
        for held in self._held.values():
            self._ledger.release(held.claim)
            self._say(held.claim, "released")
        self._held.clear()

    def _finish(self, block: int) -> None:
        claim = self._held.pop(block).claim
        self._ledger.mark_done(claim)
        self._say(claim, "done")

    def _say(self, claim: Claim, state: str, **more: int) -> None:
        self._events.write("claim", block=claim.block, epoch=claim.epoch, state=state, **more)
