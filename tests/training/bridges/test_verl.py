"""A step as verl's tensors: prompts padded left, responses padded right, masked tokens without effect."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.training.bridges import verl
from megaflow_hpc.training.bridges.rows import rows
from megaflow_hpc.training.dataflow import Dataflow, Step
from tests.support.bridges import first_step

UPDATE = {"prompts", "responses", "input_ids", "attention_mask", "position_ids", "response_mask", "advantages"}
"""Columns that ``_update_actor`` of verl 0.9.1 reads, except ``old_log_probs``, which verl computes."""


def test_lines_are_prompts_to_the_left_and_responses_to_the_right_with_the_plans_advantages(tmp_path: Path) -> None:
    step = first_step(tmp_path / "run")
    tensors, others = verl.batch(step, pad_token_id=300)
    own = rows(step)
    assert [row.rollout.id for row in own] == [rollout.id for rollout in step.plan.rollouts]
    assert tensors.keys() >= UPDATE
    assert "rollout_is_weights" not in tensors
    assert "old_log_probs" not in tensors
    width = tensors["prompts"].shape[1]
    for line, row in enumerate(own):
        prompt, response = row.first, len(row.tokens) - row.first
        place = slice(width - prompt, width + response)
        assert tensors["input_ids"][line, place].tolist() == row.tokens.tolist()
        assert tensors["position_ids"][line, place].tolist() == list(range(len(row.tokens)))
        assert tensors["attention_mask"][line].sum() == len(row.tokens)
        assert (tensors["input_ids"][line][tensors["attention_mask"][line] == 0] == 300).all()
        assert tensors["responses"][line, :response].tolist() == row.tokens[prompt:].tolist()
        assert tensors["response_mask"][line].sum() == sum(row.rollout.sampled)
        counts = tensors["response_mask"][line] == 1
        assert tensors["advantages"][line][counts].tolist() == [row.rollout.advantage] * int(counts.sum())
        assert not tensors["advantages"][line][~counts].any()
        assert np.array_equal(tensors["rollout_log_probs"][line, :response], row.logprobs[prompt:])
        assert tensors["token_level_rewards"][line].sum() == row.rollout.reward
        assert tensors["token_level_rewards"][line, response - 1] == row.rollout.reward
    assert np.array_equal(tensors["returns"], tensors["advantages"])
    assert others["uid"].tolist() == [rollout.group for rollout in step.plan.rollouts]
    assert others["__num_turns__"].tolist() == [2] * len(own)
    assert not others["max_global_steps"].any()


def test_lines_that_make_the_batch_divisible_count_for_nothing(tmp_path: Path) -> None:
    step = first_step(tmp_path / "run", samples=3)
    plain, _ = verl.batch(step)
    padded, others = verl.batch(step, multiple=4, bypass=True)
    assert {len(column) for column in [*padded.values(), *others.values()]} == {8}
    for name, column in plain.items():
        assert np.array_equal(padded[name][:6], column)
    for name in ("response_mask", "advantages", "returns", "token_level_rewards"):
        assert not padded[name][6:].any()
    assert np.array_equal(padded["old_log_probs"], padded["rollout_log_probs"])


def test_weights_of_rollouts_are_those_of_its_rollout_correction(tmp_path: Path) -> None:
    step = first_step(tmp_path / "run")
    step.plan.rollouts[0].weight, step.plan.rollouts[1].weight = 0.5, 0.0
    tensors, others = verl.batch(step)
    assert len(others["uid"]) == len(step.plan.rollouts) - 1  # a rollout without weight is left out
    weights, mask = tensors["rollout_is_weights"], tensors["response_mask"]
    assert (weights[0] == 0.5 * mask[0]).all()
    assert (weights[1:] == mask[1:]).all()


def test_a_step_in_which_nothing_counts_and_one_of_several_ranks_are_refused(tmp_path: Path) -> None:
    step = first_step(tmp_path / "run")
    flow = Dataflow(tmp_path / "run", rank=1, ranks=2)
    with pytest.raises(ConfigError, match=r"holds 42 of 82 tokens.* with one rank"):
        verl.batch(Step(flow, step.plan))
    for rollout in step.plan.rollouts:
        rollout.weight = 0.0
    with pytest.raises(ConfigError, match="it has no token to train on"):
        verl.batch(step)
