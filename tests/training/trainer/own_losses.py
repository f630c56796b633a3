"""A loss and importance weights as users write them, and some that break the contract."""

from __future__ import annotations

from typing import Any

import torch  # type: ignore[import-not-found]

from megaflow_hpc.training.trainer.losses import Tokens, Totals, mean_over_rollouts


def sapo(
    new: Any, entropies: Any, batch: Tokens, totals: Totals, *, positive: float, negative: float
) -> tuple[Any, dict[str, Any]]:
    """Return the loss of SAPO (arXiv 2511.20347): a soft gate instead of a clip."""
    ratio = (new - batch.proximal).exp()
    temperature = torch.where(batch.advantages > 0, positive, negative)
    gate = torch.sigmoid(temperature * (ratio - 1)) * 4 / temperature
    factor = batch.advantages * batch.importance * batch.weights * mean_over_rollouts(batch, totals)
    return -(gate * factor).sum(), {"ratio": ratio[batch.mask].sum()}


def icepop(batch: Tokens, *, low: float, high: float) -> Any:
    """Return token weights with 0 outside a range, as IcePop does (arXiv 2510.18855)."""
    weights = (batch.proximal - batch.engine).exp()
    return torch.where((weights >= low) & (weights <= high), weights, 0.0)


def geometric(batch: Tokens) -> Any:
    """Return the geometric mean of each sequence's token weights."""
    lengths = batch.offsets.diff()
    owner = torch.arange(len(lengths)).repeat_interleave(lengths)
    sums = torch.zeros(len(lengths), dtype=batch.proximal.dtype).index_add(0, owner, batch.proximal - batch.engine)
    counts = torch.zeros(len(lengths), dtype=batch.proximal.dtype).index_add(0, owner, batch.mask.to(sums.dtype))
    return (sums / counts.clamp(min=1)).exp()[owner].clamp(max=2.0)


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
