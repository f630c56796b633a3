"""The scheduler: FIFO, bounded retries, no slot idle while work fits, no rollout lost."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megaflow_hpc.pod.scheduler import RETRIES, Scheduler, Work
from megaflow_hpc.types import Rollout


def work(n: int, first: int = 0) -> list[Work]:
    return [Work(Rollout(f"t{i}", "p", 0, "a"), block=0, epoch=0) for i in range(first, first + n)]


def start_all(scheduler: Scheduler) -> list[tuple[int, str]]:
    started = []
    while (next_ := scheduler.next()) is not None:
        started.append((next_[0], next_[1].rollout.task_id))
    return started


def test_work_starts_in_order_on_the_emptiest_worker() -> None:
    scheduler = Scheduler()
    scheduler.join(1, 2)
    scheduler.join(2, 1)
    scheduler.add(work(5))
    assert start_all(scheduler) == [(1, "t0"), (1, "t1"), (2, "t2")]
    assert scheduler.finish(2, "t2/p/0") is not None
    assert start_all(scheduler) == [(2, "t3")]


def test_a_policy_without_an_engine_waits_and_holds_up_no_other() -> None:
    scheduler = Scheduler()
    scheduler.join(1, 3)
    scheduler.add([Work(Rollout("t", policy, 0, "a"), 0, 0) for policy in ("late", "ready")])
    scheduler.waiting = {"late"}
    started = scheduler.next()
    assert started is not None
    assert started[1].rollout.policy == "ready"
    assert scheduler.next() is None
    scheduler.waiting = set()
    assert scheduler.next() is not None


def test_a_late_message_of_a_worker_that_left_is_ignored() -> None:
    scheduler = Scheduler()
    scheduler.join(1, 1)
    scheduler.add(work(1))
    start_all(scheduler)
    assert [w.rollout.task_id for w in scheduler.leave(1)] == ["t0"]
    assert scheduler.finish(1, "t0/p/0") is None


def test_a_retry_goes_elsewhere_when_there_is_an_elsewhere() -> None:
    scheduler = Scheduler()
    scheduler.join(1, 2)
    scheduler.join(2, 1)
    scheduler.add(work(1))
    rank, item = scheduler.next() or (0, None)
    assert rank == 1
    assert item is not None
    scheduler.finish(1, item.rollout.id)
    assert scheduler.retry(item, "sandbox", 1)
    assert (scheduler.next() or (0, None))[0] == 2


def test_retries_are_bounded_by_cause() -> None:
    for kind in ("sandbox", "verifier", "user", "agent"):
        scheduler = Scheduler()
        scheduler.join(1, 1)
        scheduler.add(work(1))
        attempts = 0
        while (next_ := scheduler.next()) is not None:
            attempts += 1
            scheduler.finish(*(next_[0], next_[1].rollout.id))
            if not scheduler.retry(next_[1], kind, 1):
                break
        assert attempts == 1 + RETRIES.get(kind, 0)


@given(st.data())
def test_every_rollout_is_accounted_for_and_no_slot_idles(data: st.DataObject) -> None:
    scheduler = Scheduler()
    slots: dict[int, int] = {}
    added: set[str] = set()
    done: list[str] = []
    for step in range(data.draw(st.integers(1, 40))):
        action = data.draw(st.sampled_from(["add", "join", "leave", "finish", "fail"]))
        running = {i: w for rank in scheduler.workers for i, w in scheduler.running_on(rank).items()}
        if action == "add":
            items = work(data.draw(st.integers(1, 5)), first=step * 10)
            added |= {w.rollout.id for w in items}
            scheduler.add(items)
        elif action == "join":
            slots[step] = data.draw(st.integers(1, 3))
            scheduler.join(step, slots[step])
        elif action == "leave" and slots:
            rank = data.draw(st.sampled_from(sorted(slots)))
            del slots[rank]
            done += [w.rollout.id for w in scheduler.leave(rank) if not scheduler.retry(w, "node", rank)]
        elif running:
            item = running[data.draw(st.sampled_from(sorted(running)))]
            rank = next(r for r in scheduler.workers if scheduler.finish(r, item.rollout.id) is not None)
            if action == "finish" or not scheduler.retry(item, "node", rank):
                done.append(item.rollout.id)
        start_all(scheduler)
        assert scheduler.queued == 0 or scheduler.running == sum(slots.values())
        assert scheduler.running <= sum(slots.values())
    assert len(done) == len(set(done))
    assert len(done) + scheduler.running + scheduler.queued == len(added)
