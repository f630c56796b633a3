"""Agents without a sandbox in shared processes: reused, bounded, and a bug costs one rollout."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megaflow_hpc.agents import pool
from megaflow_hpc.agents.pool import AgentPool
from megaflow_hpc.agents.remote import AgentJob, ProcessLostError, Zygote
from megaflow_hpc.errors import UserCodeError
from megaflow_hpc.tasks.sandboxes import NoSandbox
from megaflow_hpc.types import Task
from tests.support.places import ROOT

TASK = Task("t", "Talk.", "", "/nowhere")
NAME = "tests.support.odd_agent:Odd"


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)


@pytest.fixture(autouse=True)
def one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "MAX_CORES", 1)


@asynccontextmanager
async def opened() -> AsyncIterator[AgentPool]:
    zygote = Zygote([NAME])
    found = AgentPool(zygote)
    try:
        yield found
    finally:
        found.close()
        zygote.close()


def job(what: str, place: Path | str = "", task: str = "t") -> AgentJob:
    agent = SimpleNamespace(name=NAME, max_turns=None, timeout_s=None, args={"what": what, "place": str(place)})
    it = replace(TASK, id=task)
    return AgentJob(agent, it, NoSandbox(it), label=f"{task}/p/0")  # type: ignore[arg-type]


def pids(place: Path) -> dict[str, str]:
    """Which process each task's agent runs in."""
    return dict(name.split(".") for name in os.listdir(place) if "." in name)


async def begun(place: Path, count: int) -> dict[str, str]:
    async with asyncio.timeout(60):
        while len(pids(place)) < count:
            await asyncio.sleep(0.02)
    return pids(place)


def started(it: AgentPool, jobs: Iterable[AgentJob]) -> list[asyncio.Task[Any]]:
    return [asyncio.create_task(it.run(one)) for one in jobs]


async def test_agents_that_await_share_a_process_that_is_reused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with opened() as it:
        running = started(it, (job("share", tmp_path, f"t{n}") for n in range(20)))
        assert len(set((await begun(tmp_path, 20)).values())) == 1
        (tmp_path / "end").touch()
        await asyncio.gather(*running)
        await it.run(job("share", tmp_path, "later"))
        assert len(set(pids(tmp_path).values())) == 1
        said = ""
        async with asyncio.timeout(30):
            while said.count("and its end") < 21:
                said += capsys.readouterr().err
                await asyncio.sleep(0.02)
    for name in (*(f"t{n}" for n in range(20)), "later"):
        assert f"agents: {name}/p/0: a line of {name}, and its end\n" in said


async def test_an_agent_that_blocks_has_its_process_to_itself(tmp_path: Path) -> None:
    async with opened() as it:
        running = started(it, (job("block shortly", tmp_path, f"t{n}") for n in range(5)))
        assert len(set((await begun(tmp_path, 5)).values())) == 5
        (tmp_path / "end").touch()
        await asyncio.gather(*running)


async def test_a_process_is_replaced_after_its_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "MAX_JOBS", 2)
    (tmp_path / "end").touch()
    async with opened() as it:
        for number in range(4):
            await it.run(job("share", tmp_path, f"t{number}"))
    used = pids(tmp_path)
    assert used["t0"] == used["t1"] != used["t2"] == used["t3"]


async def test_a_crash_costs_no_other_agent_its_result(tmp_path: Path) -> None:
    async with opened() as it:
        good = started(it, (job("share", tmp_path, f"t{n}") for n in range(3)))
        await begun(tmp_path, 3)
        bad = started(it, [job("crash when shared", tmp_path, "bad")])
        for one in (*good, *bad):
            with pytest.raises(ProcessLostError, match="exit code 3 before it returned a result"):
                await one
        (tmp_path / "end").touch()
        await asyncio.gather(*(it.run_alone(job("share", tmp_path, f"t{n}")) for n in range(3)))
        with pytest.raises(UserCodeError, match="exit code 3 before it returned a result"):
            await it.run_alone(job("crash when shared", tmp_path, "bad"))
        await it.run(job("share", tmp_path, "next"))


async def test_a_process_has_a_memory_limit() -> None:
    async with opened() as it:
        with pytest.raises(ProcessLostError):  # the other agents may hold the memory
            await it.run(job("fill memory"))
        with pytest.raises(UserCodeError, match="MemoryError"):
            await it.run_alone(job("fill memory"))


async def test_an_agent_that_survives_its_time_limit_costs_its_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "STALL_S", 0.2)
    async with opened() as it:
        (late,) = started(it, [job("persist", tmp_path, "late")])
        await begun(tmp_path, 1)
        (other,) = started(it, [job("share", tmp_path, "other")])
        await begun(tmp_path, 2)
        late.cancel()
        with pytest.raises(ProcessLostError, match="its process was killed"):
            await other


@pytest.mark.parametrize("what", ["wait, then block", "wait, then spin"])
async def test_an_agent_that_holds_up_others_costs_its_process(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "STALL_S", 0.3)
    async with opened() as it:
        others = started(it, (job("share", tmp_path, f"t{n}") for n in range(3)))
        await begun(tmp_path, 3)
        (blocks,) = started(it, [job(what, tmp_path, "blocks")])
        for one in (*others, blocks):
            with pytest.raises(ProcessLostError, match="its process was killed"):
                await one
        running = started(it, (job("share", tmp_path, f"n{n}") for n in range(2)))
        used = await begun(tmp_path, 6)
        assert (used["n0"] != used["n1"]) == (what == "wait, then block"), "an agent that blocks may do so again"
        (tmp_path / "end").touch()
        await asyncio.gather(*running)


async def test_the_pool_ends_with_the_runner(tmp_path: Path) -> None:
    async with opened() as it:
        running = started(it, [job("persist", tmp_path)])
        pid = (await begun(tmp_path, 1))["t"]
    with pytest.raises(ProcessLostError):
        await running[0]
    async with asyncio.timeout(10):
        while Path(f"/proc/{pid}").exists():
            await asyncio.sleep(0.02)
