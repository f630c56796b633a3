"""Blocks are added once while a campaign runs. An open lease keeps it open, and pods waiting for a while."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest

from megaflow_hpc.errors import LedgerError
from megaflow_hpc.ledger import Ledger, OpenLease, PodIdentity, add_blocks, read_blocks, write_blocks
from megaflow_hpc.ledger.files import Files
from megaflow_hpc.ledger.lease import TIMES
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.marks import FINISHED, Marks
from megaflow_hpc.types import Rollout
from tests.support.ledgers import Clock, rollouts
from tests.support.waiting import until


def batch(again: int, tasks: int = 6) -> list[Rollout]:
    return [Rollout(f"t{n}", "p", sample, "a", again) for n in range(tasks) for sample in range(2)]


def ids(run: RunDir) -> list[str]:
    return sorted(rollout.id for block in read_blocks(run) for rollout in block.rollouts)


def registered(run: RunDir, name: str = "a", clock: Clock | None = None) -> Ledger:
    pod = Ledger(run, PodIdentity(name, "0"), clock or Clock())
    pod.register()
    return pod


def work(pod: Ledger) -> int:
    """Claims and ends every block. Returns their number."""
    done = 0
    for claim in iter(lambda: pod.claim(lambda owner: 0), None):
        pod.mark_done(claim)
        done += 1
    return done


class Dying(Files):
    """Kills this process after some hard links."""

    def __init__(self, run: RunDir, links: int) -> None:
        super().__init__(run)
        self.links = links

    def _hard_link(self, private: Path, target: Path) -> None:
        if not self.links:
            os.kill(os.getpid(), signal.SIGKILL)
        self.links -= 1
        super()._hard_link(private, target)


def add_and_die(run: RunDir, links: int) -> None:
    from megaflow_hpc.ledger import blocks

    blocks.Files = lambda run: Dying(run, links)  # type: ignore[assignment,misc]
    add_blocks(run, batch(1), "p.000001", size=2)


@pytest.mark.parametrize("links", range(8))
def test_a_batch_is_added_once_although_its_adder_was_killed(run: RunDir, links: int) -> None:
    write_blocks(run, batch(0), size=4)
    process = multiprocessing.get_context("fork").Process(target=add_and_die, args=(run, links))
    process.start()
    process.join()
    assert process.exitcode == (-signal.SIGKILL if links < 7 else 0)  # six blocks and their record
    add_blocks(run, batch(2, 1), "another", size=2)
    numbers = add_blocks(run, batch(1), "p.000001", pods=3)  # cut as the first one had cut it
    assert add_blocks(run, batch(1), "p.000001") == numbers
    assert len(numbers) == 6
    assert ids(run) == sorted(rollout.id for n, tasks in ((0, 6), (1, 6), (2, 1)) for rollout in batch(n, tasks))


def add_all(run: RunDir, barrier: object) -> None:
    barrier.wait()  # type: ignore[attr-defined]
    for number in range(1, 11):
        add_blocks(run, batch(number, 3), f"p.{number}", size=2)


def test_processes_that_add_the_same_batches_at_the_same_time_add_each_once(run: RunDir) -> None:
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(4)
    processes = [context.Process(target=add_all, args=(run, barrier)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * 4
    assert ids(run) == sorted(rollout.id for number in range(1, 11) for rollout in batch(number, 3))


def test_a_token_is_of_one_batch_and_names_a_file(run: RunDir) -> None:
    add_blocks(run, batch(0), "p.0")
    with pytest.raises(LedgerError, match=r"12 other rollouts were added with it"):
        add_blocks(run, batch(1), "p.0")
    for token in ("", "../x", "a/b", ".hidden"):
        with pytest.raises(LedgerError, match="names a file"):
            add_blocks(run, batch(1), token)
    assert ids(run) == sorted(rollout.id for rollout in batch(0))


def test_a_finished_mark_that_comes_late_does_not_count(run: RunDir) -> None:
    write_blocks(run, rollouts(1), size=1)
    pod = registered(run)
    assert work(pod) == 1
    late = (run.path / FINISHED).read_bytes()
    assert pod.finished
    add_blocks(run, batch(1, 1), "p.1")
    assert not pod.finished
    (run.path / FINISHED).write_bytes(late)
    assert not pod.finished
    assert work(pod) == 1
    assert pod.finished


def test_a_campaign_is_open_until_the_last_consumer_closes_it_and_pods_wait_for_one_that_renews(run: RunDir) -> None:
    clock = Clock()
    pod = registered(run, clock=clock)
    ours, theirs = OpenLease(run, "default"), OpenLease(run, "other")
    for lease in (ours, theirs):
        lease.open()
    assert work(pod) == 0
    assert (pod.seen.opened, pod.seen.awaited, pod.finished) == (True, True, False)
    add_blocks(run, batch(0), "default.0", size=4)
    assert work(pod) == 3
    assert (pod.seen.awaited, pod.finished) == (True, False)
    theirs.close()

    def awaited_after_a_minute() -> bool:
        clock.now += 60.0
        pod.renew()
        assert work(pod) == 0
        return pod.seen.awaited

    assert all(awaited_after_a_minute() for _ in range(int(TIMES.open_s // 60) - 1))
    assert not awaited_after_a_minute()
    assert (pod.seen.opened, pod.finished) == (True, False), "the pod need not wait, but nothing is finished"
    ours.put()
    assert awaited_after_a_minute()
    ours.close()
    assert pod.finished, "the consumer writes the mark, because no pod may be left"
    assert work(pod) == 0
    assert not pod.seen.opened


def test_a_survey_includes_the_consumers(run: RunDir) -> None:
    leader, other = (registered(run, name) for name in "ab")
    lease = OpenLease(run, "default")
    lease.open()

    def survey() -> None:
        operation = leader.survey()
        while not operation.advance(100):
            pass
        other.follow(operation.result.survey)

    survey()
    assert work(other) == 0
    assert other.seen.awaited
    write_blocks(run, rollouts(1))
    survey()
    assert work(other) == 1
    lease.close()
    survey()
    assert work(other) == 0
    assert (other.seen.opened, other.finished) == (False, True)


def test_a_cancelled_campaign_is_closed_and_remembers_its_consumers(run: RunDir) -> None:
    marks, lease = Marks(run), OpenLease(run, "default")
    lease.open()
    marks.cancel()
    marks.cancel()
    assert (marks.open, marks.closed, marks.over) == ([], ["default"], True)
    lease._lease.renewed_at = -1e9  # long ago
    assert not lease.renew()
    with pytest.raises(LedgerError, match="is cancelled; continue it with: megaflow-hpc resume"):
        lease.open()
    assert marks.open == []


def test_a_thread_renews_the_lease_until_its_owner_leaves_it_open(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megaflow_hpc.ledger.consumers.RENEW_S", 0.02)
    path, lease = run.ledger / "open" / "default", OpenLease(run, "default")
    lease.keep()
    first = path.read_text()
    until(lambda: path.read_text() != first, "the lease is renewed", 30)
    lease.leave()
    last = path.read_text()
    time.sleep(0.1)
    assert path.read_text() == last
    OpenLease(run, "default").open()
    assert path.read_text() != last
