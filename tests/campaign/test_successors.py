"""Pods that are not requeued have a successor before they end, in simulated time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import inf
from pathlib import Path
from types import SimpleNamespace

import pytest

from megaflow_hpc.campaign import jobs as jobs_module
from megaflow_hpc.campaign import replacements
from megaflow_hpc.campaign.jobs import Jobs
from megaflow_hpc.campaign.replacements import EARLY_S, START_S, TOGETHER_S, Successors
from megaflow_hpc.errors import SiteError
from megaflow_hpc.ledger import Ledger
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.record import RunRecord
from megaflow_hpc.slurm.accounting import JobState

LEAD_S, WALLTIME_S, WANTED = 60.0, 600.0, 4
DUE_S = WALLTIME_S - LEAD_S - EARLY_S - START_S
"""When a pod needs a successor, in seconds after its start."""


class Cluster:
    """A Slurm with idle nodes and a clock, and a run that follows its pods there.

    Args:
        answer_s: Seconds for which the run reuses an answer of squeue.
        requeued: Pods that Slurm requeues.
    """

    def __init__(self, run: RunDir, patch: pytest.MonkeyPatch, answer_s: float, *requeued: str) -> None:
        record = RunRecord(
            campaign={"name": "x", "tasks": "t", "agent": "nop", "slurm": {"pods": {"count": WANTED}}}, total=1
        )
        self.now, self.answer_s, self.requeued = 0.0, answer_s, requeued
        self.pods: dict[str, JobState] = {}
        self.asked: list[tuple[str, ...]] = []
        self.jobs = Jobs(run, record.config, record, Ledger(run))
        patch.setattr(jobs_module, "time", SimpleNamespace(time=lambda: self.now, monotonic=lambda: self.now))
        patch.setattr(jobs_module.accounting, "finished_jobs", self.finished)
        patch.setattr(replacements.site, "ask", self.ask)
        patch.setattr(self.jobs, "live", self.live)
        patch.setattr(self.jobs, "_add", self.add)
        patch.setattr(self.jobs.arrays, "adopt", lambda *_: None)
        self.jobs._live = (-inf, None)
        self.jobs.arrays._record("7", "pods", WANTED)

    def start(self, pod: str, at: float) -> None:
        self.pods[pod] = JobState(pod, "RUNNING", starts_at=at, ends_at=at + WALLTIME_S)

    def working(self, lead_s: float) -> int:
        """Number of pods that do not end within the lead."""
        return sum(pod.ends_at - lead_s > self.now for pod in self.pods.values() if pod.ends_at)

    def live(self, max_age_s: float = 30.0) -> dict[str, JobState] | None:
        if max_age_s <= 0 or self.now - self.jobs.asked_at >= self.answer_s:
            for pod, state in self.pods.items():
                if pod in self.requeued and state.ends_at and state.ends_at <= self.now:
                    self.start(pod, self.now)
            live = {pod: state for pod, state in self.pods.items() if state.ends_at and state.ends_at > self.now}
            self.jobs._live = (self.now, live)
        return self.jobs._live[1]

    def add(self, count: int, total: int) -> list[str]:
        array = str(8 + len(self.pods))
        self.jobs.arrays._record(array, "pods", count)
        added = [f"{array}_{n}" for n in range(count)]
        for pod in added:
            self.start(pod, self.now)
        self.jobs._live = (-inf, None)
        return added

    def finished(self, arrays: list[str]) -> dict[str, JobState]:
        return {pod: replace(state, state="FAILED") for pod, state in self.pods.items()}

    def ask(self, *words: str) -> str:
        self.asked.append(words)
        lines = []
        for pod in self.pods:
            array, _, index = pod.partition("_")
            if array == words[-1]:
                requeue = int(pod in self.requeued)
                lines.append(f"JobId=99 ArrayJobId={array} ArrayTaskId={index} JobName=x Requeue={requeue} Restarts=0")
        return "\n".join(lines)

    def follow(self, until: float, each_second: Callable[[], None] = lambda: None) -> None:
        while self.now < until:
            self.jobs.top_up()
            each_second()
            self.now += 1.0


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "run")
    for folder in (run.ledger, run.tasks, run.journal, run.jobs):
        folder.mkdir(parents=True)
    for number in range(100):
        (run.tasks / f"{number:06d}.json").touch()
    return run


@pytest.mark.parametrize(("answer_s", "apart_s"), [(30.0, 0.0), (180.0, 5.0), (180.0, 40.0)])
def test_each_pod_has_a_successor_before_it_drains_and_hardly_more_work_than_are_wanted(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, answer_s: float, apart_s: float
) -> None:
    cluster, surplus_s = Cluster(run, monkeypatch, answer_s), 0
    for n in range(WANTED):
        cluster.start(f"7_{n}", n * apart_s)

    def check() -> None:
        nonlocal surplus_s
        assert cluster.working(LEAD_S / 2) >= WANTED, "a round of successors comes at most a minute after the last"
        surplus_s += max(0, cluster.working(LEAD_S) - WANTED)

    cluster.follow(3 * DUE_S, check)
    born = len(cluster.pods) - WANTED
    assert 2 * WANTED <= born <= 3 * WANTED, "one for each"
    assert surplus_s <= born * (EARLY_S + START_S + TOGETHER_S)


def test_pods_that_slurm_requeues_have_none_and_slurm_is_asked_once(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Cluster(run, monkeypatch, 30.0, "7_0", "7_1", "7_3")
    for n in range(WANTED):
        cluster.start(f"7_{n}", 50.0 * n)
    cluster.follow(DUE_S - 1.0)
    assert cluster.asked == []
    cluster.follow(DUE_S + 90.0)
    assert cluster.asked == [("scontrol", "--local", "-o", "show", "job", "7")]
    assert len(cluster.pods) == WANTED
    cluster.follow(DUE_S + 300.0)
    assert len(cluster.pods) == WANTED + 1, "the requeue of 7_2 was switched off"
    assert len(cluster.asked) == 1


def test_slurm_is_asked_again_if_it_was_away(monkeypatch: pytest.MonkeyPatch) -> None:
    def away(*words: str) -> str:
        raise SiteError("scontrol: no answer")

    found, pods = Successors(LEAD_S), [JobState("7_0@far", "RUNNING", starts_at=0.0, ends_at=WALLTIME_S)]
    monkeypatch.setattr(replacements.site, "ask", away)
    assert found.ending(pods, DUE_S) == []
    asked: list[tuple[str, ...]] = []
    shown = "JobId=8 ArrayJobId=7 ArrayTaskId=0 ArrayTaskThrottle=4 JobName=x Requeue=0 Restarts=0\n"
    monkeypatch.setattr(replacements.site, "ask", lambda *words: asked.append(words) or shown)
    assert found.ending(pods, DUE_S) == ["7_0@far"]
    assert asked == [("scontrol", "-M", "far", "-o", "show", "job", "7")]


def test_a_short_walltime_and_one_without_an_end() -> None:
    found = Successors(LEAD_S)
    brief, endless = JobState("7_0", "RUNNING", starts_at=0.0, ends_at=80.0), JobState("7_1", "RUNNING", starts_at=0.0)
    assert found.next_at([brief, endless, JobState("7_2", "PENDING", starts_at=5.0)], 0.0) == 20.0
    assert found.next_at([endless], 0.0) == inf
