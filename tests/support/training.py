"""A campaign without pods: rollouts as an engine would have sampled them, stored in a run directory block by block."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megaflow_hpc.config import parse
from megaflow_hpc.ledger import Ledger, read_blocks
from megaflow_hpc.ledger.tasks import PlannedTask, write_tasks
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.record import PolicyRecord, RunRecord, write_run
from megaflow_hpc.training.plan import StepPlan, TrainingFiles
from megaflow_hpc.trajectories import JournalWriter
from megaflow_hpc.trajectory import TokenSequence, Trajectory
from megaflow_hpc.types import Rollout, Task

VOCABULARY = 259


def training_run(
    path: Path,
    training: dict[str, Any] | None,
    tasks: int = 4,
    samples: int = 4,
    model: str = "",
    held_out: int = 0,
    sampling: dict[str, float] | None = None,
    **more: Any,
) -> RunDir:
    """Make the run directory of a campaign that trains the policy ``default`` and has requested nothing yet.

    Args:
        held_out: number of tasks, the last ones, that are only for evaluation.
        sampling: sampling settings of the policy.
        more: further sections of the campaign file.
    """
    run = RunDir(path)
    run.create()
    Ledger(run).create()
    fields: dict[str, Any] = {
        "name": "sample",
        "tasks": "tasks",
        "agent": "nop",
        "samples": samples,
        "model": {"engine": "vllm", "path": model or "model", "sampling": sampling or {}},
        **more,
    }
    if training is not None:
        fields["training"] = {"policies": {"default": {}}, **training}
    campaign = parse(fields)
    model_fields = campaign.model.model_dump(mode="json") if campaign.model else {}
    names = [f"task-{number}" for number in range(tasks)]
    write_run(
        run,
        RunRecord(
            campaign=campaign.model_dump(mode="json"),
            policies={"default": PolicyRecord(agent={"name": "nop"}, model=model_fields, samples=samples)},
            held_out=names[len(names) - held_out :],
            packed=write_tasks(run, [PlannedTask(Task(name, "", "", "").to_dict(), {}) for name in names]),
        ),
    )
    return run


def sampled(
    rollout: Rollout, reward: float | None, version: int = 0, seed: int = 0, status: str = "completed", turns: int = 2
) -> Trajectory:
    """Return the trajectory of a rollout with a random conversation, drawn from a seed."""
    draw = np.random.default_rng([seed, *rollout.id.encode()])
    one = TokenSequence(rollout.policy)
    verified = status in ("completed", "truncated")
    reward = reward if verified else None
    for _ in range(turns if verified else 0):
        prompt, answer = int(draw.integers(2, 12)), int(draw.integers(1, 9))
        one.tokens.extend(draw.integers(0, VOCABULARY, prompt + answer).tolist())
        one.logprobs.extend([math.nan] * prompt + (-3 * draw.random(answer)).tolist())
        one.loss_mask.extend([0] * prompt + [1] * answer)
        one.weight_versions.extend([-1] * prompt + [version] * answer)
    return Trajectory.begin(
        rollout, 0, status, reward=reward, rewards={} if reward is None else {"reward": reward}, sequences=[one]
    )


class Pods:
    """Stands for all pods of a campaign: samples the rollouts in the ledger's blocks.

    Args:
        reward: rollout → its reward.
        version: returns the number of the weight version that samples; called for each rollout.
    """

    def __init__(
        self,
        run: RunDir,
        reward: Callable[[Rollout], float | None],
        version: Callable[[], int] = lambda: 0,
        pod: str = "pod",
    ) -> None:
        self._run, self._reward, self._version = run, reward, version
        self._done: set[str] = set()
        self._journal = JournalWriter(run.journal_file(pod, "0"))

    def work(
        self,
        most: int | None = None,
        status: Callable[[Rollout], str] = lambda rollout: "completed",
        only: Callable[[Rollout], bool] = lambda rollout: True,
    ) -> int:
        """Sample the requested rollouts that are missing; return their number."""
        todo = [(block.number, r) for block in read_blocks(self._run) for r in block.rollouts if r.id not in self._done]
        todo = [(block, rollout) for block, rollout in todo if only(rollout)]
        for block, rollout in todo[:most]:
            self.store(block, sampled(rollout, self._reward(rollout), self._version(), status=status(rollout)))
        self._journal.commit()
        return len(todo[:most])

    def store(self, block: int, trajectory: Trajectory, epoch: int = 0) -> None:
        """Append one trajectory."""
        self._done.add(trajectory.id)
        record = {"kind": "trajectory", "block": block, "epoch": epoch, "trajectory": trajectory.to_record()}
        self._journal.append(record)

    def close(self) -> None:
        """Close the journal."""
        self._journal.close()


def trained_on(files: TrainingFiles) -> list[str]:
    """Return the ids of the rollouts in a training's plans, in the order of steps. A rollout used twice appears
    twice."""
    plans = [plan for number in files.numbers(StepPlan) if (plan := files.read(StepPlan, number))]
    return [rollout.id for plan in plans for rollout in plan.rollouts]


def rollouts(tasks: Sequence[str], samples: int, round: int = 0) -> list[Rollout]:
    """Return every sample of these tasks."""
    return [Rollout(task, "default", sample, "nop", round) for task in tasks for sample in range(samples)]
