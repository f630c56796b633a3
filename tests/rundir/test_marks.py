"""Pods of which no start reached its lease, as their batch shells reported them."""

from __future__ import annotations

import pytest

from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.marks import Marks, Unstarted


@pytest.mark.parametrize(
    ("said", "cause"),
    [
        ("loading\n0: pod: MPI sees 1 ranks\nsrun: error: task 0: exit code 1\n", "0: pod: MPI sees 1 ranks"),
        ("srun: error: Unable to create step\nlater\n", "srun: error: Unable to create step"),
        (
            "0: Fatal Python error: init\n0: ModuleNotFoundError: No module\nsrun: error: task 0: Exited with 1\n",
            "0: ModuleNotFoundError: No module",
        ),
        (
            "0: pod: MPI sees 1 ranks\nslurmstepd-a: error: *** JOB 7 ON a CANCELLED AT T DUE TO JOB REQUEUE ***\n"
            "0: pod: no room\n",
            "0: pod: no room",
        ),
        ("bash: /no/python: No such file\nbye \n\n", "bye"),
        ("", "nothing was written"),
    ],
)
def test_the_line_that_says_most_is_the_cause(run: RunDir, said: str, cause: str) -> None:
    marks, folder = Marks(run), run.ledger / "unstarted"
    assert marks.unstarted() == []
    folder.mkdir()
    (folder / "7_0").write_text(f"cpu1 137 /a log/pod.log\n{said}")
    (folder / ".7_1").write_text("half")
    assert marks.unstarted() == [Unstarted("7_0", "cpu1", 137, "/a log/pod.log", cause)]
    (run.ledger / "leases").mkdir()
    (run.ledger / "leases" / "7_0.1").touch()  # a later start got further
    assert marks.unstarted() == []
    marks.forget_unstarted()
    assert not list(folder.glob("7_*"))


def test_refused_requeues_are_read_and_only_those_of_jobs(run: RunDir) -> None:
    marks, folder = Marks(run), run.ledger / "refused"
    assert marks.refused() == []
    folder.mkdir()
    for name in ("7_0", "9@other", "--me", "7_0; ls", "7_1", "８", ".7_2"):
        (folder / name).write_text("1700000000 pod cpu1 /a log/pod.log\nInvalid job id specified\x1b[2J\n")
    (folder / "7_1").write_text("half")
    assert [one.job for one in marks.refused()] == ["7_0", "9@other"]
    assert marks.refused()[0].log == "/a log/pod.log"
    assert "\x1b" not in marks.refused()[0].words
    marks.forget_refused(["7_0"])
    assert [one.job for one in marks.refused()] == ["9@other"]
    marks.forget_refused()
    assert marks.refused() == []
