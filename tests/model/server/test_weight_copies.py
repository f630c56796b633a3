"""Servers pass versions on to each other: one reads the shared file system, and every failure ends there too."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
from aiohttp import web

from megaflow_hpc.errors import ModelServiceError
from megaflow_hpc.model.server import weight_copies
from megaflow_hpc.model.server.proxy import make_context
from megaflow_hpc.model.server.tenants import Tenants
from megaflow_hpc.model.server.weight_copies import sources
from megaflow_hpc.rundir import weights
from megaflow_hpc.rundir.endpoints import Endpoint, EndpointFiles
from megaflow_hpc.rundir.engine_pool import EnginePool
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.record import PolicyRecord, RunRecord, ServerRecord, write_run
from megaflow_hpc.rundir.weights import CHECKSUMS, Version
from tests.support.serving import ask, in_loop, listening
from tests.support.tensors import safetensors
from tests.support.weight_readers import Reader, opens

SIZE = 9 * 2**20 + 12345
"""Bytes of a version's tensors: several answers of a peer."""


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A campaign whose policy has eight servers."""
    model = {"engine": "vllm", "path": str(tmp_path / "model")}
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    run = RunDir(tmp_path / "run")
    run.create()
    servers = [ServerRecord("default", model) for _ in range(8)]
    write_run(run, RunRecord(policies={"default": PolicyRecord(model=model)}, servers=servers))
    return run


def published(run: RunDir, seed: int = 0, size: int = SIZE) -> tuple[Version, str]:
    """Publishes random bytes as a version. Returns it, and the SHA-256 of its tensors' file."""
    content = safetensors(random.Random(seed).randbytes(size))
    source = run.path.parent / f"step{seed}"
    source.mkdir()
    (source / "model.safetensors").write_bytes(content)
    return weights.publish(run, source, "default", move=True), hashlib.sha256(content).hexdigest()


@contextlib.asynccontextmanager
async def readers(run: RunDir, nodes: Sequence[str]) -> AsyncIterator[list[Reader]]:
    """Servers on these nodes."""
    scratch = run.path.parent
    started = [await Reader(run, n, node, scratch / f"scratch{n}").start() for n, node in enumerate(nodes)]
    try:
        yield started
    finally:
        for reader in started:
            await reader.stop()


def endpoints(*nodes: str) -> list[Endpoint]:
    return [Endpoint(server=f"p.{n}", policy="p", url="x", node=node) for n, node in enumerate(nodes)]


def test_servers_form_a_tree_of_nodes() -> None:
    servers = endpoints("a", "a", "b", "b", "c", "d", "e", "a")
    asked = {own.server: [server.server for server in sources(servers, own)] for own in servers}
    assert asked == {
        "p.0": [],
        "p.1": ["p.0"],
        "p.2": ["p.0"],
        "p.3": ["p.2", "p.0"],
        "p.4": ["p.0"],
        "p.5": ["p.2", "p.0"],
        "p.6": ["p.2", "p.0"],
        "p.7": ["p.0"],
    }
    started_later = Endpoint(server="p.10", policy="p", url="", node="f")
    assert [server.server for server in sources(servers, started_later)] == ["p.4", "p.0"]


def test_no_server_waits_for_itself_whichever_servers_each_one_knows() -> None:
    draw = random.Random(0)
    for _ in range(200):
        servers = endpoints(*(draw.choice("abcde") for _ in range(12)))
        for own in servers:
            known = draw.sample(servers, draw.randrange(12))
            asked = [int(server.server[2:]) for server in sources(known, own)]
            assert all(number < int(own.server[2:]) for number in asked)
            assert len(asked) == len(set(asked))


@in_loop
async def test_eight_nodes_read_the_shared_file_system_once(run: RunDir) -> None:
    version, digest = published(run)
    async with readers(run, "abcdefgh") as started:
        with opens(Path(version.path)) as opened:
            assert await asyncio.gather(*(reader.read(version) for reader in started)) == [digest] * 8
    assert opened["model.safetensors"] == 1
    assert opened["config.json"] == 1
    size = sum((Path(version.path) / name).stat().st_size for name in ("model.safetensors", "config.json"))
    assert [reader.copies.shared_bytes for reader in started] == [size] + [0] * 7
    assert [reader.copies.peer_bytes for reader in started] == [0] + [size] * 7


@in_loop
async def test_servers_on_a_node_share_one_copy(run: RunDir) -> None:
    version, digest = published(run)
    async with readers(run, "aaabb") as started:
        with opens(Path(version.path)) as opened:
            assert await asyncio.gather(*(reader.read(version) for reader in started)) == [digest] * 5
        assert opened["model.safetensors"] == 1
        files = [Path(reader.proxy.serving.weights.path) / "model.safetensors" for reader in started]
        assert [file.stat().st_nlink for file in files] == [3, 3, 3, 2, 2]
        following, digest = published(run, 1)
        assert await asyncio.gather(*(reader.read(following) for reader in started)) == [digest] * 5
        third, digest = published(run, 2)
        assert await asyncio.gather(*(reader.read(third) for reader in started)) == [digest] * 5
        for reader in started:  # the version before is kept: another server may still read it
            assert sorted(path.name for path in reader.updater.copies.scratch.iterdir()) == ["copy-2", "copy-3"]


@in_loop
async def test_deltas_and_their_bases_are_passed_on(run: RunDir) -> None:
    base, _ = published(run)
    content = bytearray((Path(base.path) / "model.safetensors").read_bytes())
    async with readers(run, "ab") as (first, second):
        await asyncio.gather(first.read(base), second.read(base))
        for step in (1, 2):
            content[-step] ^= 1
            source = run.path.parent / f"delta{step}"
            source.mkdir()
            (source / "model.safetensors").write_bytes(content)
            version = weights.publish(run, source, "default", delta=True)
            assert (Path(version.path) / "delta.json").exists()
            with opens(Path(base.path)) as opened:
                digests = await asyncio.gather(first.read(version), second.read(version))
            assert digests == [hashlib.sha256(content).hexdigest()] * 2
            assert opened["model.safetensors"] == 0
        assert second.copies.shared_bytes == 0


@in_loop
async def test_a_server_alone_copies_nothing(run: RunDir) -> None:
    version, digest = published(run)
    async with readers(run, "a") as (reader,):
        assert reader.updater.whole(version) is version
        assert await reader.read(version) == digest
        assert not list(reader.updater.copies.scratch.iterdir())
    record = RunRecord(policies={"default": PolicyRecord(model={"engine": "vllm"})})
    write_run(run, record)
    source = Path(version.path)  # published again, as it is: with checksums that no longer apply
    assert not (Path(weights.publish(run, source, "default").path) / CHECKSUMS).exists()


@in_loop
async def test_a_question_tells_a_server_of_a_version_that_it_has_not_noticed(run: RunDir) -> None:
    version, digest = published(run)
    async with readers(run, "abcd") as started:
        assert await started[3].read(version) == digest  # it asks server 1, which asks server 0
        assert [reader.copies.shared_bytes > 0 for reader in started] == [True, False, False, False]


@in_loop
async def test_damaged_bytes_of_a_peer_are_read_again_and_published_ones_are_refused(run: RunDir) -> None:
    version, digest = published(run)
    async with readers(run, "ab") as (first, second):
        await first.read(version)
        copy = Path(first.proxy.serving.weights.path) / "model.safetensors"
        copy.chmod(0o600)
        with open(copy, "r+b") as file:
            file.seek(SIZE // 2)
            file.write(b"damaged")
        assert await second.read(version) == digest
        assert second.copies.shared_bytes == copy.stat().st_size
        broken, _ = published(run, 1)
        with open(Path(broken.path) / "model.safetensors", "r+b") as file:
            file.seek(SIZE // 2)
            file.write(b"damaged")
        for reader in (first, second):
            with pytest.raises(ModelServiceError, match=r"model.safetensors: its SHA-256 differs from"):
                await reader.read(broken)


@in_loop
async def test_a_peer_that_serves_another_version_is_not_believed(run: RunDir) -> None:
    version, _ = published(run)
    later, digest = published(run, 1)
    async with readers(run, "ab") as (first, second):
        await first.read(version)
        first.copies._copies[later.version] = first.copies._copies[version.version]
        assert await second.read(later) == digest


@in_loop
async def test_a_full_disk_means_that_the_engine_reads_the_published_files(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    version, digest = published(run)
    async with readers(run, "ab") as (first, second):
        monkeypatch.setattr(first.copies, "_fits", lambda size: False)
        (second.updater.copies.scratch / f"copy-{version.version}").write_text("in the way")
        for reader in (first, second):
            assert await reader.read(version) == digest
            assert reader.proxy.serving.weights.path == version.path


async def _trickles(request: web.BaseRequest) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    with contextlib.suppress(ConnectionError):
        while True:
            await response.write(b"x")
            await asyncio.sleep(0.05)
    return response


async def _silent(request: web.BaseRequest) -> web.StreamResponse:
    await asyncio.sleep(3)  # longer than a peer waits
    return web.Response()


async def _never_ready(request: web.BaseRequest) -> web.StreamResponse:
    await asyncio.sleep(0.05)
    return web.Response(status=204)


async def _too_much(request: web.BaseRequest) -> web.StreamResponse:
    return web.Response(body=bytes(2 * weight_copies.CHUNK))


@pytest.mark.parametrize("behaviour", [_trickles, _silent, _never_ready, _too_much])
@in_loop
async def test_a_slow_or_mad_peer_is_given_up(run: RunDir, monkeypatch: pytest.MonkeyPatch, behaviour) -> None:
    monkeypatch.setattr(weight_copies, "REPLY_TIMEOUT_S", 0.5)
    monkeypatch.setattr(weight_copies, "STALL_TIMEOUT_S", 0.5)
    version, digest = published(run)
    async with readers(run, ["a", "b", "c"]) as started, listening(web.Server(behaviour)) as port:
        mad = Endpoint(server="default.1", policy="default", url=f"http://127.0.0.1:{port}", key="k", node="b")
        EndpointFiles(run).publish(mad)
        EndpointFiles(run).publish(Endpoint(server="default.0", policy="default", url="http://127.0.0.1:1", node="a"))
        began = time.monotonic()
        started[2].endpoint.node = started[2].copies._own.node = "b"  # it asks server 1, then server 0
        assert await started[2].read(version) == digest
        assert time.monotonic() - began < 20
        assert started[2].copies.shared_bytes >= SIZE


@in_loop
async def test_strangers_get_nothing_and_get_no_key(run: RunDir, tmp_path: Path) -> None:
    version, digest = published(run)
    keys: list[str] = []

    async def impostor(request: web.BaseRequest) -> web.StreamResponse:
        keys.append(request.headers.get("Authorization", ""))
        return web.Response(status=404)

    async with readers(run, "ab") as (first, second):
        await first.read(version)
        record = json.loads((run.endpoints / "default.0.json").read_text())
        path = f"/weights/{version.version}/model.safetensors"
        for key in (None, "wrong"):
            assert await ask(record, "GET", path, key) == 401
        assert await ask(record, "GET", path, record["key"]) == 200
        assert await ask(record, "POST", path, record["key"]) == 404
        for wrong in ("../../run.json", f"{version.version}/../../run.json", "99/model.safetensors", "1", "1/"):
            assert await ask(record, "GET", f"/weights/{wrong}", record["key"]) in (400, 404)
        for offset in ("-1", "x", "²"):
            assert await ask(record, "GET", f"{path}?offset={offset}", record["key"]) == 400
        pool, member = EnginePool(run.path), RunDir(tmp_path / "member")
        member.create()
        pool.create({"default": 1}, "user")
        pool.enrol(member, "mine", "default")
        first.proxy.tenants = Tenants(pool, {})
        (membership,) = EndpointFiles(member).memberships()
        assert await ask(record, "GET", "/v1/models", membership.key) == 503  # a key, but not for weights
        assert await ask(record, "GET", path, membership.key) == 404
        # Another process listens at the first server's port: its certificate differs, so it gets no key.
        (tmp_path / "impostor").mkdir(mode=0o700)
        context, _ = make_context(tmp_path / "impostor")
        runner = web.ServerRunner(web.Server(impostor))
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
        first.endpoint.url = f"https://127.0.0.1:{runner.addresses[0][1]}"
        first.beat()
        assert await second.read(version) == digest
        await runner.cleanup()
    assert keys == []
    assert second.copies.shared_bytes >= SIZE


@pytest.mark.slow
def test_servers_killed_at_random_cost_only_time(run: RunDir, tmp_path: Path) -> None:
    """Two of five servers on four nodes are killed while all copy a version, and start again."""
    draw = random.Random(1)
    processes: dict[int, subprocess.Popen[str]] = {}

    def start(number: int) -> None:
        words = [str(run.path), str(number), "abcdd"[number], str(tmp_path / f"{number}-{time.monotonic_ns()}")]
        command = [sys.executable, "-m", "tests.support.weight_readers", *words, "0.02"]
        processes[number] = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def line(number: int) -> dict:
        output = processes[number].stdout
        assert output is not None
        return json.loads(output.readline())

    try:
        for number in range(5):
            start(number)
        for number in range(5):
            assert line(number) == {}
        for seed in range(2):
            version, digest = published(run, seed, 24 * 2**20)
            victims = draw.sample(range(5), 2)
            for victim in victims:
                time.sleep(draw.uniform(0, 0.15))
                os.kill(processes[victim].pid, signal.SIGKILL)
            for number in set(range(5)) - set(victims):
                read = line(number)
                assert (read["version"], read["digest"]) == (version.version, digest)
            for victim in victims:
                processes[victim].wait()
                start(victim)
            for victim in victims:
                assert line(victim) == {}
                read = line(victim)
                assert (read["version"], read["digest"]) == (version.version, digest)
    finally:
        for process in processes.values():
            process.kill()
            process.wait()
