"""The end of a pod, decided by plain facts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megaflow_hpc.pod.master.drain import NOT_AWAITED, STUCK_S, TOO_LONG, End, Situation, end_of

NOTHING_LEFT = Situation(
    ranks_left=True,
    may_commit=True,
    stuck_s=0.0,
    draining=False,
    drain_over=False,
    paused=False,
    working=False,
    queued=False,
    too_long=False,
    nothing_free=True,
    holds_blocks=False,
    may_get_work=False,
    opened=False,
    awaited=False,
)


@pytest.mark.parametrize(
    ("facts", "end"),
    [
        ({}, End("done")),
        ({"ranks_left": False}, End("lost")),
        ({"may_commit": False, "working": True}, End("lost")),
        ({"stuck_s": STUCK_S + 1, "draining": True}, End("lost")),
        ({"draining": True, "working": True}, None),
        ({"draining": True, "working": True, "drain_over": True}, End("drained")),
        ({"draining": True, "paused": True}, End("paused")),
        ({"working": True}, None),
        ({"queued": True}, None),
        ({"nothing_free": False}, None),
        ({"nothing_free": False, "too_long": True, "holds_blocks": True}, End("drained", TOO_LONG)),
        ({"too_long": True}, End("done", TOO_LONG)),
        ({"holds_blocks": True, "may_get_work": True}, End("drained")),
        ({"may_get_work": True}, None),
        ({"opened": True, "awaited": True}, None),
        ({"opened": True}, End("drained", NOT_AWAITED)),
    ],
)
def test_a_pod_ends_by_the_first_rule_that_applies(facts: dict[str, object], end: End | None) -> None:
    assert end_of(replace(NOTHING_LEFT, **facts)) == end  # type: ignore[arg-type]
