"""Event files: lines are read as they were written, also after a full disk."""

from __future__ import annotations

import json
from pathlib import Path

from megaflow_hpc.rundir.event_reader import EventReader
from megaflow_hpc.rundir.events import (
    AttemptEvent,
    EventWriter,
    PodEvent,
    RolloutEvent,
    WorkerEvent,
    decode,
)

OLD = b"""\
{"t": 1790063423.151, "event": "pod", "state": "started", "job_id": "", "node": "n1", "ranks": 2}
{"t": 1790063423.2, "event": "worker", "rank": 1, "state": "ready", "slots": 2, "node": "n1", "later": [1]}
{"t": 1790063424.1, "event": "attempt", "id": "a/p/0", "attempt": 0, "kind": "sandbox", "error": "x", "rank": 1}
{"t": 1790063425.301, "event": "rollout", "id": "a/p/0", "status": "completed", "kind": "", "error": "\\ud83d", \
"reward": NaN, "seconds": 0.51, "turns": 3, "inexact": 0}
{"t": 1790063425.4, "event": "of a later version", "rank": 1}
{"t": 1790063426.151, "event": "pod", "sta"""


def test_lines_are_read_and_what_is_unknown_or_cut_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "7_0.0.jsonl").write_bytes(OLD)
    reader = EventReader(tmp_path)
    ((name, events),) = reader.read()
    assert name == "7_0.0"
    assert [type(event) for event in events] == [PodEvent, WorkerEvent, AttemptEvent, RolloutEvent]
    assert events[1] == WorkerEvent(t=1790063423.2, rank=1, state="ready", slots=2, node="n1")
    with open(tmp_path / "7_0.0.jsonl", "ab") as file:
        file.write(b'te": "done", "stored": 2}\n')
    ((_, events),) = reader.read()
    assert events == [PodEvent(t=1790063426.151, state="done", stored=2)]


def test_a_reader_of_one_kind_gets_no_other(tmp_path: Path) -> None:
    (tmp_path / "7_0.0.jsonl").write_bytes(OLD)
    ((_, events),) = EventReader(tmp_path, only="attempt").read()
    assert events == [AttemptEvent(t=1790063424.1, id="a/p/0", attempt=0, kind="sandbox", error="x", rank=1)]


def test_what_is_written_is_one_line_of_plain_json_also_of_text_that_is_none(tmp_path: Path) -> None:
    writer = EventWriter(tmp_path / "a.0.jsonl")
    writer.write(RolloutEvent(id="a/p/0", status="failed", kind="node", error="\udc80 \n"))
    writer.write(PodEvent(state="draining", why="walltime"))
    writer.close()
    first, second = (tmp_path / "a.0.jsonl").read_bytes().splitlines()
    assert json.loads(first)["error"] == "\udc80 \n"
    told = decode(first)
    assert isinstance(told, RolloutEvent)
    assert told.error == "\udc80 \n"
    assert told.t > 1.7e9
    assert b'"event": "pod"' in second
    assert set(json.loads(second)) == {"t", "event", "state", "why"}
