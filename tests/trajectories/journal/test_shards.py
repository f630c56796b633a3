"""Journals in parts, their shards, and files that are gathered from either: all say the same."""

from __future__ import annotations

import os
import subprocess
import sys

import h5py
import numpy as np
import pytest

from megaflow_hpc.ledger import Ledger
from megaflow_hpc.trajectories import JournalWriter, gather, open_trajectories, read_journal, valid_length, validate
from megaflow_hpc.trajectories.hdf5.publishing import clean_up
from megaflow_hpc.trajectories.journal.shard_maker import ShardMaker
from megaflow_hpc.trajectories.journal.shards import shard_entries, shard_path, write_shard
from megaflow_hpc.trajectories.journal.winners import index, journals
from megaflow_hpc.trajectories.journal.writer import base_of, parts
from megaflow_hpc.trajectories.maintenance.checksums import verify
from tests.support.journals import digests, record, write_between, write_parts, write_shards
from tests.support.samples import run_dir, trajectory

ROWS = 120


@pytest.fixture
def run(tmp_path):
    run = run_dir(tmp_path / "run")
    write_parts(run, "a", range(ROWS))
    return run


def test_a_journal_goes_on_in_parts_and_counts_over_them(tmp_path):
    run = run_dir(tmp_path / "run")
    ends = write_parts(run, "a", range(ROWS))
    first = run.journal_file("a", "0")
    found = parts(first)
    assert len(found) > 3
    assert [path.name for path in found[:2]] == ["a.0.journal", "a.0+0001.journal"]
    sizes = [path.stat().st_size for path in found]
    assert all(size >= 40_000 for size in sizes[:-1])
    assert [base_of(path) for path in found] == [sum(sizes[:n]) for n in range(len(found))]
    assert valid_length(first) == sum(sizes) == ends[-1]
    ids = [r["trajectory"]["id"] for path in found for _, r in read_journal(path) if r["kind"] == "trajectory"]
    assert ids == [trajectory(n).id for n in range(ROWS)]


def test_a_seal_counts_over_parts(tmp_path):
    run = run_dir(tmp_path / "run")
    ends = write_parts(run, "a", range(ROWS))
    write_shards(run)
    seals = {(block, 0): ("a.0", ends[69]) for block in range(ROWS // 10)}
    for shards in (True, False):
        assert [e.id for e in index(run, seals, shards).winners] == [trajectory(n).id for n in range(70)]


def test_the_base_of_a_part_survives_damage_to_its_first_record(run):
    part = parts(run.journal_file("a", "0"))[2]
    before = base_of(part)
    data = bytearray(part.read_bytes())
    data[30] ^= 1
    part.write_bytes(data)
    assert base_of(part) == before > 0


def test_a_part_whose_creation_was_killed_holds_nothing(run):
    first = run.journal_file("a", "0")
    length = valid_length(first)
    torn = first.with_name(f"a.0+{len(parts(first)):04d}.journal")
    for content in (b"", b"MFHP", bytes(24)):
        torn.write_bytes(content)
        assert valid_length(first) == length
        assert len(index(run, {}).winners) == ROWS


def test_where_no_part_can_be_added_the_journal_grows_until_one_can(tmp_path):
    path = tmp_path / "p.0.journal"
    journal = JournalWriter(path, 1000)
    tmp_path.chmod(0o500)  # as a full quota would, it refuses new files
    try:
        for n in range(50):
            journal.append({"n": n, "data": bytes(100)})
            journal.commit()
        assert parts(path) == [path]
    finally:
        tmp_path.chmod(0o700)
    journal.append({"n": 50})
    journal.close()
    assert [r["n"] for _, r in read_journal(path)] == list(range(51))
    assert len(parts(path)) == 2


def test_shards_and_journals_decide_alike(run):
    from_journals = index(run, {}, shards=False).winners
    write_shards(run)
    for path in parts(run.journal_file("a", "0"))[:-1]:
        assert shard_entries(run, path, {})
    from_shards = index(run, {}).winners
    assert [(e.id, e.status, e.epoch, e.attempt, e.time_ns, e.journal, e.start) for e in from_shards] == [
        (e.id, e.status, e.epoch, e.attempt, e.time_ns, e.journal, e.start) for e in from_journals
    ]
    assert any(e.shard_row > 0 for e in from_shards)


@pytest.mark.parametrize("pods", [1, 2])
def test_rebuilding_from_journals_gives_an_equal_file(tmp_path, pods):
    run = run_dir(tmp_path / "run")
    for pod in range(pods):
        write_parts(run, f"pod-{pod}", range(pod * ROWS, (pod + 1) * ROWS))
    write_shards(run)
    path = gather(run)
    assert validate(path) == []
    kept = path.rename(tmp_path / "from-shards.h5")
    assert digests(gather(run, rebuild=True)) == digests(kept)
    done = subprocess.run(["h5diff", "-v", kept, run.trajectories], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:]
    with open_trajectories(run.trajectories) as store:
        assert [row.id for row in store] == [trajectory(n).id for n in range(pods * ROWS)]


def test_a_superseded_record_in_a_shard_keeps_its_attempts(run):
    with JournalWriter(run.journal_file("b", "0")) as journal:
        for n in (5, 6, 70):
            journal.append(record(99, 1, trajectory(n, attempt=1)))
    failed = trajectory(500, status="failed")
    with JournalWriter(run.journal_file("c", "0")) as journal:
        journal.append(record(50, 0, failed))
    write_shards(run)
    kept = gather(run).rename(run.path / "kept.h5")
    assert digests(gather(run, rebuild=True)) == digests(kept)
    with open_trajectories(run.trajectories) as store:
        assert len(store) == ROWS + 1


def test_a_shard_that_is_torn_foreign_or_of_another_journal_is_passed_over(run, caplog):
    write_shards(run)
    found = parts(run.journal_file("a", "0"))
    torn, foreign, other, short = (shard_path(run, path.name) for path in found[:4])
    torn.write_bytes(torn.read_bytes()[:3000])
    with h5py.File(foreign, "w") as file:
        file["x"] = np.zeros(3)
    other.write_bytes(shard_path(run, found[4].name).read_bytes())
    with h5py.File(short, "r+") as file:
        del file["journal/end"]
    assert len(index(run, {}).winners) == ROWS
    assert caplog.text.count("the journal is read instead") == 4
    path = gather(run)
    assert validate(path) == []
    with h5py.File(path) as file:
        assert len(file["trajectories/id"]) == ROWS


@pytest.fixture
def between(tmp_path):
    """Three pods whose rows lie between one another, shards of all their parts, and what their journals alone make."""
    run = run_dir(tmp_path / "run")
    write_between(run, 3, ROWS)
    for path in journals(run):
        write_shard(run, path)
    expected = digests(gather(run, rebuild=True))
    run.trajectories.unlink()
    return run, expected


def test_rows_of_pods_that_lie_between_one_another_are_copied_from_their_shards(between):
    run, expected = between
    for path in journals(run):
        path.write_bytes(path.read_bytes()[:24].ljust(path.stat().st_size, b"\0"))  # no record can be decoded
    path = gather(run)
    assert digests(path) == expected
    assert validate(path) == []
    assert [check for check in verify(path) if check.state != "ok"] == []
    with open_trajectories(path) as store:
        assert [row.id for row in store] == [trajectory(n).id for n in range(ROWS)]


def test_rows_between_others_that_have_no_shard_or_lost_come_from_their_journals(between):
    run, _ = between
    shard_path(run, "pod-1.0+0001.journal").unlink()
    with JournalWriter(run.journal_file("again", "0")) as journal:
        for n in (5, 6, 70):
            journal.append(record(99, 1, trajectory(n, attempt=1)))
    with JournalWriter(run.journal_file("other", "0")) as journal:
        for n in range(ROWS, ROWS + 9):
            journal.append(record(50, 0, trajectory(n, rewards={"other": 0.25})))
    found = digests(gather(run))
    assert digests(gather(run, rebuild=True)) == found


def test_a_shard_that_is_damaged_where_rows_are_copied_costs_none_of_them(between, caplog):
    run, expected = between
    path = shard_path(run, "pod-1.0+0001.journal")
    with h5py.File(path) as file:
        info = file["messages/json"].id.get_chunk_info(0)
    data = bytearray(path.read_bytes())
    data[info.byte_offset : info.byte_offset + info.size] = bytes(info.size)
    path.write_bytes(data)
    assert digests(gather(run)) == expected
    assert "read from their journals" in caplog.text


@pytest.mark.parametrize(("most", "together"), [(1, 1 << 20), (512, 4000)])
def test_open_shards_and_rows_in_memory_are_bounded(between, monkeypatch, most, together):
    run, expected = between
    monkeypatch.setattr("megaflow_hpc.trajectories.maintenance.gather.MOST_OPEN", most)
    monkeypatch.setattr("megaflow_hpc.trajectories.maintenance.gather._TOGETHER_BYTES", together)
    assert digests(gather(run)) == expected


def test_a_finished_campaign_gets_the_shards_it_lacks_where_there_are_cpus(tmp_path, monkeypatch):
    run = run_dir(tmp_path / "run")
    Ledger(run).create()
    write_between(run, 2, 60)
    for name, value in (("CPUS", 4), ("_SHARD_BYTES", 1)):
        monkeypatch.setattr(f"megaflow_hpc.trajectories.maintenance.gather.{name}", value)
    gather(run)
    assert not list(run.shards.iterdir()), "its journals may grow"
    run.ledger.joinpath("finished").touch()
    run.trajectories.unlink()
    found = digests(gather(run))
    assert len(list(run.shards.iterdir())) == len(journals(run))
    assert digests(gather(run, rebuild=True)) == found


@pytest.mark.slow
def test_rank_0_makes_shards_in_a_child_as_parts_finish(tmp_path):
    run = run_dir(tmp_path / "run")
    maker = ShardMaker(run)
    with JournalWriter(run.journal_file("a", "0"), 60_000, on_rotate=maker.add) as journal:
        for n in range(ROWS):
            journal.append(record(0, 0, trajectory(n)))
            journal.commit()
    for _ in range(len(parts(run.journal_file("a", "0")))):
        if maker._child is not None:
            maker._child.wait(60)
        maker.poll()
    maker.close(60)
    made = sorted(path.name for path in run.shards.iterdir())
    assert made == [
        f"{path.name.removesuffix('.journal')}.h5" for path in sorted(parts(run.journal_file("a", "0"))[:-1])
    ]
    assert validate(run.shards / made[0]) == []


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


def test_chunks_on_the_same_grid_are_taken_over_as_they_are(tmp_path):
    run = run_dir(tmp_path / "run")
    many = [trajectory(n, sequences=[_long(n)], turns=[]) for n in range(40)]
    with JournalWriter(run.journal_file("a", "0"), 1) as journal:
        for first in (0, 20):
            for t in many[first : first + 20]:
                journal.append(record(0, 0, t))
            journal.commit()
    write_shards(run)
    source, second = shard_path(run, "a.0.journal"), shard_path(run, "a.0+0001.journal")
    rebuilt = digests(gather(run, rebuild=True))
    run.trajectories.unlink()
    path = gather(run)
    assert digests(path) == rebuilt
    with h5py.File(source) as one, h5py.File(second) as other, h5py.File(path) as whole:
        lead = len(one["tokens/id"]) % 16384
        for name in ("id", "logprob", "loss_mask", "weight_version"):
            a, b, c = (file[f"tokens/{name}"] for file in (one, other, whole))
            size, behind = c.chunks[0], len(a) - lead
            for part, chunk, place in ((a, 0, 0), (a, size, size), (b, 16384, behind + 16384)):
                assert part.id.read_direct_chunk((chunk,)) == c.id.read_direct_chunk((place,))
        assert other["sequences/token_offset"][0] == lead > 0
        assert other["messages/offset"][0] == one["messages/offset"][-1] > 0


def _long(number: int):
    from array import array

    from megaflow_hpc.trajectory import TokenSequence

    count = 3000 + number
    return TokenSequence(
        "default",
        array("i", range(count)),
        array("f", [-0.5] * count),
        array("B", [1] * count),
        array("i", [number] * count),
    )
