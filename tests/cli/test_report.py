"""``report`` writes the announced content under the announced names, and says clearly what it cannot do."""

from __future__ import annotations

import json
import math
import subprocess
from collections.abc import Callable
from pathlib import Path

from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.trajectories import gather
from tests.support import samples

Megaflow = Callable[..., "subprocess.CompletedProcess[str]"]


def run_of(path: Path, rollouts: int) -> RunDir:
    run = samples.run_dir(path, path.name)
    samples.commit(run, "pod0", *[(0, 0, samples.trajectory(n, f"task{n % 3}")) for n in range(rollouts)])
    return run


def test_a_report_lies_in_its_run_and_json_has_its_figures(tmp_path: Path, megaflow: Megaflow) -> None:
    run = run_of(tmp_path / "one", 12)
    done = megaflow("report", run.path, "--core-hour", "0.5", "--currency", "EUR", "--transcripts", "2")
    assert done.returncode == 0, done.stderr
    assert "6 of 12" in done.stdout
    assert f"report: {run.report / 'index.html'}" in done.stdout
    names = {path.name for path in run.report.iterdir()}
    assert {"index.html", "figures.json", "pass-at-k.png", "timeline.png"} <= names
    assert not {name for name in names if name.startswith(".")}, "nothing half-written is left"
    assert "2 of 12 transcripts are in this page" in (run.report / "index.html").read_text()
    kept = json.loads((run.report / "figures.json").read_text())
    told = json.loads(megaflow("report", run.path, "--json", "--no-pictures", "--core-hour", "0.5").stdout)
    assert [each["policies"] for each in told["runs"]] == [each["policies"] for each in kept["runs"]]
    assert told["files"][-1] == str(run.report / "index.html")


def test_several_runs_and_a_file_make_one_report(tmp_path: Path, megaflow: Megaflow) -> None:
    one, two = run_of(tmp_path / "one", 12), run_of(tmp_path / "two", 6)
    gather(two, {})
    arguments = (one.path, two.trajectories, "-o", tmp_path / "new" / "both", "--no-pictures", "--json")
    told = json.loads(megaflow("report", *arguments).stdout)
    (difference,) = told["comparison"]
    assert (difference["tasks"], difference["axis"], difference["against"]) == (3, "run", "one")
    assert told["matrix"]["arms"] == ["one", "two"]
    assert {path.name for path in (tmp_path / "new" / "both").iterdir()} == {"index.html", "figures.json"}
    assert not list(one.report.iterdir())


def test_compare_prints_differences_and_the_matrix_of_tasks(tmp_path: Path, megaflow: Megaflow) -> None:
    one, two = run_of(tmp_path / "one", 12), run_of(tmp_path / "two", 6)
    done = megaflow("compare", one.path, two.path, "--tasks", "2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[2].split()[:4] == ["run", "two", "one", "3"]
    assert "1 more tasks, which differ less (--tasks all)" in done.stdout
    told = json.loads(megaflow("compare", one.path, two.path, "--against", "two", "--json").stdout)
    assert [(each["name"], each["against"]) for each in told["comparison"]] == [("one", "two")]
    assert len(told["matrix"]["means"]) == 3
    assert "nothing to compare" in megaflow("compare", one.path).stdout
    wrong = megaflow("compare", one.path, two.path, "--against", "three")
    assert (wrong.returncode, "expected one of run: one, two" in wrong.stderr) == (2, True), wrong.stderr


def test_metrics_are_one_file_that_everybody_may_read(tmp_path: Path, megaflow: Megaflow) -> None:
    run, file = run_of(tmp_path / "one", 4), tmp_path / "megaflow.prom"
    assert megaflow("report", run.path, "--prometheus", file).returncode == 0
    assert 'megaflow_rollouts_passed_total{campaign="one",run="one",policy="default"} 2\n' in file.read_text()
    assert file.stat().st_mode & 0o777 == 0o644
    assert not list(run.report.iterdir())


def test_rewards_without_bounds_and_times_without_sense_make_a_page(tmp_path: Path, megaflow: Megaflow) -> None:
    run = samples.run_dir(tmp_path / "odd", "odd")
    long = {"setup_s": 1.0, "agent_s": 1e30, "verify_s": math.inf}
    odd = [
        samples.trajectory(0, reward=math.inf, started_at=0.0, finished_at=1.7e9, **long),
        samples.trajectory(1, reward=-math.inf, started_at=1.7e9, finished_at=1.6e9),
        samples.trajectory(2, reward=1e30, messages=[{"role": None, "content": {"x": [1]}}, {}]),
    ]
    samples.commit(run, "pod0", *[(0, 0, one) for one in odd])
    done = megaflow("report", run.path, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["runs"][0]["policies"][0]["rollouts"] == 3
    assert (run.report / "index.html").exists()
    assert megaflow("report", run.path, "--prometheus", tmp_path / "odd.prom").returncode == 0


def test_what_cannot_be_reported_is_said(tmp_path: Path, megaflow: Megaflow) -> None:
    run = run_of(tmp_path / "one", 0)
    assert megaflow("report", run.path, "--no-pictures").returncode == 0, "nothing is stored yet"
    twice = megaflow("report", run.path, run.path / ".")
    assert (twice.returncode, "named twice" in twice.stderr) == (2, True)
    wrong = megaflow("report", run.path, "--prometheus", tmp_path / "megaflow.txt")
    assert (wrong.returncode, ".prom" in wrong.stderr) == (2, True)
    blocked = tmp_path / "file"
    blocked.write_text("")
    onto = megaflow("report", run.path, "--no-pictures", "-o", blocked)
    assert (onto.returncode, "name another directory with -o" in onto.stderr) == (2, True)
    for argument in (["--core-hour", "nan"], ["--gpu-hour", "-1"], ["--transcripts", "few"]):
        assert megaflow("report", run.path, *argument).returncode == 2
