"""Gathering writes every winner once, in commit order, with bounded memory. A killed gather leaves no file behind."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from megaflow_hpc.trajectories import JournalWriter, gather, open_trajectories, validate
from megaflow_hpc.trajectories.hdf5 import writer
from megaflow_hpc.trajectories.hdf5.publishing import Unfinished, clean_up, unfinished
from megaflow_hpc.trajectories.hdf5.writer import TrajectoryWriter
from megaflow_hpc.trajectories.journal import winners
from megaflow_hpc.trajectories.maintenance.validate import column_digests
from tests.support.journals import digests, record, write_between
from tests.support.samples import run_dir, trajectory

ROWS = 120
of_gather = sys.modules[gather.__module__]


@pytest.fixture
def run(tmp_path):
    """Three pods whose rollouts alternate in time."""
    run = run_dir(tmp_path / "run")
    write_between(run, 3, ROWS)
    return run


def ids(path):
    with open_trajectories(path) as store:
        return [row.id for row in store]


def test_the_rows_of_several_pods_are_in_commit_order_and_whole(run):
    path = gather(run)
    assert validate(path) == []
    assert [check for check in column_digests(path) if check.state != "ok"] == []
    with open_trajectories(path) as store:
        assert [row.id for row in store] == [trajectory(n).id for n in range(ROWS)]
        assert [row.trajectory().messages for row in store] == [trajectory(n).messages for n in range(ROWS)]
        tokens = [sequence.tokens for row in store for sequence in row.sequences]
    written = [sequence.tokens for n in range(ROWS) for sequence in trajectory(n).sequences]
    assert [column.tobytes() for column in tokens] == [column.tobytes() for column in written]


def test_the_size_of_batches_changes_nothing(run, monkeypatch):
    one_batch = digests(gather(run))
    for size in (1, 4000):
        monkeypatch.setattr(winners, "BATCH_BYTES", size)
        assert digests(gather(run, rebuild=True)) == one_batch


def test_a_reward_that_only_some_rows_have_is_missing_in_the_others(run):
    with JournalWriter(run.journal_file("other", "0")) as journal:
        journal.append(record(50, 0, trajectory(ROWS, rewards={"other": 0.25})))
    with open_trajectories(gather(run)) as store:
        assert store.column("rewards/other")[-1] == 0.25
        assert np.isnan(store.column("rewards/other")[:-1]).all()


def stopped_after(run, rows: int) -> None:
    """Gathers so many further rows and stops."""
    left = iter(range(1, rows))
    with pytest.raises(Unfinished, match=r"of \d+ rollouts; continue with: megaflow-hpc gather"):
        gather(run, stop=lambda: next(left, None) is None)


def hidden(run) -> list[str]:
    return sorted(path.name for path in run.path.iterdir() if path.name.startswith("."))


@pytest.mark.parametrize("pauses", [[1], [40, 1, 30], [119]])
def test_a_gather_that_was_stopped_continues_and_the_file_is_the_same(run, monkeypatch, pauses):
    with JournalWriter(run.journal_file("other", "0")) as journal:  # a late reward and a longer node name
        late = trajectory(ROWS, rewards={"other": 0.25}, node="n" * 70, error="x" * 5000, status="failed")
        journal.append(record(50, 0, late))
    monkeypatch.setattr(writer, "_FLUSH_ROWS", 16)
    monkeypatch.setattr(writer, "_BATCH_BYTES", 2000)
    whole = digests(gather(run))
    run.trajectories.unlink()
    for pause in pauses:
        stopped_after(run, pause)
        assert hidden(run) == [".trajectories.h5.unfinished"]
        assert not run.trajectories.exists()
    read = []
    monkeypatch.setattr(TrajectoryWriter, "append", _noting(TrajectoryWriter.append, read))
    path = gather(run)
    assert len(read) == ROWS + 1 - sum(pauses), "only the rest is gathered"
    assert digests(path) == whole
    assert validate(path) == []
    assert [check for check in column_digests(path) if check.state != "ok"] == []
    assert hidden(run) == []


def _noting(append, into: list[str]):
    def noted(self, one):
        into.append(one.id)
        append(self, one)

    return noted


@pytest.mark.parametrize("change", ["a journal grew", "a seal", "damaged", "another version", "killed"])
def test_what_a_stopped_gather_kept_is_not_used_if_it_does_not_fit(run, monkeypatch, change):
    stopped_after(run, 50)
    kept, seals = unfinished(run.trajectories), {}
    if change == "a journal grew":
        with JournalWriter(run.journal_file("more", "0")) as journal:
            journal.append(record(9, 0, trajectory(-1)))
    elif change == "a seal":
        seals = {(0, 0): ("pod-0.0", 10_000)}
    elif change == "damaged":
        data = bytearray(kept.read_bytes())
        data[len(data) // 2 :] = bytes(len(data) - len(data) // 2)
        kept.write_bytes(data)
    elif change == "another version":
        monkeypatch.setattr("megaflow_hpc.trajectories.maintenance.gather.SOFTWARE", "megaflow-hpc 99")
    else:
        code = f"""
import os, sys
from megaflow_hpc.trajectories import gather
gather({str(run.path)!r}, stop=lambda: os.kill(os.getpid(), 9))
"""
        assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
        assert not kept.exists(), "a file that a killed gather was changing is never continued"
    fresh = run_dir(run.path.parent / "fresh")
    for path in run.journal.iterdir():
        (fresh.journal / path.name).write_bytes(path.read_bytes())
    assert digests(gather(run, seals)) == digests(gather(fresh, seals))
    assert hidden(run) == []


def test_two_gathers_that_continue_at_once_write_each_rollout_once(run, monkeypatch):
    whole = digests(gather(run))
    run.trajectories.unlink()
    stopped_after(run, 50)
    check, checks = of_gather._rows_that_fit, []

    def slow_check(*arguments):
        rows = check(*arguments)
        checks.append(rows)
        if len(checks) == 1:  # meanwhile another gather continues and is stopped, too
            stopped_after(run, 10)
        return rows

    monkeypatch.setattr(of_gather, "_rows_that_fit", slow_check)
    assert digests(gather(run)) == whole
    assert len(ids(run.trajectories)) == ROWS


def test_a_file_that_is_up_to_date_stays_and_is_written_again_if_asked(run):
    path = gather(run)
    written = path.stat().st_ino
    assert gather(run).stat().st_ino == written
    before = digests(path)
    assert gather(run, rebuild=True).stat().st_ino != written
    assert digests(path) == before
    assert [path.name for path in run.path.iterdir() if path.name.startswith(".")] == []


def test_what_a_killed_gather_left_is_removed_and_a_living_ones_stays(run):
    code = f"""
import os, sys
from pathlib import Path
from megaflow_hpc.trajectories.hdf5.publishing import published
with published(Path({str(run.trajectories)!r})) as path:
    path.write_bytes(bytes(1000))
    print(path, flush=True)
    sys.stdin.readline()
"""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as writer:
        left = writer.stdout.readline().strip()
        assert clean_up(run.trajectories) == []
        writer.kill()
    assert os.path.exists(left)
    gather(run)
    assert [path.name for path in run.path.iterdir() if path.name.startswith(".")] == []
