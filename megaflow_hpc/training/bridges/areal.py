"""Converts each step to AReaL's batch format: a list of groups of padded tensors, with the keys of AReaL's workflows.

    from megaflow_hpc.training.bridges import areal

    for step in flow.steps():
        data = [{k: torch.from_numpy(v) for k, v in group.items()} for group in areal.batch(step)]  # without images
        for group, logprobs in zip(data, actor.compute_logp(data)):
            group["prox_logp"] = logprobs
        actor.ppo_update(data)
        step.publish(folder)
        step.commit(checkpoint)

A workflow's columns are aligned with ``input_ids``: the log-probability of token t is at index t. AReaL's update
expects it at t - 1, where the token was predicted. So AReaL's ``compute_advantages`` rolls ``loss_mask`` and
``logprobs`` left by one, and writes ``advantages``, ``returns``, ``kl_rewards`` and ``tot_rewards`` at the shifted
positions. ``versions`` are not shifted. This module does the same in numpy, because the step already has advantages.
AReaL has no column for token weights, so they are multiplied into the advantages, in which AReaL's clipped losses are
linear. AReaL's actor divides logits by the ``temperature`` in its own configuration, which must equal
``step.temperature``.

(Written against AReaL 1.0.4 from PyPI: ``areal/workflow/rlvr.py``, ``areal/trainer/ppo/actor.py``,
``areal/utils/data.py``, ``areal/utils/functional/functional.py``; ``areal/workflow/vision_rlvr.py`` for images;
``areal/trainer/rl_trainer.py`` for the order of calls.)
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from megaflow_hpc.training.bridges.rows import TrainerRow, pixels_of, rows
from megaflow_hpc.training.dataflow import Step
from megaflow_hpc.training.microbatch import Minibatch
from megaflow_hpc.trajectories.exports.areal import tensors
from megaflow_hpc.trajectories.reading.batch import padded_lines

if TYPE_CHECKING:
    from megaflow_hpc.training.trainer.vision import Vision


def batch(
    step: Step, minibatch: Minibatch | None = None, *, aligned: bool = True, vision: Vision | None = None
) -> list[dict[str, Any]]:
    """Returns the step's sequences by group.

    Each group has B rows, padded on the right to the group's longest sequence (L). Sequences without a token to train
    on are omitted.

    Args:
        step: a step of a dataflow with one rank, because AReaL's controller divides the list among ranks.
        minibatch: part of the step to convert; by default the whole step.
        aligned: return the columns that ``ppo_update`` expects after ``compute_advantages``. If false, return a
            workflow's columns, so that AReaL computes its own advantages.
        vision: converts the images in sequences to pixels. Required if there are images.

    Returns:
        int32 ``input_ids`` and ``versions`` (ordinals; -1 if not sampled), bool ``attention_mask``, int32
        ``loss_mask``, float32 ``logprobs`` (0 if not sampled), all (B, L); float32 ``rewards`` (B). With ``aligned``,
        ``loss_mask`` is float32, and float32 ``advantages``, ``returns``, ``kl_rewards`` and ``tot_rewards`` are added.
        A group with images also has ``multi_modal_input``, a list with each row's tensors, such as ``pixel_values`` and
        ``image_grid_thw``.

    Raises:
        ConfigError: the step has no token to train on, or the dataflow has several ranks.
    """
    groups = [list(lines) for _, lines in itertools.groupby(rows(step, minibatch), lambda row: row.rollout.group)]
    converted: list[dict[str, Any]] = [_aligned(lines) if aligned else _plain(lines) for lines in groups]
    for data, lines in zip(converted, groups, strict=True):
        if any(row.images for row in lines):
            data["multi_modal_input"] = [pixels_of(row, vision) for row in lines]
    return converted


def _plain(lines: list[TrainerRow]) -> dict[str, NDArray[Any]]:
    return tensors(
        [
            {
                "input_ids": row.tokens,
                "loss_mask": row.mask,
                "logprobs": row.logprobs,
                "versions": row.versions,
                "attention_mask": np.ones(len(row.tokens), np.bool_),
                "rewards": row.reward,
            }
            for row in lines
        ]
    )


def _aligned(lines: list[TrainerRow]) -> dict[str, NDArray[Any]]:
    data = _plain(lines)
    advantages = padded_lines([row.advantages * row.weights for row in lines], np.float32, 0.0)
    data["loss_mask"] = _earlier(data["loss_mask"].astype(np.float32))
    data["logprobs"] = _earlier(data["logprobs"]) * data["loss_mask"]
    data["advantages"] = _earlier(advantages) * data["loss_mask"]
    data["returns"] = data["advantages"].copy()
    data["kl_rewards"] = np.zeros_like(data["advantages"])
    data["tot_rewards"] = np.zeros_like(data["advantages"])
    last = data["attention_mask"].sum(axis=1) - 2  # position that predicts the last token
    data["tot_rewards"][np.arange(len(lines)), last] = data["rewards"]
    return data


def _earlier(values: NDArray[Any]) -> NDArray[Any]:
    """Rolls values left by one along each row. The first value wraps to the end, but is masked there, since first
    tokens are never sampled."""
    return np.roll(values, -1, axis=1)
