"""Verbs about a campaign, on a host without Slurm, without running anything."""

from __future__ import annotations

import argparse
import errno
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megaflow_hpc.campaign.run import Run
from megaflow_hpc.cli import main
from megaflow_hpc.cli.campaigns.following import start_and_follow
from megaflow_hpc.errors import SiteError, file_error
from megaflow_hpc.host.atomic import make_directory, write_json
from megaflow_hpc.rundir.events import EventWriter, RolloutEvent, StartEvent
from megaflow_hpc.rundir.marks import FINISHED

Capture = pytest.CaptureFixture[str]


def refused(words: list[str], capsys: Capture, status: int = 2) -> str:
    """Return the single line that a refused command prints on stderr."""
    assert main(words) == status
    said = capsys.readouterr()
    assert said.out == ""
    [line] = said.err.splitlines()
    return line


def test_plan_makes_the_run_directory_and_says_how_to_start_it(campaign: Path, tmp_path: Path, capsys: Capture) -> None:
    assert main(["plan", str(campaign), "--run-dir", str(tmp_path / "run"), "--only", "task0"]) == 0
    said = capsys.readouterr()
    assert said.out == f"{tmp_path / 'run'}\n"
    assert said.err == f"megaflow-hpc resume {tmp_path / 'run'} --launcher local\n"
    assert Run(tmp_path / "run").status()["rollouts"]["total"] == 2
    line = refused(["plan", str(campaign), "--run-dir", str(tmp_path / "run")], capsys)
    assert f"megaflow-hpc resume {tmp_path / 'run'}" in line
    assert "ids look like <task>/<policy>/<sample>" in refused(["plan", str(campaign), "--only", "task7"], capsys)


def test_submit_without_slurm_is_refused_and_touches_nothing(campaign: Path, capsys: Capture) -> None:
    before = sorted(campaign.parent.rglob("*"))
    for words in (["submit", str(campaign)], ["submit", str(campaign), "--dry-run"]):
        assert "use --launcher local" in refused(words, capsys, status=3)
    assert sorted(campaign.parent.rglob("*")) == before


@pytest.mark.parametrize("verb", ["run", "resume"])
@pytest.mark.parametrize("ranks", ["0", "-1", "two"])
def test_ranks_are_at_least_one(verb: str, ranks: str, capsys: Capture) -> None:
    assert f"--ranks: {ranks}: give a whole number of at least 1" in refused([verb, "RUN", "--ranks", ranks], capsys)


def test_the_status_of_a_planned_run(planned: Run, capsys: Capture) -> None:
    assert main(["status", str(planned.path)]) == 0
    head, counts = capsys.readouterr().out.splitlines()
    assert head == f"small: planned    {planned.path}"
    assert counts.startswith("total 4  pending 4  running 0")
    assert main(["status", str(planned.path), "--usage", "--rollouts", "--json"]) == 0
    status = json.loads(capsys.readouterr().out)
    assert status["rollouts"]["pending"] == 4
    assert status["rollout_list"] == []
    assert status["usage"]["core_seconds"] == 0
    assert main(["usage", str(planned.path), str(planned.path)]) == 0
    assert "total" not in capsys.readouterr().out, "the same run is counted once"
    assert main(["usage", str(planned.path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["total"]["gpu_seconds"] == 0


def test_a_cancelled_run_says_so_and_how_to_go_on(planned: Run, capsys: Capture) -> None:
    assert main(["cancel", str(planned.path)]) == 0
    said = capsys.readouterr()
    assert said.out == "nothing was queued or running\n"
    assert said.err == f"continue with: megaflow-hpc resume {planned.path}\n"
    assert main(["status", str(planned.path)]) == 0
    assert capsys.readouterr().out.startswith("small: cancelled")


def test_a_finished_run_is_not_cancelled_and_its_status_says_no_time_to_go(planned: Run, capsys: Capture) -> None:
    error = "no reward\x1b[2J"
    events = EventWriter(planned.dir.event_file("7_0", "0"))
    (planned.dir.logs / "pod-7_0.log").touch()
    for number, (rollout, kind) in enumerate(
        (("task0/nop/0", "user"), ("task1/nop/0", "user"), ("task0/oracle/0", "model"))
    ):
        events.write(StartEvent(id=rollout, rank=1, attempt=0))
        events.write(RolloutEvent(id=rollout, status="failed", kind=kind, error=f"{error} {number}"))
    events.write(RolloutEvent(id="task1/oracle/0", status="completed", reward=1.0))
    events.close()
    write_json(planned.path / FINISHED, {})
    assert main(["status", str(planned.path)]) == 0
    said = capsys.readouterr().out
    assert "to go" not in said
    assert said.splitlines()[2:9] == [
        "failures by cause: user 2, model 1",
        "first of user: task0/nop/0: no reward\\x1b[2J 0",
        f"  log: {planned.path}/logs/pod-7_0.log",
        f"  more: megaflow-hpc show {planned.path} task0/nop/0; megaflow-hpc logs {planned.path} task0/nop/0",
        "first of model: task0/oracle/0: no reward\\x1b[2J 2",
        f"  log: {planned.path}/logs/pod-7_0.log",
        f"  more: megaflow-hpc show {planned.path} task0/oracle/0; megaflow-hpc logs {planned.path} task0/oracle/0",
    ]
    assert main(["cancel", str(planned.path)]) == 0
    said = capsys.readouterr()
    assert said.out == "nothing was queued or running\n"
    assert said.err == f"{planned.path} is finished: every rollout is stored, so there is nothing to cancel\n"
    assert planned.status()["state"] == "finished"
    assert main(["cancel", str(planned.path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["before"] == "finished"
    line = refused(["weights", "publish", str(planned.path), str(planned.path)], capsys)
    assert f"{planned.path}: is finished, so no engine will load these weights" in line


def test_jobs_of_a_slurm_that_is_not_here_are_not_said_to_be_cancelled(planned: Run, capsys: Capture) -> None:
    make_directory(planned.dir.jobs)
    write_json(planned.dir.jobs / "17.json", {"role": "pods", "id": "17", "elements": 1})
    said = refused(["cancel", str(planned.path)], capsys, status=3)
    assert "jobs 17: run on Slurm, which is not available here; cancel them where sbatch is" in said


def test_gather_writes_the_file_that_it_names(planned: Run, capsys: Capture) -> None:
    assert main(["gather", str(planned.path)]) == 0
    assert capsys.readouterr().out == f"{planned.path}/trajectories.h5\n"
    assert (planned.path / "trajectories.h5").exists()
    assert "no trajectory '0' among 0" in refused(["show", str(planned.path), "0"], capsys)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "no number: give --pods N or --servers N"),
        (["--pods", "1", "--servers", "2"], "1 and 2: give --pods N or --servers N"),
        (["--pods", "-1"], "--pods: -1: give a whole number of at least 0"),
        (["--servers", "1"], "no engine servers to scale; use --pods N"),
    ],
)
def test_scale_takes_one_number(planned: Run, words: list[str], said: str, capsys: Capture) -> None:
    assert said in refused(["scale", str(planned.path), *words], capsys)


def test_scale_without_slurm_is_refused(planned: Run, capsys: Capture) -> None:
    assert "Slurm is not available here" in refused(["scale", str(planned.path), "--pods", "1"], capsys, status=3)


def test_limits_are_named_and_positive(planned: Run, capsys: Capture) -> None:
    for limit, said in (
        ("days=1", "expected core_hours, gpu_hours, wall or usd, as wall=24"),
        ("wall=-1", "expected hours above 0, as wall=100, or wall=none"),
        ("wall", "expected hours above 0, as wall=100, or wall=none"),
        ("gpu_hours=abc", "expected hours above 0, as gpu_hours=100, or gpu_hours=none"),
    ):
        assert f"--limit: {limit}: {said}" in refused(["resume", str(planned.path), "--limit", limit], capsys)


def test_what_is_asked_of_slurm_names_its_jobs_and_needs_slurm(planned: Run, capsys: Capture) -> None:
    resume = ["resume", str(planned.path)]
    line = refused([*resume, "--time", "engines=1:00:00"], capsys)
    assert "expected a value, or pods=…, servers=…, trainer=…, gather=…" in line
    assert "requests to Slurm" in refused([*resume, "--time", "8:00:00", "--mem", "64G"], capsys)
    assert not planned.dir.changed_requests.exists()


def test_an_edited_campaign_file_is_said_to_change_nothing(planned: Run, capsys: Capture) -> None:
    file = planned.dir.campaign_yaml
    assert planned.status()["warnings"] == []
    file.write_text(file.read_text() + "samples: 8\n")
    assert main(["status", str(planned.path)]) == 0
    said = capsys.readouterr().out
    assert f"{file} was edited, but edits do not affect a planned run" in said
    assert "resume --time" in said


def test_a_damaged_run_directory_is_named(planned: Run, capsys: Capture) -> None:
    planned.dir.run_json.write_text("{")
    line = refused(["status", str(planned.path)], capsys)
    assert str(planned.dir.run_json) in line
    assert "the run directory is damaged" in line


@pytest.mark.parametrize(
    ("code", "remedy"),
    [(errno.ENOSPC, "free space"), (errno.EDQUOT, "larger quota"), (errno.EACCES, "permissions"), (None, "odd")],
)
def test_a_run_whose_results_cannot_be_gathered_names_the_file_the_remedy_and_how_to_continue(
    tmp_path: Path, code: int | None, remedy: str
) -> None:
    file = tmp_path / "trajectories.h5"
    error = OSError("odd") if code is None else OSError(code, os.strerror(code), str(file))

    def conclude() -> None:
        raise error

    run: Any = SimpleNamespace(
        config=SimpleNamespace(name="small"), path=tmp_path, local=None, follow=lambda **_: None, conclude=conclude
    )
    with pytest.raises(SiteError) as raised:
        start_and_follow(run, argparse.Namespace(json=False), lambda: True)
    message = str(raised.value)
    assert remedy in message
    assert message.endswith(f"; then continue with: megaflow-hpc resume {tmp_path}")
    assert code is None or message.startswith(f"{file}: {os.strerror(code)}; ")
    error = BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))
    with pytest.raises(BrokenPipeError):  # the reader of the output has left; the command ends silently
        start_and_follow(run, argparse.Namespace(json=False), lambda: True)


def test_a_write_that_fails_for_space_names_the_file_system_that_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", "/scratch")
    free = {"/scratch": (5, 0, 9)}  # free blocks, free inodes, inodes
    values = ("f_bavail", "f_favail", "f_files")
    monkeypatch.setattr(
        os, "statvfs", lambda path: SimpleNamespace(**dict(zip(values, free.get(path, (5, 5, 9)), strict=True)))
    )
    error = OSError(errno.ENOSPC, "No space left on device")
    assert file_error(error) == "/scratch: No space left on device; free space on that file system, or use another"
    free["/scratch"] = (5, 0, 0)  # a file system that does not count inodes
    assert file_error(error).startswith("No space left on device; ")
