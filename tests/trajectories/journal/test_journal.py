"""The journal keeps acknowledged records after cuts, overwritten bytes and kills."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.trajectories import JournalWriter, read_journal
from megaflow_hpc.trajectories.journal.frames import (
    FRAME_SIZE,
    HEADER_SIZE,
    MARKER,
    pack_record,
    read_frame,
    read_frames,
)

any_text = st.text(st.characters(exclude_categories=()), max_size=30)  # lone surrogates too
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | any_text | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(any_text, inner, max_size=4),
    max_leaves=12,
)


def write(path: Path, records: list[dict]) -> list[int]:
    with JournalWriter(path) as journal:
        return [journal.append(record) for record in records]


def valid_length(path: Path) -> int:
    """Returns the offset behind the last whole record."""
    ends = [frame.end for frame in read_frames(path, tolerant=True)]
    return ends[-1] if ends else min(HEADER_SIZE, path.stat().st_size)


def numbers(path: Path, **options) -> list[int]:
    return [record["n"] for _, record in read_journal(path, **options)]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(records=st.lists(st.dictionaries(any_text, values, max_size=4), max_size=6))
def test_what_was_appended_is_read_back(tmp_path, records):
    path = tmp_path / f"{time.monotonic_ns()}.journal"
    ends = write(path, records)
    assert path.exists() == bool(records), "a start that stores nothing leaves no file"
    if records:
        assert list(read_journal(path)) == list(zip(ends, records, strict=True))
        assert valid_length(path) == path.stat().st_size == ends[-1]


def test_bytes_are_taken_as_packed_records(tmp_path):
    with JournalWriter(tmp_path / "j") as journal:
        end = journal.append(pack_record({"n": 1}))
        assert journal.committed == 0 < HEADER_SIZE < end == journal.length
        assert journal.commit() == journal.committed == end
    assert numbers(tmp_path / "j") == [1]


def test_a_cut_at_every_byte_leaves_the_whole_records_before_it(tmp_path):
    whole = tmp_path / "whole"
    ends = write(whole, [{"n": n, "text": "x" * n} for n in range(5)])
    data = whole.read_bytes()
    cut = tmp_path / "cut"
    for length in range(len(data) + 1):
        cut.write_bytes(data[:length])
        expected = [n for n, end in enumerate(ends) if end <= length]
        assert numbers(cut) == expected
        last = max([min(HEADER_SIZE, length), *(end for end in ends if end <= length)])
        assert valid_length(cut) == last


def test_a_tail_of_zeros_or_noise_is_torn_not_an_error(tmp_path):
    path = tmp_path / "j"
    ends = write(path, [{"n": n} for n in range(3)])
    for tail in (bytes(4096), random.Random(1).randbytes(4096), MARKER * 100, path.read_bytes()):
        copy = tmp_path / "copy"
        copy.write_bytes(path.read_bytes() + tail)  # the last one has whole frames, but at another offset
        assert numbers(copy) == [0, 1, 2]
        assert valid_length(copy) == ends[-1]


def test_every_flipped_byte_is_noticed_and_costs_one_record(tmp_path, caplog):
    path = tmp_path / "j"
    ends = write(path, [{"n": n} for n in range(4)])
    data = path.read_bytes()
    for place in range(HEADER_SIZE, len(data)):
        path.write_bytes(data[:place] + bytes([data[place] ^ 0x40]) + data[place + 1 :])
        hit = next(n for n, end in enumerate(ends) if place < end)
        left = [n for n in range(4) if n != hit]
        assert numbers(path, tolerant=True) == left
        if hit == 3:
            assert numbers(path) == left
            continue
        start = ends[hit - 1] if hit else HEADER_SIZE
        with pytest.raises(ConfigError, match=rf"{path}: damaged at byte {start}: "):
            numbers(path)
        assert valid_length(path) == ends[-1]
    assert "skipped" in caplog.text


def test_damage_wider_than_the_search_window_is_bridged(tmp_path):
    path = tmp_path / "j"
    ends = write(path, [{"n": 0}, {"n": 1, "data": bytes(3 << 20)}, {"n": 2}])
    with open(path, "r+b") as file:
        file.seek(ends[0])
        file.write(MARKER * 1000)
    assert numbers(path, tolerant=True) == [0, 2]


def test_a_journal_inside_a_damaged_record_is_not_taken_for_records(tmp_path):
    inner = tmp_path / "inner"
    write(inner, [{"n": 7}, {"n": 8}])
    path = tmp_path / "j"
    ends = write(path, [{"n": 0}, {"n": 1, "artifact": inner.read_bytes()}, {"n": 2}])
    with open(path, "r+b") as file:
        file.seek(ends[0])
        file.write(b"\0" * FRAME_SIZE)
    assert numbers(path, tolerant=True) == [0, 2]


def test_limit_is_a_seal(tmp_path):
    path = tmp_path / "j"
    ends = write(path, [{"n": n} for n in range(4)])
    for limit in range(ends[-1] + 10):
        assert numbers(path, limit=limit) == [n for n, end in enumerate(ends) if end <= limit]


def test_one_frame_is_read_by_its_place(tmp_path):
    path = tmp_path / "j"
    write(path, [{"n": n} for n in range(3)])
    frames = list(read_frames(path))
    assert [read_frame(path, frame.start) for frame in frames] == frames
    with pytest.raises(ConfigError, match="no whole record at byte 25"):
        read_frame(path, 25)


def test_files_that_are_no_journal_are_named(tmp_path):
    foreign = tmp_path / "foreign"
    foreign.write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(100))
    with pytest.raises(ConfigError, match="not a megaflow-hpc journal"):
        numbers(foreign)
    with pytest.raises(ConfigError, match="cannot be read"):
        numbers(tmp_path / "absent")
    newer = tmp_path / "newer"
    write(newer, [{"n": 1}])
    import struct
    import zlib

    head = newer.read_bytes()[:20]
    head = head[:8] + struct.pack("<I", 99) + head[12:]
    newer.write_bytes(head + struct.pack("<I", zlib.crc32(head)))
    with pytest.raises(ConfigError, match="version 99, expected 1"):
        numbers(newer)
    flipped = bytearray(newer.read_bytes())
    flipped[9] ^= 1
    newer.write_bytes(flipped)
    with pytest.raises(ConfigError, match="header fails its checksum"):
        numbers(newer)


def test_a_record_that_is_no_map_is_named(tmp_path):
    with JournalWriter(tmp_path / "j") as journal:
        journal.append(b"\xc1 not msgpack")
        journal.append(pack_record({"n": 1}))
    with pytest.raises(ConfigError, match=f"record at byte {HEADER_SIZE} is "):
        numbers(tmp_path / "j")
    assert numbers(tmp_path / "j", tolerant=True) == [1]


def test_two_writers_of_one_name_are_refused_and_the_first_continues(tmp_path):
    with JournalWriter(tmp_path / "j") as first:
        first.append({"n": 1})
        second = JournalWriter(tmp_path / "j")
        second.append({"n": 3})
        first.commit()
        with pytest.raises(ConfigError, match="exists already"):
            second.commit()
        with pytest.raises(ConfigError, match="exists already"):
            JournalWriter(tmp_path / "j")
        first.append({"n": 2})
    assert numbers(tmp_path / "j") == [1, 2]
    with pytest.raises(ConfigError, match="cannot be created"):
        JournalWriter(tmp_path / "absent" / "j")


def test_a_closed_journal_refuses_records(tmp_path):
    journal = JournalWriter(tmp_path / "j")
    journal.close()
    journal.close()
    with pytest.raises(ValueError, match="closed"):
        journal.append({"n": 1})


def test_it_is_read_while_it_is_written(tmp_path):
    path = tmp_path / "j"
    acknowledged = [0]
    done = threading.Event()

    def work() -> None:
        with JournalWriter(path) as journal:
            for n in range(300):
                journal.append({"n": n, "data": b"x" * (n * 7)})
                if n % 5 == 4:
                    journal.commit()
                    acknowledged[0] = n + 1
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    while not path.exists():
        time.sleep(0.001)
    while not done.is_set():
        before = acknowledged[0]
        seen = numbers(path)
        assert seen == list(range(len(seen)))
        assert len(seen) >= before
    thread.join()
    assert numbers(path) == list(range(300))


FULL = textwrap.dedent("""
    import resource, sys
    from megaflow_hpc.trajectories import JournalWriter
    journal = JournalWriter(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))
    for n in range(100):
        journal.append({"n": n, "data": bytes(300)})
        try:
            journal.commit()
        except OSError as error:
            print(n, journal.committed, error.errno, flush=True)
            break
    sys.stdin.readline()
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    journal.append({"n": n + 1})
    journal.close()
""")


def test_no_space_left_acknowledges_nothing_new_and_goes_on_afterwards(tmp_path):
    path = tmp_path / "j"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", FULL, str(path)], text=True, **pipes) as process:
        assert process.stdout is not None
        refused, committed, _ = map(int, process.stdout.readline().split())
        assert numbers(path) == list(range(refused))
        assert path.stat().st_size == committed == valid_length(path)
        process.communicate("go\n", timeout=60)
    assert process.returncode == 0
    assert numbers(path) == list(range(refused + 2))


def test_appending_does_not_import_hdf5_or_numpy():
    code = "import sys, megaflow_hpc.trajectories as t; t.JournalWriter; print({'h5py', 'numpy'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


def test_the_file_is_private(tmp_path):
    write(tmp_path / "j", [{"n": 1}])
    assert os.stat(tmp_path / "j").st_mode & 0o777 == 0o600
