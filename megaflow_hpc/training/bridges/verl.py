"""Converts each step to the tensors of verl's ``DataProto``, padded as in verl's agent loop.

    from verl import DataProto
    from megaflow_hpc.training.bridges import verl

    for step in flow.steps():
        tensors, others = verl.batch(step, pad_token_id=tokenizer.pad_token_id, multiple=ranks)
        batch = DataProto.from_dict({k: torch.from_numpy(v) for k, v in tensors.items()}, others)
        batch.meta_info["temperature"] = step.temperature
        batch = batch.union(old_log_probs_of(batch))    # RayPPOTrainer._compute_old_log_prob
        update_actor(batch)                             # RayPPOTrainer._update_actor
        step.publish(folder)
        step.commit(checkpoint)

(verl 0.9.1 from PyPI: ``protocol.py``; ``experimental/agent_loop/agent_loop.py`` for padding;
``trainer/ppo/ray_trainer.py`` and ``workers/utils/losses.py:ppo_loss`` for the columns that an update reads;
``trainer/ppo/rollout_corr_helper.py`` for ``rollout_is_weights``.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from megaflow_hpc.training.bridges.rows import TrainerRow, pixels_of, rows
from megaflow_hpc.training.dataflow import Step
from megaflow_hpc.training.microbatch import Minibatch
from megaflow_hpc.trajectories.exports.verl import proto
from megaflow_hpc.trajectories.reading.batch import padded_lines

if TYPE_CHECKING:
    from megaflow_hpc.training.trainer.vision import Vision


def batch(
    step: Step,
    minibatch: Minibatch | None = None,
    *,
    pad_token_id: int = 0,
    multiple: int = 1,
    bypass: bool = False,
    vision: Vision | None = None,
) -> tuple[dict[str, NDArray[Any]], dict[str, NDArray[Any]]]:
    """Returns the step's sequences in verl's format: B rows, with left-padded prompts and right-padded responses.

    Sequences without a token to train on are omitted. A rollout with several sequences becomes several rows with the
    same ``uid``. verl's own advantages would count the rollout several times, so the plan's advantages are used.

    Args:
        step: a step of a dataflow with one rank, because verl divides a batch among ranks itself.
        minibatch: part of the step to convert; by default the whole step.
        pad_token_id: the tokenizer's padding token.
        multiple: add masked rows until B is divisible by this number (``DataProto.chunk``).
        bypass: add the engine's log-probabilities as ``old_log_probs``, as in verl's bypass mode. Otherwise verl's
            ``_compute_old_log_prob`` adds them. Since engine and trainer round differently, ratios exceed narrow clip
            ranges in bypass mode even before any update.
        vision: converts the images in sequences to pixels. Required if there are images.

    Returns:
        The tensors, and the other columns (B): ``uid`` (the group), ``__num_turns__``, ``min_global_steps`` and
        ``max_global_steps`` (ordinals of the oldest and newest versions that sampled). Tensors of (B, responses): int64
        ``responses`` and ``response_mask``; float32 ``rollout_log_probs``, ``advantages``, ``returns`` (equal to the
        advantages), ``token_level_scores``, ``token_level_rewards`` and ``rm_scores`` (the reward, on the last token),
        ``rollout_is_weights`` if a weight is not 1, ``old_log_probs`` with ``bypass``. int64 ``prompts`` (B, prompts);
        ``input_ids``, ``attention_mask``, ``position_ids`` (B, prompts + responses). If a sequence contains images,
        ``position_ids`` has the shape (B, 4, prompts + responses): the index of the token, then its position in three
        dimensions. The other columns then include ``multi_modal_inputs``: tensors such as ``pixel_values`` and
        ``image_grid_thw``, by name.

    Raises:
        ConfigError: the step has no token to train on, or the dataflow has several ranks.
    """
    lines = rows(step, minibatch)
    real = len(lines)
    lines += [lines[0]] * (-real % multiple)
    padded = proto([_line(row) for row in lines], pad_token_id)
    others = {name: padded.pop(name) for name in ("uid", "__num_turns__")}
    others["min_global_steps"] = np.array([row.versions[row.mask == 1].min() for row in lines], np.int32)
    others["max_global_steps"] = np.array([row.versions[row.mask == 1].max() for row in lines], np.int32)
    if any(row.images for row in lines):
        others["multi_modal_inputs"] = np.array([pixels_of(row, vision) for row in lines], object)
        assert vision is not None
        padded["position_ids"] = _positions(lines, vision, padded)
    padded["advantages"] = _responses(lines, [row.advantages for row in lines])
    weights = _responses(lines, [row.weights for row in lines])
    for name in ("response_mask", "advantages", "rm_scores"):
        padded[name][real:] = 0
    padded["returns"] = padded["advantages"].copy()
    padded["token_level_scores"] = padded["rm_scores"].copy()
    padded["token_level_rewards"] = padded["rm_scores"].copy()
    if (weights[padded["response_mask"] == 1] != 1).any():
        padded["rollout_is_weights"] = weights
    if bypass:
        padded["old_log_probs"] = padded["rollout_log_probs"].copy()
    return padded, others


def _positions(lines: list[TrainerRow], vision: Vision, padded: dict[str, NDArray[Any]]) -> NDArray[np.int64]:
    """Returns the positions of padded rows, shape (B, 4, length)."""
    positions = np.zeros((len(lines), 4, padded["input_ids"].shape[1]), np.int64)
    for line, row in enumerate(lines):
        begin = padded["prompts"].shape[1] - row.first
        place = slice(begin, begin + len(row.tokens))
        positions[line, 0, place] = np.arange(len(row.tokens))
        positions[line, 1:, place] = vision.positions(row.tokens, row.images).numpy()
    return positions


def _line(row: TrainerRow) -> dict[str, Any]:
    """Converts a sequence to a row of :mod:`megaflow_hpc.trajectories.exports.verl`."""
    first = row.first
    return {
        "prompts": row.tokens[:first],
        "responses": row.tokens[first:],
        "response_mask": row.mask[first:],
        "rollout_log_probs": row.logprobs[first:],
        "reward_score": row.reward,
        "uid": row.rollout.group,
        "__num_turns__": row.turns,
    }


def _responses(rows: list[TrainerRow], columns: list[NDArray[Any]]) -> NDArray[Any]:
    lines = [column[row.first :] for row, column in zip(rows, columns, strict=True)]
    return padded_lines(lines, np.float32, 0.0)
