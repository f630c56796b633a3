"""The scheduler: its orders, bounded retries, packing, no slot idle while work fits, no rollout lost or starved."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megaflow_hpc.pod.scheduling.failures import MAX_FAILURES, RULES
from megaflow_hpc.pod.scheduling.scheduler import Scheduler
from megaflow_hpc.pod.scheduling.work import Demand, Work
from megaflow_hpc.pod.scheduling.workers import OVERTAKEN
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
    scheduler.workers.join(1, 2)
    scheduler.workers.join(2, 1)
    scheduler.add(work(5))
    assert start_all(scheduler) == [(1, "t0"), (1, "t1"), (2, "t2")]
    assert scheduler.workers.finish(2, "t2/p/0") is not None
    assert start_all(scheduler) == [(2, "t3")]


def test_a_policy_without_an_engine_waits_and_holds_up_no_other() -> None:
    scheduler = Scheduler()
    scheduler.workers.join(1, 3)
    scheduler.add([Work(Rollout("t", policy, 0, "a"), 0, 0) for policy in ("late", "ready")])
    scheduler.waiting = {"late"}
    started = scheduler.next()
    assert started is not None
    assert started[1].rollout.policy == "ready"
    assert scheduler.next() is None
    scheduler.waiting = set()
    assert scheduler.next() is not None


def test_what_comes_is_told_in_the_order_in_which_it_will_start() -> None:
    for order in ("fifo", "longest"):
        scheduler = Scheduler(order)  # type: ignore[arg-type]
        scheduler.workers.join(1, 1)
        scheduler.add(
            replace(item, expected_s=float(i * 7 % 11), planned=item.rollout.task_id) for i, item in enumerate(work(40))
        )
        start_all(scheduler)
        told = scheduler.coming(15)
        assert len(told) == 16
        happened = [scheduler.workers.running_on(1)[next(iter(scheduler.workers.running_on(1)))].rollout.task_id]
        while len(happened) < len(told):
            assert scheduler.workers.finish(1, f"{happened[-1]}/p/0") is not None
            happened += [task for _, task in start_all(scheduler)]
        assert told == happened


def test_a_late_message_of_a_worker_that_left_is_ignored() -> None:
    scheduler = Scheduler()
    scheduler.workers.join(1, 1)
    scheduler.add(work(1))
    start_all(scheduler)
    assert [w.rollout.task_id for w in scheduler.workers.leave(1)] == ["t0"]
    assert scheduler.workers.finish(1, "t0/p/0") is None


def test_a_retry_goes_elsewhere_when_there_is_an_elsewhere() -> None:
    scheduler = Scheduler()
    scheduler.workers.join(1, 2)
    scheduler.workers.join(2, 1)
    scheduler.add(work(1))
    rank, item = scheduler.next() or (0, None)
    assert rank == 1
    assert item is not None
    scheduler.workers.finish(1, item.rollout.id)
    assert scheduler.retry(item, "sandbox-lost", 1)
    assert (scheduler.next() or (0, None))[0] == 2


def test_retries_are_bounded_by_cause() -> None:
    for cause, rule in RULES.items():
        scheduler = Scheduler()
        scheduler.workers.join(1, 1)
        scheduler.add(work(1))
        attempts = 0
        while (next_ := scheduler.next()) is not None:
            attempts += 1
            scheduler.workers.finish(*(next_[0], next_[1].rollout.id))
            if not scheduler.retry(next_[1], cause, 1):
                break
        assert attempts == 1 + rule.retries


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.sampled_from(sorted(RULES)), min_size=1, max_size=60))
def test_causes_are_counted_apart_and_every_rollout_is_given_up_some_time(causes: list[str]) -> None:
    scheduler = Scheduler()
    scheduler.workers.join(1, 1)
    scheduler.add(work(1))
    counted: dict[str, int] = {}
    for cause in causes:
        next_ = scheduler.next()
        assert next_ is not None
        scheduler.workers.finish(next_[0], next_[1].rollout.id)
        counted[cause] = counted.get(cause, 0) + 1
        again = scheduler.retry(next_[1], cause, 1)
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
        running = {i: w for rank in slots for i, w in scheduler.workers.running_on(rank).items()}
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
    assert len(done) == len(set(done))
    assert len(done) + scheduler.workers.running + scheduler.queued == len(added)


def one(name: str, policy: str = "p", **fields: object) -> Work:
    return Work(Rollout(name, policy, 0, "a"), block=0, epoch=0, **fields)  # type: ignore[arg-type]


def test_longest_expected_first_and_retries_before_all() -> None:
    scheduler = Scheduler("longest")
    scheduler.workers.join(1, 1)
    scheduler.add(
        [one("short", expected_s=1.0), one("long", expected_s=100.0), one("unknown"), one("mid", expected_s=9)]
    )
    order = []
    while (next_ := scheduler.next()) is not None:
        scheduler.workers.finish(next_[0], next_[1].rollout.id)
        order.append(next_[1].rollout.task_id)
        if order == ["long"]:
            assert scheduler.retry(next_[1], "node", 1)
    assert order == ["long", "long", "mid", "short", "unknown"]


def test_fair_shares_follow_the_weights_in_expected_seconds() -> None:
    scheduler = Scheduler("fair", weights={"a": 3.0})
    scheduler.workers.join(1, 1)
    scheduler.add(one(f"a{n}", share="a", expected_s=10.0) for n in range(300))
    scheduler.add(one(f"b{n}", share="b", expected_s=40.0) for n in range(300))
    given = {"a": 0.0, "b": 0.0}
    for _ in range(200):
        rank, item = scheduler.next() or (0, one(""))
        given[item.share] += item.expected_s
        scheduler.workers.finish(rank, item.rollout.id)
    assert 2.5 < given["a"] / given["b"] < 3.5


def test_a_share_that_joins_late_does_not_take_every_slot_to_catch_up() -> None:
    scheduler = Scheduler("fair")
    scheduler.workers.join(1, 1)
    scheduler.add(one(f"a{n}", share="a") for n in range(200))
    for _ in range(100):
        rank, item = scheduler.next() or (0, one(""))
        scheduler.workers.finish(rank, item.rollout.id)
    scheduler.add(one(f"b{n}", share="b") for n in range(200))
    started = []
    for _ in range(20):
        rank, item = scheduler.next() or (0, one(""))
        scheduler.workers.finish(rank, item.rollout.id)
        started.append(item.share)
    assert 8 <= started.count("b") <= 12


def test_what_cannot_end_in_time_is_put_aside_and_given_back() -> None:
    scheduler = Scheduler()
    scheduler.workers.join(1, 4)
    scheduler.add([one("long", expected_s=500.0), one("short", expected_s=50.0), one("unknown")])
    names = []
    while (next_ := scheduler.next(remaining_s=100.0)) is not None:
        names.append(next_[1].rollout.task_id)
    assert names == ["short", "unknown"]
    assert (scheduler.too_long, scheduler.queued) == (1, 0)
    assert [item.rollout.task_id for item in scheduler.clear()] == ["long"]


def test_what_no_pod_would_have_time_for_is_started_all_the_same() -> None:
    scheduler = Scheduler()
    scheduler.workers.join(1, 1)
    scheduler.add([one("endless", expected_s=5000.0)])
    assert scheduler.next(remaining_s=100.0, whole_s=3600.0) is not None


def test_cpus_and_memory_are_never_exceeded_and_what_fits_nowhere_is_named() -> None:
    scheduler = Scheduler()
    scheduler.workers.join(1, 8, cpus=4, memory_mb=1000)
    scheduler.add(one(f"m{n}", demand=Demand(1.0, 400)) for n in range(5))
    scheduler.add([one("giant", demand=Demand(1.0, 5000))])
    assert len(start_all(scheduler)) == 2
    assert [item.rollout.task_id for item in scheduler.impossible()] == ["giant"]
    scheduler.add([one("free")])
    assert start_all(scheduler) == [(1, "free")]


def test_a_large_rollout_is_overtaken_only_so_often() -> None:
    scheduler = Scheduler()
    scheduler.workers.join(1, 2, cpus=2)
    scheduler.add([one("first", demand=Demand(cpus=1))])
    scheduler.next()
    scheduler.add([one("large", demand=Demand(cpus=2))])
    scheduler.add(one(f"small{n}", demand=Demand(cpus=1)) for n in range(5 * OVERTAKEN))
    last, started = "first", 0
    while True:
        next_ = scheduler.next()
        if next_ is None:
            scheduler.workers.finish(1, f"{last}/p/0")
            continue
        name, started = next_[1].rollout.task_id, started + 1
        if name == "large":
            break
        scheduler.workers.finish(1, f"{last}/p/0")
        last = name
    assert started <= OVERTAKEN + 2


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_with_demands_limits_hold_and_all_work_ends(data: st.DataObject) -> None:
    order = data.draw(st.sampled_from(["fifo", "longest", "fair"]))
    scheduler = Scheduler(order)
    rooms = {rank: (data.draw(st.integers(1, 4)), data.draw(st.integers(2, 8))) for rank in (1, 2)}
    for rank, (slots, cpus) in rooms.items():
        scheduler.workers.join(rank, slots, cpus=cpus)
    items = [
        one(f"t{n}", share=data.draw(st.sampled_from("xy")), demand=Demand(cpus=data.draw(st.integers(0, 2))),
            expected_s=data.draw(st.integers(0, 9)))
        for n in range(data.draw(st.integers(1, 30)))
    ]  # fmt: skip
    scheduler.add(items)
    ended = []
    while len(ended) < len(items):
        start_all(scheduler)
        for rank, (slots, cpus) in rooms.items():
            running = scheduler.workers.running_on(rank).values()
            assert len(running) <= slots
            assert sum(item.demand.cpus for item in running) <= cpus
        choices = [(rank, i) for rank in rooms for i in scheduler.workers.running_on(rank)]
        assert choices, "no slot may stay empty while work fits an empty worker"
        rank, rollout_id = data.draw(st.sampled_from(choices))
        assert scheduler.workers.finish(rank, rollout_id) is not None
        ended.append(rollout_id)
    assert sorted(ended) == sorted(item.rollout.id for item in items)
    assert (scheduler.queued, scheduler.workers.running) == (0, 0)


# --- dropping, excluded workers ---


def test_what_is_dropped_never_starts_and_the_rest_keeps_its_order() -> None:
    scheduler = Scheduler()
    scheduler.workers.join(1, 10)
    scheduler.add(work(6))
    dropped = [scheduler.drop(f"t{n}/p/0") for n in (0, 3)]
    assert [item.rollout.task_id for item in dropped if item] == ["t0", "t3"]
    assert scheduler.drop("t3/p/0") is None
    assert scheduler.queued == 4
    assert [name for _, name in start_all(scheduler)] == ["t1", "t2", "t4", "t5"]
    assert scheduler.queued == 0


def test_what_may_wait_starts_only_when_nothing_else_can_and_then_does() -> None:
    for order in ("fifo", "longest", "fair"):
        scheduler = Scheduler(order)  # type: ignore[arg-type]
        scheduler.workers.join(1, 1)
        scheduler.add([one("later", later=True, expected_s=1e6, share="x"), one("now", expected_s=1.0, share="y")])
        started = []
        while (next_ := scheduler.next()) is not None:
            started.append(next_[1].rollout.task_id)
            scheduler.workers.finish(next_[0], next_[1].rollout.id)
        assert started == ["now", "later"]
        assert scheduler.later == 0


class Planned:
    """A task, of which can be seen whether it is still in memory."""


def test_a_task_is_kept_for_as_long_as_its_work_may_start_and_no_longer() -> None:
    scheduler = Scheduler()
    scheduler.workers.join(1, 1)
    scheduler.workers.join(2, 1)
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


def test_an_excluded_worker_ends_what_it_runs_and_keeps_no_other_from_starting() -> None:
    scheduler = Scheduler()
    scheduler.workers.join(1, 2)
    scheduler.workers.join(2, 2)
    scheduler.add(work(3))
    assert [rank for rank, _ in start_all(scheduler)] == [1, 2, 1]
    scheduler.workers.exclude(1)
    scheduler.add(work(3, first=3))
    assert start_all(scheduler) == [(2, "t3")]
    assert scheduler.workers.finish(1, "t0/p/0") is not None
    assert start_all(scheduler) == []
    assert scheduler.workers.finish(2, "t1/p/0") is not None
    assert start_all(scheduler) == [(2, "t4")]
