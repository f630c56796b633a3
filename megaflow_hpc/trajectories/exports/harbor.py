"""Exports to a Harbor jobs directory, which ``harbor view`` opens.

::

    harbor/CAMPAIGN/config.json, result.json
    harbor/CAMPAIGN/TASK__POLICY__SAMPLE/
      config.json, result.json
      agent/trajectory.json      ATIF (:mod:`~megaflow_hpc.trajectories.exports.atif`), with images/
      verifier/                  test-stdout.txt, reward.json, and the verifier's artifacts
      artifacts/                 other artifacts

Follows Harbor 0.25: the output validates against its models. In Harbor, the ``result.json`` of a job lists its trials
by reward. This export only counts them, because a campaign may have a million.
"""

from __future__ import annotations

import json
import math
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megaflow_hpc.resources import __version__
from megaflow_hpc.trajectories.exports.atif import document, write_images
from megaflow_hpc.trajectories.exports.files import published_directory, safe_name
from megaflow_hpc.trajectories.exports.messages import as_text, finite_rewards, iso_time, round_suffix
from megaflow_hpc.trajectories.reading.conversations import tokens_of_calls

if TYPE_CHECKING:
    from megaflow_hpc.trajectories.exports import ExportJob
    from megaflow_hpc.trajectories.reading.store import Row

HELP = "a Harbor jobs directory, for harbor view"

MAX_NAME = 120
"""Maximum number of characters of a task's name within a trial name. File systems limit a file name to 255 bytes."""
TEST_OUTPUT = "verifier.log"


def write(job: ExportJob) -> list[Path]:
    """Writes the ``harbor`` directory with one job."""
    directory = job.directory / "harbor"
    campaign = job.store.campaign or "campaign"
    with published_directory(directory) as temporary:
        folder = temporary / safe_name(campaign)
        folder.mkdir(mode=0o700)
        job_id = str(uuid.uuid5(uuid.NAMESPACE_URL, f"megaflow-hpc/{campaign}"))
        evals: dict[tuple[str, str], _Evaluation] = {}
        times: list[float] = []
        for row in job.rows():
            trial = _trial(row, campaign, job_id)
            _write_trial(folder / trial["trial_name"], trial, row, campaign)
            evals.setdefault((as_text(row.agent or "unknown"), as_text(row.policy)), _Evaluation()).add(row)
            times = [min([row.started_at, *times[:1]]), max([row.finished_at, *times[1:]])]
        count = len(job.numbers)
        started, finished = iso_time(times[0]), iso_time(times[1])
        stats = {
            "n_completed_trials": count,
            "n_errored_trials": sum(found.errors for found in evals.values()),
            "evals": {
                f"{agent}__{policy}__{as_text(campaign)}": found.stats() for (agent, policy), found in evals.items()
            },
        }
        result = {"id": job_id, "started_at": started, "finished_at": finished, "n_total_trials": count, "stats": stats}
        _put(folder / "result.json", result)
        agents = [{"name": agent, "model_name": policy} for agent, policy in evals]
        datasets = [{"path": as_text(campaign)}]
        _put(folder / "config.json", {"job_name": as_text(campaign), "agents": agents, "datasets": datasets})
    return [directory]


class _Evaluation:
    """Aggregates the rollouts of one agent and policy."""

    def __init__(self) -> None:
        self.rewards: dict[str, list[float]] = {}
        self.trials = self.errors = 0

    def add(self, row: Row) -> None:
        self.trials += 1
        self.errors += bool(row.error_kind)
        for name, value in finite_rewards(row).items():
            sums = self.rewards.setdefault(name, [0.0, 0.0])
            sums[0] += value
            sums[1] += 1

    def stats(self) -> dict[str, Any]:
        metrics = [{f"mean {as_text(name)}": total / count} for name, (total, count) in sorted(self.rewards.items())]
        return {"n_trials": self.trials, "n_errors": self.errors, "metrics": metrics}


def trial_name(row: Row) -> str:
    """Returns a trial name that is unique in the campaign and valid as a file name."""
    task = safe_name(row.task_id)
    if len(task) > MAX_NAME or task != row.task_id:
        task = f"{task[:MAX_NAME]}-{uuid.uuid5(uuid.NAMESPACE_URL, row.task_id).hex[:8]}"
    policy = safe_name(row.group_id.rpartition("/")[2])[:MAX_NAME]
    return f"{task}__{policy}__{row.sample_index}{round_suffix(row)}"


def _trial(row: Row, campaign: str, job_id: str) -> dict[str, Any]:
    name, task = trial_name(row), as_text(row.task_id)
    agent = as_text(row.agent or "unknown")
    policy = as_text(row.policy)
    counts = tokens_of_calls(row)
    started, finished = iso_time(row.started_at), iso_time(row.finished_at)
    trial: dict[str, Any] = {
        "id": str(uuid.uuid5(uuid.NAMESPACE_URL, f"{job_id}/{row.id}")),
        "task_name": task,
        "trial_name": name,
        "trial_uri": f"megaflow-hpc:{as_text(row.id)}",
        "task_id": {"path": task},
        "source": as_text(campaign),
        "task_checksum": "",
        "config": {
            "task": {"path": task},
            "trial_name": name,
            "trials_dir": safe_name(campaign),
            "agent": {"name": agent, "model_name": policy},
            "job_id": job_id,
        },
        "agent_info": {"name": agent, "version": __version__, "model_info": {"name": policy}},
        "agent_result": {
            "n_input_tokens": sum(prompt for prompt, _ in counts),
            "n_output_tokens": sum(sampled for _, sampled in counts),
            "metadata": {"rollout": as_text(row.id), "status": row.status, "turns": len(counts)},
        },
        "started_at": started,
        "finished_at": finished,
        **_phases(row),
    }
    if rewards := finite_rewards(row):
        trial["verifier_result"] = {"rewards": rewards}
    if row.error_kind or row.error:
        trial["exception_info"] = {
            "exception_type": as_text(row.error_kind or row.status),
            "exception_message": as_text(row.error),
            "exception_traceback": "",
            "occurred_at": finished,
        }
    return trial


def _phases(row: Row) -> dict[str, dict[str, str]]:
    """Returns the start and end of each phase. Assumes that the phases follow each other without gaps."""
    phases, at = {}, row.started_at
    for name, seconds in (
        ("environment_setup", row.setup_s),
        ("agent_execution", row.agent_s),
        ("verifier", row.verify_s),
    ):
        if not math.isfinite(seconds):  # a task without a sandbox has no setup
            continue
        phases[name] = {"started_at": iso_time(at), "finished_at": iso_time(at + seconds)}
        at += seconds
    return phases


def _write_trial(folder: Path, trial: dict[str, Any], row: Row, campaign: str) -> None:
    for part in ("agent", "verifier"):
        (folder / part).mkdir(parents=True, mode=0o700)
    _put(folder / "result.json", trial)
    _put(folder / "config.json", trial["config"])
    _put(folder / "agent" / "trajectory.json", document(row, campaign))
    write_images(folder / "agent", row)
    if "verifier_result" in trial:
        _put(folder / "verifier" / "reward.json", trial["verifier_result"]["rewards"])
    for artifact in row.artifacts:
        if artifact.name == TEST_OUTPUT:
            path = folder / "verifier" / "test-stdout.txt"
        else:
            path = folder.joinpath("artifacts", *map(safe_name, artifact.name.split("/")))
        if not path.exists() and not any(parent.is_file() for parent in path.parents):
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            path.write_bytes(artifact.data)


def _put(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, allow_nan=False), encoding="utf-8")
