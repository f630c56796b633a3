"""Submits batch scripts through submitit's executor, and returns its array and job handles.

submitit's own runner unpickles functions from a shared folder. Our scripts run ``python -m megaflow_hpc.pod`` instead,
so only submitit's submission and handles are used. The handles support ``state`` and ``cancel()``, but not
``result()``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import submitit
from submitit.core.utils import FailedJobError, FailedSubmissionError, JobPaths
from submitit.slurm.slurm import SlurmInfoWatcher

from megaflow_hpc.errors import SiteError
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.slurm import accounting, ids, site
from megaflow_hpc.slurm.script import Job, script


class ArrayJob(submitit.SlurmJob):
    """Handle of one array element, with ``job_id``, ``state`` and ``cancel()``."""

    def result(self) -> Any:
        """Raises RuntimeError, because elements have no return value."""
        raise RuntimeError("array elements return nothing; wait for the campaign with run.wait() and read run.path")


class ClusterJob(ArrayJob):
    """Handle of an array element on another cluster, whose name follows the ``@`` in the job id."""

    watcher = SlurmInfoWatcher(delay_s=600)  # a separate watcher, because submitit's own would query the local cluster

    @property
    def state(self) -> str:
        """State of the job on its cluster. ``UNKNOWN`` if neither squeue nor sacct lists the job."""
        states = accounting.finished_jobs([self.job_id]) | accounting.live_jobs([self.job_id])
        return states[self.job_id].state if self.job_id in states else "UNKNOWN"

    def cancel(self, check: bool = True) -> None:
        """Cancels the job on its cluster. ``check`` has no effect."""
        ids.scancel([self.job_id])


class ScriptExecutor(submitit.SlurmExecutor):
    """Submits the script of a :class:`~megaflow_hpc.slurm.script.Job`."""

    job_class = ArrayJob

    def __init__(self, folder: Path, job: Job) -> None:
        super().__init__(folder)
        self._job = job

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        return script(self._job)

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        return sbatch(str(submission_file_path))

    def _num_tasks(self) -> int:
        return 1

    def submit_job(self) -> list[ArrayJob]:
        """Submits the job and returns one handle per array element, or a single handle for a plain job."""
        job, submitted = self._job, cast(ArrayJob, self._submit_command(""))
        if job.elements is None:
            return [submitted]
        handle = ClusterJob if job.cluster else ArrayJob
        indices = range(job.first, job.first + job.elements)
        names = [ids.named(f"{submitted.job_id}_{i}", job.cluster) for i in indices]
        return [handle(folder=self.folder, job_id=name, tasks=[0]) for name in names]


SITE_VARIABLES = frozenset(("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT"))
"""Slurm variables that describe the site rather than a job."""
POD_VARIABLES = frozenset(("POD", "START", "POD_DIR", "END", "SERVER", "ELASTIC", "CLUSTER", "REQUEUES"))
"""Names of a pod's ``MEGAFLOW_…`` variables, which jobs submitted by that pod must not inherit."""


def inherited(environment: Iterable[str]) -> list[str]:
    """Returns the names of the environment variables that a submitted job must not inherit.

    They describe the job, step or MPI world around this process. Slurm and MPI would apply them to the new job.
    ``SBATCH_…`` variables are included because they override the options in a script.
    """
    foreign = re.compile(r"(SLURMD?|SBATCH|SRUN|SALLOC|PMIX?|OMPI|PRTE|HYDRA|HYDI|I_MPI_HYDRA)_")
    mine = {f"MEGAFLOW_{name}" for name in POD_VARIABLES}
    return sorted(name for name in environment if name in mine or (foreign.match(name) and name not in SITE_VARIABLES))


def sbatch(*words: str) -> list[str]:
    """Returns an ``sbatch`` command line that removes the surrounding job's variables from the environment."""
    return ["env", *(f"--unset={name}" for name in inherited(os.environ)), "sbatch", *words]


def submit(run: RunDir, job: Job) -> list[ArrayJob]:
    """Submits a job or array and returns the handles of its elements.

    Raises:
        SiteError: sbatch rejected the job. The error quotes sbatch's message.
    """
    JobPaths.get_first_id_independent_folder(run.logs).mkdir(parents=True, exist_ok=True)
    try:
        return ScriptExecutor(run.logs, job).submit_job()
    except (FailedSubmissionError, FailedJobError, RuntimeError) as error:
        # The site's submit plugin may print several lines of explanation, which precede Slurm's own.
        lines = [line.partition("sbatch: ")[2] for line in str(error).splitlines() if "sbatch: " in line]
        words = site.joined(lines or str(error).splitlines()[-1:])
        section = f"slurm.{job.role} of the campaign"
        remedy = f"; see {', '.join(keys)}" if (keys := keys_of(job.role, words)) else ""
        raise SiteError(f"sbatch refused the {job.role} job ({section}): {words}{remedy}") from None


KEYS = (
    ("wall ?time|time limit|--time|time must", "slurm.{role}.time"),
    (r"account(?!ing)|\bproject\b", "slurm.account"),
    (r"\bqos\b|quality of service", "slurm.qos"),
    ("partition|queue", "slurm.{role}.partition"),
    (r"constraint|\bfeature", "slurm.constraint"),
    (r"\bgpus?\b|gres", "the GPUs of the model or slurm.{role}.gres"),
    ("memory|--mem", "slurm.{role}.mem"),
    ("licen[cs]e", "slurm.licenses"),
)
"""Maps patterns in an error message from Slurm or the site to the campaign key that probably causes the error."""


def keys_of(role: str, words: str) -> list[str]:
    """Returns the campaign keys that probably caused a refusal."""
    return [key.format(role=role) for pattern, key in KEYS if re.search(pattern, words, re.IGNORECASE)]
