"""Progress of training: the ``training`` section of ``status --json``, also shown by ``status`` and ``watch``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megaflow_hpc.config.training import TrainingConfig
from megaflow_hpc.resources import docs
from megaflow_hpc.rundir.amendments import TRAINER, Amendment, Amendments, settings
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.marks import Marks
from megaflow_hpc.rundir.training import Commit, TrainingView

NOTHING_SAMPLED = "nothing sampled"
"""Reason for dropping a rollout that has no tokens to train on (:mod:`megaflow_hpc.training.algorithms.choice`)."""
SUSPICIOUS_Z = 6.0
"""Warn if the absolute value of ``sampling_z``, averaged over the last steps, exceeds this."""
SUSPICIOUS_SHARE = 0.03
"""Warn only if ``sampling_temperature`` deviates from 1 by more than this. In large samples, even harmless
deviations have a high z-score."""
STEPS = 5
"""Number of latest steps to show. Metrics are averaged over these steps."""
SHOWN = {
    "reward": "reward",
    "pass_rate": "passed",
    "staleness": "staleness",
    "entropy": "entropy",
    "clipped": "clipped",
    "mismatch": "mismatch",
    "sampling_z": "sampling_z",
    "sampling_temperature": "sampling_temperature",
    "tokens_per_s": "tokens_per_s",
    "seconds": "seconds",
    "seconds/wait": "wait_s",
    "not_finite": "not_finite",
    "dropped/amended": "left_out",
}
"""Maps the name of each metric in a commit to its name in the status."""
BY_AGENT = "reward/"
"""Prefix of the metrics in a commit that contain the mean reward of each agent, if there are several."""


@dataclass(frozen=True)
class TrainerJob:
    """A running or queued trainer."""

    state: str
    """``running`` or ``queued``."""
    job_id: str = ""
    node: str = ""
    reason: str = ""
    """Slurm's reason for pending. Empty if the trainer is running."""


class Trainings:
    """Computes the training progress of a run's policies."""

    def __init__(self, run: RunDir, config: TrainingConfig) -> None:
        self._config, self._marks = config, Marks(run)
        self._amendments = {policy: Amendments(run, policy) for policy in config.policies}
        self._views = {policy: TrainingView(run, policy) for policy in config.policies}

    def status(self, jobs: Mapping[str, TrainerJob] | None) -> dict[str, dict[str, Any]]:
        """Returns the progress of each trained policy.

        Args:
            jobs: Running or queued trainers, by policy. ``None`` if unknown.
        """
        return {policy: self._policy(view, jobs) for policy, view in self._views.items()}

    def _policy(self, view: TrainingView, jobs: Mapping[str, TrainerJob] | None) -> dict[str, Any]:
        commits = view.commits(STEPS)
        newest = commits[-1] if commits else Commit(step=0)
        amendments = self._amendments[view.policy].read()
        last = [{"step": commit.step, "at": round(commit.at, 3), **_shown(commit)} for commit in commits]
        means = _means(last)
        return {
            "step": newest.step,
            "steps": settings(amendments).get("steps", self._config.steps),
            "weights": newest.weights,
            "last": last,
            **means,
            "warnings": [*_sampling_warning(means), *_nothing_warning(commits), *_amended_warning(amendments, newest)],
            "trainer": self._trainer(view, newest, jobs),
        }

    def _trainer(self, view: TrainingView, newest: Commit, jobs: Mapping[str, TrainerJob] | None) -> dict[str, Any]:
        starts, word = view.trainers(), view.last_word()
        latest = starts[-1] if starts else None
        trainer: dict[str, Any] = {
            "starts": len(starts),
            "node": latest.node if latest else "",
            "job_id": latest.job_id if latest else "",
        }
        job = (jobs or {}).get(view.policy)
        if job is not None:
            trainer |= {"state": job.state, "job_id": job.job_id, "node": job.node}
            if job.reason:
                trainer["cause"] = job.reason
        elif not view.open and (newest.step or self._marks.finished):
            trainer["state"] = "done"
        elif jobs is None:
            trainer["state"] = "unknown"
        else:
            trainer["state"] = "ended" if latest or word else "not started"
        if word is not None:
            last_word = {"word": word.word, "node": word.node, "exit_status": word.exit_status, "log": word.log}
            if word.word != "done":
                last_word["cause"] = word.cause
            trainer["last_word"] = last_word
        return trainer


def _sampling_warning(means: Mapping[str, float | None]) -> Iterator[str]:
    z, seen = means["sampling_z"], means["sampling_temperature"]
    if z is not None and seen is not None and abs(z) > SUSPICIOUS_Z and abs(seen - 1) > SUSPICIOUS_SHARE:
        yield (
            f"tokens seem to be sampled at {seen:.2g} times the trained temperature (z {z:.0f}): the engine "
            "does not sample with the probabilities that it reports; compare its options with the policy's sampling"
        )


def _nothing_warning(commits: list[Commit]) -> Iterator[str]:
    dropped = sum(commit.metrics.get(f"dropped/{NOTHING_SAMPLED}", 0.0) for commit in commits)
    if dropped > sum(commit.metrics.get("rollouts", 0.0) for commit in commits):
        yield (
            f"{dropped:.0f} rollouts of the last {len(commits)} steps had no token that the policy sampled freely, and "
            "are not trained on: the agent does not call it, overrides its sampling, or constrains its answers "
            f"({docs('reference/request-options.md')})"
        )


def _amended_warning(amendments: list[Amendment], newest: Commit) -> Iterator[str]:
    recent = [one for one in amendments if one.by == TRAINER and one.step > newest.step - STEPS]
    for amendment in recent[-STEPS:]:
        what = (
            f"without {', '.join(amendment.rollouts)}" if amendment.rollouts else f"in rows of {amendment.microbatch}"
        )
        yield f"step {amendment.step} is trained {what}: {amendment.cause}"


def _shown(commit: Commit) -> dict[str, float]:
    return {name: commit.metrics[metric] for metric, name in SHOWN.items() if metric in commit.metrics}


def _means(steps: list[dict[str, float]]) -> dict[str, float | None]:
    """Returns the mean of each metric over the steps that report it, and ``wait_share``, the fraction of time spent
    waiting."""
    means: dict[str, float | None] = {}
    for name in SHOWN.values():
        values = [step[name] for step in steps if name in step]
        means[name] = sum(values) / len(values) if values else None
    seconds = sum(step.get("seconds", 0.0) for step in steps)
    means["wait_share"] = sum(step.get("wait_s", 0.0) for step in steps) / seconds if seconds else None
    return means
