"""Versions of weights: published atomically, loaded by servers under load, refused by servers that cannot run them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import struct
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from aiohttp import web
from openai import AsyncOpenAI

from megaflow_hpc.errors import ConfigError, ModelServiceError
from megaflow_hpc.model.engines.adapters import Launch
from megaflow_hpc.model.server.proxy import Proxy, Serving
from megaflow_hpc.model.server.registration import Assignment
from megaflow_hpc.model.server.weight_updates import WeightUpdater, poll_interval_s
from megaflow_hpc.rundir import weights
from megaflow_hpc.rundir.endpoints import Endpoint, EndpointFiles, RefusedWeights
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.record import PolicyRecord, RunRecord, ServerRecord, read_run, write_run
from megaflow_hpc.rundir.weight_delta import write_delta
from tests.support.campaigns import verb
from tests.support.reported import answered
from tests.support.serving import Servers, conversation, descendants, in_loop
from tests.support.tensors import safetensors
from tests.support.waiting import until


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A campaign of two policies; the first one's model is a directory."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "tokenizer.json").write_text("tokens")
    (model / "pytorch_model.bin").write_bytes(b"old")  # which nothing is compared with
    run = RunDir(tmp_path / "run")
    run.create()
    models = {"a": {"engine": "vllm", "path": str(model)}, "b": {"engine": "external"}}
    write_run(run, RunRecord(policies={name: PolicyRecord(model=model) for name, model in models.items()}))
    return run


def trained(folder: Path, content: bytes = b"new") -> Path:
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(safetensors(content))
    return folder


def test_a_version_is_a_whole_model_directory(run: RunDir, tmp_path: Path) -> None:
    assert weights.current(run, "a") == weights.Version(policy="a")
    first = weights.publish(run, trained(tmp_path / "step1"), "a")
    assert (first.version, weights.current(run, "a").version) == (1, 1)
    assert (Path(first.path) / "model.safetensors").read_bytes() == safetensors(b"new")
    assert (Path(first.path) / "tokenizer.json").read_text() == "tokens"  # what the trainer did not write
    assert (tmp_path / "step1").exists()
    second = weights.publish(run, trained(tmp_path / "step2"), "a", move=True)
    assert second.version == 2
    assert not (tmp_path / "step2").exists()
    assert [v.version for v in weights.versions(run, "a")] == [1, 2]
    assert not weights.versions(run, "b")


def test_the_run_directory_can_be_moved(run: RunDir, tmp_path: Path) -> None:
    weights.publish(run, trained(tmp_path / "step1"), "a")
    moved = RunDir(run.path.rename(tmp_path / "elsewhere"))
    assert Path(weights.current(moved, "a").path, "model.safetensors").exists()


@pytest.mark.parametrize("policy", [None, "b", "c"])
def test_a_policy_whose_weights_are_not_ours_or_not_there_is_refused(
    run: RunDir, tmp_path: Path, policy: str | None
) -> None:
    with pytest.raises(ConfigError):
        weights.publish(run, trained(tmp_path / "x"), policy)


def test_a_directory_without_weights_is_refused_and_nothing_stays(run: RunDir, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    for source in (empty, tmp_path / "none"):
        done = verb("weights", "publish", run, source, "--policy", "a")
        assert done.returncode == 2
        assert str(source) in done.stderr
    assert not list(run.weights.iterdir())


def test_weights_that_no_engine_could_load_are_refused_by_their_headers(run: RunDir, tmp_path: Path) -> None:
    def header(entries: object, data: bytes = b"") -> bytes:
        text = json.dumps(entries).encode()
        return struct.pack("<Q", len(text)) + text + data

    base = tmp_path / "model" / "model.safetensors"
    base.write_bytes(safetensors(b"old", "model.layers.0.q_proj.weight"))
    good = safetensors(b"new", "model.layers.0.q_proj.weight")
    entry = {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]}
    wrong = {
        "is not a safetensors file .100 bytes": b"x" * 100,
        "is not a safetensors file .0 bytes": b"",
        "has a header that cannot be read": struct.pack("<Q", 3) + b"{x}",
        r"has a header that cannot be read .KeyError": header({"w": {"shape": [3], "data_offsets": [0, 3]}}, b"new"),
        f"has {len(good) - 1} bytes, and its header describes {len(good)}": good[:-1],
        r"has tensor 'w' of U8 \[4\] at bytes 0 to 3": header({"w": {**entry, "shape": [4]}}, b"new"),
        r"has tensor 'w' of U8 \[3\] at bytes 1 to 4": header({"w": {**entry, "data_offsets": [1, 4]}}, b"news"),
        r"'model.layers.0.q_proj.weight' has shape \[4\], in the served model \[3\]": safetensors(
            b"news", "model.layers.0.q_proj.weight"
        ),
        "it has 'h.0.attn' and no tensor of the served model, which has 'model.layers.0.q_proj.weight'": safetensors(
            b"new", "h.0.attn"
        ),
    }
    for number, (said, content) in enumerate(wrong.items()):
        folder = tmp_path / f"wrong{number}"
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(content)
        with pytest.raises(ConfigError, match=said):
            weights.publish(run, folder, "a")
    for folder, index in ((tmp_path / "index", "model-2.safetensors"), (tmp_path / "whole", "model.safetensors")):
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(safetensors(b"new", "model.language_model.layers.0.q_proj.weight"))
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": index}}))
    with pytest.raises(
        ConfigError, match=r"model-2.safetensors: is missing, although model.safetensors.index.json names"
    ):
        weights.publish(run, tmp_path / "index", "a")
    assert not list(run.weights.iterdir())
    assert weights.publish(run, tmp_path / "whole", "a").version == 1


def adapter(folder: Path, about: str = '{"r": 8}') -> Path:
    folder.mkdir()
    (folder / "adapter_model.safetensors").write_bytes(safetensors(b"new"))
    (folder / "adapter_config.json").write_text(about)
    return folder


def test_an_adapter_is_published_as_it_is_where_the_engine_takes_it(run: RunDir, tmp_path: Path) -> None:
    source = adapter(tmp_path / "adapter")
    planned = read_run(run)
    model = planned.policies["a"].model
    assert model is not None
    too_small = {"enable-lora": True, "max-lora-rank": 4}
    for args, said in (({}, "enable-lora"), (too_small, "has rank 8, but the engine takes at most 4")):
        model["args"] = args
        write_run(run, planned)
        with pytest.raises(ConfigError, match=said):
            weights.publish(run, source, "a")
    model["args"] = {"enable_lora": True}
    write_run(run, planned)
    with pytest.raises(ConfigError, match=r"the rank .r. is missing or invalid"):
        weights.publish(run, adapter(tmp_path / "odd", "{}"), "a")
    published = weights.publish(run, source, "a")
    assert published.adapter
    assert {p.name for p in Path(published.path).iterdir()} == {
        *("adapter_config.json", "adapter_model.safetensors", weights.ABOUT)
    }
    assert not weights.publish(run, trained(tmp_path / "step"), "a").adapter
    updater = WeightUpdater(run, Assignment(0, "a", model), Proxy())
    assert updater.model(published) == model, "it lies on the campaign's own model"


@pytest.mark.parametrize(("policy", "servers", "expected"), [("a", 1, 0.2), ("a", 200, 2.0), ("b", 1, 5.0)])
def test_servers_of_a_trained_policy_poll_often_and_not_too_often_together(
    policy: str, servers: int, expected: float
) -> None:
    record = RunRecord(
        campaign={"training": {"policies": {"a": {}}}}, servers=[ServerRecord(policy, {}) for _ in range(servers)]
    )
    assert poll_interval_s(record, policy) == expected


def test_a_run_directory_that_does_not_answer_is_no_reason_for_other_weights(run: RunDir, tmp_path: Path) -> None:
    weights.publish(run, trained(tmp_path / "step"), "a")
    updater = WeightUpdater(run, Assignment(0, "a", {}), Proxy())
    assert updater.next() == updater.choose()
    pointer = run.weights / "current.a.json"
    pointer.unlink()
    pointer.mkdir()  # to be read is an error, though not of a file that is missing
    assert updater.next() is None
    run.weights.chmod(0o000)
    try:
        with pytest.raises(ModelServiceError, match="cannot be read"):
            updater.choose()
    finally:
        run.weights.chmod(0o700)


def test_a_pointer_that_was_left_behind_leads_to_the_newest_version(run: RunDir, tmp_path: Path) -> None:
    """Two publishers ran at once, and one was killed between its last check and the other's."""
    proxy = Proxy()
    updater = WeightUpdater(run, Assignment(0, "a", {}), proxy)
    weights.publish(run, trained(tmp_path / "step1"), "a")
    pointer = run.weights / "current.a.json"
    behind = pointer.read_bytes()
    second = weights.publish(run, trained(tmp_path / "step2"), "a", keep=1)
    pointer.write_bytes(behind)
    assert updater.choose().version == 2
    found = updater.next()
    assert found is not None
    assert found.version == 2
    proxy.serving = Serving(second)
    assert updater.next() is None


def test_a_version_is_tried_until_two_servers_have_refused_it(run: RunDir, tmp_path: Path) -> None:
    """Updates are rolling. The servers a.1 and a.2 serve version 0."""
    weights.publish(run, trained(tmp_path / "step1"), "a")
    updater, files = WeightUpdater(run, Assignment(3, "a", {}), Proxy()), EndpointFiles(run)
    servers = [Endpoint(server=f"a.{n}", policy="a", url="http://127.0.0.1:1/v1", start="first") for n in (1, 2)]
    for server in servers:
        files.publish(server)
    assert updater.next() is None, "both load first"
    servers[0].refused = RefusedWeights(1, "No space left on device")
    files.publish(servers[0])
    assert updater.next() is None, "a.2 loads first"
    servers[1].weight_version = 1
    files.publish(servers[1])
    found = updater.next()
    assert found is not None
    assert (found.version, updater.refused) == (1, {})
    servers[1].weight_version, servers[1].refused = 0, RefusedWeights(1, "invalid header")
    files.publish(servers[1])
    assert updater.next() is None
    assert updater.refused == {1: "a.1 could not load it: No space left on device"}


def test_a_delta_is_put_together_on_the_node_and_its_base_stays(run: RunDir, tmp_path: Path) -> None:
    def version(number: int) -> bytes:
        return bytes(5000) + bytes([number]) * 8

    updater = WeightUpdater(run, Assignment(0, "a", {}), Proxy())
    updater.copies.scratch = tmp_path / "scratch"
    updater.copies.scratch.mkdir()
    base = weights.publish(run, trained(tmp_path / "step0", version(0)), "a")
    assert updater.whole(base) is base
    for step in (1, 2, 3):
        folder = tmp_path / f"delta{step}"
        found = write_delta(trained(tmp_path / f"step{step}", version(step)), Path(base.path), base.version, folder)
        assert found is not None
        assert found[0] >= 10 * found[1]
        published = weights.publish(run, folder, "a", keep=1)
        whole = Path(updater.whole(published).path)
        assert (whole / "model.safetensors").read_bytes() == safetensors(version(step))
        assert (whole / "tokenizer.json").read_text() == "tokens"
    assert [path.name for path in updater.copies.scratch.iterdir()] == ["weights-4"]
    assert [v.version for v in weights.versions(run, "a")] == [1, 4]
    (Path(base.path) / "model.safetensors").write_bytes(safetensors(version(9)))
    damaged = weights.publish(run, folder, "a")
    with pytest.raises(ModelServiceError, match="SHA-256 differs"):
        updater.whole(damaged)
    asyncio.run(updater.load(damaged, Launch()))
    assert "SHA-256 differs" in updater.refused[5]


@in_loop
async def test_the_proxy_asks_for_an_adapter_by_its_name_and_for_nothing_before_it_is_there(tmp_path: Path) -> None:
    """Checks what arrives at an engine, over real sockets."""
    arrived: list[tuple[str, Any]] = []

    async def answer(request: web.Request) -> web.Response:
        arrived.append((request.path, await request.json()))
        return web.json_response({})

    application = web.Application()
    application.router.add_post("/{path:.*}", answer)
    runner = web.AppRunner(application)
    await runner.setup()
    await web.UnixSite(runner, str(tmp_path / "engine.sock")).start()
    proxy = Proxy()
    await proxy.start()
    proxy.opened = False
    await proxy.attach(Launch(uds=str(tmp_path / "engine.sock")))
    headers = {"Authorization": f"Bearer {proxy.key}"}
    async with aiohttp.ClientSession(f"http://127.0.0.1:{proxy.port}", headers=headers) as session:

        async def ask(path: str) -> int:
            async with session.post(path, json={"model": "solver", "prompt": "ä"}) as reply:
                return reply.status

        assert await ask("/v1/completions") == 503
        proxy.opened, proxy.serving = True, Serving(weights.Version(3), "solver@3")
        for path in ("/v1/completions", "/inference/v1/generate", "/v1/chat/completions/render"):
            assert await ask(path) == 200
        assert await ask("/v1/load_lora_adapter") == 404
    await proxy.stop()
    await runner.cleanup()
    asked = [(path, body["model"]) for path, body in arrived]
    assert asked == [
        ("/v1/completions", "solver@3"),
        ("/inference/v1/generate", "solver@3"),
        ("/v1/chat/completions/render", "solver"),
    ]
    assert all(body["prompt"] == "ä" for _, body in arrived)


def test_old_versions_are_removed_and_the_current_one_never(run: RunDir, tmp_path: Path) -> None:
    for step in range(4):
        weights.publish(run, trained(tmp_path / f"step{step}"), "a", keep=2)
    assert [v.version for v in weights.versions(run)] == [3, 4]
    assert weights.prune(run, "a", 1) == [3]
    assert weights.current(run, "a").version == 4


# --- servers ---


def answers(folder: Path, text: str, delay_s: float = 0.0) -> Path:
    """The weights of a scripted engine."""
    folder.mkdir()
    (folder / "script.yaml").write_text(yaml.safe_dump({"default": [{"text": text, "delay_s": delay_s}]}))
    return folder


def fleet(servers: Servers, count: int, **settings: str) -> None:
    file = servers.run.path / "script.yaml"
    file.write_text(yaml.safe_dump({"default": [{"text": "old", "delay_s": 0.05}]}))
    section = {"engine": "scripted", "script": str(file), "weights": settings}
    for _ in range(count):
        servers.start(section, "default", "--poll-s", "0.1", "--beat-s", "0.1")
    for number in range(count):
        servers.record(number)


@pytest.mark.slow
@pytest.mark.parametrize("update", ["rolling", "together"])
def test_engines_that_load_nothing_in_place_are_started_anew_and_no_request_is_lost(
    servers: Servers, tmp_path: Path, update: str
) -> None:
    fleet(servers, 2, update=update)

    @in_loop
    async def scenario() -> None:
        async with servers.gateway() as gateway:
            models = [await gateway.open(f"t/default/{n}", "default") for n in range(4)]
            over = asyncio.Event()
            said: list[set[str]] = [set() for _ in models]
            fewest = 2

            async def keep_asking(number: int) -> None:
                model = models[number]
                client = AsyncOpenAI(base_url=model.base_url, api_key=model.api_key, max_retries=0)
                while not over.is_set():
                    reply = await client.chat.completions.create(model="x", messages=conversation("hello"))
                    said[number].add(reply.choices[0].message.content or "")

            async def look() -> None:  # as rank 0 does
                nonlocal fewest
                while not over.is_set():
                    records = await asyncio.to_thread(servers.records)
                    fewest = min(fewest, len(records))
                    gateway.update_endpoints(records)
                    await asyncio.sleep(0.1)

            tasks = [asyncio.create_task(keep_asking(n)) for n in range(4)] + [asyncio.create_task(look())]

            async def all_heard(text: str) -> None:
                while not all(text in heard for heard in said):
                    for task in tasks:
                        if task.done():
                            task.result()
                    await asyncio.sleep(0.05)

            await all_heard("old")
            await asyncio.to_thread(weights.publish, servers.run, answers(tmp_path / "new", "new", 0.05))
            await all_heard("new")
            while {r["weight_version"] for r in await asyncio.to_thread(servers.records)} != {1}:
                await asyncio.sleep(0.05)
            over.set()
            await asyncio.gather(*tasks)
            assert said == [{"old", "new"}] * 4
            if update == "rolling":
                assert fewest == 1
            for number in range(4):
                recording = await gateway.close(f"t/default/{number}")
                for turn, text in zip(recording.turns, answered(recording), strict=True):
                    sampled = recording.sequences[turn.sequence].weight_versions[turn.token_start : turn.token_end]
                    assert set(sampled) == {{"old": 0, "new": 1}[text]}

    scenario()


@pytest.mark.slow
def test_a_version_that_does_not_run_is_refused_with_its_cause_and_the_one_before_serves(
    servers: Servers, tmp_path: Path
) -> None:
    fleet(servers, 3, update="rolling")
    broken = answers(tmp_path / "broken", "x")
    (broken / "script.yaml").write_text("default: {")
    weights.publish(servers.run, answers(tmp_path / "good", "good"))
    until(lambda: [r["weight_version"] for r in servers.records()] == [1, 1, 1], "all serve version 1")
    started = servers.record(2)["started_at"]
    weights.publish(servers.run, broken)
    until(lambda: [bool(r.get("refused")) for r in servers.records()][:2] == [True, True], "two servers refuse")
    for refusing in sorted(servers.records(), key=lambda r: r["server"])[:2]:
        assert refusing["weight_version"] == 1
        assert refusing["refused"]["version"] == 2
        assert "script.yaml" in refusing["refused"]["cause"]
    until(lambda: verb("weights", "list", servers.run).stdout.count("script.yaml") >= 1, "the list shows the refusal")
    looked = servers.record(2)["heartbeat"]
    until(lambda: servers.record(2)["heartbeat"] > looked + 5, "the third server, which must not try, looked again")
    assert servers.record(2)["started_at"] == started
    rows = {row["version"]: row for row in json.loads(verb("weights", "list", servers.run, "--json").stdout)}
    assert rows[1]["servers"] == 3
    assert rows[2]["current"] is True
    weights.publish(servers.run, answers(tmp_path / "better", "better"))  # the next one is tried again
    until(lambda: [r["weight_version"] for r in servers.records()] == [3, 3, 3], "all serve version 3")


def test_an_engine_that_served_weights_and_dies_again_and_again_does_not_refuse_them(
    servers: Servers, tmp_path: Path
) -> None:
    """What kills it may be a request. If the server refused its weights, synchronous training would wait for ever."""
    fleet(servers, 1)
    weights.publish(servers.run, answers(tmp_path / "good", "good"))
    until(lambda: [r["weight_version"] for r in servers.records()] == [1], "the server serves version 1")
    starts = set[float]()
    while servers.processes[0].poll() is None:
        with suppress(FileNotFoundError, ValueError):
            for record in servers.records():
                if record.get("url") and record["started_at"] not in starts:
                    assert (record["weight_version"], record.get("refused")) == (1, None)
                    starts.add(record["started_at"])
                    os.kill(sorted(descendants(servers.processes[0].pid))[-1], signal.SIGKILL)
        time.sleep(0.02)
    assert (servers.processes[0].wait(), len(starts)) == (1, 3)
    failed = json.loads((servers.run.endpoints / "default.0.failed.json").read_text())
    assert "the engine ended while serving" in failed["cause"]


@pytest.mark.slow
def test_an_engine_serves_weights_that_another_site_has_sent_and_so_does_one_that_starts_later(
    servers: Servers, tmp_path: Path
) -> None:
    home = RunDir(tmp_path / "home")
    home.create()
    write_run(home, RunRecord(policies={"a": PolicyRecord(model={"engine": "scripted"})}))
    fleet(servers, 1)
    box = tmp_path / "box"

    async def answer() -> str | None:
        async with servers.gateway() as gateway:
            model = await gateway.open("t/default/0", "default")
            client = AsyncOpenAI(base_url=model.base_url, api_key=model.api_key)
            reply = await client.chat.completions.create(model="x", messages=conversation("hello"))
            return reply.choices[0].message.content

    for number, text in enumerate(("first", "second"), start=1):
        weights.publish(home, answers(tmp_path / text, text))
        for word, site in (("send", home), ("receive", servers.run)):
            done = verb("weights", word, site, box)
            assert done.stdout == f"{number}\n", done.stderr
        until(lambda n=number: [r["weight_version"] for r in servers.records()] == [n], "the engine serves it")
        assert asyncio.run(answer()) == text
    later = servers.start(servers.entries[0].model, "default")
    assert servers.record(later)["weight_version"] == 2
