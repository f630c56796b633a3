"""Run directories in which files are FIFOs, devices and holes: a look at one ends, in little memory."""

from __future__ import annotations

import os
import re
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from megaflow_hpc.errors import MegaflowError
from megaflow_hpc.host.files import behind_hole, open_regular, read_regular
from megaflow_hpc.rundir import logs
from megaflow_hpc.rundir.event_reader import EventReader
from megaflow_hpc.rundir.events import EventWriter, RolloutEvent
from megaflow_hpc.trajectories.exports.files import reading
from megaflow_hpc.trajectories.hdf5.file import open_file
from megaflow_hpc.trajectories.journal.frames import read_journal
from megaflow_hpc.trajectories.reading.vocabulary import load as read_vocabulary

HOLE = 1 << 40
MEMORY = 2 << 30
ANSWER_S = 60
"""Seconds after which a look is taken to wait for ever."""


def hole(path: Path) -> None:
    path.touch()
    os.truncate(path, HOLE)


@contextmanager
def bounded(what: str) -> Iterator[None]:
    """Fails if what is done inside waits, or takes :data:`MEMORY`."""

    def waits(number: int, frame: object) -> None:
        raise AssertionError(f"{what}: no answer within {ANSWER_S} s")

    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    used = int(re.findall(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())[0]) << 10
    before = signal.signal(signal.SIGALRM, waits)
    resource.setrlimit(resource.RLIMIT_DATA, (used + MEMORY, hard))
    signal.alarm(ANSWER_S)
    try:
        yield
    except MemoryError:
        pytest.fail(f"{what}: takes the memory")
    finally:
        signal.alarm(0)
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("kind", ["fifo", "device"])
def test_readers_say_what_is_no_file(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "odd"
    os.mkfifo(path) if kind == "fifo" else path.symlink_to("/dev/zero")
    with bounded("readers"):
        for read in (open_regular, read_regular):
            with pytest.raises(OSError, match="not a regular file"):
                read(path)
        for read in (open_file, read_vocabulary, lambda path: list(read_journal(path))):
            with pytest.raises(MegaflowError, match="not a regular file"):
                read(path)
        with pytest.raises(OSError, match="not a regular file"), reading(path):
            pass
        path.unlink()
        hole(path)
        for read in (open_file, read_vocabulary):
            with pytest.raises(MegaflowError):
                read(path)
        assert not list(read_journal(path))
        with pytest.raises(OSError, match="more than 268435456 bytes"):
            read_regular(path)


def test_a_file_is_read_whole_whatever_it_says_of_its_length(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for length in (0, 1, 10, 100_000):
        path.write_bytes(b"a" * length)
        assert read_regular(path) == read_regular(path, length) == b"a" * length
        if length:
            with pytest.raises(OSError, match="more than"):
                read_regular(path, length - 1)
    assert read_regular("/proc/self/stat").startswith(str(os.getpid()).encode())  # its length is 0


def test_what_stands_behind_a_hole_is_read(tmp_path: Path) -> None:
    """A crash of a file server leaves holes; what was written behind them counts."""
    path = tmp_path / "7_0.0.jsonl"
    events = EventWriter(path)
    events.write(RolloutEvent(id="before", status="completed"))
    events.close()
    with open(path, "r+b") as file:
        file.seek(HOLE)
        file.write(b"\n")
    events = EventWriter(path)
    events.write(RolloutEvent(id="behind", status="completed"))
    events.close()
    with bounded("holes"):
        reader: EventReader[RolloutEvent] = EventReader(tmp_path, "rollout")
        ((_, found),) = reader.read()
        assert [event.id for event in found if isinstance(event, RolloutEvent)] == ["before", "behind"]
        assert not [event for _, found in reader.read() for event in found]
        assert sum("behind" in line for line in logs.whole(path)) == 1
        with open(path, "rb") as file:
            assert behind_hole(file, 1 << 20) == HOLE
            assert behind_hole(file, path.stat().st_size + 5) == path.stat().st_size + 5
