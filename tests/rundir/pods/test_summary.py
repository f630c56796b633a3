"""Summaries of event files equal their events at every position, and nothing depends on a summary."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from megaflow_hpc.monitor.status import Monitor
from megaflow_hpc.pod.master.histories import Histories
from megaflow_hpc.rundir import summaries
from megaflow_hpc.rundir.events import (
    AttemptEvent,
    EngineEvent,
    EventWriter,
    PodEvent,
    RolloutEvent,
    StartEvent,
    decode,
    encode,
)
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.pods.aggregator import (
    PIECE,
    SUMMARY_INTERVAL_S,
    TAIL,
    EventAggregator,
    SummaryWriter,
)
from megaflow_hpc.types import VERIFIED
from tests.support.histories import History
from tests.support.ledgers import Clock
from tests.support.statuses import make, said


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return make(tmp_path / "run")


def condense(events: Path, covered: int) -> bytes:
    """Write the summary of the first bytes of an event file, as its pod would; return it."""
    aggregator = EventAggregator()
    for line in events.read_bytes()[:covered].splitlines():
        event = decode(line)
        assert event is not None
        aggregator.apply(event)
    summaries.write(events, aggregator.summary(covered))
    return summaries.path_of(events).read_bytes()


def left_behind(run: RunDir) -> dict[str, Any]:
    """Return what a pod that takes over all blocks learns about the rollouts that have not ended well."""
    events = [decode(line) for path in run.events.glob("*.jsonl") for line in path.read_bytes().splitlines()]
    well = {event.id for event in events if isinstance(event, RolloutEvent) and event.status in VERIFIED}
    known = Histories(run)
    known.look_at_events(sorted(path.stem for path in run.events.glob("*.jsonl")))
    failed = {event.id for event in events if isinstance(event, AttemptEvent)}
    return {rollout: known.take(rollout) for rollout in sorted(failed - well)}


def cut(events: Path, draw: random.Random) -> int:
    """Return a position between two lines of a file, its beginning or its end."""
    ends = [0]
    for line in events.read_bytes().splitlines(keepends=True):
        ends.append(ends[-1] + len(line))
    return draw.choice(ends)


@pytest.mark.parametrize("seed", range(15))
def test_a_status_is_the_same_with_summaries_wherever_they_end(run: RunDir, seed: int) -> None:
    draw = random.Random(seed)
    History(seed, pods=6, steps=300, now=time.time()).write(run.events)
    without, rate = said(run), Monitor(run).status()["rate_per_s"]
    assert sum(without["rollouts"][state] for state in ("completed", "truncated", "failed")) > 50
    assert said(run, listed=True) == without
    behind = left_behind(run)
    for events in sorted(run.events.glob("*.jsonl")):
        condense(events, cut(events, draw))
    assert said(run) == without
    assert left_behind(run) == behind
    assert Monitor(run).status()["rate_per_s"] == pytest.approx(rate, rel=0.5)  # time passes between the polls
    for events in sorted(run.events.glob("*.jsonl")):
        whole = condense(events, cut(events, draw))
        damaged = draw.choice(
            [
                whole[: draw.randrange(len(whole))],
                whole[:-1] + bytes([whole[-1] ^ 1]),
                b"",
                whole + b"\0",
                bytes(draw.randrange(256) for _ in range(64)),
            ]
        )
        if draw.random() < 0.7:
            summaries.path_of(events).write_bytes(damaged)
    assert said(run) == without


def test_a_summary_of_more_than_there_is_is_not_used(run: RunDir) -> None:
    History(1, pods=1, steps=300, now=time.time()).write(run.events)
    events = sorted(run.events.glob("*.jsonl"))[0]
    lines = events.read_bytes().splitlines(keepends=True)
    condense(events, events.stat().st_size)
    events.write_bytes(b"".join(lines[:-20]))  # a node lost power before its last events were on the disk
    with_it = said(run)
    summaries.path_of(events).unlink()
    assert with_it == said(run)


def test_texts_that_are_none_are_summarised(run: RunDir) -> None:
    events = run.event_file("a", "0")
    events.write_bytes(encode(RolloutEvent(t=1.0, id="t/p/0", status="failed", kind="agent", error="\udc80 \ud83d")))
    condense(events, events.stat().st_size)
    assert summaries.read(events) is not None
    assert [cause["error"] for cause in said(run)["first_failures"]] == ["\\udc80 \\ud83d"]


def test_a_pod_renames_a_summary_now_and_then_and_a_first_look_reads_it_in_place_of_the_events(run: RunDir) -> None:
    clock, writes = Clock(), 0
    for pod in range(2):
        path = run.event_file(f"7_{pod}", "0")
        keeper, began = SummaryWriter(path, clock), clock.now
        inode = 0
        with open(path, "ab") as file:
            for number in range(2_000):
                clock.now += 9.0
                rollout = f"django__django-{pod}{number:05d}/qwen/0"
                t = time.time() - (2_000 - number) * 9.0
                file.write(encode(StartEvent(t=t, id=rollout, rank=1, attempt=0)))
                kind = "model" if number % 20 == 0 else ""
                status = "failed" if kind else "completed"
                file.write(
                    encode(RolloutEvent(t=t, id=rollout, status=status, kind=kind, error="e" * 300 * bool(kind)))
                )
                file.flush()
                keeper.tick()
                there = summaries.path_of(path)
                if there.exists() and there.stat().st_ino != inode:
                    inode, writes = there.stat().st_ino, writes + 1
        keeper.finish()
        assert writes <= (pod + 1) * (clock.now - began) / SUMMARY_INTERVAL_S
    size = sum(path.stat().st_size for path in run.events.glob("*.jsonl"))
    assert writes <= size / TAIL
    with_them, few = bytes_read(run)
    for path in run.events.glob("*.summary"):
        path.unlink()
    without, all_of_them = bytes_read(run)
    assert with_them == without
    assert all_of_them > size > 10 * few


def bytes_read(run: RunDir) -> tuple[dict[str, Any], int]:
    """Return the status of a first poll, and the bytes that this process read for it."""

    def read() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    before = read()
    found = said(run)
    return found, read() - before


WRITES = """
import sys, time
from pathlib import Path
from megaflow_hpc.rundir.events import EventWriter, PodEvent, RolloutEvent, StartEvent
from megaflow_hpc.rundir.pods import aggregator
aggregator.READ_INTERVAL_S, aggregator.SUMMARY_INTERVAL_S, aggregator.TAIL, aggregator.PAUSE_FACTOR = 0.0, 0.0, 1, 0
path = Path(sys.argv[1])
events, keeper = EventWriter(path), aggregator.SummaryWriter(path)
events.write(PodEvent(state="started", job_id="7_0", node="n"))
for number in range(10**9):
    rollout = f"t{number}/p/0"
    events.write(StartEvent(id=rollout, rank=1, attempt=0))
    if number % 3:
        events.write(RolloutEvent(id=rollout, status="failed" if number % 7 == 0 else "completed", kind="model"))
    events.flush()
    keeper.tick()
    if number == 20:
        print("going", flush=True)
"""


def test_a_pod_that_is_killed_at_any_instant_leaves_what_reads_right(run: RunDir) -> None:
    draw, used = random.Random(4), 0
    for number in range(4):
        path = run.event_file(f"7_{number}", "0")
        with subprocess.Popen([sys.executable, "-c", WRITES, str(path)], stdout=subprocess.PIPE) as pod:
            assert pod.stdout is not None
            pod.stdout.readline()
            time.sleep(draw.random() / 5)
            pod.send_signal(signal.SIGKILL)
        used += summaries.read(path) is not None
    with_them = said(run)
    assert used == 4
    for path in run.events.glob("*.summary"):
        path.unlink()
    assert with_them == said(run)


def test_a_successor_hears_of_failures_that_only_a_summary_covers(run: RunDir) -> None:
    path = run.event_file("a", "0")
    events = EventWriter(path)
    events.write(PodEvent(state="started"))
    for number in range(4):
        for attempt in range(2):
            events.write(StartEvent(id=f"t{number}/p/0", rank=1, attempt=attempt))
            events.write(AttemptEvent(id=f"t{number}/p/0", attempt=attempt, kind="model", error="none", rank=1))
    events.write(RolloutEvent(id="t2/p/0", status="completed"))
    events.write(RolloutEvent(id="t3/p/0", status="failed", kind="model"))  # and its block is run again
    events.close()
    told = []
    for covered in (0, path.stat().st_size):
        condense(path, covered)
        known = Histories(run)
        known.look_at_events(["a.0"])
        told.append([known.take(f"t{number}/p/0") for number in (0, 1, 3)])
    assert told[0] == told[1]
    for history in told[1]:
        assert history is not None
        assert (history.causes, history.next_attempt) == (["model", "model"], 2)


@pytest.mark.parametrize("size", [PIECE + 100, 10 * PIECE + 100])
def test_a_line_longer_than_a_piece_stops_no_summary(run: RunDir, size: int) -> None:
    path = run.event_file("a", "0")
    told = EngineEvent(t=1.0, rank=1, state="ready", node="x" * size)
    ends = [RolloutEvent(t=float(n), id=f"t{n}/p/0", status="completed") for n in range(200)]
    for long in (encode(told), b"\0" * size + encode(ends[0])):
        path.write_bytes(encode(ends[1]) + long + b"".join(encode(event) for event in ends[2:]))
        SummaryWriter(path).finish()
        found = summaries.read(path)
        assert found is not None
        assert found.covers > path.stat().st_size - PIECE
        with_it = said(run)
        summaries.path_of(path).unlink()
        assert with_it == said(run)
