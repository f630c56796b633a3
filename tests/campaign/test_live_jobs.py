"""All processes that follow a campaign share squeue's answers, and together ask at most 60 requests an hour."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from megaflow_hpc.campaign.live_jobs import ASK_SLURM_S, REFILL_S, LiveJobs, QueueCache
from megaflow_hpc.ledger import Ledger
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.record import read_run
from megaflow_hpc.slurm import accounting, site
from megaflow_hpc.slurm.accounting import JobState
from tests.support.training import training_run

HOURS = 2
REQUESTS_PER_SQUEUE = 2
"""The user's jobs and the partitions; tests/lab/test_requests.py counts them."""


class Clock:
    """Stands for the module ``time``, on both clocks."""

    now = 1e9

    def time(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("megaflow_hpc.campaign.live_jobs.time", clock)
    return clock


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return training_run(tmp_path / "run", None)


def follower(run: RunDir) -> LiveJobs:
    record = read_run(run)
    return LiveJobs(run, record.config, record, Ledger(run))


def test_ten_followers_and_a_status_every_five_seconds_ask_sixty_requests_an_hour(
    run: RunDir, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float] = []

    def squeue(ids: object, user: object) -> dict[str, JobState]:
        asked.append(clock.now)
        return {"7_0": JobState("7_0", "PENDING", "Priority")}

    monkeypatch.setattr(site, "has_slurm", lambda: True)
    monkeypatch.setattr(accounting, "live_jobs", squeue)
    follower(run).arrays._record("7", "pods", 1)
    followers = [follower(run) for _ in range(10)]
    began = clock.now
    for second in range(HOURS * 3600):
        clock.now = began + second
        for one in followers:
            assert one.live() == {"7_0": JobState("7_0", "PENDING", "Priority")}
        if second % 5 == 0:
            assert follower(run).live()
    for minute in range((HOURS - 1) * 60):
        window = [at for at in asked if began + 60 * minute <= at < began + 60 * minute + 3600]
        assert REQUESTS_PER_SQUEUE * len(window) <= 60, f"from minute {minute}"
    ages = [later - earlier for earlier, later in pairwise(asked)]
    assert ages[0] == ASK_SLURM_S
    assert max(ages) <= REFILL_S + 10


def test_what_another_process_submits_is_asked_for_at_once(run: RunDir, clock: Clock) -> None:
    mine, other = QueueCache(run), QueueCache(run)
    assert mine.read(["7"], 30.0) is None
    mine.write(["7"], [JobState("7_0", "RUNNING")])
    clock.now += 20.0
    assert other.read(["7"], 30.0) == (20.0, [JobState("7_0", "RUNNING")])
    assert other.read(["7", "8"], 30.0) is None, "the answer does not cover the new array"
    assert other.read(["7"], 0.0) is None, "scale and cancel always ask"
    mine.forget()
    assert other.read(["7"], 30.0) is None


def test_an_answer_from_a_host_whose_clock_is_ahead_is_not_used(run: RunDir, clock: Clock) -> None:
    ahead = QueueCache(run)
    clock.now += 3600.0
    ahead.write(["7"], [])
    clock.now -= 3600.0
    assert QueueCache(run).read(["7"], 30.0) is None


def test_a_damaged_file_is_no_answer(run: RunDir) -> None:
    (run.ledger / "queue.json").write_bytes(b"{")
    assert QueueCache(run).read(["7"], 30.0) is None
