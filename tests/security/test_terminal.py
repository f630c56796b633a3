"""Text of tasks, agents, files and logs is shown on a terminal, and never obeyed by it."""

from __future__ import annotations

import ast
import json
import logging
from dataclasses import replace
from pathlib import Path

import h5py
import pytest

import megaflow_hpc
from megaflow_hpc.cli import main
from megaflow_hpc.cli.output import status_line, table
from megaflow_hpc.cli.runs.status import shown
from megaflow_hpc.cli.view.words import head
from megaflow_hpc.monitor.live import Rollouts, RunSnapshot
from megaflow_hpc.rundir.events import RolloutEvent
from megaflow_hpc.texts import in_one_line, printable
from megaflow_hpc.trajectories import gather
from megaflow_hpc.trajectory import Attempt
from tests.support.harbor_tasks import TOML, write_task
from tests.support.samples import commit, run_dir, trajectory
from tests.support.steering import ATTACKS, EVIL, harmless


@pytest.mark.parametrize("text", ATTACKS.values(), ids=ATTACKS)
def test_what_steers_a_terminal_becomes_an_escape(text):
    assert harmless(printable(text))
    assert harmless(in_one_line(text))
    assert printable("plain ünïcode 🦔 → x\n\ty") == "plain ünïcode 🦔 → x\n\ty"
    assert "\n" not in in_one_line("one\ntwo\tthree")


def test_a_cell_of_a_table_cannot_make_a_row():
    rows = table(("id", "error"), [("a", "x\nb  completed\x1b[2K"), ("\x1b]0;t\x07", None)]).split("\n")
    assert len(rows) == 4
    assert all(harmless(row) for row in rows)


@pytest.fixture
def run(tmp_path):
    """A run of which every text that others choose is hostile."""
    run = run_dir(tmp_path / "run", EVIL)
    hostile = [
        replace(
            trajectory(n),
            error=EVIL,
            error_kind=f"user{EVIL}",
            agent=EVIL,
            policy=EVIL,
            node=EVIL,
            job_id=EVIL,
            rewards={EVIL: 1.0},
            messages=[
                {"role": EVIL, "content": [{"type": EVIL}, {"type": "text", "text": EVIL + str(n)}]},
                {"role": "assistant", "tool_calls": [{"function": {"name": EVIL, "arguments": EVIL}}]},
            ],
            attempts=[Attempt(0, "failed", EVIL, EVIL, EVIL, EVIL, 1.0, 2.0)],
        )
        for n in range(3)
    ]
    for each in hostile:
        each.turns = [replace(turn, finish_reason=EVIL, server=EVIL) for turn in each.turns]
        for sequence in each.sequences:
            sequence.policy = EVIL
        for artifact in each.artifacts:
            artifact.name = EVIL
    commit(run, "a", *((0, 0, t) for t in hostile))
    gather(run)
    return run


VERBS = (
    ("show", "RUN", "0"),
    ("show", "RUN", "1", "--tokens", "--full"),
    ("show", "RUN", EVIL),
    ("diff", "RUN", "0", "1"),
    ("validate", "FILE"),
    ("validate", "FILE", "--digests"),
    ("du", "FILE"),
    ("export", "RUN", "--format", "jsonl", "--where", f"agent == '{EVIL}'"),
)


@pytest.mark.parametrize("words", VERBS, ids=[" ".join(words)[:20] for words in VERBS])
def test_what_a_campaign_holds_is_printed_harmlessly(run, words, capsys):
    main([{"RUN": str(run.path), "FILE": str(run.trajectories)}.get(word, word) for word in words])
    said = capsys.readouterr()
    assert said.out + said.err
    assert harmless(said.out + said.err)


def test_a_hostile_file_is_told_of_harmlessly(run, tmp_path, capsys):
    with h5py.File(run.trajectories, "r+") as file:
        file["trajectories/status"][0] = b"\x1b[2Jx"
        file["trajectories"].create_group(EVIL.replace("/", "_"))
    main(["validate", str(run.trajectories)])
    main(["show", str(run.trajectories), "0"])
    lines = tmp_path / "x.jsonl"
    lines.write_text(json.dumps({"id": EVIL, EVIL: EVIL, "messages": EVIL}) + "\n")
    main(["import", str(lines), "-o", str(tmp_path / "x.h5")])
    main(["tasks", "import", str(lines)])
    said = capsys.readouterr()
    assert "x.jsonl" in said.err
    assert harmless(said.out + said.err)


def test_the_status_of_a_run_is_printed_harmlessly():
    """As ``status --rollouts`` and ``watch`` lay it out, before it is printed by one function."""
    status = {
        "run": "/run",
        "state": "running",
        "rollouts": dict.fromkeys(("total", "pending", "running", "completed", "truncated", "failed", "cancelled"), 1),
        "rate_per_s": 0,
        "failures": {EVIL: 1},
        "first_failures": [{"kind": EVIL, "count": 1, "id": EVIL, "error": f"{EVIL}\nfake row", "log": "/run/log"}],
        "retries": {},
        "models": {EVIL: {"calls": 1, "usd": 0.5}},
        "failed_at": {f"{EVIL}\nfake row": {f"{EVIL}\nfake row": 1}},
        "tokens_per_s": 1.0,
        "eta_s": None,
        "pods": [{"pod": 0, "state": "silent", "node": EVIL, "silent_s": 3, "why": EVIL}],
        "servers": [{"server": 0, "state": "failed", "policy": EVIL, "node": "n", "cause": f"{EVIL}\nfake row"}],
        "unstarted": [{"pod": 1, "node": EVIL, "cause": f"{EVIL}\nfake row", "log": EVIL}],
        "rollout_list": [{"id": EVIL, "status": "failed", "kind": "user", "error": f"{EVIL}\nfake row"}],
    }
    page = printable(shown(EVIL, status))
    assert harmless(page)
    assert not [line for line in page.split("\n") if line.startswith("fake row")]
    said = status_line(EVIL, {**status, "failures": {f"{EVIL}\nfake row": 1}})
    assert harmless(said)
    assert "\n" not in said
    rollouts = Rollouts([], [RolloutEvent(id=EVIL, status="failed", kind=EVIL)], {}, {}, (), 0.0)
    seen = head(EVIL, RunSnapshot({**status, "pods": []}, rollouts), (500, 80), f"{EVIL}\nfake row")
    assert harmless("".join(text.plain for text in seen))
    assert not [text for text in seen if "\n" in text.plain]


def test_tasks_are_listed_harmlessly(tmp_path, capsys):
    text = json.dumps(EVIL).replace("\x7f", "\\u007f")
    toml = TOML.replace('difficulty = "easy"', f'package = {text}\nkind = "a\\nfake row"')
    write_task(tmp_path / "tasks", toml=toml)
    assert main(["tasks", "list", str(tmp_path / "tasks")]) == 0
    said = capsys.readouterr().out
    assert harmless(said)
    assert len(said.splitlines()) == 3


def test_what_is_logged_is_printed_harmlessly(capsys, caplog):
    main(["validate", "/nonexistent"])
    formatter = logging.lastResort.formatter
    record = logging.LogRecord("x", logging.WARNING, "x", 1, "record of %s", (EVIL,), None)
    assert harmless(formatter.format(record))


def test_every_verb_prints_through_one_function():
    """``print`` itself is left to the functions that make text harmless."""
    bare = []
    for path in sorted((Path(megaflow_hpc.__file__).parent / "cli").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
                bare.append(path.name)
    assert sorted(set(bare)) == ["help.py", "output.py"]
    assert bare.count("help.py") == 1  # a script for a shell, byte for byte
