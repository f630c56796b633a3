"""A world of two without MPI: messages, and how one side knows that the other lives."""

from __future__ import annotations

import socket
import time

import pytest

from megaflow_hpc.host.wire import Link
from megaflow_hpc.pod import comm
from megaflow_hpc.pod.comm import ChildComm


def test_a_busy_runner_that_says_nothing_counts_as_alive_and_a_dead_one_as_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(comm, "BEAT_S", 0.05)
    ours, theirs = socket.socketpair()
    child = ChildComm(Link(ours))
    assert child.poll() is None
    time.sleep(0.06)
    assert child.poll() == (1, {"op": "beat"})
    assert child.poll() is None
    theirs.close()
    assert child.poll() == (1, {"op": "left", "why": "the runner process ended"})
    time.sleep(0.06)
    assert child.poll() is None
    ours.close()
