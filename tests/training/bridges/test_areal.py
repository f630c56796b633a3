"""A step as AReaL's tensors: as its workflows return it, and shifted by one position as its update takes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megaflow_hpc.training.bridges import areal
from megaflow_hpc.training.bridges.rows import rows
from tests.support.bridges import first_step


def whole(groups: list[dict[str, NDArray[Any]]]) -> dict[str, NDArray[Any]]:
    """Return all lines, padded to the widest group."""
    width = max(group["input_ids"].shape[1] for group in groups)
    found = {}
    for name in groups[0]:
        parts = [group[name] for group in groups]
        if parts[0].ndim == 2:
            parts = [np.pad(part, ((0, 0), (0, width - part.shape[1]))) for part in parts]
        found[name] = np.concatenate(parts)
    return found


def test_a_workflows_columns_are_aligned_with_the_tokens_group_by_group(tmp_path: Path) -> None:
    step = first_step(tmp_path / "run")
    groups, own = areal.batch(step, aligned=False), rows(step)
    assert [len(group["rewards"]) for group in groups] == [4, 4]
    assert {name: column.dtype.name for name, column in groups[0].items()} == {
        "input_ids": "int32",
        "loss_mask": "int32",
        "logprobs": "float32",
        "versions": "int32",
        "attention_mask": "bool",
        "rewards": "float32",
    }
    for data, lines in zip(groups, [own[:4], own[4:]], strict=True):
        assert data["input_ids"].shape[1] == max(len(row.tokens) for row in lines)
        assert data["rewards"].tolist() == [row.rollout.reward for row in lines]
        for line, row in enumerate(lines):
            length = len(row.tokens)
            assert data["attention_mask"][line, :length].all()
            assert not data["attention_mask"][line, length:].any()
            assert data["input_ids"][line, :length].tolist() == row.tokens.tolist()
            assert data["loss_mask"][line, :length].tolist() == row.mask.tolist()
            assert np.array_equal(data["logprobs"][line, :length], row.logprobs)
            assert data["versions"][line, :length].tolist() == [0 if sampled else -1 for sampled in row.mask.tolist()]
            assert (data["versions"][line, length:] == -1).all()


def test_the_updates_columns_stand_where_each_token_was_predicted(tmp_path: Path) -> None:
    step = first_step(tmp_path / "run")
    step.plan.rollouts[0].weight = 0.5
    plain, data = whole(areal.batch(step, aligned=False)), whole(areal.batch(step))
    assert np.array_equal(data["loss_mask"][:, :-1], plain["loss_mask"][:, 1:])
    assert not data["loss_mask"][:, -1].any()
    assert np.array_equal(data["logprobs"][:, :-1], plain["logprobs"][:, 1:])
    assert np.array_equal(data["versions"], plain["versions"])  # its compute_advantages does not shift them
    for line, rollout in enumerate(step.plan.rollouts):
        assert (data["advantages"][line] == rollout.advantage * rollout.weight * data["loss_mask"][line]).all()
        last = int(plain["attention_mask"][line].sum()) - 2
        assert data["tot_rewards"][line, last] == data["tot_rewards"][line].sum() == rollout.reward
    assert np.array_equal(data["returns"], data["advantages"])
    assert not data["kl_rewards"].any()
