"""Surveys: one pod scans blocks, requests, consumers and all leases on behalf of the others. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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
    earlier,
    latest,
    pairs,
)
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
    """``<pod>.<start>`` → content of its lease, for every lease."""
    live: set[str]
    """Every ``<pod>.<start>`` that has not ended and is not gone."""


def survey(rules: LedgerRules) -> Steps[Surveyed]:
    """Determines which blocks can be claimed, who requests work, and which leases have expired.

    Marks pods with expired leases as gone, so that other pods need not read those leases. Other operations of ``rules``
    may run between these steps.
    """
    gone = set((yield Names(GONE)))
    for name in sorted((yield Names(LEASES))):
        known = rules.leases.get(name)
        if name in gone or (known is not None and known.content.get("ended")):
            continue
        if (yield from rules.expired(name)):
            gone.add(name)
            yield Touch(f"{GONE}/{name}")
    leases = {name: lease.content for name, lease in rules.leases.items() if lease.content}
    live = {name for name, content in leases.items() if name not in gone and not content.get("ended")}
    done = done_blocks((yield Names(DONE)))
    blocks = block_numbers((yield Names(TASKS)))
    open_blocks = [block for block in blocks if block not in done]
    claimed = latest((yield Names(CLAIMS)))
    released = pairs((yield Names(RELEASED)))
    newest = _newest_starts(leases)
    claimable = 0
    orphans: list[tuple[int, int, str]] = []
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
            continue
        if owner in gone:
            claimable += 1
        if (owner in gone or _superseded(owner, newest)) and len(orphans) < MAX_ORPHANS:
            orphans.append((block, epoch, owner))
    requests = yield from all_work_requests()
    yield from rules.consumers.look()
    unfinished = 0 if all_done(done, blocks) else max(1, len(open_blocks))
    consumers = rules.consumers
    return Surveyed(Survey(unfinished, claimable, orphans, requests, consumers.opened, consumers.awaited), leases, live)


def _newest_starts(names: Iterable[str]) -> dict[str, str]:
    """Returns the latest start of each pod."""
    newest: dict[str, str] = {}
    for name in names:
        pod, _, start = name.rpartition(".")
        if pod not in newest or earlier(newest[pod], start):
            newest[pod] = start
    return newest


def _superseded(name: str, newest: Mapping[str, str]) -> bool:
    pod, _, start = name.rpartition(".")
    return pod in newest and earlier(start, newest[pod])
