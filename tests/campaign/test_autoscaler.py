"""Servers follow the load, and the backlog counts the rollouts that are left to run, although some end twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from megaflow_hpc.campaign.autoscaler import Backlog, wanted_servers
from megaflow_hpc.ledger import write_blocks
from megaflow_hpc.rundir import summaries
from megaflow_hpc.rundir.endpoints import Load
from megaflow_hpc.rundir.events import RolloutEvent, decode, encode
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.pods.aggregator import EventAggregator
from megaflow_hpc.types import Rollout

BUSY, IDLE, QUICK = Load(9, 6, 20.0), Load(1, 0, 0.0), Load(40, 30, 2.0)


@pytest.mark.parametrize(
    ("loads", "asking", "expected"),
    [
        ([], False, 0),  # no rollouts are left
        ([], True, 1),
        ([IDLE], False, 0),
        ([IDLE], True, 1),
        ([BUSY], True, 2),
        ([QUICK], True, 1),  # many wait, none for long
        ([BUSY, BUSY], True, 3),
        ([BUSY, IDLE], True, 2),  # the router will even that out
        ([BUSY] * 4, True, 4),
    ],
)
def test_servers_follow_what_waits(loads: list[Load], asking: bool, expected: int) -> None:
    assert wanted_servers(0, 4, loads, asking) == expected


@pytest.mark.parametrize("with_summaries", [False, True])
def test_rollouts_that_end_twice_do_not_stand_for_those_that_never_ran(tmp_path: Path, with_summaries: bool) -> None:
    run = RunDir(tmp_path / "run")
    run.create()
    write_blocks(run, [Rollout(f"t{number}", "p", 0, "a") for number in range(6)], size=6)
    left = Backlog(run)
    assert left.look() == {"p": 6}
    ended = b"".join(encode(RolloutEvent(t=1.0, id=f"t{number}/p/0", status="completed")) for number in range(3))
    for start in ("0", "1"):  # the node of the first was taken for lost, and it was alive
        path = run.event_file("7_0", start)
        path.write_bytes(ended)
        if with_summaries:
            aggregator = EventAggregator()
            for line in ended.splitlines():
                event = decode(line)
                assert event is not None
                aggregator.apply(event)
            summaries.write(path, aggregator.summary(len(ended)))
    assert left.look() == Backlog(run).look() == {"p": 3}
    failed = RolloutEvent(t=2.0, id="t3/p/0", status="failed", kind="model")
    run.event_file("7_1", "0").write_bytes(encode(failed))
    assert left.look() == left.look() == {"p": 2}
    write_blocks(run, [Rollout("t3", "p", 0, "a"), Rollout("t3", "q", 0, "a")], size=2)
    assert left.look() == {"p": 3, "q": 1}
