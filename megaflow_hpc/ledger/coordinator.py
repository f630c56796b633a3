"""Surveys and prunes the ledger. One pod does this on behalf of all. This module does no I/O itself.

A survey scans blocks, consumers and all leases, so that the other pods do not have to.

Pruning keeps the number of files from growing with time. The coordinator removes a file once all checks over more than
:attr:`Times.lease_s` have found it unneeded. By then, caches no longer show a state in which the file was needed, and
any pod that still acts on that state has a closed fence. An unneeded file never becomes needed again:

==================================== ========================================================================
file                                 is not needed once
==================================== ========================================================================
``leases/<pod>.<start>``             a later start of the element has a lease, or the pod has ended or is gone,
                                     holds no block, and its totals are in the record of ended pods
``gone/<pod>.<start>``               the pod has no lease and holds no block
``claims/<block>.<epoch>``           a later claim of the block repeats its seals, and the pod of the epoch before
                                     has ended or has no lease, so it cannot claim this name. Epoch 0 and the
                                     latest claim stay
``released/<block>.<epoch>``         the block has a later claim
``partial/<pod>.<start>.json``       every block that the pod ever held is done
``claims/.<pod>.<start>.…``          the pod has no lease, has ended or is gone
``ended/<n>``                        there is a later record
==================================== ========================================================================

If a pod is still alive when its lease is removed, it finds out at its next renewal and commits nothing more.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from megaflow_hpc.ledger.accounts import (
    Facts,
    accounts,
    add_facts,
    counted,
    facts_of_starts,
    read_record,
    recent,
    taken_over,
)
from megaflow_hpc.ledger.calls import Clock, Link, Names, Remove, Steps, Touch
from megaflow_hpc.ledger.leader import Survey
from megaflow_hpc.ledger.names import (
    CLAIMS,
    DONE,
    ENDED,
    GONE,
    LEASES,
    PARTIAL,
    RELEASED,
    TASKS,
    all_done,
    block_numbers,
    claim_path,
    done_blocks,
    done_path,
    latest,
    newest_starts,
    pairs,
    precedes,
)
from megaflow_hpc.ledger.rules import LedgerRules, NotYet

MAX_ORPHANS = 512
"""Maximum number of orphaned blocks in a survey. It is limited because every pod reads the survey. Later surveys list
the remaining blocks."""


@dataclass(frozen=True)
class Surveyed:
    """Result of a survey, including the part that is not published."""

    survey: Survey
    """The part of the result that is published for all pods."""
    leases: dict[str, dict[str, Any]]
    """Content of the lease of every pod's latest start, by ``<pod>.<start>``."""
    live: set[str]
    """Names ``<pod>.<start>`` of the starts that have neither ended nor been marked as gone."""
    accounts: dict[str, Facts]
    """Totals of every start in the history of the run (:func:`~megaflow_hpc.ledger.accounts.accounts`)."""


def survey(rules: LedgerRules) -> Steps[Surveyed]:
    """Finds claimable blocks and expired leases.

    Marks pods with expired leases as gone, so that other pods do not have to read those leases. Reads the lease of an
    ended pod only once, and never reads the leases of superseded starts. Other operations of ``rules`` may run between
    the steps of a survey.
    """
    _, record = yield from read_record()
    gone = set((yield Names(GONE)))
    listed = newest_starts((yield Names(LEASES)))
    for name in sorted(listed):
        lease = rules.leases.get(name)
        if lease is not None and lease.content and (name in gone or lease.content.get("ended")):
            continue
        if (yield from rules.expired(name)) and name not in gone:
            gone.add(name)
            yield Touch(f"{GONE}/{name}")
    leases = {name: rules.leases[name].content for name in listed if rules.leases[name].content}
    live = {name for name, content in leases.items() if name not in gone and not content.get("ended")}
    done = done_blocks((yield Names(DONE)))
    blocks = block_numbers((yield Names(TASKS)))
    open_blocks = [block for block in blocks if block not in done]
    claimed = latest((yield Names(CLAIMS)))
    released = pairs((yield Names(RELEASED)))
    claimable = 0
    held: list[tuple[int, int, str]] = []
    for block in open_blocks:
        epoch = claimed.get(block)
        if epoch is None or (block, epoch) in released:
            claimable += 1
            continue
        try:
            owner, ended = yield from rules.owner(block, epoch)
        except NotYet:
            continue
        if ended:
            yield Touch(done_path(block, epoch))  # the pod may have died before it wrote the mark
        else:
            held.append((block, epoch, owner))
    holders = {owner for _, _, owner in held}
    newest = {name.rpartition(".")[0]: name for name in leases}
    superseded = {owner for owner in holders if precedes(owner, newest.get(owner.rpartition(".")[0], ""))}
    for owner in sorted(holders - listed - gone):  # the lease was removed, or is not visible yet
        # If the latest start of an element is over, so are its earlier ones. If it is alive, it takes over their blocks
        # first.
        over = owner in superseded and newest[owner.rpartition(".")[0]] not in live
        if over or (yield from rules.expired(owner)):
            gone.add(owner)
            yield Touch(f"{GONE}/{owner}")
    claimable += sum(owner in gone for _, _, owner in held)
    orphans = [claim for claim in held if claim[2] in gone | superseded]
    rules.forget(listed | holders, open_blocks)
    yield from rules.consumers.look()
    unfinished = 0 if all_done(done, blocks) else max(1, len(open_blocks))
    consumers = rules.consumers
    shown = Survey(unfinished, claimable, orphans[:MAX_ORPHANS], consumers.opened, consumers.awaited)
    return Surveyed(shown, leases, live, accounts(leases, record))


PRUNE_S = 60.0
"""Seconds between two checks for unneeded files."""
MAX_NAMES = 1000
"""Maximum number of pods that a single check adds to the record of ended pods."""


class Pruning:
    """Finds and removes unneeded files. Calls of :meth:`look` must not overlap."""

    def __init__(self, rules: LedgerRules) -> None:
        self._rules = rules
        self._since: dict[str, float] = {}
        """Time since which every check has found a file unneeded, by path, on this machine's clock."""

    def look(self) -> Steps[None]:
        """Checks for unneeded files, and removes those that have been unneeded for long enough.

        Uses the leases that the latest survey read.
        """
        with suppress(NotYet):  # a cache hides the holder of a block, and a later check will see it
            yield from self._look()

    def _look(self) -> Steps[None]:
        began: float = yield Clock()
        # Read the record before the leases. A lease that is then missing is in the record.
        number, record = yield from read_record()
        gone = set((yield Names(GONE)))
        leases = set((yield Names(LEASES)))
        partial = yield Names(PARTIAL)
        # Read the claims last, because a pod that has ended or is gone makes no more claims.
        done = done_blocks((yield Names(DONE)))
        listed = yield Names(CLAIMS, private=True)
        claims = pairs(name for name in listed if name[0] != ".")
        released = pairs((yield Names(RELEASED)))
        newest = latest(f"{block}.{epoch}" for block, epoch in claims)
        holders, wanted = yield from self._owners(newest, done, released)
        current = newest_starts(leases)
        contents = {name: lease.content for name, lease in self._rules.leases.items() if lease.content}
        over = {name for name in current if name in contents and (name in gone or contents[name].get("ended"))}
        recorded = set(record.get("names", ()))
        kept = current - ((over & recorded) - holders)
        paths = [f"{LEASES}/{name}" for name in sorted(leases - kept)]
        paths += [f"{GONE}/{name}" for name in gone if name not in leases and name not in holders]
        alive = {name for name in leases if not contents.get(name, {}).get("ended")}
        for block, epoch in sorted(claims):
            if 0 < epoch < newest[block]:
                owners = yield from self._rules.owners(block, newest[block])
                if len(owners) >= newest[block] and owners[epoch - 1] not in alive:
                    paths.append(claim_path(block, epoch))
        paths += [f"{RELEASED}/{block:06d}.{epoch}" for block, epoch in released if epoch < newest.get(block, 0)]
        active = current - over - gone
        wanted |= active
        paths += [
            f"{PARTIAL}/{name}"
            for name in partial
            if name.endswith(".json") and name.removesuffix(".json") not in wanted
        ]
        paths += [f"{CLAIMS}/{name}" for name in listed if name[0] == "." and not _is_of(name, active)]
        paths += [f"{ENDED}/{older}" for older in (yield Names(ENDED)) if older.isdigit() and int(older) < number]
        unread = {name.rpartition(".")[0] for name in current - contents.keys()}  # may have included recorded starts
        absent = [name for name in recorded if name not in leases and name.rpartition(".")[0] not in unread]
        unneeded = [*paths, *absent]
        self._since = {path: self._since.get(path, began) for path in unneeded}
        due = {path for path in unneeded if began - self._since[path] > self._rules.times.lease_s}
        new = sorted(over - recorded - holders)[:MAX_NAMES]
        if new or due & set(absent):
            names = [name for name in [*recorded, *new] if name not in due or name in leases]
            apart = recent(record)
            for name in new:
                apart[name] = facts_of_starts({name: (yield from counted(name, contents[name]))})
            yield from self._record(number + 1, record, apart, names, taken_over(contents))
        for path in sorted(due - set(absent)):
            yield Remove(path)
            del self._since[path]

    def _owners(
        self, newest: Mapping[int, int], done: Collection[int], released: set[tuple[int, int]]
    ) -> Steps[tuple[set[str], set[str]]]:
        """Returns the current holders of open blocks, and all pods that ever held an open block.

        The first set excludes the last holders of released blocks. Raises NotYet.
        """
        holders: set[str] = set()
        ever: set[str] = set()
        for block, epoch in newest.items():
            if block not in done:
                owners = yield from self._rules.owners(block, epoch)
                ever.update(owners)
                if (block, epoch) not in released:
                    holders.add(owners[-1])
        return holders, ever

    def _record(
        self, number: int, record: Mapping[str, Any], apart: Mapping[str, Facts], names: list[str], took: set[str]
    ) -> Steps[None]:
        """Publishes the next record of ended pods. Leases are removed only after a later check has seen this record.

        Args:
            number: Number of the new record.
            record: Content of the previous record.
            apart: Totals of the starts that the record's sums do not include yet, by ``<pod>.<start>``.
            names: Starts that the new record counts, and that may still have a lease.
            took: Starts that the leases of later starts include.
        """
        not_in_sums = {*names, *took}
        sums = add_facts([record, *(facts for name, facts in apart.items() if name not in not_in_sums)])
        kept = {name: apart[name] for name in sorted(names) if name in apart}
        content = {**sums, "names": sorted(names), "recent": kept}
        yield Link(f"{ENDED}/{number}", content, f"{self._rules.identity.name}.ended.{number}.{len(kept)}")


def _is_of(private: str, pods: Collection[str]) -> bool:
    """Returns True if the name of a private file begins with the name ``<pod>.<start>`` of any of these pods."""
    parts = private.lstrip(".").split(".")
    return any(".".join(parts[:count]) in pods for count in range(2, len(parts) + 1))
