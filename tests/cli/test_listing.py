"""The verb ``list``."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from megaflow_hpc import Campaign
from megaflow_hpc.host.atomic import write_json
from megaflow_hpc.host.process import Identity
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.marks import FINISHED, Marks


def lease(run: RunDir, pod: str, **said: object) -> None:
    identity = Identity.of(os.getpid())
    assert identity is not None
    common = {"pod": pod, "start": "0", "job_id": "", "host": os.uname().nodename, "pid": identity.pid}
    common |= {"pid_start": identity.start, "counter": 1, "t": 1.0, "running": 1, "queued": 0, "stored": 1, "ended": ""}
    write_json(run.ledger / "leases" / f"{pod}.0", common | said)


def test_list_shows_what_became_of_each_run(campaign: Path, megaflow, monkeypatch: pytest.MonkeyPatch) -> None:
    here = campaign.parent / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    empty = megaflow("list")
    assert (empty.returncode, empty.stdout, empty.stderr) == (0, "", "no run in . or 3 levels below\n")
    states = ("planned", "running", "stopped", "queued", "cancelled", "finished", "broken", "half", "odd")
    found = {}
    for number, state in enumerate(states):
        run = found[state] = Campaign.from_yaml(campaign).plan(here / "runs" / state, launcher="local").dir
        os.utime(run.run_json, (1e9 + number, 1e9 + number))
    lease(found["running"], "a")
    lease(found["stopped"], "a", pid_start=1)
    lease(found["stopped"], "b", ended="drained", stored=2)
    lease(found["queued"], "a", job_id="7_0", stored=9)
    Marks(found["cancelled"]).cancel()
    write_json(found["finished"].path / FINISHED, {})
    found["broken"].run_json.write_text('{"format": "megaflow-hpc/run", ')
    found["half"].run_json.unlink()
    for number, content in enumerate(("[1]", "", '{"pid": "x", "stored": []}')):
        (found["odd"].ledger / "leases" / f"x.{number}").write_text(content)
    shown = megaflow("list")
    assert shown.returncode == 0
    rows = {line.split()[0]: line.split() for line in shown.stdout.splitlines()[2:]}
    assert {*list(rows)[:2]} == {"runs/half", "runs/broken"}
    assert list(rows)[2:] == ["runs/odd", *(f"runs/{state}" for state in reversed(states[:6]))]
    assert rows["runs/planned"][1:4] == ["small", "planned", "0/4"]
    assert rows["runs/running"][1:4] == ["small", "running", "1/4"]
    assert rows["runs/stopped"][1:4] == ["small", "stopped", "3/4"]
    assert rows["runs/queued"][1:4] == ["small", "unknown", "4/4"], "there is no Slurm here that could say"
    assert rows["runs/cancelled"][1:4] == ["small", "cancelled", "0/4"]
    assert rows["runs/finished"][1:4] == ["small", "finished", "4/4"]
    assert rows["runs/finished"][5:] == ["d", *rows["runs/finished"][-2:]]
    assert rows["runs/odd"][1:4] == ["small", "stopped", "0/4"]
    assert rows["runs/broken"][1] == rows["runs/half"][1] == "broken"
    for cause in (
        "the run directory is damaged",
        "half: not a run directory (no run.json)",
        "Slurm, which is not available here",
    ):
        assert cause in shown.stderr
    every = json.loads(megaflow("list", here, "--json").stdout)
    assert {entry["path"] for entry in every} == {str(run.path) for run in found.values()}
    sizes = {Path(entry["path"]).name: entry["bytes"] for entry in every}
    assert sizes["planned"] == sum(p.lstat().st_size for p in found["planned"].path.rglob("*") if not p.is_dir())
    assert [entry["done"] for entry in json.loads(megaflow("list", "--state", "stopped", "--json").stdout)] == [0, 3]
    assert len(json.loads(megaflow("list", "-n", "2", "--json").stdout)) == 2
