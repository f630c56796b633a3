"""Small journals of a pod's earlier starts become one file, and no reader notices: whatever a SIGKILL leaves."""

from __future__ import annotations

import errno
import os
import struct
import zlib
from pathlib import Path

import msgspec
import pytest

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.trajectories import JournalWriter, gather
from megaflow_hpc.trajectories.journal import packs
from megaflow_hpc.trajectories.journal.frames import read_frame
from megaflow_hpc.trajectories.journal.packs import FAN, pack_journals
from megaflow_hpc.trajectories.journal.winners import StoredBlock, StoredRollouts, fingerprint, index, journals
from megaflow_hpc.trajectories.reading.follow import Follower
from tests.support.journals import digests, record
from tests.support.samples import run_dir, trajectory


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packs, "LISTING_AGE_S", 0.0)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return run_dir(tmp_path / "run")


def store(run: RunDir, start: int, pod: str = "7_1", close: bool = True) -> None:
    """Stores one rollout in a start of a pod, whose block has the same number."""
    journal = JournalWriter(run.journal_file(pod, str(start)))
    journal.append(record(start, 0, trajectory(start, task=pod)))
    journal.commit()
    if close:
        journal.close()


def names(run: RunDir, suffix: str = "") -> list[str]:
    return sorted(name for name in os.listdir(run.journal) if name.endswith(suffix))


def run_starts(run: RunDir, first: int, last: int) -> None:
    """Lets starts store something and pack, one after the other, as pods do."""
    for start in range(first, last):
        pack_journals(run.journal, "7_1", str(start))
        store(run, start)


def test_a_thousand_starts_leave_a_few_files_and_all_readers_see_the_same(run: RunDir, tmp_path: Path) -> None:
    plain = run_dir(tmp_path / "plain")
    follower, seen, cursor = Follower(run), [], None
    places = {}
    for start in range(600):
        run_starts(run, start, start + 1)
        store(plain, start)
        if start % 50 == 7:
            new = follower.entries()
            places |= {entry.id: entry for entry in new}
            seen += [entry.id for entry in new]
            cursor = follower.cursor
            follower = Follower(run, cursor=cursor)  # as after a restart of the trainer
    assert len(names(run)) <= 3 * FAN
    assert [path.name for path in journals(run)] == [path.name for path in journals(plain)]
    assert fingerprint(run, {})["journals"].keys() == fingerprint(plain, {})["journals"].keys()
    seen += [entry.id for entry in follower.entries()]
    assert seen == [f"7_1/default/{start}" for start in range(600)], "each once"
    assert all(follower.load(entry).id == entry.id for entry in places.values()), "old places are valid"
    assert digests(gather(run)) == digests(gather(plain))
    copied = sum((run.journal / name).stat().st_size for name in names(run))
    assert copied < 1.5 * sum((plain.journal / name).stat().st_size for name in names(plain))


def test_journals_of_killed_starts_are_packed_too(run: RunDir) -> None:
    for start in range(3 * FAN):
        store(run, start, close=start % 3 != 0)
        if start % 3 == 0:
            with run.journal_file("7_1", str(start)).open("ab") as file:
                file.write(b"part of a record")
    before = index(run, {})
    pack_journals(run.journal, "7_1", "100")
    pack_journals(run.journal, "7_1", "101")
    assert names(run, ".journal") == []
    found = index(run, {})
    assert found.winners == before.winners
    assert len(found.winners) == 3 * FAN


def test_records_of_a_start_that_lives_on_are_kept_after_its_journal_was_copied(run: RunDir) -> None:
    for start in range(FAN):
        store(run, start)
    late = JournalWriter(run.journal_file("7_1", "99"))
    late.append(record(99, 0, trajectory(99, task="7_1")))
    late.commit()
    pack_journals(run.journal, "7_1", "100")
    late.append(record(99, 0, trajectory(100, task="7_1")))
    late.commit()
    for start in range(101, 140):
        pack_journals(run.journal, "7_1", str(start))
        assert len(index(run, {}).winners) == FAN + 2
    assert names(run, ".journal") == ["7_1.99.journal"]
    late.close()


def test_seals_count_in_packed_journals(run: RunDir) -> None:
    for start in range(FAN):
        store(run, start)
    whole = {entry.id: entry.start + entry.size for entry in index(run, {}).winners}
    pack_journals(run.journal, "7_1", "100")
    pack_journals(run.journal, "7_1", "101")
    assert names(run, ".journal") == []
    seals = {(3, 0): ("7_1.3", whole["7_1/default/3"] - 1), (4, 0): ("7_1.4", whole["7_1/default/4"])}
    assert {entry.id for entry in index(run, seals).winners} == whole.keys() - {"7_1/default/3"}
    stored = StoredRollouts(run)
    assert stored.length("7_1.5") == whole["7_1/default/5"]
    assert stored.ids(5, [StoredBlock(0, "7_1.5", stored.length("7_1.5"))]) == {"7_1/default/5"}
    assert stored.length("7_1.99") == 0, "a start that stored nothing"


class Killed(BaseException):
    """Stands for a SIGKILL: nothing after it is carried out."""


def test_a_kill_before_any_file_system_call_loses_and_doubles_nothing(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected: set[str] = set()
    calls = {"left": 0}

    def killing(name: str) -> None:
        call = getattr(os, name)

        def maybe(*arguments, **named):
            calls["left"] -= 1
            if calls["left"] == 0:
                raise Killed
            return call(*arguments, **named)

        monkeypatch.setattr(os, name, maybe)

    for name in ("link", "unlink", "fsync", "fchmod"):
        killing(name)
    kills = 0
    for start in range(400):
        calls["left"] = 0
        store(run, start)
        expected.add(f"7_1/default/{start}")
        calls["left"] = 1 + start % 7
        try:
            pack_journals(run.journal, "7_1", str(start))
        except Killed:
            kills += 1
        calls["left"] = 0
        if start % 20 == 0:
            found = index(run, {})
            assert {entry.id for entry in found.winners} == expected
            assert not found.losers
    assert kills > 20
    calls["left"] = 0
    run_starts(run, 400, 440)
    assert len(names(run)) <= 4 * FAN, "what killed starts left is cleared away"


def test_a_reader_with_an_old_listing_finds_a_journal_that_was_packed_meanwhile(run: RunDir) -> None:
    for start in range(FAN):
        store(run, start)
    found = index(run, {})
    [follower, fresh] = Follower(run), Follower(run)
    assert len(follower.entries()) == FAN
    run_starts(run, FAN, 20 * FAN)
    assert len(names(run, ".journal")) <= 2 * FAN
    assert [trajectory.id for trajectory in found.trajectories()] == [f"7_1/default/{n}" for n in range(FAN)]
    assert len(follower.entries()) == 19 * FAN
    assert len(fresh.entries()) == 20 * FAN


def test_a_journal_that_differs_from_its_copy_is_never_removed(run: RunDir) -> None:
    for start in range(FAN):
        store(run, start)
    pack_journals(run.journal, "7_1", "100")
    [pack] = names(run, ".pack")
    data = bytearray((run.journal / pack).read_bytes())
    data[100] ^= 1
    (run.journal / pack).write_bytes(data)
    pack_journals(run.journal, "7_1", "101")
    assert names(run, ".journal") == ["7_1.0.journal"]
    assert len(index(run, {}).winners) == FAN


def test_a_damaged_table_is_an_error_that_names_the_file(run: RunDir) -> None:
    for start in range(FAN):
        store(run, start)
    pack_journals(run.journal, "7_1", "100")
    [pack] = names(run, ".pack")
    data = (run.journal / pack).read_bytes()
    for damaged in (data[:-3], data[:-30] + b"x" + data[-29:], b""):
        (run.journal / pack).write_bytes(damaged)
        packs._catalogs.clear()
        with pytest.raises(ConfigError, match=f"{pack}: damaged .*it holds journals: restore the file"):
            index(run, {})
    for odd in ({"../x.journal": (8, 9)}, {"x": (8, 9)}, {"7_1.0.journal": (-1, 9)}, {"7_1.0.journal": (8, 1 << 40)}):
        table = msgspec.msgpack.encode(odd)
        footer = struct.pack("<QII8s", 100, len(table), zlib.crc32(table), b"MFHPCPCK")
        (run.journal / pack).write_bytes(data[:100] + table + footer)
        with pytest.raises(ConfigError, match=r"damaged \(entry "):
            packs.read_table(run.journal / pack)
    pack_journals(run.journal, "7_1", "101")  # logs it and removes nothing
    assert len(names(run, ".journal")) == FAN


def test_large_journals_and_those_of_other_pods_are_left_alone(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packs, "PACK_BYTES", 20_000)
    for start in range(2 * FAN):
        store(run, start)
        store(run, start, pod="7_11")
    size = run.journal_file("7_1", "0").stat().st_size
    run_starts(run, 100, 200)
    assert all((run.journal / name).stat().st_size < 20_000 + 20 * size for name in names(run, ".pack"))
    assert len([name for name in names(run) if name.startswith("7_11.")]) == 2 * FAN
    assert len(index(run, {}).winners) == 4 * FAN + 100


def test_a_record_in_a_pack_is_read_by_its_place(run: RunDir) -> None:
    for start in range(FAN):
        store(run, start)
    entry = index(run, {}).winners[5]
    before = read_frame(run.journal / entry.journal, entry.start)
    pack_journals(run.journal, "7_1", "100")
    pack_journals(run.journal, "7_1", "101")
    assert read_frame(run.journal / entry.journal, entry.start) == before
    with pytest.raises(ConfigError, match="no whole record"):
        read_frame(run.journal / entry.journal, entry.start + entry.size)


def test_a_pack_that_is_packed_again_while_a_reader_pauses_is_found(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    for start in range(FAN):
        store(run, start)
    pack_journals(run.journal, "7_1", "100")
    pack_journals(run.journal, "7_1", "101")
    [pack] = names(run)
    listing = packs._Catalog.update

    def paused(catalog: packs._Catalog, listed: list[str]) -> None:
        if pack in listed and (run.journal / pack).exists():
            (run.journal / pack).rename(run.journal / "7_1.200.2.pack")
        listing(catalog, listed)

    monkeypatch.setattr(packs._Catalog, "update", paused)
    assert len(index(run, {}).winners) == FAN


def test_a_name_that_is_given_again_does_not_hide_a_packed_journal(run: RunDir) -> None:
    for start in range(FAN):
        store(run, start)
    pack_journals(run.journal, "7_1", "100")
    pack_journals(run.journal, "7_1", "101")
    with pytest.raises(ConfigError, match=r"7_1\.3\.journal: exists already"):
        store(run, 3)  # Slurm has lost its state and counts from the beginning
    store(run, 101)
    store(run, 3, pod="7_11")
    assert len(index(run, {}).winners) == FAN + 2


def test_a_full_disk_keeps_no_part_of_a_pack(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    for start in range(FAN):
        store(run, start)

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        pack_journals(run.journal, "7_1", "100")
    assert len(names(run)) == len(names(run, ".journal")) == FAN
    pack_journals(run.journal, "7_1", "101")
    assert len(names(run, ".pack")) == 1


def test_files_with_other_names_are_not_packs(run: RunDir) -> None:
    for start in range(FAN):
        store(run, start)
    for name in ("notes.pack", "7_1.5.old.pack", ".7_1.5.1.pack.x", "7_1.5.1.pack~"):
        (run.journal / name).write_text("a user's file")
    pack_journals(run.journal, "7_1", "100")
    pack_journals(run.journal, "7_1", "101")
    assert names(run, ".journal") == []
    assert len(index(run, {}).winners) == FAN
