"""The table of contents of a journal: what is stored is found by it alone, and never other than by the journal."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.trajectories.journal.contents import contents_path
from megaflow_hpc.trajectories.journal.frames import pack_record
from megaflow_hpc.trajectories.journal.stored import Holding, StoredRollouts
from megaflow_hpc.trajectories.journal.winners import index, journals
from megaflow_hpc.trajectories.journal.writer import JournalWriter, valid_length

RECORDS = 9
STEP = 5
"""Between two places where a file is damaged."""


def record(number: int, size: int = 40, kind: str = "trajectory") -> bytes:
    status = "failed" if number % 4 == 3 else "completed"
    data = {"id": f"t{number}/p/0", "status": status, "attempt": 0, "epoch": 0, "text": "x" * size}
    return pack_record({"kind": kind, "epoch": 0, "block": number % 2, "trajectory": data})


def write(run: RunDir, pod: str, count: int = RECORDS, size: int = 40, rotate: int = 1 << 20) -> Path:
    """A journal of a pod that was killed behind its last commit, two records each."""
    path = run.journal_file(pod, "0")
    journal = JournalWriter(path, rotate)
    for number in range(count):
        journal.append(record(number, size, "note" if number == 4 else "trajectory"))
        if number % 2 or number == count - 1:
            journal.commit()
    return path


Stored = tuple[int, tuple[set[str], ...]]


def stored(run: RunDir, pod: str = "a") -> Stored:
    """The seal of a journal, and what lies within it of either block."""
    found = StoredRollouts(run)
    sealed = found.length(f"{pod}.0")
    assert sealed == valid_length(run.journal_file(pod, "0"))
    return sealed, tuple(found.ids(block, [Holding(0, f"{pod}.0", sealed)]) for block in (0, 1))


def by_the_journal(run: RunDir, pod: str = "a") -> Stored:
    contents = contents_path(run.journal_file(pod, "0"))
    aside = contents.with_name("aside")
    contents.rename(aside)
    found = stored(run, pod)
    aside.rename(contents)
    return found


def bytes_read() -> int:
    """By this process so far, from caches too."""
    return int(Path("/proc/self/io").read_text().split()[1])


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "run")
    run.create()
    return run


@pytest.fixture(params=[1 << 20, 400], ids=["one part", "parts"])
def journal(run: RunDir, request: pytest.FixtureRequest) -> Path:
    return write(run, "a", rotate=request.param)


def test_a_takeover_reads_the_table_and_not_the_journal(run: RunDir) -> None:
    write(run, "a", count=40, size=100_000)
    began = bytes_read()
    sealed, (even, odd) = stored_without_check(run)
    read = bytes_read() - began
    assert (len(even), len(odd)) == (19, 10)
    assert read < sealed / 50 < 100_000, read
    assert by_the_journal(run) == (sealed, (even, odd))


def stored_without_check(run: RunDir) -> Stored:
    found = StoredRollouts(run)
    sealed = found.length("a.0")
    return sealed, tuple(found.ids(block, [Holding(0, "a.0", sealed)]) for block in (0, 1))


def damaged(whole: bytes) -> Iterator[bytes]:
    """What may be left of a file: beginnings of it, some with zeros behind, and all of it with one byte changed."""
    for place in [*range(0, len(whole), STEP), *range(len(whole) - STEP, len(whole))]:
        if place % 3 == 0:
            yield whole[:place]
        elif place % 3 == 1:
            yield whole[:place] + bytes(len(whole) - place)
        else:
            yield whole[:place] + bytes([whole[place] ^ 0x41]) + whole[place + 1 :]


@pytest.mark.filterwarnings("ignore")
def test_a_table_that_is_cut_or_damaged_anywhere_loses_and_doubles_nothing(run: RunDir, journal: Path) -> None:
    contents, truth = contents_path(journal), by_the_journal(run)
    assert stored(run) == truth
    assert truth[1] == ({f"t{n}/p/0" for n in (0, 2, 6, 8)}, {f"t{n}/p/0" for n in (1, 5)})
    for left in damaged(contents.read_bytes()):
        contents.write_bytes(left)
        assert stored(run) == truth


def test_a_table_longer_than_its_journal_is_not_believed(run: RunDir, journal: Path) -> None:
    parts = journals(run)
    whole = parts[-1].read_bytes()
    for length in [*range(0, len(whole), 17), *range(len(whole) - 5, len(whole))]:
        parts[-1].write_bytes(whole[:length])
        assert stored(run) == by_the_journal(run)
    parts[-1].unlink()
    assert stored(run) == by_the_journal(run)


def test_a_journal_that_went_on_without_its_table_is_read_from_there_on(run: RunDir, journal: Path) -> None:
    contents = contents_path(journal)
    early = contents.read_bytes()[: contents.stat().st_size // 2]
    truth = by_the_journal(run)
    contents.write_bytes(early)
    with open(journals(run)[-1], "ab") as file:
        file.write(b"half a record")
    assert stored(run) == truth


def test_the_table_of_another_journal_is_not_believed(run: RunDir) -> None:
    """Not even of one that holds the same rollouts at the same places and one more before."""
    one, other = write(run, "a"), write(run, "b")
    truth = by_the_journal(run)
    shutil.copy(contents_path(other), contents_path(one))
    assert stored(run) == truth
    shorter = write(run, "c", count=3)
    shutil.copy(contents_path(one), contents_path(shorter))
    assert stored(run, "c") == by_the_journal(run, "c")


def test_a_journal_taken_for_its_own_table_and_the_other_way_round_is_none(run: RunDir, journal: Path) -> None:
    truth = by_the_journal(run)
    shutil.copy(journal, contents_path(journal))
    assert stored(run) == truth


def test_records_of_a_run_without_tables_are_found(run: RunDir, journal: Path) -> None:
    truth = by_the_journal(run)
    contents_path(journal).unlink()
    assert stored(run) == truth
    assert [path.name for path in run.journal.iterdir() if path.suffix != ".journal"] == []


def test_a_table_that_cannot_be_written_costs_the_journal_nothing(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    real, failed = os.pwrite, []

    def pwrite(file: int, data: bytes, place: int) -> int:
        if os.readlink(f"/proc/self/fd/{file}").endswith(".contents") and (place > 200 or failed):
            failed.append(real(file, bytes(data)[:10], place))
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(file, data, place)

    monkeypatch.setattr(os, "pwrite", pwrite)
    write(run, "a")
    assert len(failed) == 1  # after an error nothing more is tried
    assert stored(run) == by_the_journal(run)
    assert len(index(run, {}).winners) == RECORDS - 1


def test_a_table_is_no_journal_of_the_run(run: RunDir, journal: Path) -> None:
    assert contents_path(journal).exists()
    assert all(path.suffix == ".journal" for path in journals(run))
    assert len(index(run, {}).winners) == RECORDS - 1
