"""Pods that ended for good are replaced while work remains, and no storm of them starts."""

from __future__ import annotations

import pytest

from megaflow_hpc.campaign.replacements import BARREN_ROUNDS, PAUSE_S, Replacements
from megaflow_hpc.rundir.record import JobRecord

ARRAY = JobRecord("pods", "7", 4, submitted_at=100.0)
PODS = ["7_0", "7_1", "7_2", "7_3"]


def taken(plan: Replacements, ends: dict[str, str], stored: tuple[str, ...] = (), live: tuple[str, ...] = ()) -> None:
    plan.take_in([ARRAY], live, ends, stored)


def test_elements_that_slurm_no_longer_has_are_missed_once() -> None:
    plan = Replacements(4)
    assert plan.missed([ARRAY], ["7_0", "7_2"], asked_at=1000.0) == ["7_1", "7_3"]
    assert plan.missed([ARRAY], ["7_0", "7_2"], asked_at=101.0) == [], "this answer may be older than the array"
    taken(plan, {"7_1": "TIMEOUT"}, stored=("7_1",), live=("7_0", "7_2"))
    assert plan.missed([ARRAY], ["7_0", "7_2"], asked_at=1000.0) == ["7_3"]
    taken(plan, dict.fromkeys(("7_0", "7_2", "7_3"), "TIMEOUT"), stored=("7_0",))
    assert (plan.settled, plan.ended) == (["7"], {}), "of an array that is over, only its id is kept"
    assert plan.missed([ARRAY], [], asked_at=1000.0) == []


@pytest.mark.parametrize("end", ["TIMEOUT", "FAILED", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY", "BOOT_FAIL", ""])
def test_what_slurm_ended_is_replaced(end: str) -> None:
    plan = Replacements(4)
    taken(plan, {"7_1": end, "7_3": end}, stored=("7_1", "7_3"), live=("7_0", "7_2"))
    assert plan.due(live=2, open_blocks=100, now=0.0) == 2


@pytest.mark.parametrize("end", ["COMPLETED", "CANCELLED", "vain"])
def test_what_ended_in_order_was_cancelled_or_ran_in_vain_is_not_replaced(end: str) -> None:
    plan = Replacements(4)
    taken(plan, {"7_1": end, "7_3": end}, live=("7_0", "7_2"))
    assert plan.due(live=2, open_blocks=100, now=0.0) == 0
    assert (plan.wanted, plan.vain) == (2, ["7_1", "7_3"] * (end == "vain"))


def test_who_was_scaled_down_is_counted_once() -> None:
    plan = Replacements(2)  # as scale has written it
    taken(plan, {"7_1": "leaving", "7_3": "leaving"}, live=("7_0", "7_2"))
    assert plan.wanted == 2
    assert plan.due(live=2, open_blocks=100, now=0.0) == 0


def test_a_pod_and_its_successor_count_once() -> None:
    plan = Replacements(1)
    taken(plan, {"7_1": "COMPLETED"}, live=("7_0",))  # the successor found nothing to do
    assert plan.wanted == 1
    taken(plan, {"7_0": "FAILED"}, stored=("7_0",))
    assert plan.due(live=0, open_blocks=3, now=0.0) == 1


def test_a_successor_that_ended_before_its_predecessor_released_its_blocks_is_replaced() -> None:
    plan = Replacements(1)
    plan.added(["7_1"], 0.0, successors=1)
    taken(plan, {"7_0": "FAILED", "7_1": "COMPLETED"}, stored=("7_0", "7_1"))
    assert plan.due(live=0, open_blocks=3, now=PAUSE_S) == 1
    plan = Replacements(1)
    plan.added(["7_1"], 0.0, successors=1)
    taken(plan, {"7_0": "FAILED"}, stored=("7_0",), live=("7_1",))
    taken(plan, {"7_1": "COMPLETED"}, stored=("7_1",))
    assert plan.due(live=0, open_blocks=0, now=PAUSE_S) == 0
    assert plan.due(live=0, open_blocks=3, now=PAUSE_S) == 1
    plan.added(["7_2"], PAUSE_S)
    taken(plan, {"7_2": "COMPLETED"}, stored=("7_2",))
    assert (plan.wanted, plan.successors) == (0, []), "it had no predecessor, so it left blocks for another reason"


def test_no_more_pods_than_blocks_are_left_are_started() -> None:
    plan = Replacements(1000)
    assert plan.due(live=0, open_blocks=3, now=0.0) == 3
    assert plan.due(live=3, open_blocks=3, now=0.0) == 0
    assert plan.due(live=0, open_blocks=0, now=0.0) == 0


def test_a_thousand_pods_whose_walltime_ended_are_replaced_at_once() -> None:
    array = JobRecord("pods", "7", 1000, submitted_at=100.0)
    names = [f"7_{n}" for n in range(1000)]
    plan = Replacements(1000)
    plan.take_in([array], [], dict.fromkeys(names, "TIMEOUT"), names)
    assert plan.due(live=0, open_blocks=9000, now=0.0) == 1000


def test_replacements_that_die_at_once_are_repeated_later_in_smaller_numbers_and_given_up() -> None:
    plan, now, started = Replacements(1000), 0.0, []
    taken(plan, {"7_0": "FAILED"})  # nothing stored, so this may be a fault of the site
    for array in range(8, 20):
        count = plan.due(live=0, open_blocks=9000, now=now)
        if not count:
            break
        started.append(count)
        names = [f"{array}_{n}" for n in range(count)]
        plan.added(names, now)
        assert plan.due(live=0, open_blocks=9000, now=now + PAUSE_S / 2) == 0, "not again before the pause is over"
        now = plan.again_at
        plan.take_in([JobRecord("pods", str(array), count)], [], dict.fromkeys(names, "FAILED"), [])
    assert started == [100, 100]
    assert (plan.barren, plan.given_up) == (BARREN_ROUNDS, True)
    assert now == PAUSE_S * (2 + 4)
    plan.forgive()
    assert plan.due(live=0, open_blocks=9000, now=now) == 1000


def test_a_replacement_that_stores_something_ends_the_caution() -> None:
    plan = Replacements(100)
    taken(plan, {"7_0": "FAILED"})
    plan.added(["8_0"], 0.0)
    plan.take_in([], ["8_0"], {}, ["8_0"])
    assert plan.due(live=1, open_blocks=9000, now=plan.again_at) == 99
