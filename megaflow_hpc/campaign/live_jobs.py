"""Queries the state of a run's jobs in Slurm: queued, running, and the reasons for pending.

A single ``squeue`` queries all jobs of a campaign. All processes that follow the campaign (``run``, ``watch``,
``status``, autoscalers and waiting trainers) share the answer through a file::

    RUN/ledger/queue.json     time of the query, the arrays queried, and the answer

The file also contains a budget that limits all of these processes together to 60 requests to slurmctld per hour.

``python -m megaflow_hpc.campaign.live_jobs RUN`` prints the number of running and queued pods, for a waiting trainer.
It exits with 1 if the number is unknown.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from megaflow_hpc.config import CampaignConfig
from megaflow_hpc.errors import SiteError
from megaflow_hpc.ledger import Ledger
from megaflow_hpc.ledger.leader import SCALER, Leader
from megaflow_hpc.monitor.training import TrainerJob
from megaflow_hpc.rundir.layout import RunDir, try_read_json, write_record
from megaflow_hpc.rundir.marks import Marks
from megaflow_hpc.rundir.record import RunRecord, read_run
from megaflow_hpc.rundir.training import TrainingView
from megaflow_hpc.slurm import accounting, site
from megaflow_hpc.slurm.accounting import JobState
from megaflow_hpc.slurm.arrays import Arrays
from megaflow_hpc.slurm.ids import array_of, number

ASK_SLURM_S = 30.0
"""Seconds between queries while the budget in :class:`QueueAnswer` lasts."""

DISABLED = "presently disabled"
"""Part of Slurm's error message about requeueing a job that has Requeue=0."""
SOON_S = 8.0
"""Seconds between queries until Slurm reports why new jobs are pending."""


BURST = 8.0
"""Maximum number of queries in quick succession."""
REFILL_S = 180.0
"""Seconds after which the budget allows another query.

Each query sends two requests to slurmctld, for the user's jobs and for the partitions. An hour therefore has at most 2
x (8 + 3600 / 180) = 56 requests.
"""
FUTURE_S = 60.0
"""Ignore answers whose time is more than this many seconds in the future, because their host's clock is wrong."""


class QueueAnswer(msgspec.Struct):
    """Content of ``queue.json``."""

    asked_at: float = 0.0
    """Time of the query, in Unix seconds."""
    budget: float = BURST
    """Number of further queries allowed at ``asked_at``."""
    arrays: list[str] = []
    """Jobs and arrays that were queried."""
    jobs: list[JobState] | None = None
    """Elements of these arrays. ``None`` if jobs were submitted, changed or cancelled since the query."""


class QueueCache:
    """Caches a run's latest squeue answer in a file that all processes share. Processes of other users only read it."""

    def __init__(self, run: RunDir) -> None:
        self._path = run.ledger / "queue.json"
        self._answer = QueueAnswer()
        try:
            self.owner = run.path.stat().st_uid
        except OSError:  # the run was deleted
            self.owner = os.getuid()

    def read(self, arrays: Collection[str], max_age_s: float) -> tuple[float, list[JobState]] | None:
        """Returns (age in seconds, jobs) of the cached answer. Returns ``None`` if the caller must query squeue.

        Returns an answer older than ``max_age_s`` if the budget is spent. If ``max_age_s`` is 0, the caller must always
        query squeue.
        """
        self._answer = answer = try_read_json(self._path, QueueAnswer) or QueueAnswer()
        age_s = time.time() - answer.asked_at
        if max_age_s <= 0 or answer.jobs is None or age_s < -FUTURE_S or not set(arrays) <= set(answer.arrays):
            return None
        if age_s < max_age_s or self._left(age_s) < 1:
            return max(0.0, age_s), answer.jobs
        return None

    def write(self, arrays: Iterable[str], jobs: Iterable[JobState]) -> None:
        """Publishes an answer and deducts the query from the budget."""
        now = time.time()
        left = max(0.0, self._left(now - self._answer.asked_at) - 1)
        self._put(QueueAnswer(now, left, sorted(arrays), list(jobs)))

    def forget(self) -> None:
        """Drops the answer after jobs were submitted, changed or cancelled. Keeps the budget."""
        answer = try_read_json(self._path, QueueAnswer)
        if answer and answer.jobs is not None:
            answer.jobs = None
            self._put(answer)

    def _left(self, age_s: float) -> float:
        return min(BURST, self._answer.budget + max(0.0, age_s) / REFILL_S)

    def _put(self, answer: QueueAnswer) -> None:
        self._answer = answer
        if self.owner == os.getuid():
            with contextlib.suppress(OSError):  # the disk is full; every process then queries squeue itself
                write_record(self._path, answer)


class LiveJobs:
    """State of a run's jobs in Slurm.

    Args:
        planned: Content of ``run.json``.
    """

    def __init__(self, run: RunDir, config: CampaignConfig, planned: RunRecord, ledger: Ledger) -> None:
        self._run, self._config, self._ledger = run, config, ledger
        self.arrays = Arrays(run)
        self._marks = Marks(run)
        self._shared = QueueCache(run)
        self._live: tuple[float, dict[str, JobState] | None] = (-ASK_SLURM_S, None)
        self._ended: dict[str, JobState] = {}
        """Jobs that the last answer lists as ended. Slurm lists jobs for a few minutes after they end."""
        self._read_at = -ASK_SLURM_S

    def ids(self, role: str | None = None) -> list[str]:
        """Returns all arrays of this run in order of submission. Includes arrays submitted by hand once they have
        started."""
        ids = set(self.arrays.ids(role))
        if role in (None, "pods"):
            ids |= self._ledger.arrays()
        if role in (None, "trainer"):
            ids |= {job for jobs in self.trainers().values() for job in jobs}
        return sorted(ids, key=lambda job: (len(number(job)), job))

    def live(self, max_age_s: float = ASK_SLURM_S) -> dict[str, JobState] | None:
        """Returns the array elements that Slurm still has, by id. Returns ``None`` if Slurm is missing or does not
        respond.

        Args:
            max_age_s: Maximum age in seconds of a cached answer.
        """
        asked, live = self._live
        if live and any(job.state == "PENDING" and job.reason == "None" for job in live.values()):
            max_age_s = min(max_age_s, SOON_S)
        now = time.monotonic()
        # Once the budget is spent, a shared answer may be older than max_age_s. Do not read it again every second.
        if now - asked >= max_age_s and now - self._read_at >= min(max_age_s, SOON_S):
            self._read_at = now
            self._live = self._query(max_age_s)
        return self._live[1]

    def _query(self, max_age_s: float) -> tuple[float, dict[str, JobState] | None]:
        """Returns the live jobs and the time of the squeue query on the monotonic clock. Uses another process's
        answer if possible."""
        ids, now = self.ids(), time.monotonic()
        if not ids or not site.has_slurm():
            return now, None
        if shared := self._shared.read(ids, max_age_s):
            age_s, jobs = shared
            asked = now - age_s
        else:
            try:
                jobs, asked = list(accounting.live_jobs(ids, self._shared.owner).values()), now
            except SiteError:  # the controller may be down for a while; the campaign continues without it
                return now, None
            self._shared.write(ids, jobs)
        self._ended = {job.id: job for job in jobs if not job.live}
        return asked, {job.id: job for job in jobs if job.live}

    @property
    def asked_at(self) -> float:
        """Monotonic time of the squeue query whose answer :meth:`live` returned last."""
        return self._live[0]

    def invalidate(self) -> None:
        """Drops the cached answer for all processes."""
        self._live, self._read_at = (-ASK_SLURM_S, None), -ASK_SLURM_S
        self._shared.forget()

    def waiting(self, max_age_s: float = ASK_SLURM_S) -> list[dict[str, Any]]:
        """Returns the reasons for pending jobs, as grouped by :func:`~megaflow_hpc.slurm.accounting.waiting`.

        Excludes servers that start on demand, and the gather job, which waits for the pods.
        """

        def expected(role: str, state: JobState) -> bool:
            on_demand = role == "servers" and state.held and state.state not in ("SPECIAL_EXIT", "RESV_DEL_HOLD")
            return role == "gather" or on_demand

        roles = {record.id: record.role for record in self.arrays.records()}
        jobs = [(roles.get(array_of(job), "pods"), state) for job, state in (self.live(max_age_s) or {}).items()]
        return accounting.waiting((role, state) for role, state in jobs if not expected(role, state))

    def live_pods(self, max_age_s: float = ASK_SLURM_S) -> list[JobState] | None:
        """Returns the pods that are queued or running. Returns ``None`` if this is unknown."""
        live = self.live(max_age_s)
        if live is None:
            return None
        pods = set(self.ids("pods"))
        return [state for element, state in live.items() if array_of(element) in pods]

    def trainers(self) -> dict[str, list[str]]:
        """Returns the jobs of each policy's trainer in order of submission. Includes jobs submitted by hand."""
        training = self._config.training
        jobs_by_policy: dict[str, list[str]] = {policy: [] for policy in training.policies} if training else {}
        for record in self.arrays.records():
            if record.role == "trainer" and record.policy in jobs_by_policy:
                jobs_by_policy[record.policy].append(record.id)
        for policy, jobs in jobs_by_policy.items():
            entered = (start.job_id for start in TrainingView(self._run, policy).trainers())
            jobs += [job for job in dict.fromkeys(entered) if job and job not in jobs]
        return jobs_by_policy

    def trainer_states(self, max_age_s: float = ASK_SLURM_S) -> dict[str, JobState] | None:
        """Returns the trainers that are queued or running, by policy. Returns ``None`` if this is unknown."""
        live = self.live(max_age_s)
        if live is None:
            return None
        return {policy: live[job] for policy, jobs in self.trainers().items() for job in jobs if job in live}

    def starving(self, training: Mapping[str, Any], max_age_s: float = ASK_SLURM_S) -> list[str]:
        """Returns a warning if trainers are running while no pod is running or queued.

        Args:
            training: The ``training`` section of the status.
        """
        running = [policy for policy, state in training.items() if state["trainer"]["state"] == "running"]
        if not running or not self.ids("pods") or self.live_pods(max_age_s) != []:  # some may be submitted by hand
            return []
        return [
            f"the trainer of {', '.join(running)} runs, but no pod that samples for it is running or queued; start "
            f"pods with: megaflow-hpc resume {self._run}"
        ]

    def refused(self, max_age_s: float = ASK_SLURM_S) -> list[str]:
        """Returns a warning for each reason why Slurm did not requeue jobs, with a remedy."""
        causes: dict[tuple[str, str, bool], list[str]] = {}
        refused = self._marks.refused()
        live = self.live(max_age_s) if refused else None
        pods = len(self.live_pods(max_age_s) or ())
        for refusal in refused:
            if refusal.role == "gather" and self._run.trajectories.exists():
                continue
            is_live = live is not None and refusal.job in live
            if is_live or refusal.role != "pod" or pods < self._config.slurm.pods.total:  # otherwise it was replaced
                causes.setdefault((refusal.role, refusal.words, is_live), []).append(refusal.job)
        lines = []
        for (role, words, is_live), jobs in causes.items():
            who = f"{role} {jobs[0]}" if len(jobs) == 1 else f"{len(jobs)} {role}s (such as {jobs[0]})"
            if is_live:
                lines.append(f"Slurm has not requeued {who} yet: {words!r}; the request is repeated")
                continue
            why = "it was submitted with Requeue=0, by the campaign file or by the site; " if DISABLED in words else ""
            more = f"scale {self._run} --pods {self._config.slurm.pods.total}" if role == "pod" and pods else ""
            verb = "gather" if role == "gather" else "resume"
            remedy = more or f"{verb} {self._run}"
            lines.append(
                f"{who} ended, and Slurm did not requeue it: {words!r}; {why}continue with: megaflow-hpc {remedy}"
            )
        return lines

    def servers(self, max_age_s: float = ASK_SLURM_S) -> dict[int, JobState] | None:
        """Returns the engine servers that Slurm still has, by index. Returns ``None`` if this is unknown."""
        live = self.live(max_age_s)
        if live is None:
            return None
        return {index: live[job] for job, index in self._server_indices(live).items()}

    def _server_indices(self, jobs: Iterable[str]) -> dict[str, int]:
        """Returns the index of each engine server, by the array element that runs it."""
        bases = {record.id: record.base for record in self.arrays.records() if record.role == "servers"}
        parts = {job: job.partition("_") for job in jobs}
        return {
            job: int(element) + bases[array]
            for job, (array, _, element) in parts.items()
            if array in bases and element.isdecimal()
        }


def trainers(states: Mapping[str, JobState] | None) -> dict[str, TrainerJob] | None:
    """Returns the trainers that are queued or running, by policy. Returns ``None`` if this is unknown."""
    if states is None:
        return None
    return {
        policy: TrainerJob("queued", state.id, reason=state.reason)
        if state.waits
        else TrainerJob("running", state.id, state.node)
        for policy, state in states.items()
    }


def waiting_servers(
    run: RunDir, policies: Sequence[str], states: Mapping[int, JobState], registered: Collection[str]
) -> list[dict[str, Any]]:
    """Returns the engine servers that are queued or starting and have no endpoint file yet.

    Args:
        policies: Policy of each server, by index.
        states: Slurm state of each server's job, by index.
        registered: Names of servers that have an endpoint file.
    """
    waiting = []
    for index, state in sorted(states.items()):
        name = f"{policies[index]}.{index}"
        if name in registered or not state.live:
            continue
        shown = {"server": name, "policy": policies[index], "node": state.node, "job_id": state.id}
        if state.held:
            by = Leader(run, SCALER).holder()
            remedy = f"no process releases it: keep megaflow-hpc watch {run} open, or use scale --servers"
            waiting.append({**shown, "state": "held", "cause": f"released on demand by {by}" if by else remedy})
        else:
            waiting.append({**shown, "state": "queued" if state.waits else "starting"})
    return waiting


def main(path: str) -> int:
    """Prints the number of running and queued pods of the run at ``path``. Returns 1 if the number is unknown."""
    run = RunDir(path)
    run.check_ours()
    planned = read_run(run)
    jobs = LiveJobs(run, planned.config, planned, Ledger(run))
    pods = jobs.live_pods() if jobs.ids("pods") else None  # pods submitted by hand are unknown until they start
    if pods is None:
        return 1
    print(len(pods))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
