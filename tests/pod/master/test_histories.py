"""A pod that takes over the block of a killed pod knows the failures there."""

from __future__ import annotations

from pathlib import Path

from megaflow_hpc.ledger import Ledger, write_blocks
from megaflow_hpc.pod.master import histories
from megaflow_hpc.pod.master.histories import Histories, History
from megaflow_hpc.rundir.events import AttemptEvent, EventWriter
from megaflow_hpc.trajectory import Attempt
from megaflow_hpc.types import Rollout
from tests.support.ledgers import prepared
from tests.support.pods import IoPod


def fail(events: EventWriter, rollout: str, attempt: int, kind: str) -> None:
    events.write(AttemptEvent(id=rollout, attempt=attempt, kind=kind, error="no engine answered", rank=1))
    events.flush()


def test_retries_that_a_killed_pod_has_used_up_are_not_given_again(tmp_path: Path) -> None:
    run = prepared(tmp_path / "run")
    write_blocks(run, [Rollout(task, "p", 0, "a") for task in ("t0", "t1")], size=10)
    killed, heir = IoPod(run, "a"), IoPod(run, "b")
    killed.claim()
    fail(killed.events, "t0/p/0", 0, "model")
    fail(killed.events, "t0/p/0", 1, "sandbox-start")
    fail(killed.events, "t1/p/0", 0, "preemption")  # not a failure
    assert heir.blocks.claim() is None
    Ledger(run).mark_gone("a.0")
    claimed = heir.claim()
    history = claimed.histories["t0/p/0"]
    assert history.causes == ["model", "sandbox-start"]
    assert [(a.attempt, a.status, a.error_kind) for a in history.attempts] == [
        (0, "failed", "model"),
        (1, "failed", "sandbox"),
    ]
    assert history.next_attempt == 2
    assert "t1/p/0" not in claimed.histories


def test_a_written_history_counts_more_than_the_events(tmp_path: Path) -> None:
    run = prepared(tmp_path / "run")
    for pod, attempts in (("a", 1), ("b", 3)):
        events = EventWriter(run.event_file(pod, "0"))
        for number in range(attempts):
            fail(events, "t/p/0", number, "node")
        events.close()
    with run.event_file("a", "0").open("a") as file:
        file.write('{"t": 1, "event": "attempt", "id": "t/p/0", "att')  # killed while it wrote
    known = Histories(run)
    known.look_at_events(["a.0", "b.0"])
    assert (known.take("t/p/0") or History()).causes == ["node"] * 3
    run.partial.mkdir(exist_ok=True)
    written = History([Attempt(0, "cancelled"), Attempt(1, "failed")], ["model"], cuts=1)
    histories.write(run, "c.0", {"t/p/0": written})
    known = Histories(run)
    known.look(["a.0", "c.0"])
    known.look_at_events(["a.0", "b.0"])
    assert (known.take("t/p/0") or History()).cuts == 1, "how often it was cut short outweighs"
