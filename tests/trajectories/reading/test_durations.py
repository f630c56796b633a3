"""Durations of earlier campaigns decide the order of rollouts and the first estimates of pods."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from megaflow_hpc import Campaign
from megaflow_hpc.errors import ConfigError
from megaflow_hpc.ledger import read_blocks
from megaflow_hpc.pod.scheduling.estimates import Estimates
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
    expected_s = Durations([path]).expected_s
    assert expected_s(Rollout("a", "p", 7, "oracle")) == 15
    assert expected_s(Rollout("a", "q", 0, "oracle")) == 15
    assert expected_s(Rollout("new", "p", 0, "oracle")) == 30
    assert expected_s(Rollout("new", "new", 0, "oracle")) == 47.5


def test_agents_of_one_policy_have_durations_of_their_own(tmp_path: Path) -> None:
    seen = {"a/p+mini/0": 10, "a/p+codex/0": 100, "b/p+codex/0": 300}
    durations = Durations([earlier(tmp_path / "trajectories.h5", seen)])
    slow, fast = (Rollout("a", "p", 5, name, scaffold=name) for name in ("codex", "mini"))
    assert (durations.expected_s(fast), durations.expected_s(slow)) == (10, 100)
    assert durations.expected_s(Rollout("new", "p", 0, "codex", scaffold="codex")) == 200
    estimates = Estimates()
    estimates.learn(durations.learned([slow, fast]))
    assert (estimates.expect("a", fast.arm) or 0) * 2 < (estimates.expect("a", slow.arm) or 0)


def test_the_longest_of_an_earlier_campaign_are_claimed_first(
    tmp_path: Path, make_campaign: Callable[..., Path]
) -> None:
    earlier(tmp_path / "trajectories.h5", {"task0/oracle/0": 5, "task1/oracle/0": 50, "task2/oracle/0": 500})
    scheduling = "scheduling: {order: longest, learn_from: [trajectories.h5]}\n"
    run = Campaign.from_yaml(make_campaign(3, scheduling, agent="oracle")).plan(launcher="local")
    assert [r.task_id for block in read_blocks(run.dir) for r in block.rollouts] == ["task2", "task1", "task0"]


def test_a_pods_first_estimates_are_those_of_the_earlier_campaign(
    tmp_path: Path, make_campaign: Callable[..., Path]
) -> None:
    seen = {
        f"task{n}/{policy}/{i}": s
        for n, policy, s in [(0, "oracle", 5), (1, "oracle", 500), (2, "nop", 9)]
        for i in range(8)
    }
    earlier(tmp_path / "trajectories.h5", seen)
    run = Campaign.from_yaml(make_campaign(4, "scheduling: {learn_from: [trajectories.h5]}\n", agent="oracle")).plan(
        launcher="local"
    )
    assert [r.task_id for block in read_blocks(run.dir) for r in block.rollouts] == [f"task{n}" for n in range(4)]
    estimates = Estimates()
    estimates.learn(run.record.learned)
    short, long, other, new = (estimates.expect(f"task{n}", "oracle") or 0.0 for n in range(4))
    assert short < other < new < long  # task2 is known under another policy, task3 is estimated from all
    assert long > 100


def test_what_cannot_be_learned_from_is_refused(make_campaign: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match="nowhere: cannot be read"):
        Campaign.from_yaml(make_campaign(1, "scheduling: {learn_from: [nowhere]}\n")).plan(launcher="local")
