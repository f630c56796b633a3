"""What pods write of themselves in a run directory, and what whoever looks is told; tables of contents of journals."""

from __future__ import annotations

import contextlib
import json
import math
import tempfile
import zlib
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import msgspec

from megaflow_hpc.cli.runs import watch
from megaflow_hpc.cli.view.words import head
from megaflow_hpc.ledger import Ledger
from megaflow_hpc.monitor.backlog import Backlog
from megaflow_hpc.monitor.live import Live
from megaflow_hpc.monitor.status import Monitor
from megaflow_hpc.report.pods import read_events
from megaflow_hpc.rundir.budget import CampaignBudget
from megaflow_hpc.rundir.events import (
    AttemptEvent,
    PodEvent,
    ProgressEvent,
    RolloutEvent,
    StartEvent,
    WorkerEvent,
    encode,
)
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.pods import summary
from megaflow_hpc.rundir.pods.condenser import Condenser, SummaryWriter
from megaflow_hpc.trajectories.journal.contents import contents_path
from megaflow_hpc.trajectories.journal.frames import (
    frame_head,
    header,
    open_journal,
    pack_record,
    read_frames,
    read_header,
)
from megaflow_hpc.trajectories.journal.stored import Holding, StoredRollouts
from megaflow_hpc.trajectories.journal.writer import JournalWriter
from tests.security.fuzz.target import Broken, Feed, Target
from tests.support.ledgers import LEASE, NOW
from tests.support.samples import run_dir
from tests.support.steering import harmless

_EVENTS = (
    PodEvent(t=NOW, state="started", format_version=1, job_id="7_0", node="n1", ranks=3),
    WorkerEvent(t=NOW, rank=1, state="ready", slots=2, node="n1"),
    WorkerEvent(t=NOW, rank=2, state="excluded", node="n2", why="no scratch"),
    ProgressEvent(t=NOW + 1, running=1, queued=2, stored=3, core_s=4.5),
    StartEvent(t=NOW + 2, id="t/p/0", rank=1, attempt=0),
    AttemptEvent(t=NOW + 3, id="t/p/0", attempt=0, kind="sandbox", error="e", rank=1),
    RolloutEvent(t=NOW + 4, id="t/p/0", status="failed", kind="node", error="e", seconds=1.5, turns=2, inexact=1),
    RolloutEvent(t=NOW + 5, id="t/p/1", status="completed", reward=0.5, cpu_s=1.0, memory_peak_mb=2.0, inexact=1),
)


def _said(run: RunDir) -> None:
    """Whoever looks is told something, on a terminal and as JSON."""
    monitor = Monitor(run)
    status = {**monitor.status(), "queue": []}
    try:
        json.dumps(status, allow_nan=False)
    except ValueError as error:
        raise Broken("a status that is no JSON", error) from None
    if min(status["rollouts"].values()) < 0 or not math.isfinite(status["rate_per_s"]):
        raise Broken("counts below nothing", status["rollouts"])
    snapshot = Live(run, monitor).look(status)
    list(snapshot.rollouts)
    lines = [watch.line("run", status), *(text.plain for text in head("run", snapshot, (200, 100)))]
    if not all(map(harmless, lines)) or any("\n" in line for line in lines):
        raise Broken("a line that steers", lines)


@contextlib.contextmanager
def _lines(folder: Path) -> Iterator[Feed]:
    """An event among others, for whoever looks, and for the pod that condenses them."""
    run = run_dir(folder / "run")
    events = run.event_file("1", "0")
    before = b"".join(map(encode, _EVENTS))

    def feed(data: bytes) -> None:
        events.write_bytes(before + data + b"\n" + before)
        _said(run)
        read_events(run)
        Backlog(run).look()
        CampaignBudget(run, {"core_hours": 1.0, "wall": 1.0}).exceeded({"1.0": {}})
        clock = count(step=1000.0)
        writer = SummaryWriter(events, clock=lambda: next(clock))
        writer.finish()
        _said(run)
        summary.path_of(events).unlink(missing_ok=True)

    yield feed


@contextlib.contextmanager
def _summaries(folder: Path) -> Iterator[Feed]:
    run = run_dir(folder / "run")
    events = run.event_file("1", "0")
    events.write_bytes(b" " * 99 + b"\n" + encode(_EVENTS[-1]))

    def feed(data: bytes) -> None:
        summary.path_of(events).write_bytes(zlib.crc32(data).to_bytes(4, "little") + data)
        _said(run)
        Backlog(run).look()

    yield feed


def _condensed() -> list[bytes]:
    condenser = Condenser()
    found = []
    for event in _EVENTS:
        condenser.apply(event)
        found.append(msgspec.msgpack.encode(condenser.summary(100)))
    return found[-3:]


@contextlib.contextmanager
def _leases(folder: Path) -> Iterator[Feed]:
    """A pod's lease, and the same as what one pod reports for all, as GPU time and as changed limits."""
    run = run_dir(folder / "run")
    run.gpus.mkdir(parents=True, exist_ok=True)
    (run.ledger / "leases").mkdir(parents=True, exist_ok=True)
    run.event_file("1", "0").write_bytes(b"".join(map(encode, _EVENTS)))
    files = [run.ledger / "leases" / "1.0", run.ledger / "coordinator.json", run.gpus / "s.json", run.raised_limits]

    def feed(data: bytes) -> None:
        for file in files:
            file.write_bytes(data)
        _said(run)
        limits = {"core_hours": 1.0, "gpu_hours": 1.0, "wall": 1.0}
        CampaignBudget(run, limits).exceeded(Ledger(run).leases())

    yield feed


@contextlib.contextmanager
def _tables(folder: Path) -> Iterator[Feed]:
    """Frames of a table of contents: what is stored by it is stored by the journal."""
    run = run_dir(folder / "run")
    path = run.journal_file("pod", "0")
    _journal(path)
    table = contents_path(path)
    with open_journal(table) as file:
        salt = read_header(file, table) or b""
    first = next(read_frames(table)).payload

    def stored() -> list[set[str]]:
        found = StoredRollouts(run)
        sealed = found.length("pod.0")
        return [found.ids(block, [Holding(0, "pod.0", sealed)]) for block in (0, 1)]

    table.unlink()
    truth = stored()

    def feed(data: bytes) -> None:
        for payloads in ([data], [first, data]):
            made = header(salt)
            for payload in payloads:
                made += frame_head(payload, salt, len(made), 1) + payload
            table.write_bytes(made)
            for found, of_block in zip(stored(), truth, strict=True):
                if not found <= of_block:
                    raise Broken("a rollout that is nowhere is stored", found - of_block)

    yield feed


def _journal(path: Path) -> list[bytes]:
    """Writes a journal of two parts; returns the frames of its table."""
    with JournalWriter(path, rotate_bytes=300) as journal:
        for number in range(6):
            data: dict[str, Any] = {"id": f"t{number}/p/0", "status": "completed", "attempt": 0, "epoch": 0}
            journal.append(pack_record({"kind": "trajectory", "epoch": 0, "block": number % 2, "trajectory": data}))
            if number % 2:
                journal.commit()
    return [frame.payload for frame in read_frames(contents_path(path))]


def targets() -> list[Target]:
    """Events, summaries, leases and tables of contents."""

    def lines() -> list[bytes]:
        return [encode(event).rstrip() for event in _EVENTS]

    def frames() -> list[bytes]:
        with tempfile.TemporaryDirectory() as name:
            return _journal(Path(name) / "pod.0.journal")

    return [
        Target("events", _lines, lines, form="json", count=200, words=(b"NaN", b"1e999", b"9" * 400)),
        Target("summaries", _summaries, _condensed, form="msgpack"),
        Target("leases", _leases, lambda: [json.dumps(LEASE).encode()], form="json", words=(b"NaN", b"-Infinity")),
        Target("tables", _tables, frames, form="msgpack"),
    ]
