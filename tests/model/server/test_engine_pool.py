"""An engine pool: one campaign's servers, used by others with keys of their own, each user within caps."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from megaflow_hpc.campaign import plan
from megaflow_hpc.campaign.run import Run
from megaflow_hpc.config import parse
from megaflow_hpc.errors import ConfigError
from megaflow_hpc.model.gateway.server import ModelGateway
from megaflow_hpc.model.server.tenants import MIN_REFRESH_S, Tenants
from megaflow_hpc.monitor.status import pool_warnings
from megaflow_hpc.pod.master.endpoints import Endpoints
from megaflow_hpc.rundir.engine_pool import EnginePool, digest_of
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.record import RunRecord, read_run, write_run
from tests.support.second_user import as_second_user
from tests.support.serving import Servers, answer_to, chat, conversation


def where(key: str) -> str:
    return f"campaign.yaml: {key}"


def planned(folder: Path, **fields: Any) -> RunDir:
    run = RunDir(folder)
    plan.write(plan.make(parse(fields), folder.parent, where), run)
    return run


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """A pool of one scripted server that takes 0.2 s for an answer, one at a time, with two slots per user."""
    folder = tmp_path_factory.mktemp("shared")
    script = folder / "script.yaml"
    script.write_text(yaml.safe_dump({"default": [{"text": "from the pool", "delay_s": 0.2}]}))
    model = {"engine": "scripted", "script": str(script), "gpus": 0}
    with Servers(folder) as servers:
        servers.run = planned(folder / "pool", name="pool", model=model, quotas={"in_flight": 2})
        servers.serve(0)
        servers.record(0)
        yield servers


@pytest.fixture
def pool(shared: Servers) -> RunDir:
    return shared.run


def campaign(folder: Path, pool: RunDir, policy: str = "mine") -> RunDir:
    """A member's run directory, as planning writes it."""
    run = RunDir(folder)
    run.create()
    EnginePool(pool.path).enrol(run, policy, EnginePool(pool.path).policy(policy))
    return run


def test_a_campaign_with_nothing_but_a_model_is_a_pool(tmp_path: Path) -> None:
    script = tmp_path / "script.yaml"
    script.write_text("default: [x]")
    run = planned(tmp_path / "pool", name="pool", model={"engine": "scripted", "script": str(script)})
    assert EnginePool(run.path).about() == {"default": 1}
    assert read_run(run).total == 0
    with pytest.raises(ConfigError, match="tasks"):
        parse({"name": "x", "agent": "oracle"})
    with pytest.raises(ConfigError, match="no engine pool"):
        EnginePool(tmp_path).policy("default")


def test_a_member_asks_with_its_own_key_and_who_left_is_refused(shared: Servers, pool: RunDir, tmp_path: Path) -> None:
    member = campaign(tmp_path / "member", pool)
    endpoints = Endpoints(member, {"mine": 1})
    assert endpoints.refresh()
    (record,) = endpoints.engines.all
    assert record["policy"] == "mine"
    assert record["key"] != shared.record(0)["key"]
    assert not endpoints.engines.unanswered
    assert not any("key" in json.loads(file.read_text()) for file in EnginePool(pool.path).servers.iterdir())

    async def scenario() -> str:
        async with ModelGateway(wait_s=60) as gateway:
            gateway.update_endpoints(endpoints.engines.all)
            model = await gateway.open("t/mine/0", "mine")
            answer = await answer_to(model, {"messages": conversation("hello")})
            recording = await gateway.close("t/mine/0")
            assert recording.turns[0].server == "mine@default.0"
            return answer["choices"][0]["message"]["content"]

    assert asyncio.run(scenario()) == "from the pool"
    tenants = Tenants(EnginePool(pool.path), {})
    assert tenants.user(record["key"])
    (EnginePool(pool.path).members / digest_of(record["key"])).unlink()
    assert Tenants(EnginePool(pool.path), {}).user(record["key"]) is None


def test_a_user_has_so_many_requests_at_once_whatever_campaigns_they_are_of(
    shared: Servers, pool: RunDir, tmp_path: Path
) -> None:
    records = []
    for name in ("one", "two"):
        endpoints = Endpoints(campaign(tmp_path / name, pool), {"mine": 1})
        endpoints.refresh()
        records += endpoints.engines.all
    assert records[0]["key"] != records[1]["key"]
    owner = shared.record(0)
    time.sleep(MIN_REFRESH_S)  # the server may just have listed its members for the key of another test

    async def scenario() -> float:
        began = time.monotonic()
        assert await asyncio.gather(*(chat(record, record["key"]) for record in records * 4)) == [200] * 8
        return time.monotonic() - began

    assert asyncio.run(scenario()) >= 0.2 * 8 / 2  # eight requests, two at once
    assert asyncio.run(chat(owner, owner["key"])) == 200


def test_a_cancelled_pool_is_refused_and_its_members_do_not_wait_for_it(
    pool: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # a host without Slurm
    member = campaign(tmp_path / "member", pool)
    write_run(member, RunRecord(campaign={"name": "member"}, total=1, pools={"mine": 1}))
    endpoints = Endpoints(member, {"mine": 1})
    endpoints.refresh()
    assert not endpoints.engines.unanswered
    assert pool_warnings(member) == []
    assert Run(pool).status()["state"] == "serving"
    Run(pool).cancel()
    assert endpoints.refresh()
    (gone,) = endpoints.engines.all
    assert gone["all_failed"]
    assert gone["lasting"]
    assert f"{pool} was cancelled; its owner can continue it with: megaflow-hpc resume {pool}" in gone["cause"]
    assert "until then its rollouts fail" in pool_warnings(member)[0]
    with pytest.raises(ConfigError, match="was cancelled"):
        EnginePool(pool.path).policy("mine")
    EnginePool(pool.path).reopen()
    EnginePool(pool.path).withdraw("default.0")
    assert endpoints.refresh()
    assert endpoints.engines.unanswered == {"mine"}
    assert f"no server of the engine pool {pool} responds" in pool_warnings(member)[0]


def test_a_members_file_speaks_for_its_owner_alone(tmp_path: Path) -> None:
    """A link to another user's file does not give the linker that user's identity."""
    (tmp_path / "script.yaml").write_text("default: [x]")
    model = {"engine": "scripted", "script": "script.yaml"}
    pool = planned(tmp_path / "pool", name="pool", model=model)
    members = EnginePool(pool.path).members
    campaign(tmp_path / "member", pool)
    (own,) = EnginePool(pool.path).users()
    (members / digest_of("hard")).hardlink_to(members / own)
    (members / digest_of("soft")).symlink_to(own)
    (members / "short").write_text("short")
    assert list(EnginePool(pool.path).users()) == [own]


def test_every_user_has_the_limit_and_an_engine_has_its_own(tmp_path: Path) -> None:
    async def most(tenants: Tenants, name: str) -> int:
        inside, found = 0, 0

        async def one() -> None:
            nonlocal inside, found
            async with tenants.admit(name):
                inside += 1
                found = max(found, inside)
                await asyncio.sleep(0.01)
                inside -= 1

        await asyncio.gather(*(one() for _ in range(8)))
        return found

    async def scenario() -> None:
        tenants = Tenants(EnginePool(tmp_path), {"in_flight": 2, "weights": {"quick": 3}})
        assert [await most(tenants, name) for name in ("quick", "other")] == [2, 2]
        tenants.set_capacity(1)
        assert await most(tenants, "other") == 1

    asyncio.run(scenario())


MEMBER = """
import http.client, json, os, pathlib, ssl, sys, time
told = json.load(sys.stdin)
sys.path.insert(0, told["package"])
from megaflow_hpc.rundir.engine_pool import EnginePool, digest_of
pool, key = EnginePool(told["pool"]), "the second user's key"
if told["what"] == "enrol":
    (pool.members / digest_of(key)).write_text(digest_of(key))
    said = {"policies": pool.about()}
    for what, path in told["closed"].items():
        try:
            os.listdir(path)
            said[what] = "open"
        except PermissionError:
            said[what] = "closed"
else:
    (record,) = pool.serving("default")
    host, _, port = record.url.removeprefix("https://").partition(":")
    body = json.dumps({"messages": [{"role": "user", "content": "hello"}]})
    asked = []
    for _ in range(told["requests"]):  # all are with the proxy before the first answer is read
        asked.append(http.client.HTTPSConnection(host, int(port), timeout=60, context=ssl._create_unverified_context()))
        asked[-1].request("POST", "/v1/chat/completions", body, {"Authorization": "Bearer " + key})
    began = time.monotonic()
    said = {"status": [connection.getresponse().status for connection in asked]}
    said["waited"] = [began, time.monotonic()]
print(json.dumps({"uid": os.stat("/proc/self").st_uid, **said}))
"""


def test_one_user_floods_a_pool_and_another_of_its_group_is_served_all_the_same(servers: Servers, place: Path) -> None:
    """Two real users and real sockets. The engine answers two requests at once, in their order of arrival."""
    script = place / "script.yaml"
    script.write_text(yaml.safe_dump({"default": [{"text": "from the pool", "delay_s": 0.1}]}))
    model = {"engine": "scripted", "script": str(script), "gpus": 0, "args": {"slots": 2}}
    servers.run = planned(place / "pool", name="pool", model=model, share="group")
    servers.serve(0)
    servers.record(0)
    package = str(Path(plan.__file__).parents[2])
    told = {"pool": str(servers.run.path), "package": package, "closed": {"keys": str(servers.run.endpoints)}}
    found = as_second_user(MEMBER, {**told, "what": "enrol"}, member=True, python=sys.executable)
    assert (found["policies"], found["keys"]) == ({"default": 1}, "closed")
    endpoints = Endpoints(campaign(place / "member", servers.run), {"mine": 1})
    endpoints.refresh()
    (record,) = endpoints.engines.all
    assert len(set(EnginePool(servers.run.path).users().values())) == 2

    async def scenario() -> int:
        answered: list[float] = []
        first = asyncio.Event()
        headers = {"Authorization": f"Bearer {record['key']}"}
        pin = aiohttp.Fingerprint(bytes.fromhex(record["tls_fingerprint"]))
        async with aiohttp.ClientSession(headers=headers, connector=aiohttp.TCPConnector(limit=0)) as session:

            async def flood() -> None:
                while True:
                    body = {"messages": conversation("hello")}
                    async with session.post(record["url"] + "/v1/chat/completions", json=body, ssl=pin) as answer:
                        assert answer.status == 200, await answer.text()
                    answered.append(time.monotonic())
                    first.set()

            tasks = [asyncio.create_task(flood()) for _ in range(100)]
            await first.wait()
            few = {**told, "what": "ask", "requests": 10}
            said = await asyncio.to_thread(as_second_user, MEMBER, few, member=True, python=sys.executable)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        assert said["status"] == [200] * 10
        began, ended = said["waited"]  # by the clock that all processes share
        return sum(began < when < ended for when in answered)

    assert asyncio.run(scenario()) < 50, "in the engine's own order all of the flood goes before"
