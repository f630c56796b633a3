"""Who is to blame for a rollout whose last model call has no answer, or whose sandbox is gone."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from contextlib import AsyncExitStack, suppress
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
    place: Path,
    scratch: Path,
    image: str,
    engine: str,
    *agents: type,
    attempt: int = 0,
    steps: tuple[str, ...] = ("x",),
) -> dict[str, tuple[str, str, float | None]]:
    """One attempt of each agent, with an engine of its own, at a task whose tests give 0.

    Args:
        engine: ``up``; ``down``; or ``dies``, after its first answer.
        steps: Instructions of the task's steps.

    Returns:
        Status, kind of error and reward by agent.
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

    def policy(agent: type) -> Policy:
        # An engine that is down ends the agent, whose time must not run out before.
        timeout_s = 5 if agent is Waits and engine != "down" else 300
        named = AgentConfig(name=f"{__name__}:{agent.__name__}", timeout_s=timeout_s)
        return Policy(agents=(named,), model=ModelConfig(path="m"))

    policies = {agent.__name__: policy(agent) for agent in agents}

    class Dying(ScriptedEngine):
        def sample(self, text: str, prompt: Any) -> list[int]:
            if engine == "dies":
                self.script = Script(default=(ScriptedAnswer("EngineDeadError", status=500),))
            return super().sample(text, prompt)

    async def served(name: str, stack: AsyncExitStack) -> dict[str, str]:
        poison = ScriptedTask(pattern=re.compile("poison"), answers=(ScriptedAnswer("no", status=500),))
        runner = web.AppRunner(Dying(Script((poison,), (ScriptedAnswer("good"),)), "m").application(), access_log=None)
        stack.push_async_callback(runner.cleanup)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        port = 1 if engine == "down" else runner.addresses[0][1]
        return {"server": f"{name}.0", "policy": name, "url": f"http://127.0.0.1:{port}", "model_name": "m"}

    async def main() -> list[Trajectory]:
        async with AsyncExitStack() as stack:
            servers = [await served(name, stack) for name in policies]
            gateway = await stack.enter_async_context(ModelGateway(wait_s=2))
            provider = await stack.enter_async_context(ApptainerProvider(scratch))
            gateway.update_endpoints(servers)
            services = Services(config, policies, {"base": image}, provider, gateway)
            stack.callback(services.agents.close)
            rollouts = [Rollout(task.id, name, 0, one.agents[0].title) for name, one in policies.items()]
            ended = await asyncio.gather(*(run_attempt(services, rollout, task, attempt) for rollout in rollouts))
            return [each.trajectory for each in ended]

    found = asyncio.run(main())
    for one in found:
        print(one.policy, one.error)
    return {one.policy: (one.status, one.error_kind, one.reward) for one in found}


@pytest.mark.slow
def test_a_call_at_which_only_its_engine_fails_takes_no_verdict(rootfs: str, scratch: Path, tmp_path: Path) -> None:
    assert run(tmp_path, scratch, rootfs, "up", Swallows, Leaves, LeavesMany, Raises, Waits) == {
        **dict.fromkeys(("Swallows", "Leaves", "LeavesMany"), ("completed", "", 0.0)),
        "Raises": ("completed", "agent", 0.0),
        "Waits": ("truncated", "agent", 0.0),
    }


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["dies", "down"])
def test_an_engine_that_is_dead_for_everybody_is_the_services_failure(
    rootfs: str, scratch: Path, tmp_path: Path, engine: str
) -> None:
    agents = (Swallows, Leaves, Raises, Waits)
    failed = {agent.__name__: ("failed", "model", None) for agent in agents}
    assert run(tmp_path, scratch, rootfs, engine, *agents) == failed


@pytest.mark.slow
def test_an_agent_whose_sandbox_is_lost_twice_has_a_verdict(rootfs: str, scratch: Path, tmp_path: Path) -> None:
    """Nothing tells who ended it: the first time it may have been the node."""
    first = run(tmp_path / "0", scratch, rootfs, "up", EndsItsSandbox)
    assert first["EndsItsSandbox"] == ("failed", "sandbox", None)
    again = run(tmp_path / "1", scratch, rootfs, "up", EndsItsSandbox, attempt=1)
    assert again["EndsItsSandbox"] == ("completed", "agent", 0.0)


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
    rootfs: str,
    scratch: Path,
    tmp_path: Path,
    steps: tuple[str, ...],
    outcome: tuple[str, str, float | None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(tmp_path, scratch, rootfs, "up", DownloadsNothing, steps=steps) == {"DownloadsNothing": outcome}
    assert "nothing to download" in capsys.readouterr().out


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
