"""The end of a pod, decided by plain facts."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megaflow_hpc.pod.master.drain import (
    NOT_AWAITED,
    SIGNAL_S,
    STUCK_S,
    TOO_LONG,
    Drain,
    DrainPhase,
    End,
    Situation,
    end_of,
)

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
    unsettled=False,
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
        ({"holds_blocks": True, "unsettled": True}, End("drained")),
        ({"unsettled": True}, None),
        ({"opened": True, "awaited": True}, None),
        ({"opened": True}, End("drained", NOT_AWAITED)),
    ],
)
def test_a_pod_ends_by_the_first_rule_that_applies(facts: dict[str, object], end: End | None) -> None:
    assert end_of(replace(NOTHING_LEFT, **facts)) == end  # type: ignore[arg-type]


class Surroundings:
    """What a drain uses of rank 0: the supervisor's word, the signal, and what the ranks are told."""

    def __init__(self, folder: Path) -> None:
        self.word: str | None = None
        self.events: list[str] = []
        self.told: list[dict[str, Any]] = []
        self.pod = SimpleNamespace(
            why_drain=lambda wait_s: self.word,
            signalled_at=math.inf,
            drain_s=0.0,
            drain_file=folder / "drain",
            events=SimpleNamespace(write=lambda event: self.events.append(event.why)),
        )
        self.drain = Drain(self.pod, SimpleNamespace(clear=lambda: None), SimpleNamespace(tell=self.told.append))  # type: ignore[arg-type]


def test_a_signal_to_the_step_alone_begins_a_drain_as_long_as_the_grace_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    around = Surroundings(tmp_path)
    drain, pod = around.drain, around.pod
    drain.obey()
    assert drain.phase is DrainPhase.RUNNING
    pod.signalled_at = time.monotonic()
    drain.obey()
    assert drain.phase is DrainPhase.RUNNING, "the batch shell may have got the signal too, and tells why"
    pod.signalled_at -= SIGNAL_S
    drain.obey()
    assert drain.phase is DrainPhase.PREEMPTED
    assert around.told == [{"op": "suspend", "patience_s": 0.0}]
    assert "grace time" in around.events[0]
    assert (tmp_path / "preempted").exists(), "the supervisor does not count this start as one in vain"
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 3600)
    assert not drain.over
    around.word = "now"
    drain.obey()
    assert drain.phase is DrainPhase.HURRYING
    assert drain.over
    assert drain.word == "preempted"


@pytest.mark.parametrize(("word", "phase"), [("now", DrainPhase.HURRYING), ("walltime", DrainPhase.DRAINING)])
def test_a_signal_that_the_batch_shell_got_too_means_what_that_says(
    tmp_path: Path, word: str, phase: DrainPhase
) -> None:
    around = Surroundings(tmp_path)
    around.pod.signalled_at, around.word = time.monotonic() - 10, word
    around.drain.obey()
    assert around.drain.phase is phase
    assert not (tmp_path / "preempted").exists()
