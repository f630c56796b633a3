"""The verbs ``export`` and ``import``."""

from __future__ import annotations

import json
import re

import pytest

from megaflow_hpc.trajectories import gather, open_trajectories
from tests.support.samples import commit, run_dir, trajectory


@pytest.fixture
def run(tmp_path):
    run = run_dir(tmp_path / "run")
    rollouts = [trajectory(n) for n in range(12)] + [trajectory(n, task="nul") for n in range(3)]
    rollouts += [trajectory(n, task="lost", status="failed") for n in range(3)]
    commit(run, "a", *((0, 0, t) for t in rollouts))
    gather(run)
    return run


def test_the_command_line_exports_and_imports(megaflow, run, tmp_path):
    out = tmp_path / "out"
    result = megaflow("export", run, "--format", "jsonl,preds", "--where", "reward > 0.5", "-o", out, "--json")
    shown = json.loads(result.stdout)
    assert (result.returncode, result.stderr.splitlines()) == (0, shown["warnings"])
    assert shown["trajectories"] == 7
    assert shown["files"]["jsonl"] == [str(out / "trajectories.jsonl")]
    assert (out / "trajectories.jsonl").stat().st_mode & 0o777 == 0o600
    back = tmp_path / "back.h5"
    result = megaflow("import", out / "trajectories.jsonl", "-o", back, "--json")
    assert json.loads(result.stdout) == {"file": str(back), "trajectories": 7}
    again = megaflow("import", out / "trajectories.jsonl", "-o", back)
    assert (again.returncode, "exists already" in again.stderr) == (2, True)
    forced = megaflow("import", out / "trajectories.jsonl", "-o", back, "--force", "--campaign", "other")
    assert (forced.returncode, forced.stdout, forced.stderr) == (0, f"{back}\n", "7 trajectories\n")
    with open_trajectories(back) as store:
        assert (store.campaign, len(store)) == ("other", 7)


def test_without_json_the_files_are_printed_and_the_count_is_said_on_stderr(megaflow, run):
    result = megaflow("export", run, "--format", "jsonl, preds")
    files = [run.path / "export" / name for name in ("trajectories.jsonl", "preds-default-0.json")]
    *warnings, count = result.stderr.splitlines()
    assert (result.returncode, count) == (0, f"18 trajectories, warnings: {len(warnings)}")
    *damaged, lacking = warnings
    assert all(" is not UTF-8 (byte 0x" in warning for warning in damaged)
    assert damaged
    assert re.fullmatch(r"no patch in \d+ of 18 trajectories, such as .*: their predictions are empty", lacking)
    assert result.stdout.splitlines()[:2] == list(map(str, files))
    assert all(file.is_file() for file in files)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--format", "csv"), "format 'csv': there are jsonl, parquet"),
        (
            ("--format", "jsonl", "--where", "status == 'lost'"),
            "no trajectory for which \"status == 'lost'\" holds among 18",
        ),
        (("--format", "jsonl", "--where", "stat == 1"), "no column 'stat'"),
        (
            ("--format", "jsonl", "--where", "reward >"),
            "selection: 'reward >': column 1: invalid syntax; expected one such as: status ==",
        ),
    ],
)
def test_a_bad_argument_is_named(megaflow, run, tmp_path, arguments, message):
    result = megaflow("export", run, *arguments, "-o", tmp_path / "out", "--json")
    assert (result.returncode, result.stdout, message in result.stderr) == (2, "", True), result.stderr
    assert not (tmp_path / "out").exists()


def test_a_file_that_is_none_of_ours_is_named_with_the_remedy(refused, tmp_path):
    lines, target = tmp_path / "notes.jsonl", tmp_path / "back.h5"
    lines.write_text('{"id": "t/p/0"}\n')
    assert f"{lines}:1: not a trajectory of megaflow-hpc" in refused("import", lines, "-o", target, "--json")
    assert f"{tmp_path / 'nowhere.jsonl'}: cannot be read; expected JSON lines of megaflow-hpc export" in refused(
        "import", tmp_path / "nowhere.jsonl", "-o", target
    )
    assert not target.exists()
    assert f"{tmp_path / 'nowhere.h5'}: cannot be read" in refused(
        "export", tmp_path / "nowhere.h5", "--format", "jsonl"
    )
