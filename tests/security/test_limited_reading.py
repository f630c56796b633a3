"""A separate process with limits reads files of other users that would use much memory or time."""

from __future__ import annotations

import gzip
import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.host.child import ProcessLimits, run_confined
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.trajectories.reading.vocabulary import kept, load
from tests.support.campaigns import Make, cli, gathered, verb
from tests.support.samples import trajectory
from tests.support.second_user import COMMAND, as_second_user

MB = 1 << 20
HEAD = '{"model":{"vocab":{"a":1}},"added_tokens":[],"x":'


def bomb(path: Path, *parts: tuple[bytes, int]) -> None:
    """Writes a gzip file of a few megabytes, with each part repeated as often as given."""
    path.parent.mkdir(exist_ok=True)
    with gzip.open(path, "wb", 1) as file:
        for text, times in parts:
            for _ in range(times):
                file.write(text)


BOMBS: dict[str, tuple[tuple[bytes, int], ...]] = {
    "one long text": ((HEAD.encode() + b'"', 1), (b"a" * 4 * MB, 350), (b'"}', 1)),
    "many lists": ((HEAD.encode() + b"[", 1), (b"[]," * MB, 30), (b"[]]}", 1)),
    "deep lists": ((HEAD.encode(), 1), (b"[" * MB, 100), (b"]" * MB, 100), (b"}", 1)),
}


@pytest.fixture
def run(make_campaign: Make, tmp_path: Path) -> RunDir:
    return gathered(make_campaign(), tmp_path / "run")


LIMITED = """
import sys
from megaflow_hpc.cli import confined, main
from megaflow_hpc.host.child import ProcessLimits
confined.LIMITS = ProcessLimits(int(sys.argv[1]), 60, 1 << 20)
sys.exit(main(sys.argv[2:]))
"""
"""Runs a verb. A confined process may use the given number of bytes."""
MEASURED = """
import resource, subprocess, sys
status = subprocess.run(sys.argv[2:]).returncode
with open(sys.argv[1], "w") as file:
    file.write(str(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss))
sys.exit(status)
"""
"""Runs a command and writes its peak memory in kB. A child inherits the peak of its parent, and a test's is large."""


@pytest.mark.parametrize("name", BOMBS)
def test_a_tokenizer_of_another_user_takes_no_more_than_its_process_may(name: str, run: RunDir, place: Path) -> None:
    policy = trajectory(2).sequences[0].policy
    bomb(kept(run, policy), *BOMBS[name])
    assert kept(run, policy).stat().st_size < 8 * MB
    words = ["show", given_away(run, place), trajectory(2).id, "--tokens"]
    command = [sys.executable, "-c", LIMITED, str(512 * MB), *map(str, words)]
    peak = place / "peak"
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, str(peak), *command], capture_output=True, text=True, timeout=120, check=False
    )
    assert "Traceback" not in done.stderr
    assert done.returncode == 2 or "ids only: " in done.stdout
    assert int(peak.read_text()) < 800 << 10


def test_texts_of_ids_are_those_of_the_vocabulary(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    vocabulary = {"▁a": 1, "<0xFF>": 2, "x" * 5000: 3, "\\\n": 4}
    path.write_text(json.dumps({"model": {"vocab": vocabulary}, "added_tokens": [{"id": 9, "content": "<end>"}]}))
    expected = {1: " a", 2: "\udcff", 3: "x" * 5000, 4: "\\\n", 9: "<end>", 77: ""}
    assert {token: load(path).piece(token) for token in expected} == expected
    for wrong in ("{}", "[", '{"model": {"vocab": 7}}'):
        path.write_text(wrong)
        with pytest.raises(ConfigError, match=re.escape(f"{path}: no tokenizer.json")):
            load(path)


# --- runs of another user -------------------------------------------------------------------------------------------


def given_away(run: RunDir, place: Path) -> Path:
    """A copy of a run directory that belongs to another user, and that everybody may read."""
    shutil.copytree(run.path, place / "theirs", symlinks=True)
    inside = f"chown -R 1000:1000 {place}/theirs && chmod -R a+rX {place}/theirs"
    subprocess.run([*COMMAND[:4], "sh", "-c", inside], check=True)
    assert (place / "theirs").stat().st_uid != os.getuid()
    return place / "theirs"


def test_runs_of_another_user_are_read_as_ones_own(run: RunDir, place: Path, tmp_path: Path) -> None:
    theirs = given_away(run, place)
    for name, *words in (
        ["show", "2", "--tokens"],
        ["status"],
        ["export", "--format", "jsonl,parquet", "-o", tmp_path / "export"],
        ["report", "-o", tmp_path / "report"],
    ):
        told = [verb(name, run.path, *words), cli(name, theirs, *words)]
        assert [done.returncode for done in told] == [told[0].returncode] * 2, told[1].stderr
        assert "Traceback" not in told[1].stderr
        if name == "show":
            shown = [re.sub(r"\S*/(run|theirs)\b", "RUN", done.stdout) for done in told]
            assert shown[0] == shown[1]
        for made in ("export", "report"):
            shutil.rmtree(tmp_path / made, ignore_errors=True)


def test_a_run_of_another_user_that_takes_much_memory_ends_with_a_message(run: RunDir, place: Path) -> None:
    """The limits are just what importing the libraries takes, because a file as large as the real limits takes long."""
    theirs = given_away(run, place)
    command = [sys.executable, "-c", LIMITED, str(30 * MB), "show", str(theirs), "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0
    assert not done.stdout
    command[5] = str(run.path)  # the user's own run is read without limits
    assert subprocess.run(command, capture_output=True, timeout=60, check=False).returncode == 0


def _use_threads() -> int:
    over = threading.Event()
    for _ in range(1000):
        threading.Thread(target=over.wait, daemon=True).start()
    return 0


def _use_memory() -> int:
    return len(bytearray(resource.getrlimit(resource.RLIMIT_DATA)[0])) and 0


def _use_cpu() -> int:
    end = time.process_time() + 30
    while time.process_time() < end:
        pass
    return 0


def _use_network() -> int:
    try:
        socket.create_connection(("127.0.0.1", int(os.environ["PORT_OF_TEST"])), timeout=5)
    except OSError:
        return 7
    return 0


@pytest.mark.parametrize(
    ("call", "status"),
    [(_use_memory, -9), (_use_threads, -9), (_use_cpu, -9), (_use_network, 7), (lambda: 3, 3)],
    ids=lambda v: str(v)[:12],
)
def test_a_confined_process_has_its_limits(
    call: Callable[[], int], status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = int(re.findall(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())[0]) << 10
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("PORT_OF_TEST", str(server.getsockname()[1]))
        assert run_confined(call, ProcessLimits(used + 256 * MB, 2, MB)) == status
        if call is _use_network:
            assert run_confined(call, ProcessLimits(used + 256 * MB, 60, MB), network=True) == 0


def test_a_confined_process_writes_no_large_file(tmp_path: Path) -> None:
    def write() -> int:
        with open(tmp_path / "file", "wb") as file:
            file.write(bytes(2 * MB))
        return 0

    assert run_confined(write, ProcessLimits(64 << 30, 60, MB)) != 0
    assert (tmp_path / "file").stat().st_size <= MB


STUCK = """
import signal, sys, time
from megaflow_hpc.host.child import ProcessLimits, run_confined

def stuck():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    print("stuck", flush=True)
    time.sleep(600)
    return 0

print(run_confined(stuck, ProcessLimits(64 << 30, 60, 1 << 20)))
"""


def test_a_second_interrupt_kills_a_confined_process_that_ignores_the_first() -> None:
    with subprocess.Popen([sys.executable, "-c", STUCK], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "stuck\n"
        for _ in range(2):
            time.sleep(1)
            parent.send_signal(signal.SIGINT)
        assert parent.stdout.read() == "-9\n"
        parent.wait(60)
        assert parent.returncode == 0


def test_a_second_user_reads_what_a_confined_process_of_theirs_may(tmp_path: Path) -> None:
    """The user namespace, which the network namespace needs, changes no rights."""

    def check() -> int:
        (tmp_path / "made").write_text("x")
        return 0 if os.getuid() == os.stat(tmp_path / "made").st_uid == before else 1

    before = os.getuid()
    assert run_confined(check, ProcessLimits(64 << 30, 60, MB)) == 0
    assert (tmp_path / "made").stat().st_uid == before
    assert as_second_user("print(1)", None) == 1
