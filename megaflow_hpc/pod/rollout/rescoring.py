"""Scores stored rollouts again, without sampling. It uses the verification of their tasks, or the user's scorer.

A task's tests need the agent's files. They are restored in a fresh sandbox from the stored patch and artifacts. These
cover all files that matter if the tests see only the work directory and the artifacts (verification ``fresh``), and the
work directory is in a checkout. If files are missing, a Python ``score`` is called with a sandbox that raises an error
on any use. If it uses that sandbox, or if the task is not a Python task, the rollout is skipped
(:class:`~megaflow_hpc.errors.UnscoredError`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, NoReturn, cast

from megaflow_hpc.config.sections import AgentConfig
from megaflow_hpc.environments.sandbox.sandbox import ApptainerSandbox
from megaflow_hpc.errors import LimitError, MegaflowError, UnscoredError, UserCodeError
from megaflow_hpc.pod.outcome import COST_FILE
from megaflow_hpc.pod.rollout.judges import JUDGE_FILE, Judges, by_role, conversation
from megaflow_hpc.pod.rollout.sandboxes import Sandboxes, rollout_spec
from megaflow_hpc.pod.rollout.services import Services
from megaflow_hpc.tasks import checkout
from megaflow_hpc.tasks.formats import VerificationContext, format_of
from megaflow_hpc.tasks.python_class import call
from megaflow_hpc.tasks.sandboxes import NoSandbox, verification_context
from megaflow_hpc.tasks.scoring import Scorer, check_turns, scores_of
from megaflow_hpc.tasks.steps import prepare, run_conversation, run_steps
from megaflow_hpc.trajectory import Trajectory
from megaflow_hpc.types import Task, Verdict, main_reward

PATCH, PATCH_ERROR, LOG = "patch", "patch.error", "verifier.log"
"""Names of artifacts. They contain the agent's changes to the checkout, the reason why these are incomplete, and the
output of the tests."""


@dataclass
class NewScore:
    """The rewards that a scorer gave to one rollout."""

    rewards: Mapping[str, float]
    error: str = ""
    """Reason why the tests gave no valid reward. The reward is then 0."""
    calls: list[dict[str, Any]] = field(default_factory=list)
    """Calls of judges (:meth:`Judges.calls`)."""

    @property
    def reward(self) -> float | None:
        """Reward of the whole rollout, or ``None`` if the scorer gave none."""
        return main_reward(self.rewards)


class Rescoring:
    """Scores stored rollouts of one campaign.

    Args:
        services: Provide sandboxes and a gateway to the campaign's judges.
    """

    def __init__(self, services: Services) -> None:
        self._services = services

    async def by_scorer(self, scorer: Scorer, task: Task, trajectory: Trajectory) -> NewScore:
        """Scores a rollout with the user's function.

        Raises:
            UnscoredError: The function raised an error, returned something other than rewards, or used the sandbox.
            ModelServiceError: A judge is down.
            ConfigError: The function asks a judge, but the campaign has none.
        """
        judges = self._judges(trajectory)
        if "judge" in scorer.parameters and not judges.models:
            raise UnscoredError(f"{scorer.title} asks a judge; the campaign has no model with judge: true")
        stored = {artifact.name: artifact.data for artifact in trajectory.artifacts}
        known: dict[str, Any] = {
            "messages": conversation(trajectory),
            "roles": by_role(trajectory),
            "patch": stored.get(PATCH, b"").decode("utf-8", "replace"),
            "artifacts": stored,
            "task": task,
            "trajectory": trajectory,
            "reward": trajectory.reward,
            "rewards": dict(trajectory.rewards),
        }
        more = {name: value for name, value in known.items() if name in scorer.parameters}
        sandbox = WithoutFiles(NoSandbox(task), "the scorer uses the sandbox, which is not restored here")
        sandbox.close()
        given = cast(ApptainerSandbox, sandbox) if "sandbox" in scorer.parameters else None
        try:
            method = scorer.method()
            if "judge" in scorer.parameters:
                async with judges.open() as judge:
                    value = await call(task, method, given, task.verifier_timeout_s, judge=judge, **more)
            else:
                value = await call(task, method, given, task.verifier_timeout_s, **more)
            sandbox.check()
            rewards = scores_of(scorer, task, method, value, len(trajectory.turns))
        except UserCodeError as error:
            sandbox.check()
            raise UnscoredError(str(error)) from error
        return NewScore(rewards, calls=judges.calls())

    async def by_task(self, task: Task, agent: AgentConfig, trajectory: Trajectory) -> NewScore:
        """Scores a rollout with its task's own verification, on the agent's restored files.

        Raises:
            UnscoredError: The record lacks files that the verification needs.
            SandboxError: This node cannot run the tests.
            ModelServiceError: A judge is down.
            ConfigError: The task cannot be verified in this way.
        """
        services, sandboxes, judges = self._services, Sandboxes(self._services.provider), self._judges(trajectory)
        stored = {artifact.name: artifact.data for artifact in trajectory.artifacts}
        context = verification_context(
            task,
            services.config.environment,
            services.images,
            sandboxes.start,
            messages=lambda: conversation(trajectory),
            judge=judges.open if judges.models else None,
            roles=lambda: by_role(trajectory),
            artifacts=lambda: {name: data for name, data in stored.items() if name not in (COST_FILE, JUDGE_FILE, LOG)},
        )
        if not task.image:
            verdict = await run_conversation(task, NoSandbox(task), context, _nothing)
            return self._score(verdict, trajectory, judges)
        if task.services:
            raise UnscoredError("its task has services, whose state is not stored")
        if len(format_of(task).steps(task)) > 1:
            raise UnscoredError("its task has several steps, but only their changes are stored, not their order")
        sandbox = await sandboxes.start(rollout_spec(task, agent, services.images, services.config.environment))
        try:
            why = _lacking(stored, context) if task.kind == "python" else ""
            if why:
                verdict = await self._without_files(task, sandbox, context, why)
            else:
                await prepare(task, sandbox)

                async def restore(number: int, step: Task) -> None:
                    await _restore(step, sandbox, stored, context)

                verdict = await run_steps(task, sandbox, context, restore)
        except _NoCheckout as error:
            if task.kind != "python":
                raise UnscoredError(str(error)) from None
            await sandbox.stop()
            sandbox = await sandboxes.start(sandbox.spec)
            verdict = await self._without_files(task, sandbox, context, str(error))
        finally:
            await sandbox.stop()
        return self._score(verdict, trajectory, judges)

    def _judges(self, trajectory: Trajectory) -> Judges:
        return self._services.judges(trajectory.id)

    def _score(self, verdict: Verdict, trajectory: Trajectory, judges: Judges) -> NewScore:
        try:
            check_turns(verdict.rewards, len(trajectory.turns))
        except UserCodeError as error:
            raise UnscoredError(str(error)) from None
        rewards = {"reward": verdict.reward or 0.0, **verdict.rewards}
        return NewScore(rewards, verdict.error, judges.calls())

    async def _without_files(
        self, task: Task, sandbox: ApptainerSandbox, context: VerificationContext, why: str
    ) -> Verdict:
        """Calls ``setup`` with a sandbox, and then ``score`` with a sandbox that raises an error on any use."""
        guarded = WithoutFiles(sandbox, why)
        stand_in = cast(ApptainerSandbox, guarded)
        await prepare(task, stand_in)
        guarded.close()
        conversing = Task.from_dict({**task.to_dict(), "image": ""})
        try:
            verdict = await format_of(task).verify(conversing, stand_in, context, stay=False)
        except (UserCodeError, LimitError) as error:
            guarded.check()
            verdict = Verdict(error=str(error))
        guarded.check()
        return verdict


async def _nothing(number: int, step: Task) -> None:
    """Replaces an agent, and does nothing."""


class _NoCheckout(MegaflowError):
    """The record has no patch, because the work directory is not in a checkout."""


class WithoutFiles:
    """Wraps a sandbox and, once closed, raises an error on any use, because the agent's files are missing.

    Args:
        sandbox: The wrapped sandbox.
        why: Reason why the files are missing.
    """

    def __init__(self, sandbox: Any, why: str) -> None:
        self._sandbox, self._why, self._closed, self._used = sandbox, why, False, False

    def close(self) -> None:
        """Makes any later use raise an error."""
        self._closed = True

    def check(self) -> None:
        """Raises :class:`UnscoredError` if the sandbox was used after it was closed."""
        if self._used:
            raise UnscoredError(self._why)

    def __getattr__(self, name: str) -> Any:
        if self._closed:
            self._refuse()
        return getattr(self._sandbox, name)

    def _refuse(self) -> NoReturn:
        self._used = True
        raise UserCodeError(self._why)


def _lacking(stored: Mapping[str, bytes], context: VerificationContext) -> str:
    """Returns the reason why the record lacks files that the verification sees. Returns an empty string if it may
    contain them all."""
    if error := stored.get(PATCH_ERROR):
        return f"its patch is incomplete: {error.decode('utf-8', 'replace')}"
    if not context.fresh:
        return "its verification sees files outside of the checkout, which are not stored (verification: fresh)"
    return ""


async def _restore(
    task: Task, sandbox: ApptainerSandbox, stored: Mapping[str, bytes], context: VerificationContext
) -> None:
    """Restores the agent's files in a sandbox that has been prepared as for the agent.

    Raises:
        UnscoredError: The record lacks some of the files.
    """
    only_artifacts = await format_of(task).put_back(task, sandbox, stored)
    if only_artifacts:
        return
    if why := _lacking(stored, context):
        raise UnscoredError(why)
    note = json.loads(checkout.read_note(sandbox) or b"null")
    if not note or not PurePosixPath(task.workdir or "/").is_relative_to(note["top"]):
        raise _NoCheckout(f"the agent's changes are not stored: {task.workdir or '/'} is in no git checkout")
    if PATCH not in stored and PATCH_ERROR not in stored:
        raise _NoCheckout(
            "the record has no patch, not even an empty one: the agent's sandbox had no checkout or no git"
        )
    patch = stored.get(PATCH)
    if patch:
        problem = await checkout.apply(sandbox, patch)
        if problem:
            raise UnscoredError(f"its patch cannot be applied: {problem}")
