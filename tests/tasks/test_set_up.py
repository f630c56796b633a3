"""Processes that a task's set-up leaves must end before the agent starts, because its environment contains a key."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from megaflow_hpc.environments import ApptainerProvider, ApptainerSandbox, SandboxSpec
from megaflow_hpc.tasks.formats import VerificationContext
from megaflow_hpc.tasks.harbor.reader import read_harbor_task
from megaflow_hpc.tasks.loading import load_tasks
from megaflow_hpc.tasks.steps import prepare, run_steps
from megaflow_hpc.types import Task
from tests.support.harbor_tasks import write_files

LEFT = "(setsid sh -c 'trap \\\"\\\" HUP TERM; (while :; do : >/app/seen; sleep 0.05; done) & wait' >/dev/null 2>&1 &)"
"""A daemon in its own session that starts new processes all the time."""
TOML = '[environment]\ndocker_image = "base"\nworkdir = "/app"\n'
HEALTHCHECK = f'[environment.healthcheck]\ncommand = "{LEFT}; true"\ninterval_sec = 1\n'
FILES = {"instruction.md": "x", "tests/test.sh": "echo 1 > /logs/verifier/reward.txt"}
STEPS = '[[steps]]\nname = "one"\n[[steps]]\nname = "two"\n'
SETUP = LEFT.replace('\\"', '"') + "\n"
CLASS = f"""
class Left:
    image, workdir, instruction = "base", "/app", "x"
    async def setup(self, sandbox):
        await sandbox.exec({SETUP!r})
    async def score(self, sandbox):
        return 1
"""


def a_task(kind: str, home: Path) -> Task:
    if kind == "class":
        (home / "left_by_setup.py").write_text(CLASS)
        (task,) = load_tasks(["left_by_setup:Left"], home)
        return task
    files = dict(FILES)
    if kind == "steps":
        for step in ("one", "two"):
            files |= {f"steps/{step}/{name}": text for name, text in FILES.items()}
            files[f"steps/{step}/workdir/setup.sh"] = SETUP
    toml = TOML + (STEPS if kind == "steps" else HEALTHCHECK)
    return read_harbor_task(write_files(home / "task", files | {"task.toml": toml}))


@pytest.mark.parametrize("kind", ["health check", "steps", "class"])
@pytest.mark.parametrize("user", [None, "1000"])
def test_processes_that_set_up_left_have_ended_when_the_agent_starts(
    rootfs: str, scratch: Path, tmp_path: Path, kind: str, user: str | None
) -> None:
    task = a_task(kind, tmp_path)
    seen: list[tuple[bool, int]] = []

    async def agent(number: int, step: Task) -> None:
        busy = sandbox.busy
        found = await sandbox.exec("rm -f seen; sleep 0.3; ls /proc | grep -c '^[0-9]'; test ! -e seen")
        seen.append((busy, found.exit_code))

    async def main() -> None:
        nonlocal sandbox
        async with ApptainerProvider(scratch) as provider:
            async with await provider.start(SandboxSpec(rootfs, workdir="/app", user=user)) as sandbox:
                await prepare(task, sandbox)
                await run_steps(task, sandbox, VerificationContext(), agent)

    sandbox: ApptainerSandbox = None  # type: ignore[assignment]
    asyncio.run(main())
    assert seen == [(False, 0)] * (2 if kind == "steps" else 1)
