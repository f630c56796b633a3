"""A world of two without MPI: messages, and how one side knows that the other lives; how an idle rank sleeps.

A launcher that MPI does not know, too: each rank is a world of its own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

from megaflow_hpc.host.wire import WireLink
from megaflow_hpc.pod.comm import BEAT_S, SHORT_S, Backoff, ChildComm
from tests.support.ledgers import Clock


def test_a_busy_runner_that_says_nothing_counts_as_alive_and_a_dead_one_as_gone() -> None:
    ours, theirs = socket.socketpair()
    clock = Clock()
    child = ChildComm(WireLink(ours), clock)
    assert child.poll() is None
    clock.now += BEAT_S + 0.1
    assert child.poll() == (1, {"op": "beat"})
    assert child.poll() is None
    theirs.close()
    assert child.poll() == (1, {"op": "left", "why": "the runner process ended"})
    clock.now += BEAT_S + 0.1
    assert child.poll() is None
    ours.close()


def test_an_idle_rank_wakes_seldom_and_a_busy_one_is_never_late_by_more_than_a_fiftieth() -> None:
    clock = Clock()
    backoff = Backoff(clock)
    wakes = 0
    while clock.now < 10:
        sleep_s = backoff.next_s()
        assert sleep_s <= max(SHORT_S, clock.now / 50)
        clock.now += sleep_s
        wakes += clock.now > 5
    assert wakes / 5 < 20
    backoff.reset()
    assert backoff.next_s() < SHORT_S


def test_a_rank_that_finds_itself_in_a_world_of_one_names_the_plugin_to_set(tmp_path: Path) -> None:
    step = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "2", "MEGAFLOW_MPI": "pmix"}
    done = subprocess.run(
        [sys.executable, "-m", "megaflow_hpc.pod", str(tmp_path)],
        env={name: value for name, value in os.environ.items() if not name.startswith(("PMI", "SLURM"))} | step,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode
    assert "MPI sees 1 ranks where the launcher started 2: mpi4py's MPICH Version" in done.stderr
    assert "srun --mpi=pmix do not fit; set MEGAFLOW_MPI to pmi2," in done.stderr
