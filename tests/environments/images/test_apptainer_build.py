"""Builds, pulls and looks into images: our calls of Apptainer, and the same by its Python client (spython).

The second half is why the first are not made through the client.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megaflow_hpc.environments.images.apptainer_build import build
from megaflow_hpc.environments.images.image_config import working_directory
from megaflow_hpc.errors import SiteError
from megaflow_hpc.host.apptainer import find_apptainer
from megaflow_hpc.host.cleanup import BUILD_DIRECTORY
from megaflow_hpc.host.process import descendants as below
from tests.support.oci import oci_archive
from tests.support.places import ROOT
from tests.support.waiting import until

NOWHERE = "docker://127.0.0.1:1/lab/x:1"
BROKEN = "Bootstrap: localimage\nFrom: /nonexistent.sif\n"


def program(folder: Path, name: str, text: str) -> Path:
    """Writes a shell script, in place of whatever has its name: never through a link to a real program."""
    path = folder / name
    folder.mkdir(exist_ok=True)
    new = folder / f"{name}.new"
    with open(new, "x") as file:
        file.write(f"#!/bin/sh\n{text}\n")
    new.chmod(0o755)
    new.rename(path)
    return path


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """A program that starts another one, notes its pid, and waits for it."""
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
    """Whether it runs; who has ended and waits to be asked for its status does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# --- ours -------------------------------------------------------------------------------------------------------------


def test_a_build_that_fails_says_why(tmp_path: Path) -> None:
    definition = tmp_path / "x.def"
    definition.write_text(BROKEN)
    target = tmp_path / "x.sif"
    target.write_text("an older one")
    with pytest.raises(SiteError, match=r"x.def: apptainer build failed: .*nonexistent.sif"):
        build(find_apptainer(), target, str(definition), "--force")
    with pytest.raises(SiteError, match=r"127.0.0.1:1.*connection refused"):
        build(find_apptainer(), tmp_path / "y.sif", NOWHERE)


def test_a_build_that_takes_too_long_ends_with_all_it_started(tmp_path: Path, slow: tuple[Path, Path]) -> None:
    script, told = slow
    with pytest.raises(SiteError, match=r"x.def: apptainer build took more than 1 s"):
        build(str(script), tmp_path / "x.sif", "x.def", timeout_s=1)
    until(lambda: not lives(int(told.read_text())), "the build's own child ends")


def test_a_build_ends_with_all_it_started_on_ctrl_c(tmp_path: Path, slow: tuple[Path, Path]) -> None:
    script, told = slow
    text = (
        "from pathlib import Path; from megaflow_hpc.environments.images.apptainer_build import build\n"
        f"build({str(script)!r}, Path('x.sif'), 'x.def')"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", text], env=os.environ | {"PYTHONPATH": str(ROOT)}, stderr=subprocess.DEVNULL
    )
    until(told.exists, "the build runs", every_s=0.01)
    process.send_signal(signal.SIGINT)
    assert process.wait(30) != 0
    until(lambda: not lives(int(told.read_text())), "the build's own child ends")


def test_what_apptainer_unpacks_goes_with_a_build_or_when_all_are_killed_with_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, told = tmp_path / "tmp", tmp_path / "told"
    place.mkdir()
    monkeypatch.setenv("TMPDIR", str(place))
    monkeypatch.setattr(tempfile, "tempdir", None)
    text = f"mkdir -p $TMPDIR/build-temp-1/rootfs/etc; chmod 0 $TMPDIR/build-temp-1/rootfs; echo $$ >{told}; sleep 300"
    script = program(tmp_path / "slow", "apptainer", text)
    with pytest.raises(SiteError, match="more than 1 s"):
        build(str(script), tmp_path / "x.sif", "x.def", timeout_s=1)
    assert list(place.iterdir()) == []
    told.unlink()
    words = (
        f"from pathlib import Path; from {build.__module__} import build\nbuild({str(script)!r}, Path('x.sif'), 'x')"
    )
    process = subprocess.Popen([sys.executable, "-c", words], env=os.environ | {"PYTHONPATH": str(ROOT)})
    until(lambda: told.exists() and told.read_text(), "the build runs", every_s=0.01)
    process.kill()
    process.wait()
    until(lambda: not lives(int(told.read_text())), "the build ends with who asked for it")
    [left] = place.iterdir()
    assert left.name.startswith(BUILD_DIRECTORY)
    (tmp_path / "x.def").write_text(BROKEN)
    with pytest.raises(SiteError):
        build(find_apptainer(), tmp_path / "x.sif", str(tmp_path / "x.def"))
    assert list(place.iterdir()) == []


def test_a_build_that_is_killed_ends_and_the_next_removes_its_files(
    tmp_path: Path, base_sif: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Apptainer's own, in the middle of ``%post``: its directories stay where it is killed."""
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    (tmp_path / "temporary").mkdir()
    (tmp_path / "x.def").write_text(f"Bootstrap: localimage\nFrom: {base_sif}\n%post\n  sleep 300\n")
    words = f"find_apptainer(), Path({str(tmp_path / 'x.sif')!r}), {str(tmp_path / 'x.def')!r}, '--fakeroot'"
    text = (
        "from pathlib import Path; from megaflow_hpc.host.apptainer import find_apptainer\n"
        f"from megaflow_hpc.environments.images.apptainer_build import build\nbuild({words})"
    )
    process = subprocess.Popen([sys.executable, "-c", text], env=os.environ | {"PYTHONPATH": str(ROOT)})
    until(lambda: b"sleep 300" in b"".join(map(command, below(process.pid))), "the build is at work", 30)
    started = list(below(process.pid))
    process.kill()
    process.wait()
    left = list((tmp_path / "temporary").iterdir())
    assert [path.name.startswith("megaflow-build.") for path in left] == [True]
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
    build(str(shows), tmp_path / "x.sif", "x.def")
    seen = (tmp_path / "seen").read_text()
    assert "APPTAINER_BINDPATH" not in seen
    assert "SLURM_JOB_ID" not in seen


# --- the Python client ------------------------------------------------------------------------------------------------


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The client, with our Apptainer under the name that it looks for, in a directory of this test's."""
    from spython.main import Client

    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "singularity").symlink_to(find_apptainer())
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    return Client


def test_it_finds_no_apptainer_but_one_called_singularity(
    client: Any, tmp_path: Path, base_sif: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Debian's package of Apptainer brings no program of that name; ours may be anywhere."""
    ours = os.path.realpath(tmp_path / "bin" / "singularity")
    monkeypatch.setenv("MEGAFLOW_APPTAINER", ours)
    (tmp_path / "bin" / "singularity").rename(tmp_path / "bin" / "apptainer")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    for call in (
        lambda: client.pull(NOWHERE, name="x.sif", quiet=True),
        lambda: client.build("x.def", "x.sif", sudo=False, quiet=True),
        lambda: client.inspect(str(base_sif)),
    ):
        with pytest.raises(FileNotFoundError, match="singularity"):
            call()
    assert find_apptainer() == ours


def test_its_failed_pull_is_no_error(client: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert client.pull(NOWHERE, name="x.sif", quiet=True) == "x.sif"
    assert not (tmp_path / "x.sif").exists()
    assert capfd.readouterr() == ("", "")  # nor does it say why


def test_its_failed_build_is_none_or_the_file_that_was_there_before(
    client: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    Path("x.def").write_text(BROKEN)
    for wanted in ({}, {"return_result": True}):  # which is not returned
        assert client.build("x.def", "x.sif", sudo=False, quiet=True, **wanted) is None
    Path("x.sif").write_text("an older one")
    assert client.build("x.def", "x.sif", sudo=False, quiet=True, force=True) == "x.sif"
    assert capfd.readouterr() == ("", "")


def test_it_waits_as_long_as_it_takes(client: Any, slow: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """There is neither a limit to give nor a process to end."""
    script, told = slow
    monkeypatch.setenv("PATH", f"{script.parent}:{os.environ['PATH']}")
    returned = threading.Event()

    def build() -> None:
        client.build("x.def", "x.sif", sudo=False, quiet=True)
        returned.set()

    threading.Thread(target=build, daemon=True).start()
    until(told.exists, "the build runs", every_s=0.01)
    assert not returned.wait(0.5)
    end(int(told.read_text()))
    assert returned.wait(30)


def test_its_programs_see_the_callers_job(client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shows = program(tmp_path / "shows", "singularity", f"env >{tmp_path}/seen")
    monkeypatch.setenv("PATH", f"{shows.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("APPTAINER_BINDPATH", "/data")
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    client.build("x.def", "x.sif", sudo=False, quiet=True)
    seen = (tmp_path / "seen").read_text().splitlines()
    assert {"APPTAINER_BINDPATH=/data", "SLURM_JOB_ID=1"} <= set(seen)


def test_it_inspects_what_it_needs_a_program_for_and_not_where_commands_start(
    client: Any, small_rootfs: str, tmp_path: Path
) -> None:
    oci_archive(Path(small_rootfs, "etc"), tmp_path / "x.tar", "/app/src")
    build(find_apptainer(), tmp_path / "x.sif", f"oci-archive:{tmp_path / 'x.tar'}")
    found = client.inspect(str(tmp_path / "x.sif"))
    assert found["attributes"]["labels"]
    assert "/app/src" not in str(found)
    assert working_directory(tmp_path / "x.sif") == "/app/src"
    absent = client.inspect("absent.sif")  # no error, but another form of answer
    assert absent["return_code"] == 255
