"""Requeues that Slurm refused: what is said of them, and what asks again."""

from __future__ import annotations

from pathlib import Path

import pytest

from megaflow_hpc.campaign import jobs as jobs_module
from megaflow_hpc.campaign.jobs import Jobs
from megaflow_hpc.ledger import Ledger
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.record import RunRecord
from megaflow_hpc.slurm.accounting import JobState

DISABLED = "Requested operation is presently disabled for job 7_1"


class Around:
    """Jobs of a run with four pods, of which Slurm has some."""

    def __init__(self, run: RunDir, monkeypatch: pytest.MonkeyPatch, *live: str) -> None:
        record = RunRecord(
            campaign={"name": "x", "tasks": "t", "agent": "nop", "slurm": {"pods": {"count": 4}}}, total=1
        )
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
    for folder in (run.ledger, run.tasks):
        folder.mkdir(parents=True)
    return run


def test_what_slurm_said_is_shown_with_the_remedy(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    around = Around(run, monkeypatch, "7_0", "7_2")
    around.refuse("7_1", DISABLED)
    around.refuse("7_0", "Unable to contact slurm controller")
    assert around.jobs.refused() == [
        "Slurm has not requeued pod 7_0 yet: 'Unable to contact slurm controller'; the request is repeated",
        f"pod 7_1 ended, and Slurm did not requeue it: '{DISABLED}'; it was submitted with Requeue=0, by slurm.extra "
        f"or by the site; continue with: megaflow-hpc scale {run} --pods 4",
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
