"""The view of watch with many rollouts, and its lines without a terminal."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from megaflow_hpc.campaign.run import Run
from megaflow_hpc.cli.view.app import Polled, WatchApp
from megaflow_hpc.cli.view.detail import DetailScreen, facts_about
from megaflow_hpc.cli.view.reader import RunView
from megaflow_hpc.cli.view.tables import RolloutRows, RolloutTable, _fitting
from megaflow_hpc.host.atomic import write_json
from megaflow_hpc.monitor.live import Live
from megaflow_hpc.rundir.events import (
    AttemptEvent,
    EventWriter,
    PodEvent,
    RolloutEvent,
    StartEvent,
    WorkerEvent,
)
from megaflow_hpc.rundir.record import read_run, write_run
from tests.support.ledgers import LEASE
from tests.support.terminals import screen, shows

MANY = 10_000


def write_events(run: Run, left: int) -> None:
    """Write a pod's events about many rollouts: all started, all but ``left`` stored, every thousandth failed."""
    record = read_run(run.dir)
    record.total = MANY
    write_run(run.dir, record)
    events = EventWriter(run.dir.event_file("7_0", "0"))
    events.write(PodEvent(state="started", node="n\x1b[2J1", job_id="7_0"))
    events.write(WorkerEvent(rank=1, state="ready", slots=4, node="n\x1b[2J1"))
    for number in range(MANY):
        rollout = f"task{number}/oracle/0"
        events.write(StartEvent(id=rollout, rank=1, attempt=0))
        if number % 1000 == 0:
            events.write(AttemptEvent(id=rollout, attempt=0, kind="sandbox", error="x", rank=1))
            events.write(StartEvent(id=rollout, rank=1, attempt=1))
        if number < MANY - left:
            failed = {"status": "failed", "kind": "user", "error": "[red]no\x1b[0m\nway"} if number % 1000 == 0 else {}
            events.write(RolloutEvent(**{"id": rollout, "status": "completed", "reward": 1.0, **failed}))
    events.close()
    progress = {"t": time.time() + 1, "running": left, "queued": 0, "stored": MANY - left}
    write_json(run.dir.ledger / "leases" / "7_0.0", {**LEASE, "pod": "7_0", "job_id": "7_0", **progress})


def test_of_ten_thousand_rollouts_those_on_the_screen_are_made(planned: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    write_events(planned, left=3)
    made: list[int] = []
    cells = RolloutTable.cells

    def counted(table: RolloutTable, row: int) -> Any:
        made.append(row)
        return cells(table, row)

    monkeypatch.setattr(RolloutTable, "cells", counted)

    async def scenario() -> None:
        app = WatchApp(Run(planned.path), every_s=3600)
        async with app.run_test(size=(80, 24)) as pilot:
            seen = await shows(pilot, "failed attempts:")
            assert "9997/10000 99%" in seen
            assert "running 3" in seen
            assert "failed attempts: sandbox 10 (n\\x1b[2J1 10), user 10" in seen
            rows = app.query_one(RolloutRows)
            assert [rows.on_screen[n] for n in (0, 2, 3)] == [f"task{MANY - n}/oracle/0" for n in (3, 1, 4)]
            await pilot.press("end")
            await pilot.pause()
            assert "> task0/oracle/0" in screen(app)
            assert app.reader.live.shown == list(rows.on_screen), "pods are asked about the rows that came into view"
            assert len(set(made)) < 100
            await pilot.press("f", "enter")
            assert "user: [red]no\\x1b[0m\\nway" in await shows(pilot, "attempt 2 on n\\x1b[2J1")
            await pilot.press("escape", "escape", "slash", *"task123/")
            await pilot.pause()
            assert rows.on_screen == ["task123/oracle/0"]
            await pilot.press("escape", "down", "down", "down", "down")
            chosen = rows.key
            assert chosen == f"task{MANY - 5}/oracle/0"
            events = EventWriter(planned.dir.event_file("7_0", "0"))
            for number in range(2):
                events.write(RolloutEvent(id=f"later/{number}/0", status="completed"))
            events.close()
            app.reader.wake()
            await shows(pilot, "later/1/0")
            assert rows.key == chosen  # the selection stays on its row when others are stored
            app.push_screen(DetailScreen(chosen, app.reader))
            app.on_polled(Polled(RunView(app.snapshot)))  # while that screen is created
            await shows(pilot, f"{chosen}  completed")
        app.on_polled(Polled(RunView(app.snapshot)))  # one that arrives after the screen has closed

    asyncio.run(scenario())


def test_what_a_rollout_used_is_said_where_it_is_known(planned: Run) -> None:
    events = EventWriter(planned.dir.event_file("7_0", "0"))
    events.write(RolloutEvent(id="a/b/0", status="completed", turns=3, cpu_s=12.25, memory_peak_mb=103.4))
    events.write(RolloutEvent(id="a/b/1", status="completed", turns=3))
    events.close()
    told = {}
    planned.monitor.list_rollouts()
    for rollout in ("a/b/0", "a/b/1"):
        row = Live(planned.dir, planned.monitor).look(planned.status()).rollouts.of(rollout)
        assert row is not None
        told[rollout] = facts_about(row)[-1].plain
    assert told == {
        "a/b/0": "not verified  3 turns  12.2 s of CPU, at most 103 MB of memory",
        "a/b/1": "not verified  3 turns",
    }


@pytest.mark.parametrize("width", [30, 44, 60, 80, 200])
def test_the_outcome_is_shown_at_any_width(width: int) -> None:
    columns = RolloutTable.columns
    fitting, first = _fitting(columns, width)
    assert columns[fitting[-1]].head == "now, or outcome"
    assert first + sum(columns[place].width + 1 for place in fitting) == width
    assert len(fitting) == len(columns) - 1 or width < 66
