"""The table of contents of a journal: what is stored is found by it alone, and never other than by the journal."""

from __future__ import annotations

import errno
import os
import shutil
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest

from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.trajectories.journal import contents as contents_module
from megaflow_hpc.trajectories.journal.contents import contents_path
from megaflow_hpc.trajectories.journal.frames import (
    HEADER_SIZE,
    frame_head,
    header,
    open_journal,
    pack_record,
    read_frames,
    read_header,
    unpack_record,
)
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


def rewrite(path: Path, payloads: list[bytes]) -> None:
    """A table of other frames that are as valid as those of whoever may write it."""
    with open_journal(path) as file:
        salt = read_header(file, path) or b""
    made = header(salt)
    for payload in payloads:
        made += frame_head(payload, salt, len(made), 1) + payload
    path.write_bytes(made)


Said = list[dict[str, Any]]
"""The frames of a table."""


def each(place: int, value: Any) -> Callable[[Said], Any]:
    """Puts a value into a place of every record of a table but the last of all, by which it is told from another's."""

    def change(said: Said) -> None:
        for record in [record for frame in said for record in frame["records"]][:-1]:
            record[place] = value(record[place]) if callable(value) else value

    return change


def hide(said: Said) -> None:
    said[0]["end"] = said[-1]["end"]
    del said[1:]


def beyond(said: Said) -> None:
    last = said[-1]["records"][-1]
    said[-1]["records"].append([last[0] + 500, 100, "forged/p/0", "completed", 0, 0, 0])
    said[-1]["end"] += 500


def shifted(said: Said) -> None:
    """Every record lies where it says, and counts as if it ended earlier."""
    for frame in said:
        frame["base"] = max(0, frame["base"] - 30)
        for record in frame["records"]:
            record[0] -= 30
    said[-1]["end"] -= 30


FORGED: dict[str, Callable[[Said], Any]] = {
    "another rollout": each(2, "forged/p/0"),
    "no rollout": each(2, ""),
    "a number for a rollout": each(2, 7),
    "another block": each(6, lambda block: 1 - block),
    "a block that is none": each(6, None),
    "another epoch": each(4, 7),
    "another attempt": each(5, 7),
    "nothing failed": each(3, "completed"),
    "all failed": each(3, "failed"),
    "a status that is none": each(3, "fained"),
    "negative sizes": each(1, -7),
    "sizes of nothing": each(1, 0),
    "sizes beyond the journal": each(1, 1 << 40),
    "sizes of 64 bits": each(1, (1 << 64) - 1),
    "sizes that overlap": each(1, lambda size: size + 9),
    "ends of 64 bits": each(0, (1 << 64) - 1),
    "negative ends": each(0, -7),
    "ends in the middle": each(0, lambda end: end - 3),
    "ends that are fractions": each(0, 0.5),
    "records of nothing": lambda said: [frame.update(records=[]) for frame in said],
    "no records": lambda said: [frame.update(records=None) for frame in said],
    "a record of one field": lambda said: said[0]["records"].append([1]),
    "a map for a record": lambda said: said[0]["records"].insert(0, {}),
    "records in reverse": lambda said: [frame["records"].reverse() for frame in said],
    "every record twice": lambda said: [frame.update(records=frame["records"] * 2) for frame in said],
    "every frame twice": lambda said: said.extend(said[:]),
    "a frame in the middle is missing": lambda said: said.pop(1),
    "the first frame is missing": lambda said: said.pop(0),
    "another part": lambda said: [frame.update(part=frame["part"] + 1) for frame in said],
    "a part of 64 bits": lambda said: said[-1].update(part=(1 << 64) - 1),
    "a part that is far": lambda said: said[-1].update(part=1 << 60),
    "a base of nothing": lambda said: [frame.update(base=0) for frame in said],
    "another base": lambda said: [frame.update(base=frame["base"] + 9) for frame in said],
    "the journal ends later": lambda said: said[-1].update(end=said[-1]["end"] + 1_000_000),
    "the journal ends earlier": lambda said: said[-1].update(end=said[-1]["end"] - 1),
    "most of the journal is hidden": hide,
    "a record beyond the journal": beyond,
    "all of it is shifted": shifted,
    "another kind": lambda said: [frame.update(kind="trajectory") for frame in said],
    "no fields": lambda said: [frame.clear() for frame in said],
}
"""What whoever may write a run directory makes of a table; a crash makes less."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("forged", FORGED.values(), ids=FORGED)
def test_what_a_forged_table_has_counted_counts_for_every_reader_of_the_journal(
    run: RunDir, journal: Path, forged: Callable[[Said], Any]
) -> None:
    """A rollout that a takeover takes for stored is in the journal, within the seal that the takeover puts."""
    contents, (_, truth) = contents_path(journal), by_the_journal(run)
    said = [unpack_record(frame.payload) for frame in read_frames(contents)]
    forged(said)
    rewrite(contents, [pack_record(frame) for frame in said])
    sealed, counted = stored_without_check(run)
    seals = {(block, 0): ("a.0", sealed) for block in (0, 1)}
    winners = {entry.id for entry in index(run, seals).winners if entry.status != "failed"}
    assert all(found <= of_block for found, of_block in zip(counted, truth, strict=True))
    assert set.union(*counted) <= winners
    assert HEADER_SIZE <= sealed <= sum(part.stat().st_size for part in journals(run))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "payload",
    [
        b"\xdd\xff\xff\xff\xff",
        b"\x90" * 4_000_000,
        b"\xdc\xff\xff" + b"\x90" * 4_000_000,
        b"\x91" * 4_000_000,
        msgpack.packb({"kind": "contents", "part": 0, "base": 0, "start": 0, "end": 1, "records": [[]] * 4_000_000}),
        msgpack.packb({"kind": "contents", "records": [[1, 30, "", "failed", 0, 0, 0]] * 400_000, "part": 0}),
        b"",
    ],
    ids=["billions of entries", "lists", "a list of lists", "deep", "empty records", "many records", "nothing"],
)
def test_bytes_that_are_no_table_cost_little_memory(run: RunDir, journal: Path, payload: bytes) -> None:
    truth = by_the_journal(run)
    rewrite(contents_path(journal), [payload] * 2)
    tracemalloc.start()
    assert stored(run) == truth
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 * len(payload) + 1_000_000


def test_what_lies_behind_the_longest_table_is_read_from_the_journal(
    run: RunDir, journal: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    truth = by_the_journal(run)
    for most in range(0, contents_path(journal).stat().st_size, 37):
        monkeypatch.setattr(contents_module, "MOST_BYTES", most)
        assert stored(run) == truth
