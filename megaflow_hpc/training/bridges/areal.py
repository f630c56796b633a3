"""AReaL: each step as the tensors of its trajectories, by the keys of its workflows or as its PPO update takes them.

    from megaflow_hpc.training.bridges import areal

    for step in flow.steps():
        data = {k: torch.from_numpy(v) for k, v in areal.batch(step).items()}
        data["prox_logp"] = actor.compute_logp([data])[0]
        actor.ppo_update([data])
        step.publish(folder)
        step.commit(checkpoint)

A workflow's columns are aligned with ``input_ids``: the log-probability at t is that of token t. Its update wants them
where they were predicted, at t - 1: ``compute_advantages`` rolls ``loss_mask`` and ``logprobs`` by one to the left, and
writes ``advantages``, ``returns``, ``kl_rewards`` and ``tot_rewards`` there; ``versions`` stay where they are. As
advantages are the plan's, that function is done here, in numpy. Weights of tokens, for which AReaL has no column, are
factors of the advantages: its clipped losses are linear in them.

(AReaL 1.0.4 of PyPI: ``areal/workflow/rlvr.py``, ``areal/trainer/ppo/actor.py``, ``areal/utils/data.py``,
``areal/utils/functional/functional.py``.)
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.training.bridges.rows import rows
from megaflow_hpc.training.microbatch import Minibatch
from megaflow_hpc.training.step import Step
from megaflow_hpc.trajectories.exports.areal import tensors
from megaflow_hpc.trajectories.reading.batch import padded_lines


def batch(step: Step, minibatch: Minibatch | None = None, *, aligned: bool = True) -> dict[str, NDArray[Any]]:
    """Returns a step's sequences that count, B lines padded to the right, to the longest (L).

    Args:
        step: of a dataflow whose rank is AReaL's data-parallel rank.
        minibatch: only its part.
        aligned: as ``ppo_update`` takes them, behind ``compute_advantages``; otherwise as a workflow returns them, for
            AReaL to compute advantages of its own.

    Returns:
        int32 ``input_ids`` and ``versions`` (ordinals; -1 where nothing was sampled), bool ``attention_mask``, int32
        ``loss_mask``, float32 ``logprobs`` (0 where not sampled), all (B, L); float32 ``rewards`` (B). Aligned,
        ``loss_mask`` is float32 and ``advantages``, ``returns``, ``kl_rewards``, ``tot_rewards`` are there, float32.

    Raises:
        ConfigError: no token of the step counts.
    """
    found = list(rows(step, minibatch))
    if not found:
        raise ConfigError(f"step {step.number}: no token of it counts, and AReaL takes no empty batch")
    data = tensors(
        [
            {
                "input_ids": row.tokens,
                "loss_mask": row.mask,
                "logprobs": row.logprobs,
                "versions": row.versions,
                "attention_mask": np.ones(len(row.tokens), np.bool_),
                "rewards": row.reward,
            }
            for row in found
        ]
    )
    if not aligned:
        return data
    advantages = padded_lines([row.advantages * row.weights for row in found], np.float32, 0.0)
    data["loss_mask"] = _earlier(data["loss_mask"].astype(np.float32))
    data["logprobs"] = _earlier(data["logprobs"]) * data["loss_mask"]
    data["advantages"] = _earlier(advantages) * data["loss_mask"]
    data["returns"] = data["advantages"].copy()
    data["kl_rewards"] = np.zeros_like(data["advantages"])
    data["tot_rewards"] = np.zeros_like(data["advantages"])
    last = np.maximum(data["attention_mask"].sum(axis=1) - 2, 0)  # where the last token was predicted
    data["tot_rewards"][np.arange(len(found)), last] = data["rewards"]
    return data


def _earlier(values: NDArray[Any]) -> NDArray[Any]:
    """One place to the left; what was first comes last, where no mask is set, since no first token is sampled."""
    return np.roll(values, -1, axis=1)
