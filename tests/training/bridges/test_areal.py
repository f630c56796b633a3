"""A step as AReaL's tensors: as its workflows return it, and as its update takes it, one place earlier."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.training.bridges import areal
from megaflow_hpc.training.bridges.rows import rows
from tests.support.bridges import first_step


def test_a_workflows_columns_are_aligned_with_the_tokens(tmp_path: Path) -> None:
    step = first_step(tmp_path / "run")
    data = areal.batch(step, aligned=False)
    own = list(rows(step))
    assert {name: column.dtype.name for name, column in data.items()} == {
        "input_ids": "int32",
        "loss_mask": "int32",
        "logprobs": "float32",
        "versions": "int32",
        "attention_mask": "bool",
        "rewards": "float32",
    }
    for line, row in enumerate(own):
        length = len(row.tokens)
        assert data["attention_mask"][line].tolist() == [True] * length + [False] * (data["versions"].shape[1] - length)
        assert data["input_ids"][line, :length].tolist() == row.tokens.tolist()
        assert data["loss_mask"][line, :length].tolist() == row.mask.tolist()
        assert np.array_equal(data["logprobs"][line, :length], row.logprobs)
        assert data["versions"][line, :length].tolist() == [0 if sampled else -1 for sampled in row.mask.tolist()]
        assert (data["versions"][line, length:] == -1).all()
    assert data["rewards"].tolist() == [rollout.reward for rollout in step.plan.rollouts]


def test_the_updates_columns_stand_where_each_token_was_predicted(tmp_path: Path) -> None:
    step = first_step(tmp_path / "run")
    step.plan.rollouts[0].weight = 0.5
    plain, data = areal.batch(step, aligned=False), areal.batch(step)
    assert np.array_equal(data["loss_mask"][:, :-1], plain["loss_mask"][:, 1:])
    assert not data["loss_mask"][:, -1].any()
    assert np.array_equal(data["logprobs"][:, :-1], plain["logprobs"][:, 1:])
    assert np.array_equal(data["versions"], plain["versions"])  # its compute_advantages does not roll them
    for line, rollout in enumerate(step.plan.rollouts):
        assert (data["advantages"][line] == rollout.advantage * rollout.weight * data["loss_mask"][line]).all()
        last = int(plain["attention_mask"][line].sum()) - 2
        assert data["tot_rewards"][line, last] == data["tot_rewards"][line].sum() == rollout.reward
    assert np.array_equal(data["returns"], data["advantages"])
    assert not data["kl_rewards"].any()


def test_a_step_in_which_nothing_counts_is_refused(tmp_path: Path) -> None:
    step = first_step(tmp_path / "run")
    for rollout in step.plan.rollouts:
        rollout.weight = 0.0
    with pytest.raises(ConfigError, match="no token of it counts"):
        areal.batch(step)
