"""The verb ``logs``."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from megaflow_hpc.cli.runs import logs as verb
from megaflow_hpc.host.atomic import write_json
from megaflow_hpc.ledger.tasks import PlannedTask, write_tasks
from megaflow_hpc.rundir import logs
from megaflow_hpc.rundir.events import AttemptEvent, EventWriter, RolloutEvent
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.marks import FINISHED
from megaflow_hpc.rundir.record import PolicyRecord, read_run, write_run
from megaflow_hpc.types import Artifact
from tests.support.samples import commit, run_dir, trajectory

ERROR = "\x1b]0;evil\x07 it broke"


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """Make a finished run of one stored rollout, with logs of two pods, an engine and a gather job."""
    run = run_dir(tmp_path / "run")
    planned = read_run(run)
    planned.packed = write_tasks(run, [PlannedTask({"id": "task"}, {})])
    planned.policies = {"default": PolicyRecord()}
    write_run(run, planned)
    test = Artifact("verifier.log", b"expected 42\n\x1b[31m\xff\n")
    commit(run, "a", (0, 0, trajectory(5, artifacts=[test])))
    events = EventWriter(run.event_file("7_0", "0"))
    events.write(AttemptEvent(id="task/default/5", attempt=0, kind="sandbox", error=ERROR, rank=2))
    events.write(RolloutEvent(id="task/default/50", status="failed"))
    events.write(RolloutEvent(id="task/default/5", status="completed", reward=1.0, turns=3, seconds=0.25))
    events.close()
    (run.logs / "pod-7_0.log").write_bytes(
        b"".join(b"line %d\n" % number for number in range(500))
        + b"task/default/5: hello \x1b[2J\xff\ntask/default/50: another's\ntask/default/5: no end"
    )
    (run.logs / "pod-7_1.log").write_bytes(b"x" * 100_000 + b"\n")
    (run.logs / "pod-7_1.requeues").write_text("1")
    (run.logs / "default.0.engine.log").write_text("serving\n")
    (run.logs / "gather-9.log").touch()
    return run


def test_logs_lists_prints_and_names_what_there_is(megaflow, refused: Callable[..., str], run: RunDir) -> None:
    listed = megaflow("logs", run)
    rows = [line.split(maxsplit=2) for line in listed.stdout.splitlines()[2:]]
    assert [row[0] for row in rows] == ["default.0.engine", "gather-9", "pod-7_0", "pod-7_1"]
    assert rows[0][1:] == ["8", "serving"]
    assert rows[2][2] == "task/default/5: no end"
    assert f"megaflow-hpc logs {run} default.0.engine" in listed.stderr
    assert [log["role"] for log in json.loads(megaflow("logs", run, "--json").stdout)] == [
        "engine",
        "gather",
        "pod",
        "pod",
    ]
    for name in ("default.0", "default.0.engine", "engine", "default.0.engine.log"):
        assert megaflow("logs", run, name).stdout == "serving\n"
    for name in ("7_0", "pod-7_0", "7_0.3"):
        shown = megaflow("logs", run, name, "--tail", "3")
        assert shown.stdout.splitlines()[0] == "task/default/5: hello \\x1b[2J\\udcff"
        assert shown.stdout.endswith("\ntask/default/5: no end\n")
        assert f"bytes before this are left out (--tail N, --all): {run.logs}/pod-7_0.log" in shown.stderr
    assert megaflow("logs", run, "7_0").stdout.splitlines()[0] == "line 303"
    assert megaflow("logs", run, "7_0", "--all").stdout.splitlines()[0] == "line 0"
    found = json.loads(megaflow("logs", run, "7_0", "--json", "--tail", "1").stdout)
    assert found["lines"] == ["task/default/5: no end"]
    assert found["bytes_before"] == (run.logs / "pod-7_0.log").stat().st_size - len(found["lines"][0])
    assert megaflow("logs", run, "7_1").stdout == f"{'x' * logs.LINE} … cut\n"
    assert "gather-9.log: the log is still empty" in megaflow("logs", run, "9").stderr
    for name in ("pod", "7"):
        assert "several logs have this name; choose one: pod-7_0, pod-7_1" in refused("logs", run, name)
    assert "there are: default.0.engine, gather-9, pod-7_0, pod-7_1" in megaflow("logs", run, "8").stderr
    assert "name the log to follow" in megaflow("logs", run, "--follow").stderr


def test_logs_of_a_rollout_are_what_everybody_says_of_it(megaflow, run: RunDir) -> None:
    result = megaflow("logs", run, "task/default/5")
    attempt, stored, *said = result.stdout.splitlines()
    assert attempt[20:] == "attempt 1 failed on rank 2, and is repeated: sandbox: \\x1b]0;evil\\x07 it broke"
    assert stored[20:] == "stored: completed, reward 1, 3 turns, 0.25 s"
    assert said == [
        "pod-7_0.log: task/default/5: hello \\x1b[2J\\udcff",
        "verifier.log:",
        "expected 42",
        "\\x1b[31m\\udcff",
    ]
    found = json.loads(megaflow("logs", run, "task/default/5", "--json").stdout)
    assert (len(found["lines"]), found["verifier_log"][:12]) == (3, "expected 42\n")
    waiting = megaflow("logs", run, "task/default/7")
    assert (waiting.returncode, waiting.stdout) == (0, "")
    assert "task/default/7: nothing is logged about it yet" in waiting.stderr
    unknown = megaflow("logs", run, "tusk/default/5")
    assert unknown.returncode == 2
    assert "no trajectory 'tusk/default/5' among 1; there are: task/default/5" in unknown.stderr


def test_a_rollouts_log_and_any_other_are_followed_as_they_grow(
    megaflow, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = logs.RolloutLog(run, "task/default/5")
    assert len(log.read()) == 3
    assert log.ended
    place = run.logs / "pod-7_0.log"
    with open(place, "ab") as file:
        file.write(b" is here\nhalf a li")
    (run.logs / "pod-7_2.log").write_text("task/default/5: elsewhere\n")
    assert log.read() == ["pod-7_0.log: task/default/5: no end is here", "pod-7_2.log: task/default/5: elsewhere"]
    assert log.read() == []
    place.write_text("task/default/5: anew\n")
    assert log.read() == ["pod-7_0.log: task/default/5: anew"]
    write_json(run.path / FINISHED, {})
    looks: list[float] = []

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 1:
            with open(place, "a") as file:
                file.write("it goes on\nno end")
        else:
            monkeypatch.setattr(verb, "QUIET_S", 0.0)

    monkeypatch.setattr(verb.time, "sleep", sleep)
    assert megaflow("logs", run, "7_0", "--follow").stdout == "task/default/5: anew\nit goes on\nno end\n"
    assert len(looks) == 2
    everything = "task/default/5: anew\nit goes on\nno end\n"
    assert megaflow("logs", run, "7_0", "--follow", "--all").stdout == everything
    assert megaflow("logs", run, "7_0", "--all").stdout == everything
