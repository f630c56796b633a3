"""verl: converts each step to the tensors of a ``DataProto``, padded like those of verl's agent loop.

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

(verl 0.9.1 of PyPI: ``protocol.py``; ``experimental/agent_loop/agent_loop.py`` for padding;
``trainer/ppo/ray_trainer.py`` and ``workers/utils/losses.py:ppo_loss`` for the columns that an update reads;
``trainer/ppo/rollout_corr_helper.py`` for ``rollout_is_weights``.)
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from megaflow_hpc.training.bridges.rows import TrainerRow, rows
from megaflow_hpc.training.microbatch import Minibatch
from megaflow_hpc.training.step import Step
from megaflow_hpc.trajectories.exports.verl import proto
from megaflow_hpc.trajectories.reading.batch import padded_lines


def batch(
    step: Step,
    minibatch: Minibatch | None = None,
    *,
    pad_token_id: int = 0,
    multiple: int = 1,
    bypass: bool = False,
) -> tuple[dict[str, NDArray[Any]], dict[str, NDArray[Any]]]:
    """Returns a step's sequences that count as verl has them: B lines, prompts left-padded, responses right-padded.

    A rollout of several sequences gives several lines of one ``uid``; verl's own advantages would count it so often,
    so its are replaced by those of the plan.

    Args:
        step: of a dataflow with one rank: verl divides a batch among ranks itself.
        minibatch: only its part.
        pad_token_id: the tokenizer's.
        multiple: lines are added that count for nothing until B can be divided by it (``DataProto.chunk``).
        bypass: whether ``old_log_probs`` are the engine's, as in verl's bypass mode; otherwise they are left to its
            ``_compute_old_log_prob``, as ratios of engine to trainer leave narrow clips before any update.

    Returns:
        The tensors, and what is not tensors (B): ``uid`` (the group), ``__num_turns__``, ``min_global_steps`` and
        ``max_global_steps`` (ordinals of the versions that sampled). Tensors of (B, responses): int64 ``responses`` and
        ``response_mask``; float32 ``rollout_log_probs``, ``advantages``, ``returns`` (the same),
        ``token_level_scores``, ``token_level_rewards`` and ``rm_scores`` (the reward, on the last token),
        ``rollout_is_weights`` where a weight is not 1, ``old_log_probs`` with ``bypass``. int64 ``prompts`` (B,
        prompts); ``input_ids``, ``attention_mask``, ``position_ids`` (B, prompts + responses).

    Raises:
        ConfigError: no token of the step counts, or the dataflow has several ranks.
    """
    found = rows(step, minibatch)
    real = len(found)
    found += [found[0]] * (-real % multiple)
    padded = proto([_line(row) for row in found], pad_token_id)
    others = {name: padded.pop(name) for name in ("uid", "__num_turns__")}
    others["min_global_steps"] = np.array([row.versions[row.mask == 1].min() for row in found], np.int32)
    others["max_global_steps"] = np.array([row.versions[row.mask == 1].max() for row in found], np.int32)
    padded["advantages"] = _responses(found, [row.advantages for row in found])
    weights = _responses(found, [row.weights for row in found])
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


def _line(row: TrainerRow) -> dict[str, Any]:
    """A row of :mod:`megaflow_hpc.trajectories.exports.verl`."""
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


def _responses(found: list[TrainerRow], columns: list[NDArray[Any]]) -> NDArray[Any]:
    lines = [column[row.first :] for row, column in zip(found, columns, strict=True)]
    return padded_lines(lines, np.float32, 0.0)
