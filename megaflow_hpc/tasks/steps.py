"""The steps of a multi-step task: one after the other in one sandbox, each with an agent run and a verdict of its own.

A step is a :class:`Task` like any other, so that agents and the verifier need not know of steps. A single-step task is
its own only step.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megaflow_hpc.errors import SandboxError
from megaflow_hpc.tasks.healthcheck import wait_healthy
from megaflow_hpc.types import Sandbox, Task, Verdict

SETUP_S = 600.0


def steps_of(task: Task) -> list[Task]:
    """One task per step, in order."""
    harbor = task.metadata.get("harbor", {})
    if not harbor.get("steps"):
        return [task]
    common = {key: value for key, value in harbor.items() if key not in ("steps", "healthcheck", "upload_environment")}
    return [
        replace(
            task,
            instruction=step["instruction"],
            user=step["user"] or task.user,
            agent_timeout_s=step["agent_timeout_s"] or task.agent_timeout_s,
            verifier_timeout_s=step["verifier"]["timeout_s"],
            metadata={**task.metadata, "harbor": {**common, **step, "step": step["name"]}},
        )
        for step in harbor["steps"]
    ]


def name_of(step: Task) -> str:
    """The step's name; empty for a task without steps."""
    return str(step.metadata.get("harbor", {}).get("step", ""))


async def begin_step(step: Task, sandbox: Sandbox) -> None:
    """Uploads the step's ``workdir/``, runs its ``setup.sh``, waits until it is healthy.

    Raises:
        SandboxError: it cannot be set up; the rollout fails.
    """
    name = name_of(step)
    if not name:
        return
    harbor = step.metadata["harbor"]
    workdir = step.workdir or "/"
    if files := harbor.get("workdir"):
        await sandbox.upload(files, workdir)
        if os.path.isfile(os.path.join(files, "setup.sh")):
            done = await sandbox.exec(["bash", os.path.join(workdir, "setup.sh")], cwd=workdir, timeout_s=SETUP_S)
            if done.exit_code:
                raise SandboxError(
                    f"task {step.id}: step {name}: setup.sh ended with {done.exit_code}: {done.stderr.strip()[-300:]}"
                )
    if check := harbor.get("healthcheck"):
        await wait_healthy(f"{step.id}: step {name}", sandbox, check)


def goes_on(step: Task, verdict: Verdict) -> bool:
    """Whether the next step may begin: verified, and no reward below the step's ``min_reward``."""
    if verdict.error:
        return False
    wanted = step.metadata.get("harbor", {}).get("min_reward") or {}
    return all(verdict.rewards.get(name, float("-inf")) >= least for name, least in wanted.items())


@dataclass(frozen=True)
class StepVerdict:
    """``verdict`` of the step ``name``."""

    name: str
    verdict: Verdict


def combine(task: Task, verdicts: Sequence[StepVerdict]) -> Verdict:
    """One verdict of a task from those of the steps that were run.

    ``mean``: of each named reward over the verified steps, one that a step does not name counting as 0; steps that were
    not reached do not count. ``final``: of the last step that was run.
    """
    if len(verdicts) == 1 and not verdicts[0].name:
        return verdicts[0].verdict
    artifacts = [artifact for step in verdicts for artifact in step.verdict.artifacts]
    output = "".join(f"=== step {step.name} ===\n{step.verdict.output}\n" for step in verdicts)
    last = verdicts[-1].verdict
    if last.error:
        return Verdict(output=output, error=f"step {verdicts[-1].name}: {last.error}", artifacts=artifacts)
    rewards = dict(last.rewards)
    if task.metadata["harbor"].get("reward_strategy") != "final":
        names = list(dict.fromkeys(name for step in verdicts for name in step.verdict.rewards))
        rewards = {n: sum(step.verdict.rewards.get(n, 0.0) for step in verdicts) / len(verdicts) for n in names}
    return Verdict(rewards.get("reward", next(iter(rewards.values()))), rewards, output, artifacts=artifacts)
