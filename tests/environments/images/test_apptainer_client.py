"""Builds and pulls by Apptainer's Python client, in a child process that ends with its caller."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from megaflow_hpc.environments.images.apptainer_client import build, pull
from megaflow_hpc.errors import SiteError
from megaflow_hpc.host.apptainer import find_apptainer
from megaflow_hpc.host.private import BUILD_DIRECTORY
from megaflow_hpc.host.process import descendants as below
from tests.support.places import ROOT
from tests.support.waiting import until

NOWHERE = "docker://127.0.0.1:1/lab/x:1"
BROKEN = "Bootstrap: localimage\nFrom: /nonexistent.sif\n"


def program(folder: Path, name: str, text: str) -> Path:
    """Writes a shell script."""
    folder.mkdir()
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def start_build(words: str) -> subprocess.Popen[bytes]:
    """Starts ``build(WORDS)`` in another process."""
    text = (
        "from pathlib import Path; from megaflow_hpc.host.apptainer import find_apptainer\n"
        f"from {build.__module__} import build\nbuild({words})"
    )
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen([sys.executable, "-c", text], env=environ, stderr=subprocess.DEVNULL)


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """A program that starts another one and waits for it, and the file with the other's pid."""
    told = tmp_path / "told"
    text = f"test $1 = build || exit 0; sleep 300 & echo $! >{told}.new; mv {told}.new {told}; wait"
    yield program(tmp_path / "slow", "singularity", text), told
    if told.exists():
        end(int(told.read_text()))


def end(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def lives(pid: int) -> bool:
    """Returns whether a process runs. Zombies do not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(
    ("how", "said"), [("timeout", r"x.def: apptainer build took more than 1 s"), ("stopped", "interrupted")]
)
def test_a_build_that_takes_too_long_or_is_stopped_ends_with_all_it_started(
    tmp_path: Path, slow: tuple[Path, Path], how: str, said: str
) -> None:
    script, told = slow
    stopped = threading.Event()
    if how == "stopped":
        threading.Timer(1, stopped.set).start()
    with pytest.raises(SiteError, match=said):
        build(str(script), tmp_path / "x.sif", "x.def", timeout_s=1 if how == "timeout" else 60, stopped=stopped)
    until(lambda: not lives(int(told.read_text())), "the build's own child ends")


def test_a_build_ends_with_all_it_started_on_ctrl_c(slow: tuple[Path, Path]) -> None:
    script, told = slow
    process = start_build(f"{str(script)!r}, Path('x.sif'), 'x.def'")
    until(told.exists, "the build runs", every_s=0.01)
    process.send_signal(signal.SIGINT)
    assert process.wait(30) != 0
    until(lambda: not lives(int(told.read_text())), "the build's own child ends")


def test_what_apptainer_unpacks_goes_with_a_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    text = "mkdir -p $TMPDIR/build-temp-1/rootfs/etc; chmod 0 $TMPDIR/build-temp-1/rootfs; sleep 300"
    script = program(tmp_path / "slow", "apptainer", text)
    with pytest.raises(SiteError, match="more than 1 s"):
        build(str(script), tmp_path / "x.sif", "x.def", timeout_s=1)
    assert list((tmp_path / "tmp").iterdir()) == []


def test_a_build_that_is_killed_ends_and_the_next_removes_its_files(
    tmp_path: Path, base_sif: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Apptainer is in the middle of ``%post``. Its directories stay until the next build."""
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    (tmp_path / "temporary").mkdir()
    (tmp_path / "x.def").write_text(f"Bootstrap: localimage\nFrom: {base_sif}\n%post\n  sleep 300\n")
    target, definition = str(tmp_path / "x.sif"), str(tmp_path / "x.def")
    process = start_build(f"find_apptainer(), Path({target!r}), {definition!r}, '--fakeroot'")
    until(lambda: b"sleep 300" in b"".join(map(command, below(process.pid))), "the build is at work", 30)
    started = list(below(process.pid))
    process.kill()
    process.wait()
    left = list((tmp_path / "temporary").iterdir())
    assert [path.name.startswith(BUILD_DIRECTORY) for path in left] == [True]
    until(lambda: not any(map(lives, started)), "all that it has started has ended", 30)
    with pytest.raises(SiteError, match="connection refused"):
        build(find_apptainer(), tmp_path / "y.sif", NOWHERE)
    assert list((tmp_path / "temporary").iterdir()) == []


def command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
    except OSError:
        return b""


def test_a_build_sees_nothing_of_the_callers_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shows = program(tmp_path / "shows", "apptainer", f"env >{tmp_path}/seen")
    monkeypatch.setenv("APPTAINER_BINDPATH", "/data")
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    with pytest.raises(SiteError, match=r"x.def: apptainer build failed: it said nothing"):
        build(str(shows), tmp_path / "x.sif", "x.def")  # it writes no file
    seen = (tmp_path / "seen").read_text()
    assert "APPTAINER_BINDPATH" not in seen
    assert "SLURM_JOB_ID" not in seen


def test_a_pull_gets_the_file_that_appears(tmp_path: Path, base_sif: Path) -> None:
    text = f'test $1 = pull || exit 0; echo "$APPTAINER_NOHTTPS" >{tmp_path}/seen; cp {base_sif} "$3"; exit 10'
    gives = program(tmp_path / "gives", "apptainer", text)
    pull(str(gives), tmp_path / "x.sif", "library://lab/x", plain_http=True)
    assert (tmp_path / "x.sif").read_bytes() == base_sif.read_bytes()
    assert (tmp_path / "seen").read_text() == "1\n"


def test_a_file_that_was_cut_short_is_no_result(tmp_path: Path, base_sif: Path) -> None:
    cuts = program(tmp_path / "cuts", "apptainer", f'test $1 = pull && head -c 100000 {base_sif} >"$3"; exit 0')
    with pytest.raises(SiteError, match="apptainer pull failed"):
        pull(str(cuts), tmp_path / "x.sif", "library://lab/x")
    assert not (tmp_path / "x.sif").exists()


def test_a_directory_of_a_failed_build_is_no_result(tmp_path: Path) -> None:
    text = "test $1 = build || exit 0; mkdir $4; echo 'FATAL: disk full' >&2; exit 255"
    fails = program(tmp_path / "fails", "apptainer", text)
    with pytest.raises(SiteError, match="apptainer build failed: disk full"):
        build(str(fails), tmp_path / "tree", "x.sif", "--fix-perms", sandbox=True)
    assert not (tmp_path / "tree").exists()


def test_errors_that_are_not_utf_8_are_shown(tmp_path: Path) -> None:
    fails = program(tmp_path / "fails", "apptainer", r"printf 'FATAL: no caf\351\n' >&2; exit 1")
    with pytest.raises(SiteError, match=r"apptainer build failed: no caf\ufffd"):
        build(str(fails), tmp_path / "x.sif", "x.def")


def test_nothing_is_imported_from_the_directory_of_a_definition(tmp_path: Path) -> None:
    (tmp_path / "spython").mkdir()
    for module in ("json.py", "spython/__init__.py", "shlex.py"):
        (tmp_path / module).write_text(f"open({str(tmp_path / 'imported')!r}, 'w')")
    (tmp_path / "x.def").write_text(BROKEN)
    with pytest.raises(SiteError, match=r"nonexistent.sif"):
        build(find_apptainer(), tmp_path / "x.sif", "x.def", cwd=tmp_path)
    assert not (tmp_path / "imported").exists()
