"""A world of two without MPI: messages, and how one side knows that the other lives."""

from __future__ import annotations

import socket

from megaflow_hpc.host.wire import Link
from megaflow_hpc.pod.comm import BEAT_S, ChildComm
from tests.support.ledgers import Clock


def test_a_busy_runner_that_says_nothing_counts_as_alive_and_a_dead_one_as_gone() -> None:
    ours, theirs = socket.socketpair()
    clock = Clock()
    child = ChildComm(Link(ours), clock)
    assert child.poll() is None
    clock.now += BEAT_S + 0.1
    assert child.poll() == (1, {"op": "beat"})
    assert child.poll() is None
    theirs.close()
    assert child.poll() == (1, {"op": "left", "why": "the runner process ended"})
    clock.now += BEAT_S + 0.1
    assert child.poll() is None
    ours.close()
