"""The scheduler: its order, bounded retries, packing, no slot idle while work fits, no rollout lost or starved."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megaflow_hpc.pod.scheduling.failures import MAX_FAILURES, RULES
from megaflow_hpc.pod.scheduling.scheduler import MAX_OVERTAKEN, Demand, Scheduler, Work
from megaflow_hpc.types import Rollout


def one(name: str, policy: str = "p", **fields: object) -> Work:
    return Work(Rollout(name, policy, 0, "a"), block=0, epoch=0, **fields)  # type: ignore[arg-type]


def work(n: int, first: int = 0) -> list[Work]:
    return [one(f"t{i}") for i in range(first, first + n)]


def scheduler_of(*slots: int, surely_s: Mapping[str, float] | None = None) -> Scheduler:
    """A scheduler with a worker, numbered from 1, for each number of slots.

    Args:
        surely_s: task → seconds that it is expected to take at most.
    """
    scheduler = Scheduler(lambda work: (surely_s or {}).get(work.rollout.task_id, 0.0))
    for rank, number in enumerate(slots, 1):
        scheduler.workers.join(rank, number)
    return scheduler


def start(scheduler: Scheduler) -> tuple[int, Work]:
    started = scheduler.next()
    assert started is not None
    return started


def start_all(scheduler: Scheduler) -> list[tuple[int, str]]:
    return [(rank, item.rollout.task_id) for rank, item in iter(scheduler.next, None)]


def run_one(scheduler: Scheduler) -> Work:
    """Starts the next rollout and ends it at once."""
    rank, item = start(scheduler)
    assert scheduler.workers.finish(rank, item.rollout.id) is item
    return item


def names(works: list[Work]) -> list[str]:
    return [item.rollout.task_id for item in works]


def test_work_starts_in_order_on_the_emptiest_worker() -> None:
    scheduler = scheduler_of(2, 1)
    scheduler.add(work(5))
    assert start_all(scheduler) == [(1, "t0"), (1, "t1"), (2, "t2")]
    assert scheduler.workers.finish(2, "t2/p/0") is not None
    assert start_all(scheduler) == [(2, "t3")]


def test_a_policy_without_an_engine_waits_and_holds_up_no_other() -> None:
    scheduler = scheduler_of(3)
    scheduler.add([one("t", "late"), one("t", "ready")])
    scheduler.waiting = {"late"}
    assert start(scheduler)[1].rollout.policy == "ready"
    assert scheduler.next() is None
    scheduler.waiting = set()
    assert scheduler.next() is not None


def test_coming_tasks_are_in_the_order_in_which_they_start() -> None:
    scheduler = scheduler_of(1)
    scheduler.add(replace(item, planned=item.rollout.task_id, deferred=i % 3 == 0) for i, item in enumerate(work(40)))
    (started,) = start_all(scheduler)
    coming = scheduler.coming(15)
    assert len(coming) == 16
    happened = [started[1]]
    while len(happened) < len(coming):
        assert scheduler.workers.finish(1, f"{happened[-1]}/p/0") is not None
        happened += [task for _, task in start_all(scheduler)]
    assert coming == happened


def test_a_late_message_of_a_worker_that_left_is_ignored() -> None:
    scheduler = scheduler_of(1)
    scheduler.add(work(1))
    start_all(scheduler)
    assert names(scheduler.workers.leave(1)) == ["t0"]
    assert scheduler.workers.finish(1, "t0/p/0") is None


def test_a_retry_goes_to_another_worker_if_there_is_one() -> None:
    scheduler = scheduler_of(2, 1)
    scheduler.add(work(1))
    rank, item = start(scheduler)
    assert rank == 1
    scheduler.workers.finish(1, item.rollout.id)
    assert scheduler.retry(item, "sandbox-lost", 1)
    assert start(scheduler)[0] == 2


@pytest.mark.parametrize("cause", RULES)
def test_retries_are_bounded_by_cause(cause: str) -> None:
    scheduler = scheduler_of(1)
    scheduler.add(work(1))
    attempts = 1
    while scheduler.retry(run_one(scheduler), cause, 1):
        attempts += 1
    assert attempts == 1 + RULES[cause].retries


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.sampled_from(sorted(RULES)), min_size=1, max_size=60))
def test_causes_are_counted_apart_and_every_rollout_is_given_up_some_time(causes: list[str]) -> None:
    scheduler = scheduler_of(1)
    scheduler.add(work(1))
    counted = dict.fromkeys(RULES, 0)
    for cause in causes:
        item = run_one(scheduler)
        counted[cause] += 1
        again = scheduler.retry(item, cause, 1)
        assert again == (counted[cause] <= RULES[cause].retries and sum(counted.values()) < MAX_FAILURES)
        if not again:
            break
    assert sum(counted.values()) <= MAX_FAILURES


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_every_rollout_is_accounted_for_and_no_slot_idles(data: st.DataObject) -> None:
    scheduler = Scheduler()
    slots: dict[int, int] = {}
    added: set[str] = set()
    done: list[str] = []
    for step in range(data.draw(st.integers(1, 40))):
        action = data.draw(st.sampled_from(["add", "join", "leave", "finish", "fail"]))
        running = {item.rollout.id: item for item in scheduler.workers.running_work()}
        if action == "add":
            items = work(data.draw(st.integers(1, 5)), first=step * 10)
            added |= {w.rollout.id for w in items}
            scheduler.add(items)
        elif action == "join":
            slots[step] = data.draw(st.integers(1, 3))
            scheduler.workers.join(step, slots[step])
        elif action == "leave" and slots:
            rank = data.draw(st.sampled_from(sorted(slots)))
            del slots[rank]
            done += [w.rollout.id for w in scheduler.workers.leave(rank) if not scheduler.retry(w, "node", rank)]
        elif running:
            item = running[data.draw(st.sampled_from(sorted(running)))]
            rank = next(r for r in slots if scheduler.workers.finish(r, item.rollout.id) is not None)
            if action == "finish" or not scheduler.retry(item, "node", rank):
                done.append(item.rollout.id)
        start_all(scheduler)
        assert scheduler.queued == 0 or scheduler.workers.running == sum(slots.values())
        assert scheduler.workers.running <= sum(slots.values())
        assert scheduler.workers.free == sum(slots.values()) - scheduler.workers.running
    assert len(done) == len(set(done))
    assert len(done) + scheduler.workers.running + scheduler.queued == len(added)


def test_retries_start_before_all() -> None:
    scheduler = scheduler_of(1)
    scheduler.add(work(3))
    first = run_one(scheduler)
    assert scheduler.retry(first, "node", 1)
    assert names([first, *(run_one(scheduler) for _ in range(3))]) == ["t0", "t0", "t1", "t2"]


def test_what_cannot_end_in_time_is_put_aside_and_given_back() -> None:
    scheduler = scheduler_of(4, surely_s={"long": 500.0, "short": 50.0})
    scheduler.add([one("long"), one("short"), one("unknown")])
    started = [item for _, item in iter(lambda: scheduler.next(remaining_s=100.0), None)]
    assert names(started) == ["short", "unknown"]
    assert (scheduler.too_long, scheduler.queued) == (1, 0)
    assert names(scheduler.clear()) == ["long"]


def test_what_is_too_long_for_every_pod_starts_all_the_same() -> None:
    scheduler = scheduler_of(1, surely_s={"endless": 5000.0})
    scheduler.add([one("endless")])
    assert scheduler.next(remaining_s=100.0, whole_s=3600.0) is not None


def test_cpus_and_memory_are_never_exceeded_and_what_fits_nowhere_is_named() -> None:
    scheduler = Scheduler()
    scheduler.workers.join(1, 8, cpus=4, memory_mb=1000)
    scheduler.add(one(f"m{n}", demand=Demand(1.0, 400)) for n in range(5))
    scheduler.add([one("giant", demand=Demand(1.0, 5000))])
    assert len(start_all(scheduler)) == 2
    assert names(scheduler.remove_impossible()) == ["giant"]
    scheduler.add([one("free")])
    assert start_all(scheduler) == [(1, "free")]


def test_a_large_rollout_is_overtaken_a_limited_number_of_times() -> None:
    scheduler = Scheduler()
    scheduler.workers.join(1, 2, cpus=2)
    scheduler.add([one("first", demand=Demand(cpus=1))])
    scheduler.next()
    scheduler.add([one("large", demand=Demand(cpus=2))])
    scheduler.add(one(f"small{n}", demand=Demand(cpus=1)) for n in range(5 * MAX_OVERTAKEN))
    last, started = "first", 0
    while last != "large":
        started += 1
        next_ = scheduler.next()
        scheduler.workers.finish(1, f"{last}/p/0")
        if next_ is None:
            next_ = start(scheduler)
        last = next_[1].rollout.task_id
    assert started <= MAX_OVERTAKEN + 2


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_with_demands_limits_hold_and_all_work_ends(data: st.DataObject) -> None:
    scheduler = Scheduler()
    limits = {rank: (data.draw(st.integers(1, 4)), data.draw(st.integers(2, 8))) for rank in (1, 2)}
    for rank, (slots, cpus) in limits.items():
        scheduler.workers.join(rank, slots, cpus=cpus)
    items = [
        one(f"t{n}", data.draw(st.sampled_from("xy")), demand=Demand(cpus=data.draw(st.integers(0, 2))))
        for n in range(data.draw(st.integers(1, 30)))
    ]  # fmt: skip
    scheduler.add(items)
    running: dict[str, tuple[int, Work]] = {}
    ended = []
    while len(ended) < len(items):
        running |= {item.rollout.id: (rank, item) for rank, item in iter(scheduler.next, None)}
        for rank, (slots, cpus) in limits.items():
            there = [item for at, item in running.values() if at == rank]
            assert len(there) <= slots
            assert sum(item.demand.cpus for item in there) <= cpus
        assert running, "no slot may stay empty while work fits an empty worker"
        rollout_id = data.draw(st.sampled_from(sorted(running)))
        rank, _ = running.pop(rollout_id)
        assert scheduler.workers.finish(rank, rollout_id) is not None
        ended.append(rollout_id)
    assert sorted(ended) == sorted(item.rollout.id for item in items)
    assert (scheduler.queued, scheduler.workers.running) == (0, 0)


def test_what_is_dropped_never_starts_and_the_rest_keeps_its_order() -> None:
    scheduler = scheduler_of(10)
    scheduler.add(work(6))
    assert names([item for n in (0, 3) if (item := scheduler.drop(f"t{n}/p/0"))]) == ["t0", "t3"]
    assert scheduler.drop("t3/p/0") is None
    assert scheduler.queued == 4
    assert [name for _, name in start_all(scheduler)] == ["t1", "t2", "t4", "t5"]
    assert scheduler.queued == 0


def test_deferred_work_starts_when_nothing_else_is_ready() -> None:
    scheduler = scheduler_of(1)
    scheduler.add([one("deferred", "x", deferred=True), one("now", "y")])
    assert names([run_one(scheduler), run_one(scheduler)]) == ["now", "deferred"]
    assert scheduler.deferred == 0


class Planned:
    """A task that a weak reference can watch."""


def test_a_task_is_kept_for_as_long_as_its_work_may_start_and_no_longer() -> None:
    scheduler = scheduler_of(1, 1)
    planned = [Planned() for _ in range(3)]
    kept = [weakref.ref(each) for each in planned]
    scheduler.add(replace(item, planned=each) for item, each in zip(work(3), planned, strict=True))
    del planned

    def in_memory() -> list[bool]:
        gc.collect()
        return [each() is not None for each in kept]

    assert [name for _, name in start_all(scheduler)] == ["t0", "t1"]
    assert scheduler.drop("t2/p/0") is not None  # handed off
    assert in_memory() == [True, True, False]
    assert scheduler.workers.finish(2, "t1/p/0") is not None
    assert in_memory() == [True, False, False]
    ended = scheduler.workers.finish(1, "t0/p/0")
    assert ended is not None
    assert scheduler.retry(ended, "node", 1)
    del ended
    ((_, again),) = iter(scheduler.next, None)
    assert again.planned is kept[0]()
    assert scheduler.workers.finish(2, "t0/p/0") is not None
    del again
    assert in_memory() == [False, False, False]


def test_an_excluded_worker_ends_what_it_runs_and_starts_nothing() -> None:
    scheduler = scheduler_of(2, 2)
    scheduler.add(work(3))
    assert [rank for rank, _ in start_all(scheduler)] == [1, 2, 1]
    scheduler.workers.exclude(1)
    scheduler.add(work(3, first=3))
    assert start_all(scheduler) == [(2, "t3")]
    assert scheduler.workers.finish(1, "t0/p/0") is not None
    assert start_all(scheduler) == []
    assert scheduler.workers.finish(2, "t1/p/0") is not None
    assert start_all(scheduler) == [(2, "t4")]
