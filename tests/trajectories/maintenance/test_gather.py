"""Gathering writes every winner once, in commit order, with bounded memory. A killed gather leaves no file behind."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from megaflow_hpc.trajectories import JournalWriter, gather, open_trajectories, validate
from megaflow_hpc.trajectories.hdf5.publishing import clean_up
from megaflow_hpc.trajectories.journal import winners
from megaflow_hpc.trajectories.journal.frames import pack_record
from megaflow_hpc.trajectories.maintenance.validate import verify
from tests.support.journals import digests, record, write_between, write_parts
from tests.support.samples import run_dir, trajectory

ROWS = 120


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
    assert [check for check in verify(path) if check.state != "ok"] == []
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


def test_parts_and_one_journal_make_the_same_file(tmp_path):
    whole, parted = run_dir(tmp_path / "whole"), run_dir(tmp_path / "parted")
    write_parts(whole, "a", range(ROWS), rotate_bytes=1 << 30)
    write_parts(parted, "a", range(ROWS))
    assert digests(gather(whole)) == digests(gather(parted))


def test_a_reward_that_only_some_rows_have_is_missing_in_the_others(run):
    with JournalWriter(run.journal_file("other", "0")) as journal:
        journal.append(record(50, 0, trajectory(ROWS, rewards={"other": 0.25})))
    with open_trajectories(gather(run)) as store:
        assert store.column("rewards/other")[-1] == 0.25
        assert np.isnan(store.column("rewards/other")[:-1]).all()


def test_what_earlier_versions_left_next_to_the_journals_is_ignored(run):
    expected = ids(gather(run))
    run.trajectories.unlink()
    (run.path / "shards").mkdir()
    (run.path / "shards" / "pod-0.0.h5").write_bytes(b"not read")
    (run.journal / "pod-0.0.contents").write_bytes(pack_record({"kind": "contents", "records": []}))
    assert ids(run.path) == expected
    assert ids(gather(run)) == expected


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
