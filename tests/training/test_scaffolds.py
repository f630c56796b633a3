"""One policy is trained by several agents: groups, shares, metrics, and the unmodified programs of others."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megaflow_hpc.ledger import read_blocks
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.record import read_run
from megaflow_hpc.training.dataflow import Dataflow
from megaflow_hpc.training.plan import StepPlan
from megaflow_hpc.training.policy import TrainedPolicy, evaluations, trained_policy
from megaflow_hpc.types import Rollout
from tests.support.hash_trainer import drink
from tests.support.programs import repair, train_with_programs
from tests.support.training import Pods, training_run

CAREFUL = {"as": "careful", "name": "nop", "share": 3}
QUICK = {"as": "quick", "name": "nop"}


def policy_of(run: RunDir) -> TrainedPolicy:
    record = read_run(run)
    assert record.config.training
    return trained_policy(run, record, None, record.config.training)


def trained(run: RunDir, reward: Callable[[Rollout], float]) -> tuple[Dataflow, list[StepPlan]]:
    """Train a run to its end with rewards that depend on the rollout."""
    pods = Pods(run, reward)
    flow, plans = drink(run, pods)
    pods.work()
    return flow, plans


def by_agent(rollout: Rollout) -> float:
    """The careful agent's odd samples pass, and the quick agent's never."""
    return float(rollout.agent == "careful" and rollout.sample_index % 2)


def test_each_group_has_one_agent_and_agents_get_their_shares(tmp_path: Path) -> None:
    training = {"batch": 4, "staleness": 0, "steps": 3, "evaluate": {"tasks": "held-out", "every": 3, "samples": 2}}
    run = training_run(tmp_path / "run", training, tasks=6, samples=4, agent=[CAREFUL, QUICK], held_out=1)
    flow, plans = trained(run, by_agent)
    for plan in plans:
        groups = {rollout.group: rollout.agent for rollout in plan.rollouts}
        assert Counter(groups.values()) == {"careful": 3, "quick": 1}
        for rollout in plan.rollouts:
            assert rollout.group.endswith(f"/default+{rollout.agent}")
            assert rollout.id.startswith(f"{rollout.group}/")
            assert (rollout.advantage != 0) == (rollout.agent == "careful"), "each agent is compared with itself alone"
    lines = [json.loads(line) for line in flow.files.metrics.read_text().splitlines()]
    assert [(line["reward/careful"], line["reward/quick"], line["rollouts/careful"]) for line in lines] == [
        (0.5, 0.0, 12)
    ] * 3
    results = [(result.step, result.agent, result.rollouts, result.reward) for result in evaluations(run, "default")]
    assert results == [(3, "careful", 2, 0.5), (3, "quick", 2, 0.0)]


def test_mixed_groups_compare_agents(tmp_path: Path) -> None:
    training = {"batch": 2, "staleness": 0, "steps": 2, "policies": {"default": {"mix_agents": True}}}
    run = training_run(tmp_path / "run", training, tasks=3, samples=4, agent=[CAREFUL, QUICK])
    _, plans = trained(run, lambda rollout: float(rollout.agent == "careful"))
    for plan in plans:
        agents: dict[str, list[str]] = {}
        for rollout in plan.rollouts:
            agents.setdefault(rollout.group, []).append(rollout.agent)
            assert rollout.group.endswith("/default")
            assert (rollout.advantage > 0) == (rollout.agent == "careful")
        assert [Counter(own) for own in agents.values()] == [{"careful": 3, "quick": 1}] * 2


def test_a_later_trainer_gives_the_same_groups_to_the_same_agents(tmp_path: Path) -> None:
    training = {"batch": 5, "staleness": 1, "steps": 2}
    run = training_run(tmp_path / "run", training, tasks=5, samples=2, agent=[CAREFUL, QUICK])
    flow = Dataflow(run, say=lambda text: None)
    flow.start()
    flow.request()
    requested = [rollout for block_ in read_blocks(run) for rollout in block_.rollouts]
    flow.leave()
    later = Dataflow(run, say=lambda text: None)
    later.start()
    later.request()
    assert [rollout for block_ in read_blocks(run) for rollout in block_.rollouts] == requested
    policy = policy_of(run)
    batches = [policy.rollouts([("t", 0)] * 5, 1, np.random.default_rng(seed)) for seed in range(2000)]
    counts = [Counter(rollout.agent for rollout in batch)["careful"] for batch in batches]
    assert set(counts) == {3, 4}, "3.75 of 5, rounded up or down"
    assert abs(np.mean(counts) - 3.75) < 0.05
    firsts = [batch[0].agent for batch in batches]
    assert abs(firsts.count("careful") / 2000 - 0.75) < 0.05, "no place in a batch belongs to one agent"


@pytest.mark.slow
def test_an_unmodified_program_feeds_one_training_step(
    tmp_path: Path, base_sif: Path, make_task: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """tests/agents/test_cli_agents.py checks what is recorded of every program."""
    train_with_programs(tmp_path, base_sif, make_task, monkeypatch, {"codex": repair("codex")})
