"""Untrusted archives: those of honest programs are unpacked completely; all others fail without leaving the target."""

from __future__ import annotations

import contextlib
import io
import os
import random
import subprocess
import tarfile
from pathlib import Path

import pytest

from megaflow_hpc.host.tar import Budget, RefusedMember, TarReader, stays_inside, unpack_tar
from tests.support.archives import archive, hardlink, hostile, member, symlink

HONEST = [
    member("./", type=tarfile.DIRTYPE, mode=0o755),
    member("plain", b"plain", mode=0o640),
    member("d" * 90 + "/" + "e" * 90 + "/file", bytes(range(256)) * 5),
    member("n" * 120 + "/" + "m" * 200, b"long"),
    member("unicod\u00e9", b"x" * 512),
    member("empty", b""),
    symlink("soft", "plain"),
    symlink("n" * 120 + "/up", "../plain"),
    hardlink("hard", "plain"),
    member("pipe", type=tarfile.FIFOTYPE),
    member("device", type=tarfile.CHRTYPE, devmajor=1, devminor=3),
]


def unpacked(data: bytes, target: Path, size: int = 1 << 20, files: int = 1000) -> Budget:
    budget = Budget(size, files)
    unpack_tar(io.BytesIO(data), target, budget)
    return budget


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_an_honest_archive_comes_out_whole(tmp_path: Path, form: int) -> None:
    members = [m for m in HONEST if form != tarfile.USTAR_FORMAT or len(m[0].name) < 150]
    unpacked(archive(members, form), tmp_path / "in")
    for info, data in members:
        place = tmp_path / "in" / info.name
        if info.isreg():
            assert place.read_bytes() == data
            assert place.stat().st_mode & 0o777 == info.mode
        elif info.issym():
            assert os.readlink(place) == info.linkname
        elif info.islnk():
            assert place.read_bytes() == b"plain"
        else:
            assert place.is_dir() == info.isdir()


@pytest.mark.parametrize("form", ["v7", "oldgnu", "gnu", "ustar", "posix"])
def test_what_the_program_tar_writes_is_read(tmp_path: Path, form: str) -> None:
    source = tmp_path / "source"
    (source / "deep" / "er").mkdir(parents=True)
    (source / "deep" / "er" / "file").write_bytes(b"content" * 1000)
    (source / "link").symlink_to("deep/er/file")
    os.link(source / "deep" / "er" / "file", source / "same")
    data = subprocess.check_output(["tar", "-C", source, f"--format={form}", "-cf", "-", "."])
    unpacked(data, tmp_path / "in")
    assert subprocess.check_output(["diff", "-r", source, tmp_path / "in"]) == b""


def test_a_second_archive_replaces_what_the_first_has_brought(tmp_path: Path) -> None:
    unpacked(archive([member("a", b"1"), symlink("b", "a"), member("c/d", b"1"), member("e", b"1")]), tmp_path / "in")
    unpacked(archive([member("a", b"2"), member("b/x", b"2"), symlink("e", "a"), symlink("c", "a")]), tmp_path / "in")
    inside = tmp_path / "in"
    assert (inside / "a").read_bytes() == b"2"
    assert (inside / "b" / "x").read_bytes() == b"2"
    assert (inside / "c" / "d").read_bytes() == b"1"
    assert os.readlink(inside / "e") == "a"


@pytest.mark.parametrize(
    ("target", "depth", "inside"),
    [
        ("a", 0, True),
        (".", 0, True),
        ("./a//b/", 0, True),
        ("..", 0, False),
        ("..", 1, True),
        ("../../a", 1, False),
        ("../../a", 2, True),
        ("a/..", 3, False),
        ("./../a", 1, True),
        ("../a/../b", 3, False),
        ("/", 3, False),
        ("", 3, False),
    ],
)
def test_a_link_is_judged_by_itself(target: str, depth: int, inside: bool) -> None:
    assert stays_inside(target.encode(), depth) is inside


def test_links_lead_nowhere_outside_whatever_else_there_is(tmp_path: Path) -> None:
    """Random trees of links and directories that replace one another."""
    chance = random.Random(7)
    names = ["a", "b", "a/a", "a/b", "b/a", "a/a/a", "a/b/b", "b/a/b/a"]
    steps = ["..", "a", "b", ".", "../..", "a/..", "b/../..", "a/b"]
    inside = tmp_path / "in"
    for _ in range(300):
        members = [
            symlink(name, "/".join(chance.choices(steps, k=chance.randint(1, 4))))
            if chance.random() < 0.6
            else member(name, b"x")
            for name in chance.sample(names, 6)
        ]
        try:
            unpacked(archive(members), inside)
        except RefusedMember:
            continue
    found = list(inside.rglob("*"))
    assert found
    assert os.listdir(tmp_path) == ["in"]
    for path in found:
        with contextlib.suppress(OSError, RuntimeError):  # a dangling or circular link
            assert path.resolve(strict=True).is_relative_to(inside)


@pytest.mark.parametrize("name", hostile())
def test_a_hostile_archive_is_refused_or_stays_inside_its_budget(tmp_path: Path, name: str) -> None:
    try:
        unpacked(hostile()[name], tmp_path / "in", 16 << 20, 5000)
    except (RefusedMember, OSError):
        pass
    assert os.listdir(tmp_path) == ["in"]
    found = list((tmp_path / "in").rglob("*"))
    assert sum(path.lstat().st_size for path in found) < 20 << 20
    assert len(found) <= 5000


def test_damaged_archives_are_refused_and_nothing_else(tmp_path: Path) -> None:
    chance = random.Random(11)
    honest = archive(HONEST, tarfile.GNU_FORMAT) + archive(HONEST, tarfile.PAX_FORMAT)
    for trial in range(600):
        data = bytearray(honest[: chance.choice((len(honest), chance.randrange(len(honest))))])
        for _ in range(chance.randint(0, 20)):
            at = chance.randrange(len(data) + 1)
            data[at : at + chance.randint(0, 12)] = chance.randbytes(chance.randint(0, 12))
        for start in range(0, len(data) - 511, 512):  # so that more than the checksum is tested
            if data[start + 257 : start + 262] == b"ustar" or chance.random() < 0.1:
                data[start + 148 : start + 156] = b" " * 8
                data[start + 148 : start + 156] = b"%06o\0 " % sum(data[start : start + 512])
        try:
            unpacked(bytes(data), tmp_path / "in" / str(trial % 10), 1 << 20, 100)
        except (RefusedMember, OSError):
            pass
    assert os.listdir(tmp_path) == ["in"]


def test_the_budget_counts_every_byte_and_entry(tmp_path: Path) -> None:
    data = archive([member("a/b/c", b"12345"), hardlink("d", "a/b/c"), symlink("e", "d")])
    left = unpacked(data, tmp_path / "in", 100, 100)
    assert (left.bytes, left.entries) == (90, 95)
    for size, files in ((9, 100), (100, 4)):
        with pytest.raises(RefusedMember, match=r"more (bytes|files) than are allowed"):
            unpacked(data, tmp_path / f"in{size}", size, files)


def test_a_reader_gives_what_its_stream_gives_in_crumbs() -> None:
    class Crumbs(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            return super().read(min(size or 0, 7))

    reader = TarReader(Crumbs(archive([member("x", bytes(1000)), member("y", b"z")])))
    assert [(m.name, b"".join(reader.content())) for m in reader] == [(b"x", bytes(1000)), (b"y", b"z")]
