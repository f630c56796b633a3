"""Looking at rollouts while they run: which, where, how far, and what was said."""

from __future__ import annotations

import asyncio
import fcntl
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from megaflow_hpc.campaign.facade import Run
from megaflow_hpc.cli.view.app import WatchApp
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.live import LiveFiles
from megaflow_hpc.rundir.marks import FINISHED
from tests.support.campaigns import running, stored
from tests.support.scripted import SOLVE, block
from tests.support.terminals import Terminal, screen, shows
from tests.support.waiting import until, until_async

HOSTILE = "\x1b[31m[bold]not bold[/bold]\x07"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, base_sif: Path, write_task: Callable[..., Path]) -> Iterator[Run]:
    """A campaign of one rollout that is solved, one whose agent's command never ends, and one that cannot run."""
    folder = tmp_path_factory.mktemp("watched")
    for name in ("quick", "hanging", "broken"):
        write_task(folder / "tasks", name)
    with open(folder / "tasks" / "broken" / "task.toml", "a") as file:
        file.write('[environment.healthcheck]\ncommand = "false"\nretries = 1\n')
    script = {
        "tasks": [
            {"when": "Task hanging", "answers": [block(f"echo '{HOSTILE}'"), block("sleep 3600")]},
            {"when": "Task", "answers": SOLVE},
        ]
    }
    (folder / "answers.yaml").write_text(yaml.safe_dump(script))
    (folder / "campaign.yaml").write_text(
        "name: watched\ntasks: tasks/*\nagent: mini-swe-agent\nmodel: {engine: scripted, script: answers.yaml}\n"
        f"environment: {{network: none, images: {{base: {base_sif}}}}}\nslurm: {{pods: {{slots_per_rank: 3}}}}\n"
    )
    process, path = running(folder / "campaign.yaml")
    run = Run(path)
    yield run
    process.send_signal(signal.SIGINT)
    until(lambda: run.status()["pods"][0]["state"] != "started", "the pod drains")
    process.send_signal(signal.SIGINT)  # and does not wait
    process.communicate(timeout=60)


@pytest.mark.slow
def test_status_tells_what_runs_where_and_who_looks_is_told_what_was_said(run: Run) -> None:
    until(lambda: stored(run) == 2, "the others are stored")
    status = run.status()
    [pod] = status["pods"]
    [place] = run.monitor.running.longest([pod["pod"]])
    assert (place.id, place.pod, place.attempt) == ("hanging/default/0", pod["pod"], 0)
    assert place.node == pod["node"]
    node = pod["node"]
    assert status["failed_at"] == {"sandbox-lost": {node: 2}, "sandbox": {node: 1}}  # it was tried twice more
    until(lambda: [lease["tokens"] for lease in run.ledger.leases().values()] > [0], "the lease counts tokens")

    viewer = LiveFiles(run.dir)
    assert not run.dir.live.exists()  # nobody looks: nothing is written
    viewer.ask(["hanging/default/0", "no/such/0"], "hanging/default/0")
    until(lambda: (said := viewer.status(pod["pod"])) and said.transcripts, "the transcript is shown")
    said = viewer.status(pod["pod"])
    assert said is not None
    assert said.rollouts.keys() == said.transcripts.keys() == {"hanging/default/0"}
    assert (said.rollouts["hanging/default/0"].calls, said.rollouts["hanging/default/0"].waits) == (2, False)
    messages = said.transcripts["hanging/default/0"].messages
    assert [role for role, _ in messages] == ["system", "user", "assistant", "user", "assistant"]
    assert HOSTILE in messages[3][1]
    assert "sleep 3600" in messages[4][1]
    assert run.dir.live.stat().st_mode & 0o777 == 0o700
    viewer.leave()
    until(lambda: viewer.status(pod["pod"]) is None, "nobody looks any more")
    assert list(run.dir.live.iterdir()) == []


@pytest.mark.slow
def test_the_view_shows_a_run_and_looks_into_a_rollout_while_it_runs(run: Run) -> None:
    until(lambda: stored(run) == 2, "the others are stored")

    async def scenario() -> None:
        app = WatchApp(Run(run.path), every_s=0.2)
        async with app.run_test(size=(80, 24)) as pilot:
            seen = await shows(pilot, "agent 0:")  # the pod has told what it does
            assert "2/3 66%" in seen
            assert "running 1  completed 1  truncated 0  failed 1" in seen
            assert "slots 1/3 (33%)  engines 1" in seen
            assert "failed attempts: sandbox" in seen
            rows = [line.split()[:3] for line in seen.splitlines() if "/default/0" in line]
            assert rows[0] == [">", "hanging/default/0", "running"]
            assert sorted(row[0] for row in rows[1:]) == ["broken/default/0", "quick/default/0"]

            await pilot.press("enter")
            seen = await shows(pilot, "sleep 3600")
            assert "model calls 2" in seen
            assert "\\x1b[31m[bold]not bold[/bold]\\x07" in seen  # neither the terminal's nor Textual's
            await pilot.press("l")
            await shows(pilot, "attempt 1 starts on rank")
            await pilot.press("escape", "f")
            assert "quick/default" not in await shows(pilot, "shown: failed only")
            await pilot.press("enter")
            assert "attempt 3 on" in await shows(pilot, "not healthy")
            await pilot.press("escape", "escape", "slash", *"QUICK", "enter", "enter")
            await shows(pilot, "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")
            await pilot.press("escape", "p")
            assert "default.0" in await shows(pilot, "run/slots")
            await pilot.resize_terminal(40, 12)  # columns are left out, and lines cut
            await pilot.press("question_mark")
            await shows(pilot, "choose a rollout")
            await pilot.press("x", "q")
        assert not app.is_running
        assert not app.over

    asyncio.run(scenario())
    until(lambda: not list(run.dir.live.glob("*.ask")), "the view asks no more")


@pytest.mark.slow
def test_on_a_terminal_of_24_lines_without_colours_it_can_be_left_and_resized(run: Run) -> None:
    terminal = Terminal(80, 24, sys.executable, "-m", "megaflow_hpc", "watch", str(run.path), "--every", "0.5")
    terminal.until("hanging/default/0")
    terminal.write("\r")
    terminal.until("sleep 3600")
    terminal.resize(60, 16)
    terminal.until("Esc back")
    terminal.write("\x1b")
    terminal.until("q leave")
    terminal.write("q")
    assert terminal.wait() == 0
    assert "watched: running, 2/3 done" in terminal.text
    assert "the campaign continues" in terminal.text
    assert not re.search(rb"\x1b\[(?:\d+;)*(?:3[0-8]|4[0-8]|9\d|10[0-7])[;m]", terminal.written), "a colour"
    assert terminal.written.rindex(b"\x1b[?1049l") > terminal.written.rindex(b"\x1b[?1049h")  # the screen is as before

    away = Terminal(80, 24, sys.executable, "-m", "megaflow_hpc", "watch", str(run.path), "--every", "0.5")
    away.until("hanging/default/0")
    assert away.hang_up() == -signal.SIGHUP  # no login node keeps it


@pytest.mark.slow
def test_a_run_that_does_not_answer_or_is_removed_stops_no_key(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megaflow_hpc.cli.view.app.SLOW_RUN_DIRECTORY_S", 1.0)
    before = signal.signal(signal.SIGIO, signal.SIG_IGN)  # by which a lender is asked to give a file back
    copy = RunDir(shutil.copytree(run.path, tmp_path / "copy", ignore=shutil.ignore_patterns("live")))

    async def scenario() -> None:
        app = WatchApp(Run(copy), every_s=0.2)
        async with app.run_test(size=(80, 24)) as pilot:
            await shows(pilot, "quick/default/0")
            lent = os.open(copy.path / FINISHED, os.O_RDWR | os.O_CREAT)
            fcntl.fcntl(lent, fcntl.F_SETLEASE, fcntl.F_WRLCK)  # who opens it waits, as for a file server that is away
            await shows(pilot, "the run directory has not answered for 0:0")
            await pilot.press("f")
            assert "quick" not in await shows(pilot, "failed only")
            await pilot.press("escape")
            os.unlink(copy.path / FINISHED)
            os.close(lent)
            await until_async(lambda: "not answered" not in screen(app), "it answers again")
            shutil.rmtree(copy.path)
            await shows(pilot, "no longer exists")
            await pilot.press("question_mark")
            await shows(pilot, "look into it")
            await pilot.press("x", "q")
        assert not app.is_running

    try:
        asyncio.run(scenario())
    finally:
        signal.signal(signal.SIGIO, before)
