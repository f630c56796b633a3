"""Durations of earlier campaigns, for estimates."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.trajectories.hdf5.writer import TrajectoryWriter
from megaflow_hpc.trajectories.reading.durations import Durations
from megaflow_hpc.types import Rollout
from tests.support.samples import trajectory


def earlier(path: Path, seconds: dict[str, float]) -> Path:
    """Writes an earlier campaign's file."""
    with TrajectoryWriter(path, "earlier") as writer:
        for number, (name, took) in enumerate(seconds.items()):
            group = name.rpartition("/")[0]
            task, _, policy = group.rpartition("/")
            named = replace(trajectory(number, task), id=name, group_id=group, policy=policy)
            writer.append(replace(named, started_at=1000.0, finished_at=1000.0 + took))
    return path


def test_a_task_that_was_not_seen_is_expected_to_take_what_its_policy_takes(tmp_path: Path) -> None:
    path = earlier(tmp_path / "trajectories.h5", {"a/p/0": 10, "a/p/1": 20, "b/p/0": 60, "b/q/0": 100})
    expected_s = Durations(path).expected_s
    assert expected_s(Rollout("a", "p", 7, "oracle")) == 15
    assert expected_s(Rollout("a", "q", 0, "oracle")) == 15
    assert expected_s(Rollout("new", "p", 0, "oracle")) == 30
    assert expected_s(Rollout("new", "new", 0, "oracle")) == 47.5


def test_agents_of_one_policy_have_durations_of_their_own(tmp_path: Path) -> None:
    seen = {"a/p+mini/0": 10, "a/p+codex/0": 100, "b/p+codex/0": 300}
    durations = Durations(earlier(tmp_path / "trajectories.h5", seen))
    slow, fast = (Rollout("a", "p", 5, name, scaffold=name) for name in ("codex", "mini"))
    assert (durations.expected_s(fast), durations.expected_s(slow)) == (10, 100)
    assert durations.expected_s(Rollout("new", "p", 0, "codex", scaffold="codex")) == 200


def test_what_cannot_be_learned_from_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere: cannot be read"):
        Durations(tmp_path / "nowhere")
