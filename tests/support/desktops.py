"""The image of desktops, agents that act on a screen without a model, and rollouts of single tasks."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megaflow_hpc.config.sections import EnvironmentConfig
from megaflow_hpc.environments import ApptainerProvider, ApptainerSandbox
from megaflow_hpc.tasks.sandboxes import sandbox_spec, verification_context
from megaflow_hpc.tasks.services import services_of
from megaflow_hpc.tasks.steps import prepare, run_steps
from megaflow_hpc.types import AgentResult, ModelEndpoint, Sandbox, Task


@pytest.fixture(scope="session")
def desktop_sif(base_sif: Path) -> Path:
    """Return the image of desktops that the launchers build."""
    path = base_sif.with_name("desktop.sif")
    if not path.exists():
        pytest.fail(
            f"{path} does not exist; launchers/desktop-image.sh {base_sif} {path} builds it, as launchers/test does"
        )
    return path


async def screen(sandbox: ApptainerSandbox | Sandbox, *words: str, **env: str) -> dict[str, Any]:
    """Run a verb of ``screen`` and return its answer."""
    done = await sandbox.exec(["screen", *words], env=env)
    return json.loads(done.stdout)


async def act(sandbox: ApptainerSandbox | Sandbox, **action: Any) -> dict[str, Any]:
    """Carry out one action and return the answer."""
    return await screen(sandbox, "do", json.dumps(action))


class RandomClicker:
    """An agent that clicks at random places of the screen of a task of MiniWoB++."""

    def __init__(self, clicks: int) -> None:
        self._clicks = clicks

    async def run(self, task: Task, sandbox: Sandbox, model: ModelEndpoint | None) -> AgentResult:
        """Click, each time at a place that depends on the task alone."""
        chance = random.Random(task.id)
        for _ in range(self._clicks):
            await act(sandbox, action="left_click", coordinate=[chance.randrange(480), chance.randrange(150, 630)])
        return AgentResult()


async def played(task: Task, images: Mapping[str, str], provider: ApptainerProvider, agent: Any) -> tuple[float, str]:
    """Run one rollout of a task with an agent. Return its reward, and the error of the agent or the verifier."""
    environment = EnvironmentConfig(network="gateway")
    errors: list[str] = []

    async def run(number: int, step: Task) -> None:
        result = await agent.run(step, sandbox, None)
        errors.append(result.error or "")

    async with services_of(task, images, environment, provider.start) as services:
        spec = replace(sandbox_spec(task, images, environment), services=services.reachable)
        async with await provider.start(spec) as sandbox:
            await prepare(task, sandbox)
            context = verification_context(task, environment, images, provider.start)
            verdict = await services.guard(run_steps(task, sandbox, context, run))
    return verdict.reward, " ".join(filter(None, [*errors, verdict.error]))
