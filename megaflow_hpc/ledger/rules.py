"""The rules by which pods share blocks: claims, seals, takeovers, handing off. Pure: no file is touched here.

*Claim.* ``claims/<block>.<epoch>`` is a name that one pod gets. It holds for as long as the pod's lease
(:mod:`megaflow_hpc.ledger.lease`).

*Takeover.* A block that was released, or whose pod is gone, is claimed with the next epoch. The claim records how much
of the predecessor's journal counts, its *seal*: what the predecessor said when it released, else what there is after it
was found to be gone. Whoever takes a block over leaves out what it handed off (:mod:`~megaflow_hpc.ledger.sharing`),
and lists the blocks handed off that it knows; one that appears later belongs to nobody and is marked done without a
run.

*The end.* Whoever finishes a block claims its next epoch and says that it is done: so a block is either done or taken
over, whatever its holder and its successor know of each other. A mark ``done/<block>.<epoch>.<n>`` repeats this for
those who list: that epoch ended the block, which handed off n others. The campaign is finished when all blocks that can
be seen are done, as many handed-off ones can be seen as the marks speak of, and no consumer may add some
(:mod:`megaflow_hpc.ledger.ending`).
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from megaflow_hpc.errors import LedgerError
from megaflow_hpc.ledger.calls import Length, Link, Names, Publish, Read, Steps, Touch
from megaflow_hpc.ledger.ending import Consumers, finish
from megaflow_hpc.ledger.lease import TIMES, Lease, PodIdentity, Times
from megaflow_hpc.ledger.names import (
    CLAIMS,
    DONE,
    FIRST_HANDED_OFF,
    RELEASED,
    TASKS,
    all_done,
    block_numbers,
    claim_path,
    done_blocks,
    done_path,
    latest,
    pairs,
)
from megaflow_hpc.ledger.report import Survey
from megaflow_hpc.ledger.sharing import NotYet, Sharing
from megaflow_hpc.types import Rollout

T = TypeVar("T")


@dataclass(frozen=True)
class Claim:
    """The right of one pod to commit the rollouts of one block."""

    block: int
    epoch: int
    left: tuple[str, ...] | None = field(default=None, compare=False)
    """Ids of the rollouts that are to be run, where the predecessor said so; ``None``: those not stored."""
    without: frozenset[str] = field(default=frozenset(), compare=False)
    """Ids that lie in blocks handed off."""


@dataclass
class Outlook:
    """What a pod's last look for a block to claim has shown."""

    unsettled: bool = False
    """Some block is held by a pod that was neither seen to renew nor is known to be gone."""
    others: bool = False
    """Some block is held by another pod that may be alive."""
    unfinished: bool = True
    """Some block is not done."""
    opened: bool = False
    """Where nothing was found: a consumer may add blocks, so the campaign is not finished."""
    awaited: bool = False
    """Where nothing was found: one of these has renewed its lease not long ago; it is worth staying."""


REFUSALS = 3
"""Claims that may be refused before the claims are listed again."""


class Rules(Lease):
    """What one start of a pod knows of the ledger; operations are steps, of which one runs at a time."""

    def __init__(self, identity: PodIdentity, times: Times = TIMES, pods: int = 1) -> None:
        """``pods``: how many may claim at the same time; each begins at a place of its own."""
        super().__init__(identity, times)
        self._place = _number(identity.pod) % pods
        self.surveyed: Survey | None = None
        """What another pod found out not long ago, where one does so for all."""
        self.held: set[Claim] = set()
        self._let_go: set[Claim] = set()
        """Held earlier: what a cache still shows of them is not to be believed."""
        self.seen = Outlook()
        self.consumers = Consumers(times.open_s)
        self.free: list[int] = []
        """After :meth:`claim`: the free blocks that it saw and left."""
        self.preferred: tuple[int, ...] = ()
        """Free blocks that are claimed before others, in this order."""
        self._done: dict[int, int] = {}
        self._blocks: list[int] = []
        self._known: set[int] = set()
        """Every block that any look has shown."""
        self._owners: dict[tuple[int, int], tuple[str, int | None]] = {}
        """Block and epoch → who claimed it and, if that ended the block, how many others it had handed off."""
        self._unanswered: set[tuple[int, int]] = set()
        """Claims that were asked for and whose answer was lost: they may be this pod's."""
        self.sharing = Sharing(identity.name)

    # --- claims ---

    def claim(self) -> Steps[Claim | None]:
        """Claims a block that is free or whose holder is gone; ``None`` if there is none now."""
        if not (yield from self.may_commit()):
            return None
        try:
            return (yield from self._claim())
        except NotYet:
            self.seen.unsettled = True
            return None

    def _claim(self) -> Steps[Claim | None]:
        if self.free and (claim := (yield from self._first(self.free))):
            return claim
        if (found := self._surveyed) and (found.open or found.opened) and not self._may_take(found):
            self.seen.unsettled, self.seen.others = False, found.open > len(self.held)
            self.seen.opened, self.seen.awaited = found.opened, found.awaited
            return None
        claim = yield from self._look()
        if claim is None:
            yield from self.consumers.look()
            self.seen.opened, self.seen.awaited = self.consumers.opened, self.consumers.awaited
            if not (self.seen.unfinished or self.seen.opened or (yield from self._finish())):
                self.seen.unsettled = True  # blocks were added before the last consumer left
        return claim

    @property
    def _surveyed(self) -> Survey | None:
        """What another pod found out, as far as it is enough: of a claim whose answer was lost only a look tells."""
        return None if self._unanswered else self.surveyed

    def _may_take(self, found: Survey) -> bool:
        return found.claimable > 0 or any(self._earlier(owner) for _, _, owner in found.orphans)

    def _look(self) -> Steps[Claim | None]:
        self._done = done_blocks((yield Names(DONE)))
        self._blocks = block_numbers((yield Names(TASKS)))  # after the marks: whoever is done has given before
        self.seen.unsettled = self.seen.others = False
        self._known.update(self._blocks)
        self.seen.unfinished = not all_done(self._done, self._blocks)
        if not self.seen.unfinished:
            return None
        claimed = latest((yield Names(CLAIMS)))
        open_blocks = [block for block in self._blocks if block not in self._done]
        free = [block for block in open_blocks if block not in claimed]
        held = {block: claimed[block] for block in open_blocks if block in claimed}
        # Whose element starts for the first time has nothing to take back; who holds what matters once nothing is free.
        taken = yield from self._take_over(held, released_only=bool(free) and self.identity.start == "0")
        if taken or not free:
            return taken
        claim = yield from self._first(free)
        self.seen.unsettled |= claim is None  # others were faster; there may be more
        return claim

    def _first(self, free: Sequence[int]) -> Steps[Claim | None]:
        """Claims one of these blocks that nobody else was faster to claim, and keeps what is left of them.

        Pods that begin together each begin at a place of their own: of those that all begin at the first one, most are
        refused. A block's number is its place in the order, so that no pod leaves it by more than the number of pods.
        """
        refused = 0
        left = list(free)
        self.free = []
        while left:
            block = next((block for block in self.preferred if block in left), left[self._place % len(left)])
            left.remove(block)
            if block >= FIRST_HANDED_OFF and not (yield from self._belongs(block)):
                continue
            if (yield from self._take(block, 0, {"owner": self.identity.name}, every="")):
                self.free = left
                return self._hold(Claim(block, 0))
            refused += 1
            if refused % REFUSALS == 1:
                claimed = latest((yield Names(CLAIMS)))
                left = [block for block in left if block not in claimed]
        return None

    def _take(self, block: int, epoch: int, content: Mapping[str, Any], every: str | None = None) -> Steps[bool]:
        """``every``: names the claims of this pod that have the same content, and so one private file."""
        token = f"{block}.{epoch}" if every is None else every
        name = f"{self.identity.name}.{token}"
        self._unanswered.add((block, epoch))
        won: bool = yield Link(claim_path(block, epoch), content, name, keep=every is not None)
        self._unanswered.discard((block, epoch))
        if won:
            self._owners[block, epoch] = self.identity.name, content.get("done")
        return won

    def _hold(self, claim: Claim) -> Claim:
        self.held.add(claim)
        return claim

    def _take_over(self, claimed: Mapping[int, int], released_only: bool) -> Steps[Claim | None]:
        me = self.identity.name
        released = pairs((yield Names(RELEASED)))
        owners, told = {}, self._surveyed
        orphans = {(block, epoch): owner for block, epoch, owner in told.orphans} if told else {}
        self._owners.update({claim: (owner, None) for claim, owner in orphans.items()})
        for block, epoch in () if released_only else claimed.items():
            if (block, epoch) in released:
                continue
            if told and (block, epoch) not in orphans:  # whoever has it is alive, or the next survey will tell
                self.seen.others |= Claim(block, epoch) not in self.held
                continue
            owner, given = yield from self._owner(block, epoch)
            if given is not None:
                yield Touch(done_path(block, epoch, given))  # its pod may have died before it could
            elif owner == me and Claim(block, epoch) not in self.held | self._let_go:
                return self._hold((yield from self._again(block, epoch)))  # the answer to our claim had been lost
            else:
                owners[block] = owner
        if not (released_only or told):  # what a cached listing does not show yet, a later one may
            self._unanswered -= {(b, e) for b, e in self._unanswered if b in self._done or claimed.get(b, -1) >= e}
        gone = yield from self._look_after(set(owners.values()) - {me})
        for block, owner in _from(self._place, list(owners.items())):
            if owner in gone:
                content = yield from self._what_counts(block, owner)
                if claim := (yield from self._succeed(block, claimed[block], owner, content)):
                    return claim
            else:
                self.seen.unsettled |= owner not in (me, *self._alive)
                self.seen.others |= owner != me
        given_back = [(block, epoch) for block, epoch in claimed.items() if (block, epoch) in released]
        for block, epoch in _from(self._place, given_back):
            said = yield Read(f"{RELEASED}/{block:06d}.{epoch}")
            if said is None:
                continue  # listed and not yet to be seen: a cache will let it through
            owner, _ = yield from self._owner(block, epoch)
            content = {"sealed": said["sealed"], "left": said["left"], "given": said["given"]}
            if claim := (yield from self._succeed(block, epoch, owner, content)):
                return claim
        return None

    def _succeed(self, block: int, epoch: int, owner: str, content: Mapping[str, Any]) -> Steps[Claim | None]:
        whole = {"owner": self.identity.name, "predecessor": owner, **content}
        if (yield from self._take(block, epoch + 1, whole)):
            return self._hold((yield from self._taken(block, epoch + 1, whole)))
        return None

    def _what_counts(self, block: int, owner: str) -> Steps[dict[str, Any]]:
        """Returns, of a block whose holder is gone, the seal of its journal and the blocks handed off."""
        self._blocks = block_numbers((yield Names(TASKS)))
        given = yield from self.sharing.handed_off_by(block, self._blocks)
        return {"sealed": (yield Length(owner)), "left": None, "given": given}

    def _taken(self, block: int, epoch: int, content: Mapping[str, Any]) -> Steps[Claim]:
        without = yield from self.sharing.take_over(block, content["given"])
        left = content["left"]
        return Claim(block, epoch, None if left is None else tuple(left), without)

    def _again(self, block: int, epoch: int) -> Steps[Claim]:
        if not epoch:
            return Claim(block, epoch)
        content = yield Read(claim_path(block, epoch))
        if content is None:
            raise NotYet
        return (yield from self._taken(block, epoch, content))

    def _belongs(self, number: int) -> Steps[bool]:
        """Tells whether a block handed off counts; one that its origin's next holder did not know is marked done."""
        block, epoch, _ = yield from self.sharing.parent(number)
        successor = yield Read(claim_path(block, epoch + 1))
        if successor is None or "done" in successor or isinstance(successor["given"], int):
            return True
        if number in successor["given"]:
            return True
        yield from self._end(number, 0, 0)
        return False

    def _owner(self, block: int, epoch: int) -> Steps[tuple[str, int | None]]:
        if (block, epoch) not in self._owners:
            content = yield Read(claim_path(block, epoch))
            if content is None:
                raise NotYet
            self._owners[block, epoch] = str(content["owner"]), content.get("done")
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
        content = {"sealed": sealed, "left": sorted(left), "given": self.sharing.given(claim.block)}
        yield Publish(f"{RELEASED}/{claim.block:06d}.{claim.epoch}", content)

    def hand_off(self, claim: Claim, rollouts: Sequence[Rollout], token: str) -> Steps[bool]:
        """Hands rollouts of a held block, none of them started, to others. They must not be started hereafter.

        Args:
            token: names this hand-off; a repeated call with it, after an error, is the same one.
        """
        if not (yield from self.may_commit()):
            return False
        yield from self.sharing.hand_off(claim.block, claim.epoch, rollouts, token)
        return True

    def mark_done(self, claim: Claim) -> Steps[None]:
        """Marks a block done: every rollout of it is durable. Writes the finished mark after the last block.

        Raises:
            LedgerError: the block was taken over; what this pod stored late does not count.
        """
        if not (yield from self._end(claim.block, claim.epoch + 1, self.sharing.given(claim.block))):
            raise LedgerError(
                f"block {claim.block} was taken over from epoch {claim.epoch}; this pod was too slow to renew"
            )
        self._drop(claim)
        if not self.held:
            yield from self._finish()

    def _end(self, block: int, epoch: int, given: int) -> Steps[bool]:
        me = self.identity.name
        ended = self._owners.get((block, epoch)) == (me, given)  # the mark alone had failed
        if not ended and not (yield from self._take(block, epoch, {"owner": me, "done": given}, every=f"done.{given}")):
            return False
        yield Touch(done_path(block, epoch, given))
        return True

    def _finish(self) -> Steps[bool]:
        return (yield from finish(self.identity.name, self._known))


def _from(place: int, items: list[T]) -> list[T]:
    """All of them, from a pod's own place on: pods that look at the same time do not all begin with the same one."""
    place %= max(1, len(items))
    return items[place:] + items[:place]


def _number(pod: str) -> int:
    """A number of a pod: that of an array's element, else one that its name gives."""
    element = re.search(r"_(\d+)(?:@|$)", pod)
    return int(element[1]) if element else zlib.crc32(pod.encode())
