"""Blocks of a pod: what it reads before it claims, and what it leaves when it drains."""

from __future__ import annotations

import errno

from megaflow_hpc.ledger import Claim, write_blocks
from megaflow_hpc.ledger.tasks import PlannedTask
from megaflow_hpc.rundir.layout import RunDir
from tests.support.ledgers import AnyTasks, rollouts
from tests.support.pods import IoPod


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


def test_a_drained_block_says_what_is_left(run: RunDir) -> None:
    write_blocks(run, rollouts(3), size=100)
    first, second = IoPod(run, "a"), IoPod(run, "b")
    first.claim()
    first.blocks.settled(0, "t001/oracle/0")
    first.blocks.release(0)
    claimed = second.claim()
    assert claimed.claim == Claim(0, 1)
    assert [rollout.task_id for rollout in claimed.rollouts] == ["t000", "t002"]
