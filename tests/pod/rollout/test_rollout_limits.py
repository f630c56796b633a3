"""What becomes of a rollout whose agent passes a limit of its sandbox: its own doing, and verified like any other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from megaflow_hpc.config import AgentConfig, CampaignConfig, Policy
from megaflow_hpc.environments import ApptainerProvider
from megaflow_hpc.host.files import remove_tree
from megaflow_hpc.host.wire import pack, unpack
from megaflow_hpc.model.gateway.server import ModelGateway
from megaflow_hpc.pod.outcome import Outcome
from megaflow_hpc.pod.rollout.rollout import run_attempt
from megaflow_hpc.pod.rollout.services import Services
from megaflow_hpc.tasks.harbor.reader import read_harbor_task
from megaflow_hpc.trajectory import Trajectory
from megaflow_hpc.types import AgentResult, ModelEndpoint, Rollout, Sandbox, Task

HOG = "python3 -c 'held = []\nwhile True: held.append(b\"x\" * 10_000_000)'"


class Recovers:
    """Passes the memory limit, reads what happened, and solves the task."""

    async def run(self, task: Task, sandbox: Sandbox, model: ModelEndpoint | None) -> AgentResult:
        result = await sandbox.exec(HOG, timeout_s=60)
        await sandbox.exec(["sh", "-c", 'echo "$1" > /answer', "sh", result.breach])
        return AgentResult()


class Spins:
    """Uses up its CPU time, then goes on as if nothing had been."""

    async def run(self, task: Task, sandbox: Sandbox, model: ModelEndpoint | None) -> AgentResult:
        await sandbox.exec("echo 'memory limit' > /answer")
        while True:
            await sandbox.exec("while :; do :; done", timeout_s=60)


BURN = "python3 -c 'import time; held = b\"x\" * 60_000_000\nwhile time.process_time() < 0.6: pass'"


class Burns:
    """Takes CPU time, and some memory."""

    async def run(self, task: Task, sandbox: Sandbox, model: ModelEndpoint | None) -> AgentResult:
        await sandbox.exec(BURN, timeout_s=60)
        return AgentResult()


def run(place: Path, image: str, task: Task, agents: dict[str, str], **environment: object) -> dict[str, Trajectory]:
    """Runs one attempt of each agent, given by policy."""
    campaign = {"name": "x", "tasks": str(place), "agent": "nop", "environment": {"network": "none", **environment}}
    config = CampaignConfig.model_validate(campaign)
    policies = {name: Policy(agents=(AgentConfig(name=agent),)) for name, agent in agents.items()}

    async def main() -> dict[str, Trajectory]:
        async with ApptainerProvider(place / "scratch") as provider:
            services = Services(config, policies, {"base": image}, provider, ModelGateway())
            rollouts = [Rollout(task.id, name, 0, agent) for name, agent in agents.items()]
            ended = await asyncio.gather(*(run_attempt(services, rollout, task, 0) for rollout in rollouts))
            return {each.trajectory.policy: each.trajectory for each in ended}

    found = asyncio.run(main())
    remove_tree(place / "scratch")
    return found


@pytest.fixture
def task(tmp_path: Path) -> Task:
    """Solved where /answer names the limit; the reference solution is the hog itself."""
    root = tmp_path / "task"
    for name, text in {
        "task.toml": 'version = "1.0"\n[environment]\ndocker_image = "base"\nmemory_mb = 200\n',
        "instruction.md": "Use much memory.\n",
        "tests/test.sh": "grep -c 'memory limit' /answer > /logs/verifier/reward.txt || true\n",
        "solution/solve.sh": f"echo 'memory limit' > /answer\n{HOG}\n",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return read_harbor_task(root)


@pytest.mark.slow
def test_a_limit_passed_is_the_agents_doing_and_the_rollout_is_verified(
    rootfs: str, tmp_path: Path, task: Task
) -> None:
    agents = {"oracle": "oracle", "recovers": f"{__name__}:Recovers", "spins": f"{__name__}:Spins"}
    found = run(tmp_path, rootfs, replace(task, limits=replace(task.limits, cpu_s=3)), agents)
    assert {name: t.status for name, t in found.items()} == {
        "oracle": "completed",
        "recovers": "completed",
        "spins": "truncated",
    }
    assert {t.error_kind for t in found.values()} == {"agent"}
    assert "memory limit" in found["oracle"].error
    assert found["recovers"].error.startswith("memory limit: ")
    assert "has ended: cpu time limit: " in found["spins"].error
    assert {name: t.reward for name, t in found.items()} == dict.fromkeys(agents, 1.0)


@pytest.mark.parametrize("verification", ["shared", "fresh"])
def test_what_its_sandboxes_used_is_part_of_a_rollout(
    rootfs: str, tmp_path: Path, make_task: Callable[..., Path], verification: str
) -> None:
    """The verifier's own sandbox too; what another process sees is what came out of the journal's record."""
    root = make_task(tmp_path, "burns")
    with (root / "task.toml").open("a") as file:
        file.write('workdir = "/app"\n')
    (root / "tests/test.sh").write_text(f"{BURN.replace('60_000_000', '1000')}\necho 1 > /logs/verifier/reward.txt\n")
    task = read_harbor_task(root)
    found = run(tmp_path, rootfs, task, {"burns": f"{__name__}:Burns"}, verification=verification)["burns"]
    assert (found.status, found.reward) == ("completed", 1.0), found.error
    stored = Trajectory.from_record(unpack(pack(found.to_record())))
    assert 1.1 <= (stored.cpu_s or 0) <= 4
    assert 60 <= (stored.memory_peak_mb or 0) <= 120
    assert Outcome.of(found).to_event().cpu_s == round(stored.cpu_s or 0, 2)
