"""The rules of the pod that looks at everything for all: one look at blocks, requests, consumers and every pod's lease.
Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from megaflow_hpc.ledger.calls import Names, Steps, Touch
from megaflow_hpc.ledger.lease import TIMES, PodIdentity, Times
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
from megaflow_hpc.ledger.rules import Rules
from megaflow_hpc.ledger.sharing import NotYet, requests_of_all

TOLD = 512
"""Blocks of those who are gone that a survey names: every pod reads it. The others are named once these are taken."""


class SurveyingRules(Rules):
    """The rules of any pod, and those of one that surveys."""

    def __init__(self, identity: PodIdentity, times: Times = TIMES, pods: int = 1) -> None:
        super().__init__(identity, times, pods)
        self.live: set[str] = set()
        """After :meth:`survey`: every ``<pod>.<start>`` that has neither ended nor is gone."""

    def survey(self) -> Steps[Survey]:
        """Looks at everything: which blocks may be claimed, who asks for work, whose lease has run out.

        Marks whose lease has run out as gone, so that the others need not read it. Other operations may run between
        the steps of this one.
        """
        gone = set((yield Names(GONE)))
        for name in sorted((yield Names(LEASES))):
            if name not in gone and not self.leases.get(name, {}).get("ended") and (yield from self._expired(name)):
                gone.add(name)
                yield Touch(f"{GONE}/{name}")
        self.live = {name for name, lease in self.leases.items() if name not in gone and not lease.get("ended")}
        done = done_blocks((yield Names(DONE)))
        blocks = block_numbers((yield Names(TASKS)))
        open_blocks = [block for block in blocks if block not in done]
        claimed = latest((yield Names(CLAIMS)))
        released = pairs((yield Names(RELEASED)))
        newest = _newest(self.leases)
        claimable = 0
        orphans: list[tuple[int, int, str]] = []
        for block in open_blocks:
            epoch = claimed.get(block)
            if epoch is None or (block, epoch) in released:
                claimable += 1
                continue
            try:
                owner, given = yield from self._owner(block, epoch)
            except NotYet:
                continue  # listed and not yet to be seen: a cache will let it through
            if given is not None:
                yield Touch(done_path(block, epoch, given))  # its pod may have died before it could
                continue
            claimable += owner in gone
            if (owner in gone or _superseded(owner, newest)) and len(orphans) < TOLD:
                orphans.append((block, epoch, owner))
        requests = yield from requests_of_all()
        yield from self.consumers.look()
        still = 0 if all_done(done, blocks) else max(1, len(open_blocks))
        return Survey(still, claimable, orphans, requests, self.consumers.opened, self.consumers.awaited)


def _newest(names: Iterable[str]) -> dict[str, str]:
    """Pod → its latest start."""
    found: dict[str, str] = {}
    for name in names:
        pod, _, start = name.rpartition(".")
        if pod not in found or earlier(found[pod], start):
            found[pod] = start
    return found


def _superseded(name: str, newest: Mapping[str, str]) -> bool:
    pod, _, start = name.rpartition(".")
    return pod in newest and earlier(start, newest[pod])
