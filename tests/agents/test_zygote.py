"""Python agents in their own processes: an agent that breaks its process costs one rollout."""

from __future__ import annotations

import asyncio
import os
import resource
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megaflow_hpc.agents import remote
from megaflow_hpc.agents.command import PRESETS
from megaflow_hpc.agents.remote import AgentJob, Zygote, forked
from megaflow_hpc.agents.zygote import MAX_CPU_S, _label, _Labelled
from megaflow_hpc.errors import SandboxError, UserCodeError
from megaflow_hpc.types import Task
from tests.support.local_sandbox import LocalSandbox
from tests.support.places import ROOT

TASK = Task("t", "Dö it.", "base", "/nowhere")
NAME = "tests.support.odd_agent:Odd"


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)


@asynccontextmanager
async def zygote() -> AsyncIterator[Zygote]:
    found = Zygote([NAME, "mini-swe-agent"])
    try:
        yield found
    finally:
        found.close()


def spec(what: str, **args: Any) -> Any:
    return SimpleNamespace(name=NAME, max_turns=None, timeout_s=None, args={"what": what, **args})


async def blocked(zygote: Zygote, folder: Path) -> tuple[asyncio.Task[Any], int]:
    """Start an agent that never answers; return it and the pid of its process."""
    place = folder / "pid"
    running = asyncio.create_task(
        zygote.run(AgentJob(spec("block", place=str(place)), TASK, LocalSandbox(folder / "a")))
    )
    while not place.exists() or not place.read_text():
        await asyncio.sleep(0.02)
    return running, int(place.read_text())


async def gone(pid: int) -> bool:
    for _ in range(500):
        if not Path(f"/proc/{pid}").exists():
            return True
        await asyncio.sleep(0.02)
    return False


async def test_an_agent_works_on_its_sandbox_from_another_process(tmp_path: Path) -> None:
    counted: list[str] = []

    @contextmanager
    def timed() -> Iterator[None]:
        counted.append("begun")
        yield
        counted.append("ended")

    async with zygote() as found:
        results = await asyncio.gather(
            *(found.run(AgentJob(spec("pipe"), TASK, LocalSandbox(tmp_path / str(n)), timed=timed)) for n in range(4))
        )
    assert sorted(counted) == ["begun"] * 28 + ["ended"] * 28  # seven operations each
    for result in results:
        assert result.messages == [{"role": "user", "content": "Dö it. \udcff"}]
        assert result.exit_code == 124


async def test_what_one_agent_does_to_itself_costs_its_rollout_alone(tmp_path: Path) -> None:
    async with zygote() as found:
        good = asyncio.create_task(found.run(AgentJob(spec("pipe"), TASK, LocalSandbox(tmp_path / "good"))))
        for number, (what, said) in enumerate(
            [
                ("crash", "ended by SIGSEGV"),
                ("leave", "exit code 3 before it returned a result"),
                ("exit", "exit code 3 before it returned a result"),
                ("raise", r"KeyError\('no such thing'\) at .*odd_agent"),
            ]
        ):
            with pytest.raises(UserCodeError, match=said):
                await found.run(AgentJob(spec(what), TASK, LocalSandbox(tmp_path / str(number))))
        assert (await good).exit_code == 124


async def test_a_process_has_ended_although_its_daemon_holds_the_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "DRAIN_S", 0.1)
    async with zygote() as found, asyncio.timeout(15):
        with pytest.raises(UserCodeError, match="exit code 3 before it returned a result"):
            await found.run(AgentJob(spec("leave a daemon"), TASK, LocalSandbox(tmp_path / "a")))


async def test_a_process_that_cannot_be_started_costs_its_rollout_alone(tmp_path: Path) -> None:
    async with zygote() as found:
        running, pid = await blocked(found, tmp_path)
        assert found._process is not None
        limit = partial(resource.prlimit, found._process.pid, resource.RLIMIT_NPROC)
        before = limit()
        limit((0, before[1]))
        with pytest.raises(UserCodeError, match="before it returned a result"):
            await found.run(AgentJob(spec("pipe"), TASK, LocalSandbox(tmp_path / "refused")))
        limit(before)
        assert (await found.run(AgentJob(spec("pipe"), TASK, LocalSandbox(tmp_path / "next")))).exit_code == 124
        assert not running.done()
        assert Path(f"/proc/{pid}").exists()
        running.cancel()


async def test_a_limited_process_gets_more_cpu_time_while_it_responds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "ASK_S", 0.1)
    async with zygote() as found:
        result = await found.run(AgentJob(spec("use CPU"), TASK, LocalSandbox(tmp_path / "a")), limited=True)
    assert int(result.error) > MAX_CPU_S


def test_a_line_without_an_end_is_printed_in_parts() -> None:
    reading, writing = os.pipe()
    stream = _Labelled(writing)
    token = _label.set("t/p/0")
    try:
        for _ in range(10):
            stream.write("x" * 1000)
        assert os.read(reading, 65536) == (b"t/p/0: " + b"x" * 5000 + b"\n") * 2
    finally:
        _label.reset(token)
        stream.close()
        os.close(reading)
        os.close(writing)


async def test_what_agents_print_bears_their_names_and_is_bounded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with zygote() as found:
        works = (found.run(AgentJob(spec("print"), TASK, LocalSandbox(tmp_path / n), label=f"t/p/{n}")) for n in "01")
        await asyncio.gather(*works)
        said = ""
        async with asyncio.timeout(30):
            while said.count("the rest is not shown") < 2:
                said += capsys.readouterr().err
                await asyncio.sleep(0.02)
    for name in ("t/p/0: ", "t/p/1: "):
        lines = [line.removeprefix(name) for line in said.splitlines() if line.startswith(name)]
        assert lines[:2] == ["half a line, and \\x1b[2J the rest \\udcff", "its child"]
        assert lines[-1] == f"(it printed more than {remote.MAX_SHOWN_BYTES} bytes; the rest is not shown)"
        assert {len(line) for line in lines[2:-2]} == {remote.MAX_LINE_BYTES}
        assert sum(map(len, lines)) < remote.MAX_SHOWN_BYTES + 200
    assert "beyond" not in said


async def test_an_agent_that_blocks_is_ended_with_its_rollout(tmp_path: Path) -> None:
    async with zygote() as found:
        running, pid = await blocked(found, tmp_path)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert await gone(pid)


async def test_what_an_agent_started_ends_with_it(tmp_path: Path) -> None:
    async with zygote() as found:
        await found.run(AgentJob(spec("spawn", place=str(tmp_path / "pid")), TASK, LocalSandbox(tmp_path / "a")))
        assert await gone(int((tmp_path / "pid").read_text()))


async def test_a_sandbox_that_is_lost_is_the_same_error_there(tmp_path: Path) -> None:
    sandbox = LocalSandbox(tmp_path / "a")
    await sandbox.stop()
    async with zygote() as found:
        with pytest.raises(SandboxError, match="the sandbox is gone"):
            await found.run(AgentJob(spec(""), TASK, sandbox))


async def test_agents_end_with_the_runner(tmp_path: Path) -> None:
    async with zygote() as found:
        running, pid = await blocked(found, tmp_path)
        assert found._process is not None
        found._process.kill()
        with pytest.raises(UserCodeError, match="ended by SIGKILL"):
            await running
    assert await gone(pid)


def test_only_python_agents_have_processes_of_their_own() -> None:
    assert forked("mini-swe-agent")
    assert forked("package.module:Class")
    assert not any(forked(name) for name in ("oracle", "nop", "replay", "command", *PRESETS))
