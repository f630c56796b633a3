"""Other users of a node put things into /tmp and /dev/shm before us, and while we clean up after ourselves."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megaflow_hpc.environments import ApptainerProvider
from megaflow_hpc.environments.sandbox.scratch import default_scratch, sweep
from megaflow_hpc.errors import SiteError
from megaflow_hpc.host.private import POD_DIRECTORY, SHARED_MEMORY, sweep_directories, sweep_shared_memory
from megaflow_hpc.host.process import Identity
from tests.support.second_user import as_second_user

LONG_AGO = time.time() - 3600

PLANT = """
import json, os, socket, sys
told = json.load(sys.stdin)
os.umask(0)
os.chdir(told["base"])
for kind, name, target in told["entries"]:
    name = os.fsencode(name)
    if kind == "link":
        os.symlink(os.fsencode(target), name)
    elif kind == "directory":
        os.makedirs(name)
    elif kind == "closed":
        os.mkdir(name, 0)
    elif kind == "fifo":
        os.mkfifo(name)
    elif kind == "socket":
        socket.socket(socket.AF_UNIX).bind(name)
    elif kind == "file":
        with open(name, "w") as file:
            file.write(target)
    if kind not in ("link", "closed"):
        os.utime(name, (1, 1))
print(json.dumps(sorted(os.listdir("."))))
"""
REMOVE = """
import json, os, shutil, sys
told = json.load(sys.stdin)
for name in told:
    name = os.fsencode(name)
    if os.path.isdir(name) and not os.path.islink(name):
        os.chmod(name, 0o700)
        shutil.rmtree(name)
    elif os.path.lexists(name):
        os.unlink(name)
print("{}")
"""


@pytest.fixture
def shared(place: Path) -> Path:
    """A directory as /tmp is."""
    path = place / "tmp"
    path.mkdir()
    path.chmod(0o1777)
    return path


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """What is the victim's own, and old enough to be thought left over."""
    path = tmp_path / "home"
    (path / "thesis").mkdir(parents=True)
    (path / "thesis" / "chapter").write_text("words")
    for entry in (path / "thesis" / "chapter", path / "thesis", path):
        os.utime(entry, (LONG_AGO, LONG_AGO))
    return path


def plant(base: Path, *entries: tuple[str, str, str]) -> None:
    as_second_user(PLANT, {"base": str(base), "entries": entries})


def janitor(base: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environ = {k: v for k, v in os.environ.items() if k not in ("SLURM_TMPDIR", "MEGAFLOW_SCRATCH")}
    return subprocess.run(
        [sys.executable, "-m", "megaflow_hpc", "janitor", "--json", *words],
        env={**environ, "TMPDIR": str(base)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


# --- shared memory --------------------------------------------------------------------------------------------------


@pytest.fixture
def prefix() -> Iterator[str]:
    """Of names in /dev/shm that MPI's might have; nothing of that name is left."""
    name = f"mpich-{secrets.token_hex(8)}"
    yield name
    left = [str(path) for path in Path(SHARED_MEMORY).glob(f"{name}*")]
    for path in left:
        if os.lstat(path).st_uid == os.getuid():
            (os.rmdir if os.path.isdir(path) and not os.path.islink(path) else os.unlink)(path)
    as_second_user(REMOVE, [path for path in left if os.path.lexists(path)])


def test_a_strangers_entries_in_shared_memory_neither_end_the_janitor_nor_go(prefix: str, home: Path) -> None:
    chapter = home / "thesis" / "chapter"
    plant(
        Path(SHARED_MEMORY),
        ("link", f"{prefix}-file", str(chapter)),
        ("link", f"{prefix}-directory", str(home)),
        ("link", f"{prefix}-nowhere", "/nowhere"),
        ("link", f"{prefix}-loop", f"{prefix}-loop"),
        ("fifo", f"{prefix}-fifo", ""),
        ("socket", f"{prefix}-socket", ""),
        ("closed", f"{prefix}-closed", ""),
        ("file", f"{prefix}-\udcff", "not UTF-8"),
    )
    before = sorted(Path(SHARED_MEMORY).glob(f"{prefix}*"))
    assert len(before) == 8
    done = janitor(home.parent)
    assert done.returncode == 0, done.stderr
    assert sorted(Path(SHARED_MEMORY).glob(f"{prefix}*")) == before
    assert chapter.read_text() == "words"


def test_of_our_own_shared_memory_only_old_files_that_nobody_maps_go(prefix: str, home: Path) -> None:
    top = Path(SHARED_MEMORY)
    (top / f"{prefix}-link").symlink_to(home / "thesis" / "chapter")
    (top / f"{prefix}-directory").mkdir()
    (top / f"{prefix}-young").write_bytes(b"x")
    for name in ("old", "\udcff"):
        (top / f"{prefix}-{name}").write_bytes(b"x")
    for path in top.glob(f"{prefix}*"):
        if not path.name.endswith("young"):
            os.utime(path, (LONG_AGO, LONG_AGO), follow_symlinks=False)
    assert sweep_shared_memory(prefix) == 2
    assert {path.name.removeprefix(prefix) for path in top.glob(f"{prefix}*")} == {"-link", "-directory", "-young"}
    assert (home / "thesis" / "chapter").read_text() == "words"


MAP = """
import mmap, os, sys
from megaflow_hpc.errors import SiteError
from megaflow_hpc.pod.comm import check_shared_memory
descriptor = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT, 0o666)
os.ftruncate(descriptor, 4096)
shared = mmap.mmap(descriptor, 4096)
print("mapped", flush=True)
input()
try:
    check_shared_memory()
    print("nobody else's")
except SiteError as error:
    print(error)
"""


@pytest.mark.parametrize("whose", ["ours", "a stranger's", "a stranger's that is gone"])
def test_a_rank_shares_no_memory_with_a_stranger_who_had_its_name_first(prefix: str, whose: str) -> None:
    """MPICH opens what has the name that it works out of the numbers of job and step, whoever made it."""
    path = str(Path(SHARED_MEMORY, f"{prefix}_0"))
    if whose != "ours":
        plant(Path(SHARED_MEMORY), ("file", f"{prefix}_0", ""))
    rank = subprocess.Popen([sys.executable, "-c", MAP, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert rank.stdout is not None
    assert rank.stdout.readline() == "mapped\n"
    if whose == "a stranger's that is gone":
        as_second_user(REMOVE, [path])
    said, _ = rank.communicate("\n", timeout=60)
    assert ("another user" in said) == (whose != "ours"), said


# --- private directories of pods ------------------------------------------------------------------------------------


def test_only_our_own_dead_pods_directories_go_whatever_else_bears_their_names(shared: Path, home: Path) -> None:
    dead = f"{POD_DIRECTORY}.{os.uname().nodename}.1-1"
    plant(
        shared,
        ("link", f"{dead}.stranger-link", str(home)),
        ("fifo", f"{dead}.stranger-fifo", ""),
        ("socket", f"{dead}.stranger-socket", ""),
        ("directory", f"{dead}.stranger-directory/state", ""),
        ("closed", f"{dead}.stranger-closed", ""),
        ("directory", f"{dead}.\udcff", ""),
        ("directory", f"{dead}{'1' * 150}.digits", ""),
        ("directory", f"{POD_DIRECTORY}.{os.uname().nodename}.\u0661-\u0661.x", ""),
    )
    kept = set(os.listdir(shared))
    (shared / f"{dead}.ours" / "state").mkdir(parents=True)
    (shared / f"{dead}.link").symlink_to(home)
    (shared / f"{dead}.closed" / "state").mkdir(parents=True)
    (shared / f"{dead}.closed").chmod(0)
    done = janitor(shared)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["pods"] == 3
    assert set(os.listdir(shared)) - {f"megaflow-{os.getuid()}"} == kept
    assert (home / "thesis" / "chapter").read_text() == "words"


@pytest.mark.parametrize("mode", [0o333, 0o000], ids=["cannot be listed", "cannot be entered"])
def test_a_shared_directory_that_tells_nothing_is_passed_over(tmp_path: Path, mode: int) -> None:
    base = tmp_path / "tmp"
    base.mkdir()
    base.chmod(mode)
    try:
        assert sweep_directories(base) == 0
    finally:
        base.chmod(0o700)
    assert sweep_directories(tmp_path / "gone") == 0


# --- scratch --------------------------------------------------------------------------------------------------------


def test_a_scratch_directory_that_a_stranger_laid_out_takes_nothing_of_ours(shared: Path, home: Path) -> None:
    """Its cache leads to the victim's home, and its sandboxes say that a living process of the victim is theirs."""
    mine = subprocess.Popen(["sleep", "600"], start_new_session=True)
    try:
        identity = Identity.of(mine.pid)
        name = f"megaflow-{os.getuid()}"
        plant(
            shared,
            ("directory", f"{name}/cache", ""),
            ("directory", f"{name}/owners/1-1/s1", ""),
            ("link", f"{name}/cache/work", str(home)),
            ("link", f"{name}/cache/users", str(home)),
            ("link", f"{name}/owners/2-2", str(home)),
            ("file", f"{name}/owners/1-1/s1/owner", f"{identity}\n"),
        )
        done = janitor(shared)
        assert (home / "thesis" / "chapter").read_text() == "words"
        assert mine.poll() is None
        assert done.returncode == 0, done.stderr
        done = janitor(shared, "--scratch", str(shared / name))
        assert (home / "thesis" / "chapter").read_text() == "words"
        assert mine.poll() is None
        assert done.returncode == 3
        assert "other users own it or may write to it" in done.stderr
    finally:
        mine.kill()
        mine.wait()


def test_a_sweep_touches_no_scratch_in_which_others_may_write(tmp_path: Path) -> None:
    mine = subprocess.Popen(["sleep", "600"], start_new_session=True)
    try:
        sandbox = tmp_path / "scratch" / "owners" / "1-1" / "s1"
        sandbox.mkdir(parents=True)
        (sandbox / "owner").write_text(f"{Identity.of(mine.pid)}\n")
        (tmp_path / "scratch").chmod(0o777)
        with pytest.raises(SiteError, match="others"):
            sweep(tmp_path / "scratch")
        (tmp_path / "scratch").chmod(0o700)
        (tmp_path / "scratch" / "owners").chmod(0o777)
        assert sweep(tmp_path / "scratch")["owners"] == 0
        assert mine.poll() is None
    finally:
        mine.kill()
        mine.wait()


def test_a_sweep_survives_what_a_crash_left_in_the_files_it_reads(tmp_path: Path) -> None:
    for number, content in enumerate((b"\xff\xfe", b"9" * 100_000 + b"-1", b"1" * 5000, b"", b"1-" + b"9" * 400)):
        sandbox = tmp_path / "owners" / f"{number + 1}-1" / "s1"
        sandbox.mkdir(parents=True)
        (sandbox / "owner").write_bytes(content)
    os.mkfifo(tmp_path / "owners" / "1-1" / "fifo")
    (tmp_path / "owners" / "\udcff").mkdir()
    (tmp_path / "cache").write_text("a file")
    counts = sweep(tmp_path)
    assert (counts["owners"], counts["processes"]) == (5, 0)
    assert os.listdir(tmp_path / "owners") == ["\udcff"]


TAKEN = {
    "directory": [("directory", "{name}", "")],
    "closed": [("closed", "{name}", "")],
    "link": [("link", "{name}", "/home")],
    "dangling": [("link", "{name}", "/nowhere")],
    "file": [("file", "{name}", "x")],
    "fifo": [("fifo", "{name}", "")],
    "other names too": [
        ("directory", "{name}", ""),
        ("directory", "{name}.00000000", ""),
        ("link", "{name}.0", "/home"),
    ],
}


@pytest.mark.parametrize("taken", TAKEN.values(), ids=TAKEN)
def test_who_takes_our_scratchs_name_blocks_nobody(
    shared: Path, taken: list[tuple[str, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"megaflow-{os.getuid()}"
    plant(shared, *((kind, entry.format(name=name), target) for kind, entry, target in taken))
    monkeypatch.setenv("MEGAFLOW_SCRATCH", str(shared))
    scratch = default_scratch()
    found = scratch.lstat()
    assert (found.st_uid, found.st_mode & 0o7777) == (os.getuid(), 0o700)
    assert scratch.parent == shared
    assert scratch.name.startswith(f"{name}.")
    assert default_scratch() == scratch


def test_our_processes_share_the_other_name_and_its_images_and_the_janitor_knows_it(
    shared: Path, rootfs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(shared, ("directory", f"megaflow-{os.getuid()}", ""))
    program = "from megaflow_hpc.environments.sandbox.scratch import default_scratch as s; print(s())"
    environ = {**os.environ, "MEGAFLOW_SCRATCH": str(shared)}
    asked = [
        subprocess.Popen([sys.executable, "-c", program], env=environ, stdout=subprocess.PIPE, text=True)
        for _ in range(6)
    ]
    said = {process.communicate(timeout=60)[0].strip() for process in asked}
    monkeypatch.setenv("MEGAFLOW_SCRATCH", str(shared))
    assert said == {str(default_scratch())}
    provider = ApptainerProvider()
    assert provider.cache == default_scratch() / "cache"
    (default_scratch() / "owners" / "1-1" / "s1").mkdir(parents=True)
    done = subprocess.run(
        [sys.executable, "-m", "megaflow_hpc", "janitor", "--json"], env=environ, capture_output=True, timeout=60
    )
    assert (done.returncode, json.loads(done.stdout)["owners"]) == (0, 1), done.stderr


def test_a_stranger_who_holds_the_shared_directorys_lock_delays_us_and_no_more(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(shared, ("directory", f"megaflow-{os.getuid()}", ""))
    monkeypatch.setenv("MEGAFLOW_SCRATCH", str(shared))
    hold = "import fcntl, os, sys; fcntl.flock(os.open(sys.argv[1], 0), fcntl.LOCK_EX); print(flush=True); input()"
    holder = subprocess.Popen([sys.executable, "-c", hold, str(shared)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None
        holder.stdout.readline()
        assert default_scratch().name.startswith(f"megaflow-{os.getuid()}.")
        assert holder.poll() is None
    finally:
        holder.kill()
        holder.communicate()
