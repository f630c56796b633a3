"""The latest squeue answer about a run's jobs, shared by all processes that follow the run.

::

    RUN/ledger/queue.json    time of the query, the arrays queried, and the answer

``run``, ``watch``, ``status``, autoscalers and waiting trainers reuse each other's answers. A budget in the same file
keeps all of them together below 60 requests to slurmctld per hour.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Collection, Iterable

import msgspec

from megaflow_hpc.rundir.json_files import try_read_json, write_record
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.slurm.accounting import JobState

BURST = 8.0
"""Maximum number of queries in quick succession."""
REFILL_S = 180.0
"""Seconds after which another query is allowed. A query is two requests to slurmctld, for the user's jobs and for the
partitions, so an hour has at most 2 x (8 + 3600 / 180) = 56 requests."""
FUTURE_S = 60.0
"""Answers dated further ahead than this come from a host whose clock is wrong, and are ignored."""


class QueueAnswer(msgspec.Struct):
    """Content of the file."""

    asked_at: float = 0.0
    """Unix seconds."""
    budget: float = BURST
    """Number of further queries allowed at ``asked_at``."""
    arrays: list[str] = []
    """Jobs and arrays that were queried."""
    jobs: list[JobState] | None = None
    """Their elements. ``None`` if jobs were submitted, changed or cancelled since."""


class SharedLook:
    """Reads and writes the shared answer of one run. Other users' processes only read it."""

    def __init__(self, run: RunDir) -> None:
        self._path = run.ledger / "queue.json"
        self._answer = QueueAnswer()
        try:
            self.owner = run.path.stat().st_uid
        except OSError:  # the run was deleted
            self.owner = os.getuid()

    def read(self, arrays: Collection[str], max_age_s: float) -> tuple[float, list[JobState]] | None:
        """Returns the age of the shared answer in seconds, and the jobs. ``None`` if the caller must query squeue.

        If the budget is spent, an answer older than ``max_age_s`` is returned as well. If ``max_age_s`` is 0, the
        caller must always query squeue.
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
        """Drops the answer, because jobs were submitted, changed or cancelled. The budget is kept."""
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
