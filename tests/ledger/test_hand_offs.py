"""The last blocks do not wait for one pod: what it has not started is handed to pods without work."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from itertools import groupby
from pathlib import Path

import pytest

from megaflow_hpc import Campaign
from megaflow_hpc.campaign.local import LocalPod
from megaflow_hpc.ledger import Claim, Ledger, read_blocks, write_blocks
from megaflow_hpc.ledger.tasks import PlannedTask
from megaflow_hpc.pod.master.run_io import WorkRequested
from megaflow_hpc.pod.master.work_stealing import WorkStealing, rollouts_for
from megaflow_hpc.pod.scheduling.groups import GroupRules, Groups
from megaflow_hpc.pod.scheduling.scheduler import Scheduler, Work
from megaflow_hpc.rundir.layout import RunDir
from tests.support.ledgers import AnyTasks, rollouts
from tests.support.pods import IoPod
from tests.support.waiting import until


def requested(pod: IoPod) -> list[int]:
    """Takes a turn. Returns the slots that other pods ask to be filled."""
    return [report.slots for report in pod.turn() if isinstance(report, WorkRequested)]


def test_what_waits_is_spread_over_all_slots() -> None:
    assert (rollouts_for(1, 8, 1), rollouts_for(100, 8, 8)) == (1, 50)
    assert (rollouts_for(9, 1, 2), rollouts_for(0, 8, 8)) == (6, 0)


def test_given_rollouts_are_run_by_who_claims_them_and_the_campaign_ends_with_the_last(run: RunDir) -> None:
    write_blocks(run, rollouts(3, samples=2), size=100)
    giver, taker = IoPod(run, "a"), IoPod(run, "b")
    giver.claim()
    assert taker.blocks.claim() is None
    taker.turn()
    assert taker.io.state.seen.others
    taker.io.requests.request_work = 3
    taker.turn()
    giver.io.requests.find_work_requests = True
    assert requested(giver) == [3]
    giver.io.hand_off([(0, rollout) for rollout in rollouts(3, samples=2)[2:]], max_rollouts=3)
    assert not giver.io.idle
    giver.turn()
    assert giver.io.idle
    given = [block.rollouts for block in read_blocks(run)[1:]]
    assert [len({r.group_id for r in block}) for block in given] == [1, 1]  # groups stay whole
    for rollout in rollouts(1, samples=2):
        giver.blocks.settled(0, rollout.id)
    assert len(giver.blocks) == 0
    assert not giver.ledger.finished
    while (claimed := taker.blocks.claim()) is not None:
        for rollout in claimed.rollouts:
            taker.blocks.settled(claimed.claim.block, rollout.id)
    assert taker.ledger.finished


def test_pods_look_ahead_into_different_small_blocks_and_claim_them_first(run: RunDir) -> None:
    write_blocks(run, rollouts(30), size=1)
    one, other = (IoPod(run, name, ahead=4) for name in "ab")
    before, others = one.claim(), other.claim()
    assert len(before.upcoming) == len(others.upcoming) == 4
    assert not {planned.task["id"] for planned in before.upcoming} & {planned.task["id"] for planned in others.upcoming}
    for _ in range(4):
        claimed = one.claim()
        assert [rollout.task_id for rollout in claimed.rollouts] == [before.upcoming[0].task["id"]]
        assert len(claimed.upcoming) == 4
        before = claimed
    assert IoPod(run, "c").claim().upcoming == ()


def test_a_pod_does_not_look_beyond_large_blocks(run: RunDir) -> None:
    write_blocks(run, rollouts(60), size=20)
    assert IoPod(run, "a", ahead=4).claim().upcoming == ()


def test_a_claim_stands_where_what_comes_next_cannot_be_read(run: RunDir) -> None:
    class Away(AnyTasks):
        """Tasks of which only the first can be read."""

        def __missing__(self, task: str) -> PlannedTask:
            if self:
                raise OSError(errno.EIO, "Input/output error")
            self[task] = super().__missing__(task)
            return self[task]

    write_blocks(run, rollouts(30), size=1)
    pod = IoPod(run, "a", ahead=4, tasks=Away())
    claimed = pod.claim()
    assert (len(claimed.rollouts), claimed.upcoming) == (1, ())
    assert len(pod.blocks) == 1


def test_who_takes_a_block_over_leaves_out_what_was_given(run: RunDir) -> None:
    write_blocks(run, rollouts(3), size=100)
    giver, taker = IoPod(run, "a"), IoPod(run, "b")
    giver.claim()
    giver.blocks.hand_off([(0, rollout) for rollout in rollouts(3)[1:]], each=100)
    Ledger(run).mark_gone("a.0")
    claims = [taker.claim(), taker.claim()]
    ran = {each.claim.block: [rollout.id for rollout in each.rollouts] for each in claims}
    assert ran == {0: ["t000/oracle/0"], 1_000_000: ["t001/oracle/0", "t002/oracle/0"]}


def test_a_drained_block_says_what_is_left(run: RunDir) -> None:
    write_blocks(run, rollouts(3), size=100)
    first, second = IoPod(run, "a"), IoPod(run, "b")
    first.claim()
    first.blocks.settled(0, "t001/oracle/0")
    first.blocks.release(0)
    claimed = second.claim()
    assert claimed.claim == Claim(0, 1)
    assert [rollout.task_id for rollout in claimed.rollouts] == ["t000", "t002"]


def test_of_groups_that_may_be_closed_early_those_are_given_of_which_nothing_has_started(run: RunDir) -> None:
    write_blocks(run, rollouts(4, samples=4), size=100)
    giver, taker = IoPod(run, "a"), IoPod(run, "b")
    claimed = giver.claim()
    groups, scheduler = Groups(GroupRules(signal_after=2)), Scheduler()
    for name, samples in groupby(claimed.rollouts, key=lambda rollout: rollout.group_id):
        group = list(samples)
        deferred = groups.admit(name, "oracle", [rollout.id for rollout in group])
        scheduler.add(Work(rollout, 0, 0, deferred=rollout.id in deferred) for rollout in group)
    scheduler.workers.join(1, 3)
    for _, work in iter(scheduler.next, None):  # two of the first group, one of the second
        groups.started(work.rollout.group_id, work.rollout.id)
    assert taker.blocks.claim() is None
    taker.io.requests.request_work = 30
    taker.turn()
    giver.turn()
    stealing = WorkStealing(giver.io, scheduler, groups)
    for _ in range(2):
        stealing.tick(True, False)
        stealing.requests += requested(giver)
    left = {work.rollout.id for work in scheduler.waiting_work()}
    assert not left & {rollout.id for block in read_blocks(run)[1:] for rollout in block.rollouts}
    given = {rollout.group_id for block in read_blocks(run)[1:] for rollout in block.rollouts}
    assert given == {"t002/oracle", "t003/oracle"}
    assert sum(len(block.rollouts) for block in read_blocks(run)[1:]) == 8
    assert len(groups) == 2
    assert scheduler.queued == 5


@pytest.mark.slow
def test_a_pod_that_finds_nothing_to_claim_gets_what_the_other_has_not_started(
    make_campaign: Callable[..., Path],
) -> None:
    """Two real pods and one block. Without hand-offs, one pod would leave with nothing done."""
    extra = "samples: 2\nscheduling: {signal_after: 2}\nslurm: {pods: {slots_per_rank: 2}}\n"
    path = make_campaign(6, extra, agent="oracle", solution="sleep 3; echo 42 > answer")
    run = Campaign.from_yaml(path).plan(launcher="local")
    rollouts = [rollout for block in read_blocks(run.dir) for rollout in block.rollouts]
    for file in run.dir.tasks.iterdir():
        file.unlink()
    pods = [LocalPod(run.dir, 1, 0) for _ in range(2)]
    try:
        until(lambda: len(run.ledger.leases()) == 2, "both pods look for work")
        write_blocks(run.dir, rollouts, size=100)
        for pod in pods:
            assert pod.pod.wait(300) == 0
    finally:
        for pod in pods:
            pod.stop()
    assert run.ledger.finished
    events = [[json.loads(line) for line in file.read_text().splitlines()] for file in run.dir.events.glob("*.jsonl")]
    stored = [[event["id"] for event in each if event["event"] == "rollout"] for each in events]
    assert sorted(rollout for each in stored for rollout in each) == sorted(rollout.id for rollout in rollouts)
    assert all(stored)
    assert (run.dir.tasks / "1000000.json").exists(), "one pod handed off rollouts"
