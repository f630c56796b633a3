"""The blocks that this pod has claimed, and what is still missing of each."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby

from megaflow_hpc.ledger import Claim, Ledger, read_block
from megaflow_hpc.ledger.names import GIVEN
from megaflow_hpc.pod.master.histories import Histories, History
from megaflow_hpc.pod.master.lookahead import Foresight
from megaflow_hpc.rundir.events import ClaimEvent, EventWriter
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.types import Rollout


@dataclass
class _Held:
    claim: Claim
    missing: set[str]


class Holdings:
    """
    Args:
        journal_length: of the journal of a pod (``<pod>.<start>``) whose block is taken over, or of this one's own.
        stored: ids of the rollouts that are stored and did not fail; asked once, when a dead pod's block is taken over.
        ahead: blocks of few rollouts that are looked into before they are claimed.
    """

    def __init__(
        self,
        run: RunDir,
        ledger: Ledger,
        events: EventWriter,
        journal_length: Callable[[str], int],
        stored: Callable[[], set[str]],
        ahead: int = 0,
    ) -> None:
        self._histories = Histories(run)
        self._foresight = Foresight(run, ledger, ahead)
        self._run, self._ledger, self._events = run, ledger, events
        self._journal_length, self._stored = journal_length, stored
        self._held: dict[int, _Held] = {}
        self._stored_ids: set[str] | None = None
        self._unread: Claim | None = None
        self._gifts: list[tuple[int, list[Rollout], str]] = []
        """Block, rollouts and token of what is to be given: kept until that is known to be done."""
        self._gift = 0
        self._offers: deque[tuple[list[tuple[int, Rollout]], int]] = deque()
        self._wanted = self._said = 0
        self._ask = self._looking = False
        self._answers: deque[int] = deque()
        self._served: set[str] = set()

    def __len__(self) -> int:
        return len(self._held)

    def claim(self) -> tuple[Claim, list[Rollout]] | None:
        """Claims the next block; with what of it has to run. ``None`` while there is none to be had."""
        claim = self._unread or self._ledger.claim(self._journal_length)
        if claim is None:
            return None
        self._unread = claim  # until it has been read: an error in between must not lose it
        rollouts = read_block(self._run, claim.block).rollouts
        stored: set[str] = set()
        if claim.left is not None:
            rollouts = tuple(rollout for rollout in rollouts if rollout.id in claim.left)
        elif claim.epoch:
            # Asked once: what is stored meanwhile is run again at worst, and counts once all the same.
            self._stored_ids = stored = self._stored() if self._stored_ids is None else self._stored_ids
        todo = [rollout for rollout in rollouts if rollout.id not in stored and rollout.id not in claim.without]
        if claim.epoch or claim.block >= GIVEN:
            self._histories.look()
            if claim.epoch and claim.left is None:
                self._histories.look_at_events()
        self._unread = None
        self._held[claim.block] = _Held(claim, {rollout.id for rollout in todo})
        self._say(claim, "claimed", rollouts=len(todo))
        self._foresight.claimed(len(rollouts))
        if not todo:
            self._finish(claim.block)
        return claim, todo

    @property
    def coming(self) -> list[str]:
        """Tasks of blocks that this pod will claim next, as far as it looks ahead."""
        return self._foresight.tasks

    def history(self, rollout_id: str) -> History | None:
        """What earlier pods have told of a rollout that was claimed; once."""
        return self._histories.take(rollout_id)

    def settled(self, block: int, rollout_id: str) -> None:
        """A rollout is durable; with its last one the block is marked done."""
        held = self._held.get(block)
        if held is not None:
            held.missing.discard(rollout_id)
            if not held.missing:
                self._finish(block)

    # --- sharing: called by the loop, carried out by share() ---

    @property
    def others(self) -> bool:
        """Other pods hold blocks, as far as is known."""
        return self._ledger.others

    @property
    def claimed_all(self) -> bool:
        """No block was free when this pod looked last."""
        return not self._ledger.unclaimed

    def want(self, slots: int) -> None:
        """Asks other pods to fill so many slots; 0: no more."""
        self._wanted, self._ask = slots, slots > 0

    def look(self) -> None:
        """Has the ledger looked at for hungry pods; :meth:`asked` gives the answers."""
        self._looking = True

    def asked(self) -> Iterator[int]:
        """Slots that other pods want filled, each request once."""
        while self._answers:
            yield self._answers.popleft()

    def offer(self, rollouts: list[tuple[int, Rollout]], each: int) -> None:
        """Has rollouts given away that were taken out of the queue; see :meth:`give`."""
        self._offers.append((rollouts, each))

    @property
    def sharing(self) -> bool:
        """Something is on its way to other pods."""
        return bool(self._offers or self._gifts)

    def share(self) -> None:
        """Carries out what was asked for above."""
        self.hand_over()
        while self._offers:
            self.give(*self._offers.popleft())
        if self._ask or (self._said and not self._wanted):
            self._ask, self._said = False, self._wanted
            self._ledger.hunger(self._said)
        if self._looking:
            self._looking = False
            for request, slots in self._ledger.hungry().items():
                if request not in self._served:
                    self._served.add(request)
                    self._answers.append(slots)

    def give(self, rollouts: Iterable[tuple[int, Rollout]], each: int) -> None:
        """Hands rollouts that were not started, with the blocks they are of, to other pods.

        Args:
            each: rollouts a new block at most; those of a group stay together.
        """
        for block, of_block in groupby(sorted(rollouts, key=lambda pair: pair[0]), key=lambda pair: pair[0]):
            part: list[Rollout] = []
            for _, samples in groupby((rollout for _, rollout in of_block), key=lambda rollout: rollout.group_id):
                group = list(samples)
                if part and len(part) + len(group) > each:
                    self._keep_to_give(block, part)
                    part = []
                part += group
            self._keep_to_give(block, part)
        self.hand_over()

    def hand_over(self) -> None:
        """Gives what could not be given yet."""
        while self._gifts:
            block, rollouts, token = self._gifts[0]
            held = self._held[block]
            if not self._ledger.give(held.claim, rollouts, token):
                return  # fenced: whoever takes over runs them
            self._gifts.pop(0)
            self._say(held.claim, "gave", rollouts=len(rollouts))
            for rollout in rollouts:
                self.settled(block, rollout.id)

    def release(self) -> None:
        """Gives back every block that is not done."""
        self._wanted = 0
        self.share()
        if not self._held:
            return
        sealed = self._journal_length(self._ledger.identity.name) if self._ledger.identity else 0
        for held in self._held.values():
            self._ledger.release(held.claim, sealed, held.missing)
            self._say(held.claim, "released", rollouts=len(held.missing))
        self._held.clear()

    def _keep_to_give(self, block: int, rollouts: list[Rollout]) -> None:
        self._gift += 1
        self._gifts.append((block, rollouts, f"gift.{self._gift}"))

    def _finish(self, block: int) -> None:
        claim = self._held[block].claim
        self._ledger.mark_done(claim)
        del self._held[block]
        self._say(claim, "done")

    def _say(self, claim: Claim, state: str, rollouts: int | None = None) -> None:
        self._events.write(ClaimEvent(block=claim.block, epoch=claim.epoch, state=state, rollouts=rollouts))
