"""After SIGKILL during a write or fsync, no acknowledged record is lost and no record is there twice."""

from __future__ import annotations

import pytest

from tests.trajectories.journal.crash import WINDOWS, trial


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("seed", [1, 2])
def test_a_writer_killed_there_loses_and_doubles_nothing(tmp_path, window, seed):
    _, lost, doubled = trial(tmp_path / "run", seed, window)
    assert (lost, doubled) == (0, 0)
