"""Requeues that Slurm refused: what is said of them, and what asks again."""

from __future__ import annotations

from pathlib import Path

import pytest

from megaflow_hpc.campaign import jobs as jobs_module
from megaflow_hpc.campaign.jobs import Jobs
from megaflow_hpc.ledger import Ledger
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.marks import Marks
from megaflow_hpc.rundir.record import RunRecord, ServerGroup, ServerRecord
from megaflow_hpc.slurm.accounting import JobState
from megaflow_hpc.slurm.limits import Allowance

DISABLED = "Requested operation is presently disabled for job 7_1"


class Around:
    """Jobs of a run with four pods, of which Slurm has some."""

    def __init__(self, run: RunDir, monkeypatch: pytest.MonkeyPatch, *live: str, **campaign: object) -> None:
        campaign = {"name": "x", "tasks": "t", "agent": "nop", "slurm": {"pods": {"count": 4}}, **campaign}
        record = RunRecord(campaign=campaign, total=1)
        run.jobs.mkdir(parents=True, exist_ok=True)
        (run.jobs / "7.json").write_text('{"role": "pods", "id": "7", "elements": 4}')
        (run.jobs / "9.json").write_text('{"role": "gather", "id": "9", "elements": null}')
        self.run, self.asked, self.refuses = run, list[tuple[str, ...]](), False
        self.jobs = Jobs(run, record.config, record, Ledger(run))
        self.states = {job: JobState(job, "RUNNING") for job in live}
        monkeypatch.setattr(self.jobs, "live", self.live)
        monkeypatch.setattr(jobs_module.site, "ask", self.ask)

    def live(self, max_age_s: float = 0.0) -> dict[str, JobState]:
        """Stands for a new answer of squeue at each call."""
        self.jobs._live = (self.jobs.asked_at + 1.0, self.states)
        return self.states

    def ask(self, *words: str) -> str:
        self.asked.append(words)
        if self.refuses:
            raise jobs_module.SiteError("scontrol: refused")
        self.states[words[-1]] = JobState(words[-1], "PENDING")
        return ""

    def refuse(self, job: str, words: str, role: str = "pod") -> None:
        folder = self.run.ledger / "refused"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / job).write_text(f"1700000000 {role} cpu1 /log\n{words}\n")


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "run")
    for folder in (run.ledger, run.tasks, run.logs):
        folder.mkdir(parents=True)
    return run


def test_what_slurm_said_is_shown_with_the_remedy(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    around = Around(run, monkeypatch, "7_0", "7_2")
    around.refuse("7_1", DISABLED)
    around.refuse("7_0", "Unable to contact slurm controller")
    assert around.jobs.refused() == [
        "Slurm has not requeued pod 7_0 yet: 'Unable to contact slurm controller'; the request is repeated",
        f"pod 7_1 ended, and Slurm did not requeue it: '{DISABLED}'; it was submitted with Requeue=0, by the campaign "
        f"file or by the site; continue with: megaflow-hpc scale {run} --pods 4",
    ]
    around.states.clear()
    assert around.jobs.refused()[0].endswith(f"continue with: megaflow-hpc resume {run}")
    around.states.update({f"8_{n}": JobState(f"8_{n}", "RUNNING") for n in range(4)})
    (run.jobs / "8.json").write_text('{"role": "pods", "id": "8", "elements": 4}')
    assert around.jobs.refused() == [], "others have replaced them"
    around.refuse("9", DISABLED, "gather")
    assert around.jobs.refused()[0].endswith(f"continue with: megaflow-hpc gather {run}")
    run.trajectories.touch()
    assert around.jobs.refused() == []


def test_each_refusal_is_answered_by_one_request_for_as_many_pods_as_are_missing(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    around = Around(run, monkeypatch, "7_0", "7_2", "7_3")
    around.refuse("7_1", "Unable to contact slurm controller")
    around.refuse("6_0", "Unable to contact slurm controller")
    (run.jobs / "6.json").write_text('{"role": "pods", "id": "6", "elements": 1}')
    assert around.jobs.bring_back() == ["6_0"]
    assert around.asked == [("scontrol", "requeue", "6_0")]
    assert around.jobs.bring_back() == [], "four pods are enough"
    del around.states["7_3"], around.states["6_0"]
    around.refuses = True
    assert around.jobs.bring_back() == []
    assert around.jobs.bring_back() == []
    assert around.asked[1:] == [("scontrol", "requeue", "7_1")], "the same refusal is not answered twice"


def test_a_gather_job_leaves_the_work_to_a_later_one_while_pods_come_back(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    around, queued = Around(run, monkeypatch), list[list[str]]()
    monkeypatch.setattr(around.jobs, "_queue_gather", queued.append)
    around.refuse("7_1", "Unable to contact slurm controller")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert not around.jobs.gather_later(["5"]), "called by a user"
    monkeypatch.setenv("SLURM_JOB_ID", "9")
    assert around.jobs.gather_later(["5"])
    assert queued == [["5"]]
    around.states.clear()
    assert not around.jobs.gather_later(["5"]), "no pod is left"


def test_a_gather_job_ends_no_engine_before_slurm_has_answered(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    around, queued, paused = Around(run, monkeypatch, "7_0"), list[list[str]](), list[float]()
    monkeypatch.setattr(around.jobs, "_queue_gather", queued.append)
    monkeypatch.setattr(jobs_module.site, "has_slurm", lambda: True)
    monkeypatch.setattr(jobs_module.time, "sleep", paused.append)
    monkeypatch.setattr(around.jobs, "live", lambda max_age_s=0.0: around.live() if len(paused) > 2 else None)
    monkeypatch.setenv("SLURM_JOB_ID", "9")
    assert around.jobs.gather_later(["5"]), "a pod is in the queue"
    assert (queued, len(paused)) == ([["5"]], 3)


def test_refusals_of_pods_that_were_replaced_leave_no_files(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing is requeued, each end of a walltime leaves one: 720,000 in 30 days of 1,000 pods."""
    around = Around(run, monkeypatch, "8_0", "8_1", "8_2")
    monkeypatch.setattr(jobs_module.accounting, "finished_jobs", lambda jobs: {})
    (run.jobs / "8.json").write_text('{"role": "pods", "id": "8", "elements": 4}')
    for job in ("7_1", "7_2", "8_0"):
        around.refuse(job, DISABLED)
    around.refuse("5_0", DISABLED, "trainer")
    around.jobs.top_up()
    assert {mark.job for mark in Marks(run).refused()} == {"7_1", "7_2", "8_0", "5_0"}, "status says why one is missing"
    around.states["8_3"] = JobState("8_3", "RUNNING")
    around.jobs.top_up()
    assert {mark.job for mark in Marks(run).refused()} == {"8_0", "5_0"}


@pytest.fixture
def engines(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> tuple[Around, list[list[tuple[int, int, bool]]]]:
    """Four pods and two of four engines that Slurm still has, and the (first, count, held) of each submission."""
    around = Around(run, monkeypatch, "7_0", "7_1", "7_2", "7_3", "5_1", "5_2")
    (run.jobs / "5.json").write_text('{"role": "servers", "id": "5", "elements": 4}')
    around.jobs._groups = [ServerGroup(0, 3, 1), ServerGroup(3, 1, 1, held=True)]
    around.jobs._servers = [ServerRecord("p", {})] * 3 + [ServerRecord("q", {}, held=True)]
    submitted = list[list[tuple[int, int, bool]]]()

    def queue(_: Allowance, groups: list[ServerGroup]) -> list[str]:
        submitted.append([(group.first, group.count, group.held) for group in groups])
        return []

    monkeypatch.setattr(around.jobs, "_queue_servers", queue)
    monkeypatch.setattr(jobs_module.limits, "allowance", lambda options: Allowance())
    return around, submitted


def test_an_engine_that_slurm_does_not_requeue_is_replaced(
    run: RunDir, engines: tuple[Around, list[list[tuple[int, int, bool]]]]
) -> None:
    around, submitted = engines
    around.refuse("5_0", DISABLED, "server")
    around.refuse("5_2", "Unable to contact slurm controller", "server")
    around.jobs.top_up()
    assert submitted == [[(0, 1, False)]], "and not one that Slurm still has"
    assert [mark.job for mark in Marks(run).refused()] == ["5_2"]
    around.jobs.top_up()
    assert len(submitted) == 1
    around.jobs._servers[0] = ServerRecord("q", {})
    around.refuse("5_0", DISABLED, "server")
    around.jobs.top_up()
    assert submitted[1:] == [[(0, 1, True)]], "it may have been idle: the scaler releases it when it is needed"


def test_resume_starts_the_engines_that_are_missing_beside_pods_that_wait_for_them(
    run: RunDir,
    engines: tuple[Around, list[list[tuple[int, int, bool]]]],
) -> None:
    around, submitted = engines
    for name in ("server-0", "trainer-p", "pod-7_0"):
        (run.logs / f"{name}.requeues").write_text("....")
    around.jobs.revive()
    assert [path.name for path in run.logs.iterdir()] == ["pod-7_0.requeues"], "the others are tried again as often"
    assert submitted == [[(0, 1, False), (3, 1, True)]]


def test_a_trainer_that_slurm_does_not_requeue_is_replaced_and_no_other(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = {"policies": {"p": {}, "q": {}}, "batch": 2, "steps": 3}
    models = {policy: {"engine": "scripted", "script": "answers.yaml"} for policy in "pq"}
    live = ("7_0", "7_1", "7_2", "7_3", "4")
    around = Around(run, monkeypatch, *live, models=models, training=training, samples=2)
    (run.jobs / "3.json").write_text('{"role": "trainer", "id": "3", "policy": "p"}')
    (run.jobs / "4.json").write_text('{"role": "trainer", "id": "4", "policy": "q"}')
    queued = list[str]()
    monkeypatch.setattr(around.jobs.arrays, "queue", lambda job: queued.append(job.policy) or ["6"])
    around.refuse("3", "Unable to contact slurm controller", "trainer")
    around.jobs.top_up()
    assert queued == [], "Slurm has requeued it"
    del around.states["3"]
    for job in ("3", "4"):
        around.refuse(job, DISABLED, "trainer")
    around.jobs.top_up()
    assert queued == ["p"], "the other has not ended yet"
    assert {mark.job for mark in Marks(run).refused()} == {"4"}
    around.jobs.top_up()
    assert queued == ["p"]
