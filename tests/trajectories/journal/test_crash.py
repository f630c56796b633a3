"""SIGKILL in the write and fsync windows of the writer: nothing acknowledged is lost, nothing is there twice."""

from __future__ import annotations

import pytest

from tests.trajectories.journal.crash import WINDOWS, trial


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_writer_killed_there_loses_and_doubles_nothing(tmp_path, window, seed):
    _, lost, doubled = trial(tmp_path / "run", seed, window)
    assert (lost, doubled) == (0, 0)
