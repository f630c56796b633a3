"""Telling systematic failures from bad luck, and a bad rank from a bad image."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megaflow_hpc.pod.scheduling.failures import BAD_STARTS, NEARLY_ALL, RULES, Blame, Pattern


def test_failures_are_systematic_when_nearly_all_of_the_last_have_one_cause() -> None:
    pattern = Pattern(20)
    for n in range(19):
        pattern.add("user" if n else "")
    assert pattern.systematic == ""
    pattern.add("user")
    assert "19 of the last 20" in pattern.systematic
    for cause in ("model", "sandbox-lost"):
        pattern.add(cause)
    assert pattern.systematic == "18 of the last 20 rollouts failed for one cause, user"
    pattern.add("")
    assert pattern.systematic == ""


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.sampled_from(["", "", "model", "user"]), max_size=60))
def test_a_campaign_whose_rollouts_mostly_end_well_is_never_stopped(causes: list[str]) -> None:
    pattern = Pattern(10)
    for number, cause in enumerate(causes):
        pattern.add(cause)
        last = causes[max(0, number - 9) : number + 1]
        most = max(last.count("model"), last.count("user"))
        assert bool(pattern.systematic) == (len(last) == 10 and most >= NEARLY_ALL * 10)


def test_a_rank_is_bad_only_when_others_can_start_what_it_cannot_and_is_named_once() -> None:
    blame = Blame()
    assert not any(blame.add(1, "sandbox-start") for _ in range(3 * BAD_STARTS)), "nobody can: the image is at fault"
    blame = Blame()
    named = []
    for _ in range(3 * BAD_STARTS):
        blame.add(2, "")
        named.append(blame.add(1, "sandbox-start"))
    assert named.count(True) == 1
    assert named.index(True) == BAD_STARTS - 1


def test_a_sandbox_that_started_clears_a_rank() -> None:
    blame = Blame()
    for _ in range(10):
        blame.add(2, "")
        assert not blame.add(1, "sandbox-start")
        assert not blame.add(1, "sandbox-lost")


def test_only_infrastructure_is_tried_again() -> None:
    assert {cause for cause, rule in RULES.items() if not rule.retries} == {"agent", "user"}
