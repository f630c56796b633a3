"""Implements the protocol for sharing blocks between pods: leases, claims and takeovers. This module does no I/O
itself.

*Fence.* A pod may commit results while its fence is open. The fence closes once the pod's lease is ``commit_s`` seconds
old, measured from *before* the lease was written. A result is valid if the fence is still open *after* the result
became durable. A pod that sees a later start of the same array element closes its fence permanently: Slurm considers
its node lost, and the later start takes over its blocks.

*Claim.* Only one pod can create ``claims/<block>.<epoch>``. The claim is valid for as long as the pod's lease is.

*Takeover.* If a block was released, or its pod is gone, another pod claims the next epoch. The claim contains the
*seal*: how much of the predecessor's journal is valid. The predecessor writes the seal when it releases a block.
Otherwise, the seal is the length of the journal after the predecessor was found to be gone.

*End of a block.* The pod that finishes a block claims its next epoch with the word *done*. A block is therefore either
done or taken over, no matter what its holder and its successor know about each other. The mark ``done/<block>.<epoch>``
makes this visible in listings: the claim of that epoch ended the block. The campaign is finished when all visible
blocks are done and no consumer may add blocks (:mod:`megaflow_hpc.ledger.consumers`).
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
from megaflow_hpc.ledger.accounts import counted, take_over
from megaflow_hpc.ledger.calls import Clock, Do, Length, Link, Names, Publish, Read, Remove, Steps, There, Touch
from megaflow_hpc.ledger.consumers import Consumers, finish
from megaflow_hpc.ledger.leader import Survey
from megaflow_hpc.ledger.lease import TIMES, Lease, PodIdentity, Times
from megaflow_hpc.ledger.names import (
    CLAIMS,
    DONE,
    GONE,
    LEASES,
    RELEASED,
    TASKS,
    UNSTARTED,
    Seal,
    all_done,
    block_numbers,
    claim_path,
    done_blocks,
    done_path,
    earlier,
    latest,
    newest_starts,
    pairs,
    precedes,
    seals_in,
)

T = TypeVar("T")

MAX_REFUSALS = 3
"""Number of refused claims after which the claims are listed again."""


class NotYet(Exception):
    """Raised if a listed file cannot be read yet, because a cache hides it. A later poll will succeed."""


@dataclass(frozen=True)
class Claim:
    """A pod's right to commit the rollouts of one block."""

    block: int
    epoch: int
    left: tuple[str, ...] | None = field(default=None, compare=False)
    """Ids of the rollouts that the previous holder left when it released the block. ``None`` means all rollouts that
    are not stored."""
    seals: tuple[Seal, ...] = field(default=(), compare=False)
    """Seals of all earlier epochs of the block, starting with epoch 0."""


class Holding(Enum):
    """State of a claimed block that is neither done nor released, for one pod. Each state implies one next step.

    ========== ======================================================= ==========================================
    state      evidence                                                next step
    ========== ======================================================= ==========================================
    ENDED      the claim says that its block is done                   write the done mark, which its pod did not
    FORGOTTEN  this pod's claim, but it neither held nor dropped it    hold it, because the call's reply was lost
    OURS       this pod's claim                                        none
    GONE       its pod is marked as gone, or the lease has expired     claim the next epoch
    ALIVE      its pod renewed its lease, or a survey reports it alive none
    SILENT     nothing is known about its pod yet                      poll again
    ========== ======================================================= ==========================================
    """

    ENDED = "ended"
    FORGOTTEN = "forgotten"
    OURS = "ours"
    GONE = "gone"
    ALIVE = "alive"
    SILENT = "silent"


class HeldBlock(NamedTuple):
    """A claimed block and its state."""

    block: int
    epoch: int
    state: Holding
    owner: str = ""
    """Pod start ``<pod>.<start>`` that holds the block. Empty if a survey reports the holder as alive."""


@dataclass(frozen=True)
class Outlook:
    """Result of a pod's last search for a block to claim."""

    unsettled: bool = False
    """True if a block may become available soon, because a holder may be dead or other pods were faster."""
    unfinished: bool = True
    """True if any block is not done."""
    opened: bool = False
    """True if a consumer may add blocks, so that the campaign is not finished. Set only if no block was claimed."""
    awaited: bool = False
    """True if any consumer that may add blocks has an unexpired lease, in which case the pod should wait. Set only if
    no block was claimed."""


class LedgerRules:
    """The ledger protocol for one pod start, with what the pod knows about the ledger.

    Operations are generators of file-system calls. Only one operation may run at a time.

    Args:
        pods: Number of pods that may claim at the same time. Each pod starts at a different position in the claim
            order.
    """

    def __init__(self, identity: PodIdentity, times: Times = TIMES, pods: int = 1) -> None:
        self.identity, self.times = identity, times
        self._place = _number(identity.pod) % pods
        self.lease = Lease(f"{LEASES}/{identity.name}")
        self.renew_s = times.renew_s
        """Seconds between two renewals. Shorter than the default if the lease publishes the pod's progress."""
        self.progress: dict[str, Any] = {}
        """Progress to publish in the lease."""
        self.superseded = False
        """True if a later start of this array element has a lease, or has removed this pod's lease."""
        self.earlier: dict[str, Any] = {}
        """Totals of the earlier starts whose leases this start has removed (:mod:`megaflow_hpc.ledger.accounts`)."""
        self.leases: dict[str, Lease] = {}
        """Leases of other starts, by ``<pod>.<start>``."""
        self.surveyed: Survey | None = None
        """Latest survey by the coordinator, which reads all leases for the other pods. ``None`` if this pod scans the
        ledger itself."""
        self.held: set[Claim] = set()
        self._dropped: set[Claim] = set()
        """Claims that this pod no longer holds. A cache may still show them."""
        self.seen = Outlook()
        self.consumers = Consumers(times.open_s)
        self.free: list[int] = []
        """Blocks that were still free after the last :meth:`claim`."""
        self.preferred: tuple[int, ...] = ()
        """Blocks to claim first if they are free, in this order."""
        self._known: set[int] = set()
        """All blocks seen in any listing."""
        self._owners: dict[tuple[int, int], tuple[str, bool]] = {}
        """Holder of each claim, and whether the claim ended the block, by (block, epoch)."""
        self._chains: dict[tuple[int, int], tuple[str, ...]] = {}
        """Results of :meth:`owners` by (block, epoch). Only the coordinator uses them."""
        self._looked_at = -math.inf
        """Time when the last scan began, on this machine's clock."""
        self._unanswered: set[tuple[int, int]] = set()
        """This pod's claims to which the file system did not reply. They may have succeeded."""

    # --- the lease and the fence ---

    @property
    def closes_at(self) -> float:
        """Time on this machine's clock after which this pod must not commit. Minus infinity before the lease is
        written."""
        return -math.inf if self.superseded else self.lease.renewed_at + self.times.commit_s

    def open_at(self, now: float) -> bool:
        """Returns whether the fence is open at ``now``. Results that became durable before then are valid."""
        return now < self.closes_at

    def may_commit(self) -> Steps[bool]:
        """Returns whether the fence is open now."""
        return self.open_at((yield Clock()))

    def committed(self, commit: Callable[[], object]) -> Steps[bool]:
        """Calls ``commit``, which makes results durable. Returns whether they are valid.

        They are valid if the fence was open before the call, and is still open after the results became durable.
        """
        if not (yield from self.may_commit()):
            return False
        yield Do(commit)
        return (yield from self.may_commit())

    def renew(self, force: bool = False) -> Steps[None]:
        """Renews the lease if it is due, or always with ``force``. Does nothing if the fence has closed, because a
        takeover may have begun."""
        now: float = yield Clock()
        if not self.lease.counter:
            yield from self._register(now)
        elif self.open_at(now) and (force or now - self.lease.renewed_at >= self.renew_s):
            try:
                yield from self.lease.rewrite(now, self._content)
            except FileNotFoundError:
                self.superseded = True
            else:
                # Writing to the open file also succeeds after its removal, so check that it still exists.
                self.superseded = not (yield There(self.lease.path))

    @property
    def _content(self) -> dict[str, Any]:
        return {**asdict(self.identity), **self.progress, **({"earlier": self.earlier} if self.earlier else {})}

    def _register(self, now: float) -> Steps[None]:
        """Writes the lease, and removes the leases of the element's earlier starts, which are superseded.

        Start 0 has no earlier starts. If a later start already has a lease, this start writes none.
        """
        me = self.identity.name
        earlier: dict[str, dict[str, Any]] = {}
        if self.identity.start != "0":
            for name in (yield Names(LEASES)):
                if precedes(me, name):
                    self.superseded = True
                    return
                if precedes(name, me):
                    lease = self.leases.setdefault(name, Lease(f"{LEASES}/{name}"))
                    yield from lease.look()
                    earlier[name] = yield from counted(name, lease.content)
        self.earlier = take_over(earlier)
        yield from self.lease.publish(now, self._content)
        for name in earlier:
            yield Remove(f"{LEASES}/{name}")
        if self.identity.start != "0":
            yield Remove(f"{UNSTARTED}/{self.identity.pod}")

    def _look_after(self, owners: Collection[str]) -> Steps[set[str]]:
        """Returns the owners among ``owners`` that are gone."""
        marked = set((yield Names(GONE))) if owners else set()
        latest_marked = {name.rpartition(".")[0]: name for name in newest_starts(marked)}
        gone = set()
        for owner in sorted(owners):
            # A superseded start may not be marked itself, because its lease was removed.
            over = precedes(owner, latest_marked.get(owner.rpartition(".")[0], ""))
            is_gone = owner in marked or over or self._is_earlier_start(owner)
            if not is_gone and self.surveyed is None:
                is_gone = yield from self.expired(owner)
            if is_gone:
                gone.add(owner)
        return gone

    def _is_earlier_start(self, owner: str) -> bool:
        pod, _, start = owner.rpartition(".")
        return pod == self.identity.pod and earlier(start, self.identity.start)

    def expired(self, owner: str) -> Steps[bool]:
        """Reads the lease of another start. Returns True if it has expired."""
        lease = self.leases.setdefault(owner, Lease(f"{LEASES}/{owner}"))
        unchanged_s = yield from lease.look()
        return unchanged_s > self.times.lease_s

    def forget(self, leases: Collection[str], open_blocks: Collection[int]) -> None:
        """Drops cached data about other leases and blocks, so that memory does not grow with the campaign."""
        self.leases = {name: lease for name, lease in self.leases.items() if name in leases}
        keep = {*open_blocks, *(claim.block for claim in self.held)}
        self._owners = {claim: owner for claim, owner in self._owners.items() if claim[0] in keep}
        self._chains = {claim: owners for claim, owners in self._chains.items() if claim[0] in keep}
        self._dropped = {claim for claim in self._dropped if claim.block in keep}

    def _is_alive(self, owner: str) -> bool:
        return self.surveyed is not None or (owner in self.leases and self.leases[owner].changed)

    # --- claims ---

    def claim(self) -> Steps[Claim | None]:
        """Claims a block that is free or whose holder is gone. Returns ``None`` if no block is available now."""
        if not (yield from self.may_commit()):
            return None
        try:
            return (yield from self._claim())
        except NotYet:
            self.seen = replace(self.seen, unsettled=True)
            return None

    def _claim(self) -> Steps[Claim | None]:
        if self.free:
            claim = yield from self._first_of(self.free)
            if claim is not None:
                return claim
        survey = self._usable_survey
        if survey and (survey.open or survey.opened) and not self._may_take(survey):
            self.seen = Outlook(False, survey.open > 0, survey.opened, survey.awaited)
            return None
        claim = yield from self._look()
        if claim is not None:
            return claim
        yield from self.consumers.look()
        self.seen = replace(self.seen, opened=self.consumers.opened, awaited=self.consumers.awaited)
        if not (self.seen.unfinished or self.seen.opened or (yield from self._finish())):
            self.seen = replace(self.seen, unsettled=True)  # a consumer added blocks just before it left
        return None

    @property
    def _usable_survey(self) -> Survey | None:
        """The latest survey, or ``None`` if it cannot be used. If a reply was lost, only a scan shows whether the claim
        succeeded."""
        return None if self._unanswered else self.surveyed

    def _may_take(self, survey: Survey) -> bool:
        return survey.claimable > 0 or any(self._is_earlier_start(owner) for _, _, owner in survey.orphans)

    def _look(self) -> Steps[Claim | None]:
        """Scans the ledger and claims a block if one is available."""
        self._looked_at = yield Clock()
        done = done_blocks((yield Names(DONE)))
        blocks = block_numbers((yield Names(TASKS)))
        self._known.update(blocks)
        if all_done(done, blocks):
            self.seen = replace(self.seen, unfinished=False, unsettled=False)
            return None
        self.seen = replace(self.seen, unfinished=True, unsettled=False)
        epochs = latest((yield Names(CLAIMS)))
        open_blocks = [block for block in blocks if block not in done]
        free = [block for block in open_blocks if block not in epochs]
        claimed = {block: epochs[block] for block in open_blocks if block in epochs}
        released = pairs((yield Names(RELEASED)))
        # A pod's first start has no earlier claims to reclaim. While blocks are free, holders do not matter.
        if not free or self.identity.start != "0":
            taken = yield from self._take_held(claimed, released, done)
            if taken is not None:
                return taken
        taken = yield from self._take_released([claim for claim in claimed.items() if claim in released])
        if taken is not None or not free:
            return taken
        claim = yield from self._first_of(free)
        if claim is None:
            self.seen = replace(self.seen, unsettled=True)  # other pods were faster, and more blocks may be free
        return claim

    def _take_held(
        self, claimed: Mapping[int, int], released: Collection[tuple[int, int]], done: Collection[int]
    ) -> Steps[Claim | None]:
        """Takes the next step for each held block (:class:`Holding`) until a step returns a claim."""
        survey = self._usable_survey
        blocks = yield from self._states([claim for claim in claimed.items() if claim not in released], survey)
        for held in blocks:
            if held.state is Holding.ENDED:
                yield Touch(done_path(held.block, held.epoch))
        for held in blocks:
            if held.state is Holding.FORGOTTEN:
                return self._hold((yield from self._remembered(held.block, held.epoch)))
        if survey is None:
            self._forget_answered(claimed, done)
        self.seen = replace(self.seen, unsettled=any(held.state is Holding.SILENT for held in blocks))
        for held in _from(self._place, blocks):
            if held.state is Holding.GONE:
                seal = {"sealed": (yield Length(held.owner)), "left": None}
                claim = yield from self._succeed(held.block, held.epoch, held.owner, seal)
                if claim is not None:
                    return claim
        return None

    def _states(self, claimed: Iterable[tuple[int, int]], survey: Survey | None) -> Steps[list[HeldBlock]]:
        """Determines the states of claimed blocks. With a survey, the claims of live pods are not read."""
        orphans = {(block, epoch): owner for block, epoch, owner in survey.orphans} if survey else {}
        self._owners.update({claim: (owner, False) for claim, owner in orphans.items()})
        states: list[HeldBlock] = []
        of_others: list[HeldBlock] = []
        for block, epoch in claimed:
            claim = Claim(block, epoch)
            ours = claim in self.held or claim in self._dropped
            if survey is not None and (block, epoch) not in orphans:
                states.append(HeldBlock(block, epoch, Holding.OURS if ours else Holding.ALIVE))
                continue
            owner, ended = yield from self.owner(block, epoch)
            if ended:
                states.append(HeldBlock(block, epoch, Holding.ENDED, owner))
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
        """Forgets the claims without a reply that this scan has found. A cached listing may still hide the others."""
        for block, epoch in list(self._unanswered):
            if block in done or claimed.get(block, -1) >= epoch:
                self._unanswered.discard((block, epoch))

    def _take_released(self, released: Sequence[tuple[int, int]]) -> Steps[Claim | None]:
        for block, epoch in _from(self._place, released):
            release = yield Read(f"{RELEASED}/{block:06d}.{epoch}")
            if release is None:
                continue  # listed, but hidden by a cache
            owner, _ = yield from self.owner(block, epoch)
            seal = {"sealed": release["sealed"], "left": release["left"]}
            claim = yield from self._succeed(block, epoch, owner, seal)
            if claim is not None:
                return claim
        return None

    def _first_of(self, free: Sequence[int]) -> Steps[Claim | None]:
        """Claims the first available block, and remembers the remaining blocks as free.

        Pods that start together begin at different positions in the list, because otherwise most claims would be
        refused. The list is in claim order, and a pod deviates from it by at most the number of pods.
        """
        refused = 0
        left = list(free)
        self.free = []
        while left:
            block = next((block for block in self.preferred if block in left), left[self._place % len(left)])
            left.remove(block)
            if (yield from self._link(block, 0, {"owner": self.identity.name}, "", keep=True)):
                self.free = left
                return self._hold(Claim(block, 0))
            refused += 1
            if refused % MAX_REFUSALS == 1:
                claimed = latest((yield Names(CLAIMS)))
                left = [block for block in left if block not in claimed]
        return None

    def _succeed(self, block: int, epoch: int, owner: str, seal: Mapping[str, Any]) -> Steps[Claim | None]:
        """Claims the epoch after another pod's epoch, and seals that pod's journal.

        Repeats the seals of the previous claim, so that the coordinator may remove the previous claim.
        """
        content = {"owner": self.identity.name, "predecessor": owner, **seal}
        if epoch:
            content["seals"] = seals_in((yield from self._read_claim(block, epoch)))
        if not (yield from self._link(block, epoch + 1, content, f"{block}.{epoch + 1}")):
            return None
        if (yield Clock()) - self._looked_at >= self.times.commit_s:
            # Measuring the journal took so long that later claims may have replaced an earlier claim of this name,
            # which freed the name. In that case, this claim does not count. If it is the latest claim, the next scan
            # finds it.
            return None
        return self._hold(_claim_of(block, epoch + 1, content))

    def _remembered(self, block: int, epoch: int) -> Steps[Claim]:
        """Restores a claim of this pod whose reply was lost."""
        if not epoch:
            return Claim(block, epoch)
        return _claim_of(block, epoch, (yield from self._read_claim(block, epoch)))

    def _read_claim(self, block: int, epoch: int) -> Steps[dict[str, Any]]:
        """Reads a claim. Raises NotYet if it is not visible yet, or was removed after a later claim."""
        content = yield Read(claim_path(block, epoch))
        if content is None:
            raise NotYet
        return content

    def owner(self, block: int, epoch: int) -> Steps[tuple[str, bool]]:
        """Returns the holder of a claim, and whether the claim ended its block. Raises NotYet."""
        if (block, epoch) not in self._owners:
            content = yield from self._read_claim(block, epoch)
            self._owners[block, epoch] = str(content["owner"]), "done" in content
        return self._owners[block, epoch]

    def owners(self, block: int, epoch: int) -> Steps[tuple[str, ...]]:
        """Returns all holders of a block up to this claim, oldest first. Raises NotYet."""
        if (block, epoch) not in self._chains:
            content = yield from self._read_claim(block, epoch)
            self._chains[block, epoch] = (*(seal.owner for seal in seals_in(content)), str(content["owner"]))
        return self._chains[block, epoch]

    def _link(self, block: int, epoch: int, content: Mapping[str, Any], token: str, keep: bool = False) -> Steps[bool]:
        """Claims one epoch of a block. Returns True if this pod won the claim.

        Args:
            token: Identifies this content among all claims of this pod.
            keep: Keep the temporary file, so that later claims of this pod with the same content can use it again.
        """
        name = f"{self.identity.name}.{token}"
        self._unanswered.add((block, epoch))
        won: bool = yield Link(claim_path(block, epoch), content, name, keep)
        self._unanswered.discard((block, epoch))
        if won:
            self._owners[block, epoch] = self.identity.name, "done" in content
        return won

    def _hold(self, claim: Claim) -> Claim:
        self.held.add(claim)
        return claim

    # --- releasing and finishing ---

    def _drop(self, claim: Claim) -> None:
        self.held.discard(claim)
        self._dropped.add(claim)

    def release(self, claim: Claim, sealed: int, left: Iterable[str]) -> Steps[None]:
        """Releases a block. The first ``sealed`` bytes of the journal must contain everything committed for the
        block."""
        self._drop(claim)
        if not (yield from self.may_commit()):
            return
        content = {"sealed": sealed, "left": sorted(left)}
        yield Publish(f"{RELEASED}/{claim.block:06d}.{claim.epoch}", content)

    def mark_done(self, claim: Claim) -> Steps[None]:
        """Marks a block done once all its rollouts are durable. Writes the finished mark after the last block.

        Raises:
            LedgerError: Another pod took over the block. Results stored after the takeover are not valid.
        """
        if not (yield from self._end(claim.block, claim.epoch + 1)):
            raise LedgerError(
                f"block {claim.block} was taken over from epoch {claim.epoch}; this pod was too slow to renew"
            )
        self._drop(claim)
        if not self.held:
            yield from self._finish()

    def _end(self, block: int, epoch: int) -> Steps[bool]:
        me = self.identity.name
        claimed = self._owners.get((block, epoch)) == (me, True)  # an earlier call failed to write the mark
        if not claimed:
            content = {"owner": me, "done": True}
            seals = next((claim.seals for claim in self.held if claim == Claim(block, epoch - 1)), ())
            if seals:
                claimed = yield from self._link(block, epoch, {**content, "seals": seals}, f"done.{block}.{epoch}")
            else:
                claimed = yield from self._link(block, epoch, content, "done", keep=True)
        if not claimed or (epoch and not (yield from self.may_commit())):
            return False  # after a long pause, later claims may have replaced an earlier claim of this name
        yield Touch(done_path(block, epoch))
        return True

    def _finish(self) -> Steps[bool]:
        return (yield from finish(self.identity.name, self._known))


def _claim_of(block: int, epoch: int, content: Mapping[str, Any]) -> Claim:
    left = content["left"]
    return Claim(block, epoch, None if left is None else tuple(left), tuple(seals_in(content)))


def _from(start: int, items: Sequence[T]) -> list[T]:
    """Rotates ``items`` to start at position ``start``. Pods that scan at the same time start at different items."""
    start %= max(1, len(items))
    return [*items[start:], *items[:start]]


def _number(pod: str) -> int:
    """Returns the index of a pod's array element. For a pod outside an array, derives a number from its name."""
    element = re.search(r"_(\d+)(?:@|$)", pod)
    return int(element[1]) if element else zlib.crc32(pod.encode())
