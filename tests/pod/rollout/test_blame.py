"""Who is to blame for a rollout whose last model call has no answer, or whose sandbox is gone."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import aiohttp
import pytest
from aiohttp import web

from megaflow_hpc.config import AgentConfig, CampaignConfig, Policy
from megaflow_hpc.config.model import ModelConfig
from megaflow_hpc.environments import ApptainerProvider
from megaflow_hpc.model.engines.scripted.engine import ScriptedEngine
from megaflow_hpc.model.engines.scripted.script import Script, ScriptedAnswer, ScriptedTask
from megaflow_hpc.model.gateway.server import ModelGateway
from megaflow_hpc.pod.outcome import Outcome
from megaflow_hpc.pod.rollout.rollout import run_attempt
from megaflow_hpc.pod.rollout.runner import Runner
from megaflow_hpc.pod.rollout.services import Services
from megaflow_hpc.tasks.harbor.reader import read_harbor_task
from megaflow_hpc.trajectory import Trajectory
from megaflow_hpc.types import AgentResult, ModelEndpoint, Rollout, Sandbox, Task
from tests.support.dodges import CODE
from tests.support.harbor_tasks import write_files


async def ask(model: ModelEndpoint | None, text: str, timeout_s: float = 60) -> Mapping[str, Any]:
    """Makes a call, as clients do: an answer that is an error is raised."""
    assert model is not None
    body = {"messages": [{"role": "user", "content": text}]}
    headers = {"Authorization": f"Bearer {model.api_key}"}
    timeout = aiohttp.ClientTimeout(timeout_s)
    async with aiohttp.ClientSession(headers=headers, raise_for_status=True, timeout=timeout) as session:
        async with session.post(f"{model.base_url}/chat/completions", json=body) as response:
            found: Mapping[str, Any] = await response.json()
            return found


class Asks:
    """Asks two questions, of which its engine fails at the second; what it makes of that is the subclass's."""

    async def run(self, task: Task, sandbox: Sandbox, model: ModelEndpoint | None) -> AgentResult:
        await ask(model, "hello")
        await self.end(model)
        return AgentResult()

    async def end(self, model: ModelEndpoint | None) -> None:
        raise NotImplementedError


class Swallows(Asks):
    async def end(self, model: ModelEndpoint | None) -> None:
        with suppress(aiohttp.ClientError):
            await ask(model, "poison")


class Leaves(Asks):
    async def end(self, model: ModelEndpoint | None) -> None:
        with suppress(TimeoutError):
            await ask(model, "poison", 0.3)


class LeavesMany(Asks):
    async def end(self, model: ModelEndpoint | None) -> None:
        with suppress(TimeoutError):
            await asyncio.gather(*(ask(model, "poison", 0.3) for _ in range(50)))


class Raises(Asks):
    async def end(self, model: ModelEndpoint | None) -> None:
        await ask(model, "poison")


class Waits(Asks):
    """Its time runs out while it makes such calls."""

    async def end(self, model: ModelEndpoint | None) -> None:
        while True:
            with suppress(aiohttp.ClientError):
                await ask(model, "poison")


class EndsItsSandbox:
    async def run(self, task: Task, sandbox: Sandbox, model: ModelEndpoint | None) -> AgentResult:
        await sandbox.exec(["python3", "-c", CODE["breaks the memory of PID 1"]])
        return AgentResult()


class DownloadsNothing:
    """Downloads a file that does not exist, in the last step of the task."""

    async def run(self, task: Task, sandbox: Sandbox, model: ModelEndpoint | None) -> AgentResult:
        if "ask" in task.instruction:
            await ask(model, "hello")
        if "last" in task.instruction:
            await sandbox.download("/nothing", "/tmp/nothing")
        return AgentResult()


def run(
    place: Path, scratch: Path, rootfs: str, agent: type, engine: str, attempt: int = 0, steps: tuple[str, ...] = ("x",)
) -> Trajectory:
    """One attempt at a task whose tests give 0.

    Args:
        engine: ``up``; ``down``; or ``dies``, after its first answer.
        steps: Instructions of the task's steps.
    """
    toml, test = 'version = "1.0"\n[environment]\ndocker_image = "base"\n', "echo 0 > /logs/verifier/reward.txt\n"
    files = {"task.toml": toml, "instruction.md": steps[0], "tests/test.sh": test}
    if len(steps) > 1:
        files["task.toml"] += "".join(f'[[steps]]\nname = "s{number}"\n' for number in range(len(steps)))
        for number, instruction in enumerate(steps):
            files |= {f"steps/s{number}/instruction.md": instruction, f"steps/s{number}/tests/test.sh": test}
    task = read_harbor_task(write_files(place / "task", files))
    config = CampaignConfig.model_validate(
        {"name": "blame", "tasks": str(place), "agent": "nop", "environment": {"network": "none"}}
    )
    # An engine that is down ends the agent, whose time must not run out before.
    timeout_s = 5 if agent is Waits and engine != "down" else 300
    named = AgentConfig(name=f"{__name__}:{agent.__name__}", timeout_s=timeout_s)
    policy = Policy(agents=(named,), model=ModelConfig(path="m"))

    class Dying(ScriptedEngine):
        def sample(self, text: str, prompt: Any) -> list[int]:
            if engine == "dies":
                self.script = Script(default=(ScriptedAnswer("EngineDeadError", status=500),))
            return super().sample(text, prompt)

    async def main() -> Trajectory:
        poison = ScriptedTask(pattern=re.compile("poison"), answers=(ScriptedAnswer("no", status=500),))
        runner = web.AppRunner(Dying(Script((poison,), (ScriptedAnswer("good"),)), "m").application(), access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        port = 1 if engine == "down" else runner.addresses[0][1]
        server = {"server": "p.0", "policy": "p", "url": f"http://127.0.0.1:{port}", "model_name": "m"}
        async with ModelGateway(wait_s=2) as gateway, ApptainerProvider(scratch) as provider:
            gateway.update_endpoints([server])
            services = Services(config, {"p": policy}, {"base": rootfs}, provider, gateway)
            try:
                return (await run_attempt(services, Rollout(task.id, "p", 0, named.title), task, attempt)).trajectory
            finally:
                services.agents.close()
                await runner.cleanup()

    return asyncio.run(main())


@pytest.mark.slow
@pytest.mark.parametrize("agent", [Swallows, Leaves, LeavesMany, Raises, Waits])
def test_a_call_at_which_only_its_engine_fails_takes_no_verdict(
    rootfs: str, scratch: Path, tmp_path: Path, agent: type
) -> None:
    found = run(tmp_path, scratch, rootfs, agent, "up")
    kind = {Raises: "agent", Waits: "agent"}.get(agent, "")
    status = "truncated" if agent is Waits else "completed"
    assert (found.status, found.error_kind, found.reward) == (status, kind, 0.0), found.error


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["dies", "down"])
@pytest.mark.parametrize("agent", [Swallows, Leaves, Raises, Waits])
def test_an_engine_that_is_dead_for_everybody_is_the_services_failure(
    rootfs: str, scratch: Path, tmp_path: Path, agent: type, engine: str
) -> None:
    found = run(tmp_path, scratch, rootfs, agent, engine)
    assert (found.status, found.error_kind, found.reward) == ("failed", "model", None), found.error


@pytest.mark.slow
def test_an_agent_whose_sandbox_is_lost_twice_has_a_verdict(rootfs: str, scratch: Path, tmp_path: Path) -> None:
    """Nothing tells who ended it: the first time it may have been the node."""
    first = run(tmp_path / "0", scratch, rootfs, EndsItsSandbox, "up")
    assert (first.status, first.error_kind, first.reward) == ("failed", "sandbox", None), first.error
    again = run(tmp_path / "1", scratch, rootfs, EndsItsSandbox, "up", attempt=1)
    assert (again.status, again.error_kind, again.reward) == ("completed", "agent", 0.0), again.error


@pytest.mark.slow
@pytest.mark.parametrize(
    ("steps", "outcome"),
    [
        (("last",), ("failed", "sandbox", None)),
        (("ask, last",), ("completed", "agent", 0.0)),
        (("ask", "last"), ("completed", "agent", 0.0)),
    ],
    ids=["before-an-answer", "after-one", "in-a-later-step"],
)
def test_a_step_in_the_sandbox_that_fails_after_an_answer_is_the_agents_failure(
    rootfs: str, scratch: Path, tmp_path: Path, steps: tuple[str, ...], outcome: tuple[str, str, float | None]
) -> None:
    found = run(tmp_path, scratch, rootfs, DownloadsNothing, "up", steps=steps)
    assert (found.status, found.error_kind, found.reward) == outcome, found.error
    assert "nothing to download" in found.error


async def test_a_task_that_cannot_be_read_fails_instead_of_running_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    runner, sent = Runner(asyncio.StreamReader(), Mock()), list[dict[str, Any]]()
    gateway = Mock(tokens=0, usd=0.0, activity=dict)
    monkeypatch.setattr(runner, "_opened", Mock(gateway=gateway))
    monkeypatch.setattr(runner, "_send", AsyncMock(side_effect=sent.append))
    rollout = Rollout("t", "p", 0, "nop")
    start = {"task": {"services": 17}, "attempts": [], "attempt": 0, "epoch": 0, "rank": 1}
    start |= {"job_id": "1", "checkpoint": ""}
    await runner._run(rollout, start)
    (outcome,) = (Outcome.from_message(message) for message in sent if message["op"] == "result")
    assert (outcome.status, outcome.error_kind) == ("failed", "user")
