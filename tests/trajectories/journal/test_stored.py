"""Finding the rollouts that earlier holders of a block stored reads only their journals, within the seals, and once."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from megaflow_hpc.ledger import Claim, Ledger, PodIdentity, write_blocks
from megaflow_hpc.ledger.lease import TIMES
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.trajectories.journal import winners
from megaflow_hpc.trajectories.journal.frames import pack_record
from megaflow_hpc.trajectories.journal.winners import RENEW_BYTES, StoredBlock, StoredRollouts
from megaflow_hpc.trajectories.journal.writer import JournalWriter
from tests.support.ledgers import Clock, rollouts
from tests.support.operations import counted


def record(number: int, block: int, epoch: int, status: str = "completed") -> bytes:
    trajectory = {"id": f"t{number}/p/0", "status": status, "attempt": 0, "epoch": epoch}
    return pack_record({"kind": "trajectory", "epoch": epoch, "block": block, "trajectory": trajectory})


def write(run: RunDir, pod: str, *records: bytes) -> list[int]:
    """Returns the length of the journal behind each record."""
    lengths = []
    with JournalWriter(run.journal_file(pod, "0")) as journal:
        for each in records:
            journal.append(each)
            lengths.append(journal.commit())
    return lengths


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "run")
    run.create()
    return run


def test_what_lies_within_the_seals_of_the_block_is_stored(run: RunDir) -> None:
    ends = write(run, "a", record(0, 7, 0), record(1, 8, 0), record(2, 7, 0, "failed"), record(3, 7, 0))
    write(run, "b", record(4, 7, 1), record(5, 7, 0))
    stored = StoredRollouts(run)
    assert stored.ids(7, [StoredBlock(0, "a.0", ends[2])]) == {"t0/p/0"}
    assert stored.ids(7, [StoredBlock(0, "a.0", ends[3]), StoredBlock(1, "b.0", 1 << 40)]) == {
        "t0/p/0",
        "t3/p/0",
        "t4/p/0",
    }
    assert stored.ids(8, [StoredBlock(0, "a.0", ends[3])]) == {"t1/p/0"}
    assert stored.ids(9, [StoredBlock(0, "nobody.0", 0)]) == set()


def test_other_pods_journals_are_not_read_and_the_holders_once(run: RunDir) -> None:
    for pod in ("a", "b", "c"):
        write(run, pod, record(0, 0, 0), record(1, 1, 0))
    stored = StoredRollouts(run)
    with counted(run.path) as operations:
        length = stored.length("a.0")
        assert stored.ids(0, [StoredBlock(0, "a.0", length)]) == {"t0/p/0"}
    assert operations["opens"] == 1
    with counted(run.path) as operations:
        assert stored.length("a.0") == length
        assert stored.ids(1, [StoredBlock(0, "a.0", length)]) == {"t1/p/0"}
    assert operations["opens"] == 0


def test_a_journal_that_has_grown_is_read_again(run: RunDir) -> None:
    with JournalWriter(run.journal_file("a", "0")) as journal:
        journal.append(record(0, 0, 0))
        first = journal.commit()
        stored = StoredRollouts(run)
        assert stored.length("a.0") == first
        assert stored.ids(0, [StoredBlock(0, "a.0", first)]) == {"t0/p/0"}
        journal.append(record(1, 0, 0))
        second = journal.commit()
        assert stored.length("a.0") == second
        assert stored.ids(0, [StoredBlock(0, "a.0", second)]) == {"t0/p/0", "t1/p/0"}


def test_other_records_are_read_once_and_trajectories_behind_them_are_found(run: RunDir) -> None:
    note = pack_record({"kind": "note"})
    with JournalWriter(run.journal_file("a", "0")) as journal:
        journal.append(note)
        first = journal.commit()
        stored = StoredRollouts(run)
        assert stored.ids(0, [StoredBlock(0, "a.0", first)]) == set()
        journal.append(record(0, 1, 0))
        journal.append(note)
        second = journal.commit()
        assert stored.ids(1, [StoredBlock(0, "a.0", second)]) == {"t0/p/0"}
        with counted(run.path) as operations:
            assert stored.ids(0, [StoredBlock(0, "a.0", second)]) == set()
        assert operations["opens"] == 0


def test_the_reader_renews_its_lease_within_a_long_journal(run: RunDir) -> None:
    large = pack_record({"kind": "note", "text": "x" * (RENEW_BYTES // 4)})
    ends = write(run, "a", *[large] * 20, record(0, 0, 0))
    renewals: list[None] = []
    stored = StoredRollouts(run, lambda: renewals.append(None))
    assert "t0/p/0" in stored.ids(0, [StoredBlock(0, "a.0", ends[-1])])
    assert len(renewals) >= 6


def fails_once(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Makes one call fail with ESTALE."""
    real, failed = getattr(winners, name), []

    def fails(*arguments: Any) -> Any:
        if not failed:
            failed.append(name)
            raise OSError(errno.ESTALE, "Stale file handle")
        return real(*arguments)

    monkeypatch.setattr(winners, name, fails)


def test_a_journal_that_could_not_be_read_is_read_again(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    (end,) = write(run, "a", record(0, 0, 0))
    stored = StoredRollouts(run)
    fails_once(monkeypatch, "headings")
    with pytest.raises(OSError, match="Stale"):
        stored.length("a.0")
    assert stored.length("a.0") == end == run.journal_file("a", "0").stat().st_size
    assert stored.ids(0, [StoredBlock(0, "a.0", end)]) == {"t0/p/0"}


def test_a_claim_seals_a_journal_that_could_not_be_read_at_once_behind_its_last_record(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    Ledger(run).create()
    write_blocks(run, rollouts(1), size=1)
    clock = Clock()
    dead, heir = (Ledger(run, PodIdentity(name, "0"), clock) for name in "ab")
    dead.register()
    heir.register()
    assert dead.claim(lambda owner: 0) == Claim(0, 0)
    (end,) = write(run, "a", record(0, 0, 0))
    stored = StoredRollouts(run)
    fails_once(monkeypatch, "headings")
    claims = [heir.claim(stored.length)]
    while claims[-1] is None and clock.now < 3 * TIMES.lease_s:
        clock.now += TIMES.renew_s
        heir.renew()
        claims.append(heir.claim(stored.length))
    assert claims[-1] == Claim(0, 1)
    assert Ledger(run).seals() == {(0, 0): ("a.0", end)}
