"""Run directories in which files are FIFOs, devices, holes and circles: a look at one ends, in little memory."""

from __future__ import annotations

import os
import re
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from megaflow_hpc import Campaign
from megaflow_hpc.cli import main
from megaflow_hpc.errors import MegaflowError
from megaflow_hpc.host.files import behind_hole, open_regular, read_regular
from megaflow_hpc.rundir import logs
from megaflow_hpc.rundir.events import EventReader, EventWriter, RolloutEvent
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.weight_delta import put_together
from megaflow_hpc.trajectories.exports.files import reading
from megaflow_hpc.trajectories.hdf5.file import open_file
from megaflow_hpc.trajectories.journal.frames import read_journal
from megaflow_hpc.trajectories.reading.vocabulary import load as read_vocabulary
from tests.support.harbor_tasks import write_solved_task
from tests.support.samples import commit, trajectory

HOLE = 1 << 40
MEMORY = 2 << 30
ANSWER_S = 60
"""Seconds after which a look is taken to wait for ever."""
ROLLOUT = "task0/oracle/0"


def hole(path: Path) -> None:
    path.touch()
    os.truncate(path, HOLE)


KINDS: dict[str, Callable[[Path], None]] = {
    "fifo": os.mkfifo,
    "zeros": lambda path: path.symlink_to("/dev/zero"),
    "hole": hole,
    "circle": lambda path: path.symlink_to(path),
    "directory": Path.mkdir,
}


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


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """A run of two rollouts with a journal, events, a log and a gathered file."""
    for name in ("SLURM_CONF", "SLURM_JOB_ID", "MEGAFLOW_SITE_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MEGAFLOW_SCRATCH", str(tmp_path))
    monkeypatch.setenv("MEGAFLOW_SITE_CHECK", "0")
    for number in range(2):
        write_solved_task(tmp_path / "tasks", f"task{number}")
    (tmp_path / "image" / "bin").mkdir(parents=True)
    (tmp_path / "campaign.yaml").write_text(
        "name: odd\ntasks: tasks/*\nagent: [oracle]\n"
        f"environment: {{network: none, images: {{base: {tmp_path / 'image'}}}}}\n"
    )
    run = RunDir(Campaign.from_yaml(tmp_path / "campaign.yaml").plan(launcher="local").path)
    commit(run, "7_0", (0, 0, trajectory(0)))
    events = EventWriter(run.event_file("7_0", "0"))
    events.write(RolloutEvent(id=ROLLOUT, status="completed", reward=1.0, turns=3, seconds=0.25))
    events.close()
    (run.logs / "pod-7_0.log").write_text(f"{ROLLOUT}: said\n")
    (run.training / "default").mkdir(parents=True, exist_ok=True)
    (run.training / "default" / "last").write_text("failed n 1 log\n")
    (run.path / "endpoints" / "default.0.json").write_text("{}")
    assert main(["gather", str(run.path)]) == 0
    return run


def files_of(run: RunDir) -> list[Path]:
    """One file of each kind in a run directory."""
    kinds: dict[tuple[str, ...], Path] = {}
    for path in sorted(run.path.rglob("*")):
        if path.is_file() and "scripts" not in path.parts and not path.name.startswith("."):
            where = path.relative_to(run.path)
            kinds.setdefault((*where.parts[:-1], path.suffix if len(where.parts) > 1 else path.name), path)
    return list(kinds.values())


@pytest.mark.parametrize("kind", KINDS)
def test_no_look_at_a_run_waits_or_takes_the_memory(
    run: RunDir, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    looks = [
        ["status", run.path, "--json"],
        ["logs", run.path],
        ["logs", run.path, "pod"],
        ["logs", run.path, ROLLOUT],
        ["show", run.path, ROLLOUT],
        ["list", run.path.parent],
        ["gather", run.path],
    ]
    if kind in ("fifo", "hole"):  # the slow ones
        looks += [["status", run.path], ["report", run.path, "--output", tmp_path / "report.html"]]
    found, wrong = files_of(run), list[str]()
    assert {path.suffix for path in found} >= {".json", ".jsonl", ".log", ".h5", ".journal"}, found
    for path in found:
        kept = path.with_name(f".{path.name}.kept")
        os.rename(path, kept)
        KINDS[kind](path)
        for look in looks:
            if look[0] == "report" and kind == "hole" and path.suffix not in (".jsonl", ".journal", ".h5"):
                continue
            where = f"{' '.join(map(str, look))} with {path.relative_to(run.path)} a {kind}"
            try:
                with bounded(where):
                    main([str(word) for word in look])
            except BaseException as error:
                wrong.append(f"{where}: {error!r}")
            if "Traceback" in capsys.readouterr().err:
                wrong.append(f"{where}: a traceback")
        if kind == "directory":
            path.rmdir()
        else:
            path.unlink()
        os.rename(kept, path)
    assert not wrong, "\n".join(wrong)


def test_readers_say_what_is_no_file(tmp_path: Path) -> None:
    path = tmp_path / "odd"
    os.mkfifo(path)
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


def test_a_version_of_weights_is_put_together_of_files_alone(tmp_path: Path) -> None:
    for name in ("delta", "base"):
        (tmp_path / name).mkdir()
    os.mkfifo(tmp_path / "delta" / "delta.json")
    with bounded("weights"), pytest.raises(MegaflowError):
        put_together(tmp_path / "delta", tmp_path / "base", tmp_path / "whole")
