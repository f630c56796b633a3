"""Journals in several parts, as earlier versions wrote them. Offsets and seals count over all parts."""

from __future__ import annotations

import shutil

import pytest

from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.trajectories import read_journal
from megaflow_hpc.trajectories.journal.stored import StoredBlock, StoredRollouts
from megaflow_hpc.trajectories.journal.winners import base_of, index, parts
from tests.support.journals import write_parts
from tests.support.samples import run_dir, trajectory

ROWS = 120


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A run with one journal in parts, and the offset behind each record."""
    run = run_dir(tmp_path_factory.mktemp("parts") / "run")
    return run, write_parts(run, "a", range(ROWS))


@pytest.fixture
def run(written, tmp_path):
    return RunDir(shutil.copytree(written[0].path, tmp_path / "run"))


def test_offsets_and_seals_count_over_parts(written):
    run, ends = written
    files = parts(run.journal_file("a", "0"))
    assert len(files) > 3
    assert [path.name for path in files[:2]] == ["a.0.journal", "a.0+0001.journal"]
    sizes = [path.stat().st_size for path in files]
    assert [base_of(path) for path in files] == [sum(sizes[:n]) for n in range(len(files))]
    assert StoredRollouts(run).length("a.0") == sum(sizes) == ends[-1]
    ids = [r["trajectory"]["id"] for path in files for _, r in read_journal(path) if r["kind"] == "trajectory"]
    assert ids == [trajectory(n).id for n in range(ROWS)]
    seals = {(block, 0): ("a.0", ends[69]) for block in range(ROWS // 10)}
    assert [e.id for e in index(run, seals).winners] == [trajectory(n).id for n in range(70)]
    assert StoredRollouts(run).ids(6, [StoredBlock(0, "a.0", ends[64])]) == {trajectory(n).id for n in range(60, 65)}


def test_the_base_of_a_part_survives_damage_to_its_first_record(run):
    part = parts(run.journal_file("a", "0"))[2]
    before = base_of(part)
    data = bytearray(part.read_bytes())
    data[30] ^= 1
    part.write_bytes(data)
    assert base_of(part) == before > 0


def test_a_part_whose_creation_was_killed_holds_nothing(run):
    first = run.journal_file("a", "0")
    length = StoredRollouts(run).length("a.0")
    torn = first.with_name(f"a.0+{len(parts(first)):04d}.journal")
    for content in (b"", b"MFHP", bytes(24)):
        torn.write_bytes(content)
        assert StoredRollouts(run).length("a.0") == length
        assert len(index(run, {}).winners) == ROWS
