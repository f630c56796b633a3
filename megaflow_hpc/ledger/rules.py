"""The rules by which pods share blocks: leases, claims, takeovers, hand-offs. Pure: no file is touched here.

*Fence.* A pod commits nothing once its lease is ``commit_s`` old, counted from *before* it was written. A result counts
if the fence is still open *after* the result became durable. A start that sees a later start of the same element closes
its fence for good: Slurm took its node for lost, and the later start takes its blocks over.

*Claim.* ``claims/<block>.<epoch>`` is a name that one pod gets. The claim holds for as long as the pod's lease.

*Takeover.* A block that was released, or whose pod is gone, is claimed with the next epoch. The claim records how much
of the predecessor's journal counts, its *seal*. The seal is what the predecessor released, or else the length of the
journal after the predecessor was found to be gone. The new holder leaves out what was handed off
(:mod:`~megaflow_hpc.ledger.hand_offs`) and lists the handed-off blocks that it knows. A block that appears later
belongs to no pod and is marked done without a run.

*End of a block.* The pod that finishes a block claims its next epoch with the word *done*. So a block is either done or
taken over, whatever its holder and its successor know of each other. A mark ``done/<block>.<epoch>.<n>`` repeats this
for listings: that epoch ended the block, from which n blocks were handed off. The campaign is finished when all visible
blocks are done, as many handed-off blocks are visible as the marks count, and no consumer may add blocks
(:mod:`megaflow_hpc.ledger.ending`).
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from typing import Any, NamedTuple, TypeVar

from megaflow_hpc.errors import LedgerError
from megaflow_hpc.ledger.calls import Clock, Do, Length, Link, Names, Publish, Read, Steps, There, Touch
from megaflow_hpc.ledger.ending import Consumers, finish
from megaflow_hpc.ledger.hand_offs import HandOffs, NotYet
from megaflow_hpc.ledger.lease import TIMES, Lease, PodIdentity, Times
from megaflow_hpc.ledger.names import (
    CLAIMS,
    DONE,
    FIRST_HANDED_OFF,
    GONE,
    LEASES,
    RELEASED,
    TASKS,
    all_done,
    block_numbers,
    claim_path,
    done_blocks,
    done_path,
    earlier,
    latest,
    pairs,
)
from megaflow_hpc.ledger.report import Survey
from megaflow_hpc.types import Rollout

T = TypeVar("T")

MAX_REFUSALS = 3
"""Claims that may be refused before the claims are listed again."""


@dataclass(frozen=True)
class Claim:
    """The right of one pod to commit the rollouts of one block."""

    block: int
    epoch: int
    left: tuple[str, ...] | None = field(default=None, compare=False)
    """Ids of the rollouts to run, as the predecessor released them. ``None``: those that are not stored."""
    without: frozenset[str] = field(default=frozenset(), compare=False)
    """Ids of the rollouts that were handed off."""


class Holding(Enum):
    """State of a claimed block that is neither done nor released, as one pod sees it. Each leads to one next step.

    ========== ======================================================= ==========================================
    state      known because                                           next step
    ========== ======================================================= ==========================================
    ENDED      the claim says that its block is done                   write the done mark, which its pod did not
    FORGOTTEN  the claim is ours, and we neither held nor dropped it   hold it: the answer to our call was lost
    OURS       the claim is ours                                       none
    GONE       its pod is marked as gone, or its lease expired         claim the next epoch
    ALIVE      its pod was seen to renew, or a survey says so          none
    SILENT     nothing is known of its pod yet                         look again
    ========== ======================================================= ==========================================
    """

    ENDED = "ended"
    FORGOTTEN = "forgotten"
    OURS = "ours"
    GONE = "gone"
    ALIVE = "alive"
    SILENT = "silent"


class HeldBlock(NamedTuple):
    """One claimed block and its state."""

    block: int
    epoch: int
    state: Holding
    owner: str = ""
    """``<pod>.<start>``. Empty if a survey says that the pod is alive."""
    handed_off: int = 0
    """Blocks that were handed off from a block that ended."""


@dataclass(frozen=True)
class Outlook:
    """What a pod's last look for a block to claim has shown."""

    unsettled: bool = False
    """Some block may become free soon: it is not known whether its pod is alive, or other pods were faster."""
    others: bool = False
    """Some block is held by another pod that may be alive."""
    unfinished: bool = True
    """Some block is not done."""
    opened: bool = False
    """If nothing was claimed: a consumer may add blocks, so the campaign is not finished."""
    awaited: bool = False
    """If nothing was claimed: the lease of such a consumer has not expired, so the pod should stay."""


class LedgerRules:
    """The ledger as one start of a pod knows it. Operations are steps; one operation runs at a time."""

    def __init__(self, identity: PodIdentity, times: Times = TIMES, pods: int = 1) -> None:
        """``pods``: number of pods that may claim at the same time. Each starts at its own place in the order."""
        self.identity, self.times = identity, times
        self._place = _number(identity.pod) % pods
        self.lease = Lease(f"{LEASES}/{identity.name}")
        self.renew_s = times.renew_s
        """Seconds between renewals. Short if the lease shows the pod's progress to readers."""
        self.progress: dict[str, Any] = {}
        """Further content of the lease."""
        self.superseded = False
        """A later start of this element has a lease."""
        self.leases: dict[str, Lease] = {}
        """Leases of other pods, by ``<pod>.<start>``."""
        self.surveyed: Survey | None = None
        """The latest survey of another pod, if one pod surveys for all. That pod reads all leases instead of us."""
        self.held: set[Claim] = set()
        self._dropped: set[Claim] = set()
        """Claims held earlier. A cache may still show them."""
        self.seen = Outlook()
        self.consumers = Consumers(times.open_s)
        self.hand_offs = HandOffs(identity.name)
        self.free: list[int] = []
        """After :meth:`claim`: the free blocks that it saw and left."""
        self.preferred: tuple[int, ...] = ()
        """Free blocks that are claimed before other blocks, in this order."""
        self._known: set[int] = set()
        """Every block that any look has shown."""
        self._owners: dict[tuple[int, int], tuple[str, int | None]] = {}
        """Block and epoch → owner of the claim and, if it ended the block, the number of blocks handed off."""
        self._unanswered: set[tuple[int, int]] = set()
        """Claims of ours whose answer was lost. They may have succeeded."""

    # --- the lease and the fence ---

    @property
    def closes_at(self) -> float:
        """When the fence closes, by this machine's clock. Minus infinity before the lease was written."""
        return -math.inf if self.superseded else self.lease.renewed_at + self.times.commit_s

    def open_at(self, now: float) -> bool:
        """Tells whether the fence is open: results that became durable until ``now`` count."""
        return now < self.closes_at

    def may_commit(self) -> Steps[bool]:
        """Tells whether the fence is open now."""
        return self.open_at((yield Clock()))

    def committed(self, commit: Callable[[], object]) -> Steps[bool]:
        """Calls ``commit``. True if it counts: the fence was open before, and still is now that all is durable."""
        if not (yield from self.may_commit()):
            return False
        yield Do(commit)
        return (yield from self.may_commit())

    def renew(self, force: bool = False) -> Steps[None]:
        """Renews the lease when that is due, or by ``force``. Never renews an old lease: a takeover may have begun."""
        now: float = yield Clock()
        content = {**asdict(self.identity), **self.progress}
        if not self.lease.counter:
            yield from self.lease.publish(now, content)
        elif self.open_at(now) and (force or now - self.lease.renewed_at >= self.renew_s):
            yield from self.lease.rewrite(now, content)
        else:
            return
        start = self.identity.start
        if start.isdigit() and (yield There(f"{LEASES}/{self.identity.pod}.{int(start) + 1}")):
            self.superseded = True

    def _look_after(self, owners: Collection[str]) -> Steps[set[str]]:
        """Returns those of ``owners`` that are gone."""
        marked = set((yield Names(GONE))) if owners else set()
        gone = set()
        for owner in sorted(owners):
            is_gone = owner in marked or self._is_earlier_start(owner)
            if not is_gone and self.surveyed is None:
                is_gone = yield from self.expired(owner)
            if is_gone:
                gone.add(owner)
        return gone

    def _is_earlier_start(self, owner: str) -> bool:
        pod, _, start = owner.rpartition(".")
        return pod == self.identity.pod and earlier(start, self.identity.start)

    def expired(self, owner: str) -> Steps[bool]:
        """Reads the lease of another pod. Returns whether it has expired."""
        lease = self.leases.setdefault(owner, Lease(f"{LEASES}/{owner}"))
        unchanged_s = yield from lease.look()
        return unchanged_s > self.times.lease_s

    def _is_alive(self, owner: str) -> bool:
        return self.surveyed is not None or (owner in self.leases and self.leases[owner].changed)

    # --- claims ---

    def claim(self) -> Steps[Claim | None]:
        """Claims a block that is free or whose holder is gone. ``None`` if no block is available now."""
        if not (yield from self.may_commit()):
            return None
        try:
            return (yield from self._claim())
        except NotYet:
            self.seen = replace(self.seen, unsettled=True)
            return None

    def _claim(self) -> Steps[Claim | None]:
        if self.free and (claim := (yield from self._first_of(self.free))):
            return claim
        survey = self._usable_survey
        if survey and (survey.open or survey.opened) and not self._may_take(survey):
            others = survey.open > len(self.held)
            self.seen = Outlook(False, others, survey.open > 0, survey.opened, survey.awaited)
            return None
        claim = yield from self._look()
        if claim is not None:
            return claim
        yield from self.consumers.look()
        self.seen = replace(self.seen, opened=self.consumers.opened, awaited=self.consumers.awaited)
        if not (self.seen.unfinished or self.seen.opened or (yield from self._finish())):
            self.seen = replace(self.seen, unsettled=True)  # blocks were added before the last consumer left
        return None

    @property
    def _usable_survey(self) -> Survey | None:
        """The latest survey. It cannot tell whether a claim whose answer was lost is ours: only a look can."""
        return None if self._unanswered else self.surveyed

    def _may_take(self, survey: Survey) -> bool:
        return survey.claimable > 0 or any(self._is_earlier_start(owner) for _, _, owner in survey.orphans)

    def _look(self) -> Steps[Claim | None]:
        """Lists the ledger and claims what can be claimed."""
        done = done_blocks((yield Names(DONE)))
        blocks = block_numbers((yield Names(TASKS)))  # after the marks: a pod hands off before it is done
        self._known.update(blocks)
        if all_done(done, blocks):
            self.seen = replace(self.seen, unfinished=False, unsettled=False, others=False)
            return None
        self.seen = replace(self.seen, unfinished=True, unsettled=False, others=False)
        epochs = latest((yield Names(CLAIMS)))
        open_blocks = [block for block in blocks if block not in done]
        free = [block for block in open_blocks if block not in epochs]
        claimed = {block: epochs[block] for block in open_blocks if block in epochs}
        released = pairs((yield Names(RELEASED)))
        # The first start of a pod has no earlier claims to reclaim. While blocks are free, their holders do not matter.
        if not free or self.identity.start != "0":
            taken = yield from self._take_held(claimed, released, done)
            if taken is not None:
                return taken
        taken = yield from self._take_released([claim for claim in claimed.items() if claim in released])
        if taken is not None or not free:
            return taken
        claim = yield from self._first_of(free)
        if claim is None:
            self.seen = replace(self.seen, unsettled=True)  # other pods were faster; there may be more
        return claim

    def _take_held(
        self, claimed: Mapping[int, int], released: Collection[tuple[int, int]], done: Collection[int]
    ) -> Steps[Claim | None]:
        """Does the next step of each block that is held (:class:`Holding`), until one of them brings a claim."""
        survey = self._usable_survey
        blocks = yield from self._states([claim for claim in claimed.items() if claim not in released], survey)
        for held in blocks:
            if held.state is Holding.ENDED:
                yield Touch(done_path(held.block, held.epoch, held.handed_off))
        for held in blocks:
            if held.state is Holding.FORGOTTEN:
                return self._hold((yield from self._remembered(held.block, held.epoch)))
        if survey is None:
            self._forget_answered(claimed, done)
        others = any(held.state in (Holding.ALIVE, Holding.SILENT) for held in blocks)
        unsettled = any(held.state is Holding.SILENT for held in blocks)
        self.seen = replace(self.seen, others=others, unsettled=unsettled)
        for held in _from(self._place, blocks):
            if held.state is Holding.GONE:
                seal = yield from self._seal(held.block, held.owner)
                claim = yield from self._succeed(held.block, held.epoch, held.owner, seal)
                if claim is not None:
                    return claim
        return None

    def _states(self, claimed: Iterable[tuple[int, int]], survey: Survey | None) -> Steps[list[HeldBlock]]:
        """Determines the state of claimed blocks. A survey saves reading the claims of pods that are alive."""
        orphans = {(block, epoch): owner for block, epoch, owner in survey.orphans} if survey else {}
        self._owners.update({claim: (owner, None) for claim, owner in orphans.items()})
        states: list[HeldBlock] = []
        of_others: list[HeldBlock] = []
        for block, epoch in claimed:
            claim = Claim(block, epoch)
            ours = claim in self.held or claim in self._dropped
            if survey is not None and (block, epoch) not in orphans:
                states.append(HeldBlock(block, epoch, Holding.OURS if ours else Holding.ALIVE))
                continue
            owner, handed_off = yield from self.owner(block, epoch)
            if handed_off is not None:
                states.append(HeldBlock(block, epoch, Holding.ENDED, owner, handed_off))
            elif owner == self.identity.name:
                states.append(HeldBlock(block, epoch, Holding.OURS if ours else Holding.FORGOTTEN, owner))
            else:
                of_others.append(HeldBlock(block, epoch, Holding.SILENT, owner))
        gone = yield from self._look_after({held.owner for held in of_others})
        for held in of_others:
            state = Holding.ALIVE if self._is_alive(held.owner) else Holding.SILENT
            states.append(held._replace(state=Holding.GONE if held.owner in gone else state))
        return states

    def _forget_answered(self, claimed: Mapping[int, int], done: Collection[int]) -> None:
        """Forgets the lost answers that this look has settled. A cached listing may not show the other claims yet."""
        for block, epoch in list(self._unanswered):
            if block in done or claimed.get(block, -1) >= epoch:
                self._unanswered.discard((block, epoch))

    def _take_released(self, released: Sequence[tuple[int, int]]) -> Steps[Claim | None]:
        """Claims one of the blocks that their pods gave back."""
        for block, epoch in _from(self._place, released):
            release = yield Read(f"{RELEASED}/{block:06d}.{epoch}")
            if release is None:
                continue  # listed, but hidden by a cache
            owner, _ = yield from self.owner(block, epoch)
            seal = {"sealed": release["sealed"], "left": release["left"], "given": release["given"]}
            claim = yield from self._succeed(block, epoch, owner, seal)
            if claim is not None:
                return claim
        return None

    def _first_of(self, free: Sequence[int]) -> Steps[Claim | None]:
        """Claims the first of these blocks that no other pod claimed faster, and keeps the rest of them.

        Pods that begin together each start at a place of their own. If all started at the first block, most would be
        refused. A block's number is its place in the order, so no pod leaves the order by more than the number of pods.
        """
        refused = 0
        left = list(free)
        self.free = []
        while left:
            block = next((block for block in self.preferred if block in left), left[self._place % len(left)])
            left.remove(block)
            if block >= FIRST_HANDED_OFF and not (yield from self._belongs(block)):
                continue
            if (yield from self._link(block, 0, {"owner": self.identity.name}, every="")):
                self.free = left
                return self._hold(Claim(block, 0))
            refused += 1
            if refused % MAX_REFUSALS == 1:
                claimed = latest((yield Names(CLAIMS)))
                left = [block for block in left if block not in claimed]
        return None

    def _succeed(self, block: int, epoch: int, owner: str, seal: Mapping[str, Any]) -> Steps[Claim | None]:
        """Claims the epoch after one of another pod, and seals that pod's journal."""
        content = {"owner": self.identity.name, "predecessor": owner, **seal}
        if not (yield from self._link(block, epoch + 1, content)):
            return None
        return self._hold((yield from self._claim_of(block, epoch + 1, content)))

    def _seal(self, block: int, owner: str) -> Steps[dict[str, Any]]:
        """Returns the seal of a pod that is gone: how much of its journal counts, and what was handed off."""
        blocks = block_numbers((yield Names(TASKS)))
        given = yield from self.hand_offs.made_of(block, blocks)
        return {"sealed": (yield Length(owner)), "left": None, "given": given}

    def _remembered(self, block: int, epoch: int) -> Steps[Claim]:
        """Returns a claim of ours whose answer had been lost."""
        if not epoch:
            return Claim(block, epoch)
        content = yield Read(claim_path(block, epoch))
        if content is None:
            raise NotYet
        return (yield from self._claim_of(block, epoch, content))

    def _claim_of(self, block: int, epoch: int, content: Mapping[str, Any]) -> Steps[Claim]:
        without = yield from self.hand_offs.take_over(block, content["given"])
        left = content["left"]
        return Claim(block, epoch, None if left is None else tuple(left), without)

    def _belongs(self, number: int) -> Steps[bool]:
        """Tells whether a handed-off block counts. Marks it done if its origin's next holder did not know it."""
        origin = yield from self.hand_offs.origin(number)
        successor = yield Read(claim_path(origin.block, origin.epoch + 1))
        if successor is None or "done" in successor or isinstance(successor["given"], int):
            return True
        if number in successor["given"]:
            return True
        yield from self._end(number, 0, 0)
        return False

    def owner(self, block: int, epoch: int) -> Steps[tuple[str, int | None]]:
        """Returns the owner of a claim and, if it ended its block, how many blocks were handed off. Raises NotYet."""
        if (block, epoch) not in self._owners:
            content = yield Read(claim_path(block, epoch))
            if content is None:
                raise NotYet
            self._owners[block, epoch] = str(content["owner"]), content.get("done")
        return self._owners[block, epoch]

    def _link(self, block: int, epoch: int, content: Mapping[str, Any], every: str | None = None) -> Steps[bool]:
        """Claims one epoch of a block. Returns whether this pod got it.

        Args:
            every: names the claims of this pod that have the same content, so that they share a private file.
        """
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

    # --- letting go ---

    def _drop(self, claim: Claim) -> None:
        self.held.discard(claim)
        self._dropped.add(claim)

    def release(self, claim: Claim, sealed: int, left: Iterable[str]) -> Steps[None]:
        """Gives a block back. Everything committed for it is durable within ``sealed`` bytes of the journal."""
        self._drop(claim)
        if not (yield from self.may_commit()):
            return
        content = {"sealed": sealed, "left": sorted(left), "given": self.hand_offs.count(claim.block)}
        yield Publish(f"{RELEASED}/{claim.block:06d}.{claim.epoch}", content)

    def hand_off(self, claim: Claim, rollouts: Sequence[Rollout], token: str) -> Steps[bool]:
        """Hands off rollouts of a held block that were not started. They must not be started hereafter.

        Args:
            token: names this hand-off. A repeated call with it, after an error, is the same hand-off.
        """
        if not (yield from self.may_commit()):
            return False
        yield from self.hand_offs.make(claim.block, claim.epoch, rollouts, token)
        return True

    def mark_done(self, claim: Claim) -> Steps[None]:
        """Marks a block done: every rollout of it is durable. Writes the finished mark after the last block.

        Raises:
            LedgerError: the block was taken over. What this pod stored late does not count.
        """
        if not (yield from self._end(claim.block, claim.epoch + 1, self.hand_offs.count(claim.block))):
            raise LedgerError(
                f"block {claim.block} was taken over from epoch {claim.epoch}; this pod was too slow to renew"
            )
        self._drop(claim)
        if not self.held:
            yield from self._finish()

    def _end(self, block: int, epoch: int, handed_off: int) -> Steps[bool]:
        me = self.identity.name
        claimed = self._owners.get((block, epoch)) == (me, handed_off)  # an earlier call failed at the mark
        if not claimed:
            content = {"owner": me, "done": handed_off}
            claimed = yield from self._link(block, epoch, content, every=f"done.{handed_off}")
        if claimed:
            yield Touch(done_path(block, epoch, handed_off))
        return claimed

    def _finish(self) -> Steps[bool]:
        return (yield from finish(self.identity.name, self._known))


def _from(place: int, items: Sequence[T]) -> list[T]:
    """Returns all items, starting at a pod's own place: pods that look at the same time start at different items."""
    place %= max(1, len(items))
    return [*items[place:], *items[:place]]


def _number(pod: str) -> int:
    """Returns the number of a pod's array element, or else a number that its name gives."""
    element = re.search(r"_(\d+)(?:@|$)", pod)
    return int(element[1]) if element else zlib.crc32(pod.encode())
