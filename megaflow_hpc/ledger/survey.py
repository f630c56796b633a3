"""Surveys: one pod scans blocks, requests, consumers and all leases on behalf of the others. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megaflow_hpc.ledger.calls import Names, Steps, Touch
from megaflow_hpc.ledger.hand_offs import NotYet, all_work_requests
from megaflow_hpc.ledger.names import (
    CLAIMS,
    DONE,
    GONE,
    LEASES,
    RELEASED,
    TASKS,
    all_done,
    block_numbers,
    done_blocks,
    done_path,
    latest,
    newest_starts,
    pairs,
    precedes,
)
from megaflow_hpc.ledger.past import Facts, accounts, read_record
from megaflow_hpc.ledger.report import Survey
from megaflow_hpc.ledger.rules import LedgerRules

MAX_ORPHANS = 512
"""Maximum number of orphaned blocks in a survey, because every pod reads it. Later surveys list the others."""


@dataclass(frozen=True)
class Surveyed:
    """Full result of a survey."""

    survey: Survey
    """The part that is published for all pods."""
    leases: dict[str, dict[str, Any]]
    """``<pod>.<start>`` → content of its lease, for the newest start of every pod that has one."""
    live: set[str]
    """Every ``<pod>.<start>`` that has not ended and is not gone."""
    accounts: dict[str, Facts]
    """Facts about every start that the run ever had; see :func:`~megaflow_hpc.ledger.past.accounts`."""


def survey(rules: LedgerRules) -> Steps[Surveyed]:
    """Determines which blocks can be claimed, which pods request work, and which leases have expired.

    Marks pods with expired leases as gone, so that other pods need not read those leases. Reads the lease of an ended
    pod only once, and never the leases of superseded starts. Other operations of ``rules`` may run between these steps.
    """
    _, record = yield from read_record()
    gone = set((yield Names(GONE)))
    listed = newest_starts((yield Names(LEASES)))
    for name in sorted(listed):
        known = rules.leases.get(name)
        if known is not None and known.content and (name in gone or known.content.get("ended")):
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
            owner, handed_off = yield from rules.owner(block, epoch)
        except NotYet:
            continue
        if handed_off is not None:
            yield Touch(done_path(block, epoch, handed_off))  # the pod may have died before it could
        else:
            held.append((block, epoch, owner))
    holders = {owner for _, _, owner in held}
    newest = {name.rpartition(".")[0]: name for name in leases}
    superseded = {owner for owner in holders if precedes(owner, newest.get(owner.rpartition(".")[0], ""))}
    for owner in sorted(holders - listed - gone):  # its lease was removed, or is not visible yet
        # If the latest start of an element is over, so are its earlier ones. If it is alive, it takes over their blocks
        # first.
        over = owner in superseded and newest[owner.rpartition(".")[0]] not in live
        if over or (yield from rules.expired(owner)):
            gone.add(owner)
            yield Touch(f"{GONE}/{owner}")
    claimable += sum(owner in gone for _, _, owner in held)
    orphans = [one for one in held if one[2] in gone | superseded]
    rules.forget(listed | holders, open_blocks)
    requests = yield from all_work_requests()
    yield from rules.consumers.look()
    unfinished = 0 if all_done(done, blocks) else max(1, len(open_blocks))
    consumers = rules.consumers
    shown = Survey(unfinished, claimable, orphans[:MAX_ORPHANS], requests, consumers.opened, consumers.awaited)
    return Surveyed(shown, leases, live, accounts(leases, record))
