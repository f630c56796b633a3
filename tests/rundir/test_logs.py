"""The files that are read for the log of one rollout."""

from __future__ import annotations

from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.logs import RolloutLog, all_logs
from tests.support.operations import counted

PODS = 50


def test_only_logs_that_have_grown_are_opened_again(run: RunDir) -> None:
    for number in range(PODS):
        (run.logs / f"pod-7_{number}.log").write_text(f"a/b/{number}: one\n")
    rollout = RolloutLog(run, "a/b/3")
    assert rollout.read() == ["pod-7_3.log: a/b/3: one"]
    with counted(run.logs) as operations:
        assert rollout.read() == []
        assert len(all_logs(run)) == PODS
    assert operations["opens"] == 0
    for number in (3, 4):
        with (run.logs / f"pod-7_{number}.log").open("a") as file:
            file.write("a/b/3: two\na/b/4: two\n")
    with counted(run.logs) as operations:
        assert rollout.read() == ["pod-7_3.log: a/b/3: two", "pod-7_4.log: a/b/3: two"]
    assert operations["opens"] <= 4, "of fifty"
    (run.logs / "pod-7_9.log").write_text("a/b/3\n")
    assert rollout.read() == ["pod-7_9.log: a/b/3"], "one that became shorter is read anew"
