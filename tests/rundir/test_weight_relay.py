"""Weights reach a run at another site complete or not at all, newer each time, however their files are copied."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.host.atomic import write_json
from megaflow_hpc.rundir import weight_relay, weights
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.record import PolicyRecord, RunRecord, ServerRecord, write_run
from megaflow_hpc.rundir.weight_relay import receive, send
from megaflow_hpc.rundir.weight_source import DELTA
from tests.support.tensors import safetensors

FILE = "model.safetensors"


class Sites:
    """Two runs with a policy ``a``, and the directory that is copied from one to the other."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.home, self.away = self.run("home", 1), self.run("away", 2)
        self.outbox, self.inbox = folder / "outbox", folder / "inbox"
        self.inbox.mkdir()

    def run(self, name: str, servers: int) -> RunDir:
        run = RunDir(self.folder / name)
        run.create()
        model = {"engine": "vllm", "path": "model"}
        server = ServerRecord("a", model)
        write_run(run, RunRecord(policies={"a": PolicyRecord(model=model)}, servers=[server] * servers))
        return run

    def publish(self, content: bytes, delta: bool = False) -> None:
        source = self.folder / "trained"
        source.mkdir(exist_ok=True)
        (source / FILE).write_bytes(safetensors(content))
        (source / "config.json").write_text("{}")
        weights.publish(self.home, source, keep=2, delta=delta)

    def copy(self) -> None:
        """Copies as rsync does with --delete."""
        shutil.rmtree(self.inbox)
        shutil.copytree(self.outbox, self.inbox)

    def send(self) -> Path:
        """Sends and copies the newest version. Returns its directory at the receiver."""
        number = send(self.home, self.outbox).version
        self.copy()
        return next(self.inbox.glob(f"{number}.*"))

    def served(self) -> bytes:
        return Path(weights.current(self.away, "a").path, FILE).read_bytes()


@pytest.fixture
def sites(tmp_path: Path) -> Sites:
    return Sites(tmp_path)


def numbers(directory: Path) -> list[int]:
    return sorted(int(path.name.partition(".")[0]) for path in directory.glob("[0-9]*"))


def test_the_newest_version_is_sent_and_published_once(sites: Sites) -> None:
    assert send(sites.home, sites.outbox).version == 0
    sites.copy()
    assert receive(sites.away, sites.inbox).version is None
    for content in (b"one", b"two"):
        sites.publish(content)
    sites.send()
    received = receive(sites.away, sites.inbox)
    assert received.version is not None
    assert (received.version.version, received.version.ordinal, received.sent, received.waiting) == (1, 1, 2, "")
    assert sites.served() == safetensors(b"two")
    folder = Path(received.version.path)
    assert weights.read_checksums(folder) == {name: weights.checksum(folder / name) for name in (FILE, "config.json")}
    assert send(sites.home, sites.outbox).version == 2
    sites.copy()
    assert receive(sites.away, sites.inbox) == weight_relay.Received(None, 2, "")
    assert [version.version for version in weights.versions(sites.away)] == [1]


def test_nothing_accumulates_and_a_sent_version_outlives_its_removal_from_the_run(sites: Sites) -> None:
    sites.publish(b"0")
    send(sites.home, sites.outbox)
    for step in range(1, 8):
        sites.publish(bytes([step]) * 1000)
    assert numbers(sites.outbox) == [1]
    assert weights.version(sites.home, 1) is None
    shutil.copytree(sites.outbox, sites.inbox, dirs_exist_ok=True)
    assert receive(sites.away, sites.inbox).sent == 1
    assert sites.served() == safetensors(b"0")
    for step in range(8, 13):
        sites.publish(bytes([step]) * 1000)
        send(sites.home, sites.outbox)
        assert numbers(sites.outbox) == [step + 1]
        shutil.copytree(sites.outbox, sites.inbox, dirs_exist_ok=True)  # a transport that removes nothing
        assert receive(sites.away, sites.inbox).sent == step + 1
        assert numbers(sites.inbox) == [step + 1]
    assert [version.version for version in weights.versions(sites.away)] == [4, 5, 6]
    assert not list(sites.away.weights.glob(".publishing.*"))
    assert not list(sites.outbox.glob(".sending.*"))


def test_a_delta_is_sent_with_its_base_and_published_as_a_full_version(sites: Sites) -> None:
    base = bytes(range(250)) * 100
    sites.publish(base)
    for step in (1, 2):
        sites.publish(bytes([step]) * 4 + base[4:], delta=True)
    folder = sites.send()
    assert numbers(sites.inbox) == [1, 3]
    assert (folder / DELTA).exists()
    received = receive(sites.away, sites.inbox)
    assert received.version is not None
    assert sites.served() == safetensors(bytes([2]) * 4 + base[4:])
    assert sorted(path.name for path in Path(received.version.path).iterdir()) == sorted(
        [weights.CHECKSUMS, weights.ABOUT, FILE, "config.json"]
    )
    assert weights.read_checksums(Path(received.version.path))[FILE] == weights.checksum(
        Path(received.version.path, FILE)
    )
    sites.publish(bytes([3]) * 4 + base[4:], delta=True)
    sites.send()
    assert receive(sites.away, sites.inbox).sent == 4
    assert numbers(sites.inbox) == [1, 4]
    sites.publish(base[::-1])
    sites.send()
    assert receive(sites.away, sites.inbox).sent == 5
    assert sites.served() == safetensors(base[::-1])


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("name", [FILE, "config.json", weights.CHECKSUMS])
@pytest.mark.parametrize("damage", ["missing", "truncated", "flipped", "longer"])
def test_a_version_that_is_not_complete_is_published_once_it_is(sites: Sites, name: str, damage: str) -> None:
    sites.publish(b"one")
    file = sites.send() / name
    whole = file.read_bytes()
    if damage == "missing":
        file.unlink()
    elif damage == "flipped":
        flip(file)
    else:
        file.write_bytes(whole[:-1] if damage == "truncated" else whole + b"\n")
    received = receive(sites.away, sites.inbox)
    assert received.version is None
    assert str(file) in received.waiting
    assert not list(sites.away.weights.glob("[!.]*"))
    file.write_bytes(whole)
    assert receive(sites.away, sites.inbox).version is not None
    assert sites.served() == safetensors(b"one")


def test_a_delta_waits_for_its_base(sites: Sites) -> None:
    base = bytes(range(250)) * 100
    sites.publish(base)
    sites.publish(b"x" + base[1:], delta=True)
    sites.send()
    (folder,) = sites.inbox.glob("1.*")
    kept = folder.rename(sites.folder / "kept")
    assert "its base, version 1, is missing" in receive(sites.away, sites.inbox).waiting
    kept.rename(folder)
    flip(folder / FILE)
    assert str(folder) in receive(sites.away, sites.inbox).waiting
    flip(folder / FILE)
    assert receive(sites.away, sites.inbox).sent == 2
    assert sites.served() == safetensors(b"x" + base[1:])


def test_a_complete_version_does_not_wait_for_a_newer_one_and_none_is_published_late(sites: Sites) -> None:
    sites.publish(b"one")
    first = sites.send()
    shutil.copytree(first, sites.folder / "late" / first.name)
    sites.publish(b"two")
    second = sites.send()
    shutil.copytree(sites.folder / "late", sites.inbox, dirs_exist_ok=True)
    (second / FILE).rename(sites.folder / FILE)
    received = receive(sites.away, sites.inbox)
    assert received.sent == 1
    assert str(second / FILE) in received.waiting
    (sites.folder / FILE).rename(second / FILE)
    assert receive(sites.away, sites.inbox).sent == 2
    shutil.copytree(sites.folder / "late", sites.inbox, dirs_exist_ok=True)
    assert receive(sites.away, sites.inbox) == weight_relay.Received(None, 2, "")
    shutil.rmtree(second)
    assert receive(sites.away, sites.inbox) == weight_relay.Received(None, 2, "")
    assert sites.served() == safetensors(b"two")


def test_a_receiver_that_was_killed_before_it_moved_the_pointer_moves_it_at_the_next_call(sites: Sites) -> None:
    for content in (b"one", b"two"):
        sites.publish(content)
        sites.send()
        receive(sites.away, sites.inbox)
    write_json(sites.away.weights / "current.a.json", {"version": 1, "ordinal": 1})
    assert receive(sites.away, sites.inbox).version is None
    assert sites.served() == safetensors(b"two")


def test_versions_of_another_run_are_refused_by_both_sites(sites: Sites) -> None:
    sites.publish(b"one")
    sites.send()
    receive(sites.away, sites.inbox)
    sites.home = sites.run("other", 1)
    sites.publish(b"other")
    with pytest.raises(ConfigError, match=r"is not a version of policy 'a' of .*other; give each run and policy"):
        send(sites.home, sites.outbox)
    shutil.rmtree(sites.outbox)
    sites.send()
    with pytest.raises(ConfigError, match="its version 1 is not the one that was received before"):
        receive(sites.away, sites.inbox)
    with pytest.raises(ConfigError, match=r"gone: not a directory; name the one to which"):
        receive(sites.away, sites.folder / "gone")


@pytest.mark.parametrize("above", ["..", "/"], ids=["relative", "absolute"])
def test_no_file_is_written_outside_of_the_run(sites: Sites, above: str) -> None:
    sites.publish(b"one")
    folder = sites.send()
    (folder.parent / "stolen").write_text("x")
    name = "../stolen" if above == ".." else str(folder.parent.resolve() / "stolen")
    sums = json.loads((folder / weights.CHECKSUMS).read_text())
    sums[name] = {"size": 1, "sha256": weights.checksum(folder.parent / "stolen").sha256}
    write_json(folder / weights.CHECKSUMS, sums)
    folder.rename(folder.with_name(f"1.{weights.checksum(folder / weights.CHECKSUMS).sha256}"))
    with pytest.raises(ConfigError, match="stolen' is not a file of the version"):
        receive(sites.away, sites.inbox)
    assert not list(sites.away.path.rglob("stolen"))
