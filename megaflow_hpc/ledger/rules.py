"""The rules by which pods share blocks: claims, seals, takeovers, handing off. Pure: no file is touched here.

*Claim.* ``claims/<block>.<epoch>`` is a name that one pod gets. It holds for as long as the pod's lease
(:mod:`megaflow_hpc.ledger.lease`).

*Takeover.* A block that was released, or whose pod is gone, is claimed with the next epoch. The claim records how much
of the predecessor's journal counts, its *seal*: what the predecessor said when it released, else what there is after it
was found to be gone. *Handing off.* A pod hands rollouts that it has not started to others by a new block, numbered
from ``FIRST_HANDED_OFF`` on, that names the block they come from. Whoever takes that one over leaves them out, and
lists the blocks handed off that it knows; one that appears later belongs to nobody and is marked done without a run.

*The end.* A mark ``done/<block>.<n>`` says that a block is finished and handed off n others; the campaign is finished
when all blocks that can be seen are done and as many handed-off ones can be seen as the marks speak of.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from megaflow_hpc.errors import LedgerError
from megaflow_hpc.ledger.calls import Length, Link, Names, Publish, Read, Remove, Steps, There, Touch
from megaflow_hpc.ledger.lease import TIMES, Lease, PodIdentity, Times
from megaflow_hpc.ledger.names import (
    CLAIMS,
    DONE,
    FIRST_HANDED_OFF,
    RELEASED,
    REQUESTS,
    TASKS,
    all_done,
    block_numbers,
    claim_path,
    done_blocks,
    latest,
    pairs,
    task_path,
)
from megaflow_hpc.rundir.marks import FINISHED
from megaflow_hpc.types import Rollout


@dataclass(frozen=True)
class Claim:
    """The right of one pod to commit the rollouts of one block."""

    block: int
    epoch: int
    left: tuple[str, ...] | None = field(default=None, compare=False)
    """Ids of the rollouts that are to be run, where the predecessor said so; ``None``: those not stored."""
    without: frozenset[str] = field(default=frozenset(), compare=False)
    """Ids that lie in blocks handed off."""


class _NotYet(Exception):
    """A file is listed and cannot be opened: a cache will let it through at a later look."""


class Rules(Lease):
    """What one start of a pod knows of the ledger; operations are steps, of which one runs at a time."""

    def __init__(self, identity: PodIdentity, times: Times = TIMES) -> None:
        super().__init__(identity, times)
        self.held: set[Claim] = set()
        self._let_go: set[Claim] = set()
        """Held earlier: what a cache still shows of them is not to be believed."""
        self.unsettled = False
        """After :meth:`claim`: some block is held by a pod that was neither seen to renew nor is known to be gone."""
        self.unclaimed = 0
        """After :meth:`claim`: free blocks that it saw and left."""
        self.others = False
        """After :meth:`claim`: some block is held by another pod that may be alive."""
        self.unfinished = True
        """After :meth:`claim`: some block that it saw is not done."""
        self.free: list[int] = []
        """After :meth:`claim`: the free blocks that it saw and left, in the order in which they will be claimed."""
        self.preferred: frozenset[int] = frozenset()
        """Free blocks that are claimed before others."""
        self._done: dict[int, int] = {}
        self._blocks: list[int] = []
        self._owners: dict[tuple[int, int], str] = {}
        self._parents: dict[int, tuple[int, int, frozenset[str]]] = {}
        """Block handed off → block and epoch that it comes from, ids of its rollouts."""
        self._given: dict[int, int] = {}
        """Block → number of blocks that it handed off, as far as its holder must know."""
        self._request = ""
        """Path of the request that stands."""
        self._requests = 0

    # --- claims ---

    def claim(self) -> Steps[Claim | None]:
        """Claims a block that is free or whose holder is gone; ``None`` if there is none now."""
        if not (yield from self.may_commit()):
            return None
        try:
            return (yield from self._claim())
        except _NotYet:
            self.unsettled = True
            return None

    def _claim(self) -> Steps[Claim | None]:
        free, self.free = self._in_order(self.free), []
        if free and (claim := (yield from self._first(free[:1]))):  # seen at the last look: the link decides
            self.free, self.unclaimed = free[1:], len(free) - 1
            return claim
        if free:
            claimed = latest((yield Names(CLAIMS)))
            if claim := (yield from self._first([block for block in free if block not in claimed])):
                return claim
        self._done = done_blocks((yield Names(DONE)))
        self._blocks = block_numbers((yield Names(TASKS)))  # after the marks: whoever is done has given before
        self.unsettled, self.others, self.unclaimed = False, False, 0
        self.unfinished = not all_done(self._done, self._blocks)
        if not self.unfinished:
            yield from self._finish()
            return None
        claimed = latest((yield Names(CLAIMS)))
        open_blocks = [block for block in self._blocks if block not in self._done]
        taken = yield from self._take_over({block: claimed[block] for block in open_blocks if block in claimed})
        free = self._in_order(block for block in open_blocks if block not in claimed)
        return taken or (yield from self._first(free))

    def _in_order(self, free: Iterable[int]) -> list[int]:
        return sorted(free, key=lambda block: block not in self.preferred)

    def _first(self, free: Sequence[int]) -> Steps[Claim | None]:
        """Claims the first of these that nobody else was faster to claim."""
        for place, block in enumerate(free):
            if block >= FIRST_HANDED_OFF and not (yield from self._belongs(block)):
                continue
            if (yield from self._take(block, 0, {"owner": self.identity.name}, keep=True)):
                self.free = list(free[place + 1 :])
                self.unclaimed = len(self.free)
                return self._hold(Claim(block, 0))
        return None

    def _take(self, block: int, epoch: int, content: Mapping[str, Any], keep: bool = False) -> Steps[bool]:
        token = "" if keep else f"{block}.{epoch}"
        won: bool = yield Link(claim_path(block, epoch), content, f"{self.identity.name}.{token}", keep)
        if won:
            self._owners[block, epoch] = self.identity.name
        return won

    def _hold(self, claim: Claim) -> Claim:
        self.held.add(claim)
        return claim

    def _take_over(self, claimed: Mapping[int, int]) -> Steps[Claim | None]:
        me = self.identity.name
        released = pairs((yield Names(RELEASED)))
        owners = {}
        for block, epoch in claimed.items():
            owner = yield from self.owner(block, epoch)
            claim = Claim(block, epoch)
            if owner == me and (block, epoch) not in released and claim not in self.held | self._let_go:
                return self._hold((yield from self._again(block, epoch)))  # the answer to our claim had been lost
            owners[block] = owner
        waiting = {block for block, epoch in claimed.items() if (block, epoch) not in released}
        gone = yield from self._look_after({owners[block] for block in waiting} - {me})
        for block, epoch in claimed.items():
            owner, content = owners[block], {"owner": me, "predecessor": owners[block]}
            if block not in waiting:
                said = yield Read(f"{RELEASED}/{block:06d}.{epoch}")
                if said is None:
                    continue  # listed and not yet to be seen: a cache will let it through
                content |= {"sealed": said["sealed"], "left": said["left"], "given": said["given"]}
            elif owner in gone:
                content |= yield from self._what_counts(block, owner)
            else:
                self.unsettled |= owner not in (me, *self._alive)
                self.others |= owner != me
                continue
            if (yield from self._take(block, epoch + 1, content)):
                return self._hold(self._taken(block, epoch + 1, content))
        return None

    def _what_counts(self, block: int, owner: str) -> Steps[dict[str, Any]]:
        """Returns, of a block whose holder is gone, the seal of its journal and the blocks handed off."""
        self._blocks = block_numbers((yield Names(TASKS)))
        given = yield from self._given_by(block)
        return {"sealed": (yield Length(owner)), "left": None, "given": given}

    def _given_by(self, block: int) -> Steps[list[int]]:
        found = []
        for number in self._blocks:
            if number >= FIRST_HANDED_OFF and (yield from self._parent(number))[0] == block:
                found.append(number)
        return found

    def _taken(self, block: int, epoch: int, content: Mapping[str, Any]) -> Claim:
        left, given = content["left"], content["given"]
        self._given[block] = given if isinstance(given, int) else len(given)
        without = [] if isinstance(given, int) else [self._parents[number][2] for number in given]
        return Claim(block, epoch, None if left is None else tuple(left), frozenset().union(*without))

    def _again(self, block: int, epoch: int) -> Steps[Claim]:
        if not epoch:
            return Claim(block, epoch)
        content = yield Read(claim_path(block, epoch))
        if content is None:
            raise _NotYet
        if not isinstance(content["given"], int):
            for number in content["given"]:
                yield from self._parent(number)
        return self._taken(block, epoch, content)

    def _parent(self, number: int) -> Steps[tuple[int, int, frozenset[str]]]:
        if number not in self._parents:
            content = yield Read(task_path(number))
            if content is None:
                raise _NotYet
            ids = frozenset(Rollout(**rollout).id for rollout in content["rollouts"])
            self._parents[number] = int(content["from"][0]), int(content["from"][1]), ids
        return self._parents[number]

    def _belongs(self, number: int) -> Steps[bool]:
        """Tells whether a block handed off counts; one that its origin's next holder did not know is marked done."""
        block, epoch, _ = yield from self._parent(number)
        successor = yield Read(claim_path(block, epoch + 1))
        if successor is None or isinstance(successor["given"], int) or number in successor["given"]:
            return True
        yield Touch(f"{DONE}/{number:06d}.0")
        return False

    def owner(self, block: int, epoch: int) -> Steps[str]:
        """Returns the ``<pod>.<start>`` of a claim."""
        if (block, epoch) not in self._owners:
            content = yield Read(claim_path(block, epoch))
            if content is None:
                raise _NotYet
            self._owners[block, epoch] = str(content["owner"])
        return self._owners[block, epoch]

    # --- letting go ---

    def _drop(self, claim: Claim) -> None:
        self.held.discard(claim)
        self._let_go.add(claim)

    def release(self, claim: Claim, sealed: int, left: Iterable[str]) -> Steps[None]:
        """Gives a whole block back. What was committed for it is durable within ``sealed`` bytes of the journal."""
        self._drop(claim)
        if not (yield from self.may_commit()):
            return
        content = {"sealed": sealed, "left": sorted(left), "given": self._given.get(claim.block, 0)}
        yield Publish(f"{RELEASED}/{claim.block:06d}.{claim.epoch}", content)

    def hand_off(self, claim: Claim, rollouts: Sequence[Rollout], token: str) -> Steps[bool]:
        """Hands rollouts of a held block, none of them started, to others. They must not be started hereafter.

        Args:
            token: names this hand-off; a repeated call with it, after an error, is the same one.
        """
        if not (yield from self.may_commit()):
            return False
        numbers = block_numbers((yield Names(TASKS)))
        number = max([FIRST_HANDED_OFF - 1, *numbers]) + 1
        content = {"from": [claim.block, claim.epoch], "rollouts": [asdict(rollout) for rollout in rollouts]}
        while not (yield Link(task_path(number), content, f"{self.identity.name}.{token}")):
            number += 1
        self._given[claim.block] = self._given.get(claim.block, 0) + 1
        return True

    def mark_done(self, claim: Claim) -> Steps[None]:
        """Marks a block done: every rollout of it is durable. Writes the finished mark after the last block.

        Raises:
            LedgerError: the block was taken over; what this pod stored late does not count.
        """
        if (yield There(claim_path(claim.block, claim.epoch + 1))):
            raise LedgerError(
                f"block {claim.block} was taken over from epoch {claim.epoch}; this pod was too slow to renew"
            )
        if not (yield from self.may_commit()):
            return
        yield Touch(f"{DONE}/{claim.block:06d}.{self._given.get(claim.block, 0)}")
        self._drop(claim)
        if not self.held:
            done = done_blocks((yield Names(DONE)))
            if all_done(done, block_numbers((yield Names(TASKS)))):
                yield from self._finish()

    def _finish(self) -> Steps[None]:
        if not (yield There(FINISHED)):
            yield Publish(FINISHED, {"by": self.identity.name})

    # --- requests for work ---

    def request_work(self, slots: int) -> Steps[None]:
        """Tells others that this pod has so many free slots and found nothing to claim; 0 withdraws that."""
        before, self._request = self._request, ""
        if slots:
            self._requests += 1
            self._request = f"{REQUESTS}/{self.identity.name}.{self._requests}.{slots}"
            yield Touch(self._request)
        if before:
            yield Remove(before)

    def work_requests(self) -> Steps[dict[str, int]]:
        """Returns the slots that other pods ask to be filled, by request."""
        found = {}
        for name in (yield Names(REQUESTS)):
            owner, number, slots = name.rsplit(".", 2)
            if owner != self.identity.name:
                found[f"{owner}.{number}"] = int(slots)
        return found
