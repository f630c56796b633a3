"""A loss as users write it, and losses and importance weights that break the contract."""

from __future__ import annotations

from typing import Any

import torch  # type: ignore[import-not-found]

from megaflow_hpc.training.trainer import recipes
from megaflow_hpc.training.trainer.losses import Tokens, Totals


def sapo(new: Any, entropies: Any, batch: Tokens, totals: Totals) -> tuple[Any, dict[str, Any]]:
    """Return the loss of the recipe of that name, and the sum of the ratios as a metric."""
    loss, _ = recipes.sapo(new, entropies, batch, totals)
    return loss, {"ratio": (new - batch.proximal).exp()[batch.mask].sum()}


def only_a_loss(new: Any, entropies: Any, batch: Tokens, totals: Totals) -> Any:
    return new.sum()


def by_token(new: Any, entropies: Any, batch: Tokens, totals: Totals) -> Any:
    return new, {}


def constant(new: Any, entropies: Any, batch: Tokens, totals: Totals) -> Any:
    return new.detach().sum(), {}


def sums_by_token(new: Any, entropies: Any, batch: Tokens, totals: Totals) -> Any:
    return new.sum(), {"ratio": new}


def sums_of_text(new: Any, entropies: Any, batch: Tokens, totals: Totals) -> Any:
    return new.sum(), {"ratio": "high"}


def attached(sequences: Any, models: Any) -> Any:
    return [torch.ones(len(s.tokens), requires_grad=True) for s in sequences]


def one_weight(batch: Tokens) -> Any:
    return batch.proximal.new_ones(1)


def negative_weights(batch: Tokens) -> Any:
    return -torch.ones_like(batch.proximal)
