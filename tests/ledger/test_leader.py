"""One process of a campaign leads, and another takes over when it is gone."""

from __future__ import annotations

from megaflow_hpc.ledger.leader import STALE_S, Leader
from megaflow_hpc.rundir.layout import RunDir
from tests.support.ledgers import Clock


def test_one_process_leads_and_another_takes_over_when_it_is_gone(run: RunDir) -> None:
    clock = Clock()
    first, second, watcher = (Leader(run, "role", name, clock) for name in ("first", "second", ""))
    assert watcher.holder() == ""
    assert first.hold()
    assert not second.hold()
    assert watcher.holder() == "first"
    assert first.hold()
    assert watcher.confirmed()
    clock.now += STALE_S + 1
    assert watcher.holder() == ""
    assert not second.hold()  # it has seen the counter move just now, whenever that was
    clock.now += STALE_S + 1
    assert second.hold()
    assert not first.hold()
    second.leave()
    assert first.hold()
