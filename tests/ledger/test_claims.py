"""The ledger: one winner per claim, blocks come back, seals void what was written too late."""

from __future__ import annotations

import json
import multiprocessing
from typing import Any

import pytest

from megaflow_hpc.errors import LedgerError
from megaflow_hpc.ledger import Claim, Ledger, PodIdentity, read_blocks, write_blocks
from megaflow_hpc.ledger.blocks import MAX_BLOCK, RolloutGroups, count_blocks, deal, split
from megaflow_hpc.ledger.calls import Names
from megaflow_hpc.ledger.consumers import finish
from megaflow_hpc.ledger.lease import TIMES
from megaflow_hpc.ledger.names import DONE
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.marks import OPEN
from tests.support.ledgers import Clock, rollouts

COMMIT_S, LEASE_S = TIMES.commit_s, TIMES.lease_s


def pod(run: RunDir, name: str, start: str = "0", clock: Clock | None = None) -> Ledger:
    ledger = Ledger(run, PodIdentity(name, start), clock or Clock())
    ledger.register()
    return ledger


def nothing(owner: str) -> int:
    return 0


def claimed(ledger: Ledger) -> Claim:
    claim = ledger.claim(nothing)
    assert claim is not None
    return claim


def claim_all(run: RunDir, name: str, barrier: Any, queue: Any) -> None:
    ledger = pod(run, name)
    barrier.wait()
    queue.put([claim.block for claim in iter(lambda: ledger.claim(nothing), None)])


def test_every_block_goes_to_exactly_one_of_many_processes(run: RunDir) -> None:
    write_blocks(run, rollouts(60), size=1)
    context = multiprocessing.get_context("fork")
    barrier, queue = context.Barrier(4), context.Queue()
    processes = [context.Process(target=claim_all, args=(run, f"p{i}", barrier, queue)) for i in range(4)]
    for process in processes:
        process.start()
    blocks = [block for _ in processes for block in queue.get(timeout=60)]
    for process in processes:
        process.join()
    assert sorted(blocks) == list(range(60))


def test_the_samples_of_a_group_stay_in_one_block() -> None:
    blocks = list(split(rollouts(5, samples=4), 1, size=6))
    assert [len(block) for block in blocks] == [4, 4, 4, 4, 4]
    assert all(len({r.sample_index for r in block}) == 4 for block in split(rollouts(50, samples=4), 4))


def test_a_group_is_shared_out_where_there_are_fewer_groups_than_pods() -> None:
    one = rollouts(1, samples=16)
    assert [len(block) for block in split(one, 2)] == [16]
    shared = list(split(one, 2, whole=False))
    assert sorted(r.id for block in shared for r in block) == sorted(r.id for r in one)
    assert len(shared[0]) <= 8  # each pod begins with some
    assert len(shared) > 2  # and what is left goes to the one that is done first
    assert list(split(rollouts(2, samples=4), 2, whole=False)) == list(split(rollouts(2, samples=4), 2))


def test_blocks_become_small_towards_the_end_and_leave_nothing_out() -> None:
    dealt = deal([1] * 100_000, 4)
    assert sorted(n for block in dealt for n in block) == list(range(100_000))
    assert max(map(len, dealt)) <= MAX_BLOCK
    assert [len(block) for block in dealt[-4:]] == [1, 1, 1, 1]
    assert [len(block) for block in deal([1] * 3, 4)] == [1, 1, 1]


def test_blocks_have_at_most_64_rollouts_unless_they_would_be_too_many() -> None:
    assert max(map(len, split(rollouts(10_000, samples=8), 2))) == 64
    million = RolloutGroups((rollouts(1)[0], range(1000)) for _ in range(1000))
    assert count_blocks(million, 64, whole=False) < 6000


def test_blocks_come_back_as_written(run: RunDir) -> None:
    write_blocks(run, rollouts(7), size=3)
    write_blocks(run, rollouts(2), size=3)
    assert [len(block.rollouts) for block in read_blocks(run)] == [3, 3, 1, 2]


def test_a_released_block_is_claimed_again_with_the_predecessor_sealed(run: RunDir) -> None:
    write_blocks(run, rollouts(1), size=1)
    first, second = pod(run, "a"), pod(run, "b")
    claim = first.claim(nothing)
    assert claim == Claim(0, 0)
    assert second.claim(nothing) is None
    first.release(claim, 123, ["t000/oracle/0"])
    taken = second.claim({}.__getitem__)  # what the predecessor says needs no look at its journal
    assert taken == Claim(0, 1)
    assert taken.left == ("t000/oracle/0",)
    assert Ledger(run).seals() == {(0, 0): ("a.0", 123)}


def test_a_requeued_element_takes_its_own_blocks_back_at_once(run: RunDir) -> None:
    write_blocks(run, rollouts(1), size=1)
    assert pod(run, "7_0", "0").claim(nothing) == Claim(0, 0)
    assert pod(run, "8_0", "0").claim(nothing) is None
    assert pod(run, "7_0", "1").claim(nothing) == Claim(0, 1)


def test_a_silent_pod_loses_its_block_after_the_lease_and_a_renewing_one_does_not(run: RunDir) -> None:
    write_blocks(run, rollouts(2), size=1)
    silent, lively = pod(run, "silent"), pod(run, "lively")
    assert silent.claim(nothing) == Claim(0, 0)
    assert lively.claim(nothing) == Claim(1, 0)
    clock = Clock()
    observer = pod(run, "observer", clock=clock)
    assert observer.claim(nothing) is None
    for _ in range(3):
        clock.now += LEASE_S / 3
        observer.renew()
        lively.renew(force=True)
        assert observer.claim(nothing) is None
    clock.now += 1
    assert observer.claim(nothing) == Claim(0, 1)
    assert observer.claim(nothing) is None


def test_a_pod_marked_gone_loses_its_block_at_once(run: RunDir) -> None:
    write_blocks(run, rollouts(1), size=1)
    pod(run, "a").claim(nothing)
    Ledger(run).mark_gone("a.0")
    assert pod(run, "b").claim(nothing) == Claim(0, 1)


def test_a_pod_that_could_not_renew_must_not_commit(run: RunDir) -> None:
    clock = Clock()
    ledger = pod(run, "a", clock=clock)
    assert ledger.may_commit
    clock.now += COMMIT_S + 1
    assert not ledger.may_commit
    ledger.renew(force=True)
    assert not ledger.may_commit


def test_a_block_that_was_taken_over_is_not_marked_done_by_its_former_owner(run: RunDir) -> None:
    write_blocks(run, rollouts(1), size=1)
    slow = pod(run, "slow")
    claim = claimed(slow)
    Ledger(run).mark_gone("slow.0")
    assert pod(run, "next").claim(nothing) == Claim(0, 1)
    with pytest.raises(LedgerError, match="taken over"):
        slow.mark_done(claim)
    assert not slow.finished


def test_a_pod_knows_whether_the_holders_of_the_rest_are_alive(run: RunDir) -> None:
    write_blocks(run, rollouts(2), size=1)
    other, observer = pod(run, "other"), pod(run, "observer")
    assert other.claim(nothing) == Claim(0, 0)
    assert observer.claim(nothing) == Claim(1, 0)
    assert observer.claim(nothing) is None
    assert observer.seen.unsettled
    other.renew(force=True)
    assert observer.claim(nothing) is None
    assert not observer.seen.unsettled


def test_the_last_block_done_finishes_the_campaign_and_new_blocks_reopen_it(run: RunDir) -> None:
    write_blocks(run, rollouts(2), size=1)
    ledger = pod(run, "a")
    for _ in range(2):
        assert not ledger.finished
        ledger.mark_done(claimed(ledger))
    assert ledger.finished
    write_blocks(run, rollouts(1), size=1)
    assert not ledger.finished
    assert ledger.claim(nothing) == Claim(2, 0)


def test_a_block_is_done_or_taken_over_though_neither_pod_knows_of_the_other(run: RunDir) -> None:
    write_blocks(run, rollouts(2), size=1)
    slow, swift = pod(run, "slow"), pod(run, "swift")
    first, second = claimed(slow), claimed(slow)
    Ledger(run).mark_gone("slow.0")  # by mistake: it is alive, and its fence is open

    def meanwhile(owner: str) -> int:
        slow.mark_done(first)  # after the journal was measured, before the claim
        return 0

    assert swift.claim(meanwhile) == Claim(1, 1)
    with pytest.raises(LedgerError, match="taken over"):
        slow.mark_done(second)
    assert Ledger(run).done() == {0}
    assert Ledger(run).seals() == {(1, 0): ("slow.0", 0)}
    assert not swift.finished
    swift.mark_done(Claim(1, 1))
    assert swift.finished


@pytest.mark.parametrize("mark", ["lost", "refused"])
def test_a_done_block_whose_mark_was_not_written_is_marked_by_whoever_looks(run: RunDir, mark: str) -> None:
    write_blocks(run, rollouts(1), size=1)
    holder = pod(run, "holder")
    claim = claimed(holder)
    holder.mark_done(claim)
    (run.ledger / "finished").unlink()
    (done,) = (run.ledger / "done").iterdir()
    done.unlink()
    who = pod(run, "other") if mark == "lost" else holder
    assert Ledger(run).seals() == {}
    if mark == "lost":
        assert who.claim(nothing) is None
    else:
        who.mark_done(claim)  # what the pod does again after an error
    assert [path.name for path in (run.ledger / "done").iterdir()] == [done.name]
    assert who.claim(nothing) is None
    assert who.finished


def test_a_start_ends_when_it_sees_a_later_one_of_its_element(run: RunDir) -> None:
    write_blocks(run, rollouts(1), size=1)
    earlier = pod(run, "a")
    assert earlier.claim(nothing) is not None
    Ledger(run, PodIdentity("a", "1")).register()
    earlier.renew(force=True)
    assert not earlier.may_commit
    assert earlier.claim(nothing) is None


def test_an_ended_block_costs_one_listing_while_marks_are_missing() -> None:
    """A pod asks whether all is done after each block that it ends with nothing else in hand."""
    steps = finish("7_0.0", {0, 1, 2})
    assert steps.send(None) == Names(OPEN)
    assert steps.send(()) == Names(DONE)
    with pytest.raises(StopIteration) as ended:
        steps.send(("000000.1", "000002.1"))
    assert ended.value.value is False


def test_the_ledger_of_an_older_run_whose_pods_handed_blocks_to_each_other_is_read(run: RunDir) -> None:
    write_blocks(run, rollouts(2), size=1)
    pod(run, "a")
    (run.ledger / "done" / "000000.1.0").touch()
    (run.ledger / "done" / "000001.2.3").touch()
    claim = {"pod": "c", "start": "0", "predecessor": "b.0", "sealed": 7, "given": 3, "seals": [["a.0", 5, [1000000]]]}
    (run.ledger / "claims" / "000001.2").write_text(json.dumps(claim))
    assert Ledger(run).done() == {0, 1}
    assert Ledger(run).seals() == {(1, 0): ("a.0", 5), (1, 1): ("b.0", 7)}
