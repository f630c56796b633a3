"""Rank 0's I/O thread, a turn at a time: durable first, then counted; what a disk refuses is kept; a fence holds."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from megaflow_hpc.ledger import Claim, Ledger, PodIdentity, write_blocks
from megaflow_hpc.ledger.calls import Touch
from megaflow_hpc.ledger.files import Files
from megaflow_hpc.ledger.lease import TIMES
from megaflow_hpc.pod.master.histories import History
from megaflow_hpc.pod.master.run_io import LOOP_HANGS_S, Claimed, Durable, Report
from megaflow_hpc.pod.outcome import Outcome
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.trajectories.journal.writer import JournalWriter
from megaflow_hpc.trajectory import Trajectory
from tests.support.ledgers import Clock, prepared, rollouts
from tests.support.pods import IoPod


class Full(Files):
    """Files that refuse marks of finished blocks while ``full``."""

    full = False

    def _touch(self, call: Touch) -> None:
        if self.full and call.path.startswith("ledger/done/"):
            raise OSError(errno.ENOSPC, "No space left on device")
        super()._touch(call)


class Journal(JournalWriter):
    """Counts the records that were appended and that are durable."""

    appended = durable = 0

    def append(self, record: bytes | Mapping[str, Any]) -> int:
        self.appended += 1
        return super().append(record)

    def commit(self) -> int:
        self.durable = self.appended
        return super().commit()


class Pod(IoPod):
    journal: Journal

    def __init__(self, run: RunDir) -> None:
        self.clock = Clock()
        self.files = Full(run, self.clock)
        super().__init__(run, files=self.files, journal=Journal(run.journal_file("a", "0")))

    def store(self, number: int) -> None:
        trajectory = Trajectory.begin(rollouts(number + 1)[number], 0, "completed")
        self.io.store(Outcome.of(trajectory), 0, 0)
        self.io.push()


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = prepared(tmp_path / "run")
    write_blocks(run, rollouts(2), size=10)
    return run


@pytest.fixture
def pod(run: RunDir) -> Pod:
    """A pod that holds the one block."""
    pod = Pod(run)
    pod.io.claim()
    claimed = [report for report in pod.turn() if isinstance(report, Claimed)]
    assert [each.block.claim for each in claimed if each.block] == [Claim(0, 0)]
    assert pod.io.state.held == 1
    assert not pod.io.claiming
    return pod


def durable(reports: list[Report]) -> list[str]:
    return [result.outcome.id for report in reports if isinstance(report, Durable) for result in report.results]


def test_results_are_reported_when_they_are_durable_and_the_last_one_with_its_block_done(pod: Pod) -> None:
    pod.store(0)
    assert not pod.io.idle
    assert pod.journal.appended == 0
    assert durable(pod.turn()) == ["t000/oracle/0"]
    assert pod.journal.durable == 1
    assert pod.io.state.held == 1
    pod.store(1)
    assert durable(pod.turn()) == ["t001/oracle/0"]
    assert pod.io.idle
    assert pod.io.state.held == 0, "who hears of the last result knows that its block is done"
    assert pod.ledger.finished


def test_a_block_whose_mark_is_refused_is_marked_later_and_no_result_is_lost(pod: Pod) -> None:
    pod.files.full = True
    pod.store(0)
    pod.store(1)
    assert durable(pod.turn()) == ["t000/oracle/0"]
    assert pod.io.stuck
    assert not pod.io.idle
    assert durable(pod.turn()) == []
    pod.files.full = False
    assert durable(pod.turn()) == ["t001/oracle/0"]
    assert not pod.io.stuck
    assert pod.io.idle
    assert pod.journal.appended == pod.journal.durable == 2
    assert pod.ledger.finished


def test_a_pod_whose_fence_has_closed_reports_nothing_and_the_loop_knows_it_by_the_clock(pod: Pod) -> None:
    assert pod.io.may_commit
    pod.store(0)
    pod.clock.now += TIMES.commit_s
    assert not pod.io.may_commit, "also while the thread hangs in a call"
    assert durable(pod.turn()) == []
    assert pod.journal.appended == 0
    assert not pod.io.idle


def test_a_commit_that_outlasts_the_fence_does_not_count(pod: Pod) -> None:
    def slow() -> None:
        pod.clock.now += TIMES.commit_s

    pod.journal.commit = slow  # type: ignore[method-assign]
    pod.store(0)
    assert durable(pod.turn()) == []
    assert not pod.io.idle


def test_the_lease_is_renewed_only_while_the_loop_turns(pod: Pod) -> None:
    first = pod.ledger.closes_at
    pod.thread.loop_turned_at -= LOOP_HANGS_S + 1
    pod.clock.now += TIMES.renew_s
    pod.thread.turn()
    assert pod.ledger.closes_at == first, "others may take over what a loop that hangs has claimed"
    list(pod.io.collect())
    pod.thread.turn()
    assert pod.ledger.closes_at == first + TIMES.renew_s


def test_at_its_end_the_thread_leaves_word_and_gives_the_block_back(pod: Pod, run: RunDir) -> None:
    run.partial.mkdir(exist_ok=True)
    pod.io.start()
    pod.store(0)
    assert pod.io.finish(60, release=True, histories={"t001/oracle/0": History(cuts=1)})
    assert durable(list(pod.io.collect())) == ["t000/oracle/0"]
    assert pod.io.state.held == 0
    assert not pod.io.finished
    heir = Ledger(run, PodIdentity("b", "0"))
    heir.register()
    claim = heir.claim(lambda owner: 0)
    assert claim is not None
    assert (claim, claim.left) == (Claim(0, 1), ("t001/oracle/0",))
    assert [file.name for file in run.partial.iterdir()] == ["a.0.json"]


def test_a_run_directory_that_is_deleted_ends_the_pod(run: RunDir) -> None:
    """Writing to its open lease still succeeds."""
    pod = Pod(run)
    pod.turn()
    shutil.rmtree(run.path)
    pod.clock.now += TIMES.renew_s
    pod.thread.turn()
    assert pod.ledger.superseded
    assert not pod.io.may_commit, "so the loop ends the pod as lost"
