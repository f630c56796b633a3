"""Losses of a trainer: pure functions of log-probabilities, advantages and masks of packed tokens.

Three policies give each token a log-probability. The *engine* sampled it. The *proximal* policy is the trainer's before
the first optimizer step on this step's data. The *new* policy has the gradient. Ratios are new over proximal, exactly 1
before the first optimizer step. Ratios of new to engine are not 1, because engine and trainer round differently: with
a bfloat16 engine and a float32 trainer, 82 % of sequences were outside a clip of 3e-4 before any update. Proximal over
engine is a truncated weight without gradient, and the metric ``mismatch``.

======== =========================================== ===================================== ================
kind     for each token                              averaged                              arXiv
======== =========================================== ===================================== ================
ppo      min(r A, clip(r) A)                         over all tokens                       1707.06347 eq. 7
dapo     the same, with a higher bound above         over all tokens                       2503.14476
grpo     the same                                    in each sequence, then over sequences 2402.03300 eq. 3
dr_grpo  the same                                    sum / (samples × longest)             2503.20783
gspo     the same; r of the sequence: the geometric  in each sequence, then over sequences 2507.18071 eq. 5
         mean of its tokens'
cispo    clip(r) A log p, clip(r) without gradient   over all tokens                       2506.13585
m2po     r A, without the tokens of the largest      over all tokens                       2510.01161
         |log r| among those that moved as A asks
rloo     A log p                                     sum / samples                         2402.14740
======== =========================================== ===================================== ================

Every average is over the whole minibatch (:class:`Totals`), so the losses and gradients of micro-batches and ranks add
up to those of the undivided minibatch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

import torch  # type: ignore[import-not-found]

from megaflow_hpc.errors import ConfigError

Tensor = Any
Kind = Literal["ppo", "grpo", "dr_grpo", "dapo", "gspo", "cispo", "m2po", "rloo"]
Level = Literal["none", "token", "sequence"]
Statistics = dict[str, Tensor]
"""Sums over tokens, or maxima for names in :data:`MAXIMA`, as float64 scalars."""

MAXIMA = {"mismatch_max", "log_ratio_max"}
"""Names of statistics that are maxima rather than sums."""
MAX_LOG_RATIO = math.log(20)
"""|log ratio| above which M2PO always masks a token: ratios below 1/20 or above 20. AstraFlow has similar bounds
(343e808, ``_calculate_m2po_clip_range``). The limit also keeps the metrics finite."""


class Totals(Protocol):
    """Denominators of a loss: totals of the whole minibatch over all its micro-batches and ranks."""

    tokens: int
    """Number of tokens to train on."""
    sequences: int
    """Number of sequences with such tokens."""
    samples: int
    """Number of rollouts with such tokens."""
    longest: int
    """Largest number of such tokens in one rollout; the constant of Dr.GRPO."""


SECOND_MOMENT = 0.04
"""M2PO's upper bound on the mean squared log ratio, as in the paper."""


@dataclass(frozen=True, slots=True)
class Loss:
    """Kind of loss and its bounds.

    Raises:
        ConfigError: the kind or the level is unknown.
    """

    kind: Kind
    clip: tuple[float, float] = (0.2, 0.2)
    """Clip range of the ratio, as distances below and above 1."""
    entropy: float = 0.0
    """Coefficient of the entropy bonus, which is the mean entropy over tokens."""
    importance: Level = "token"
    """Whether importance weights (proximal over engine) are per token or their product over a sequence."""
    truncate: float = 2.0
    """Cap on importance weights."""

    def __post_init__(self) -> None:
        for value, kinds in ((self.kind, get_args(Kind)), (self.importance, get_args(Level))):
            if value not in kinds:
                raise ConfigError(f"loss: {value!r} is unknown; expected one of {', '.join(kinds)}")


@dataclass(frozen=True, slots=True)
class Tokens:
    """S concatenated sequences with T tokens in total, on one device."""

    offsets: Tensor
    """int64 (S+1), start of each sequence, then T."""
    mask: Tensor
    """bool (T), true for tokens to train on."""
    proximal: Tensor
    """float (T), proximal log-probabilities. Here and below, values of masked tokens are arbitrary."""
    engine: Tensor
    """float (T), the engine's log-probabilities; NaN if not sampled."""
    advantages: Tensor
    """float (T)."""
    weights: Tensor
    """float (T), per-token loss factors."""


def policy_loss(
    loss: Loss, new: Tensor, entropies: Tensor, batch: Tokens, totals: Totals, limit: float = math.inf
) -> tuple[Tensor, Statistics]:
    """Returns this micro-batch's share of the minibatch's loss, and sums for :func:`report`.

    Args:
        loss: kind and bounds of the loss.
        new: float (T), log-probabilities, with gradient.
        entropies: float (T), entropy of the distribution of each token; with gradient if there is an entropy bonus.
        batch: the micro-batch; it may be empty.
        totals: totals of the minibatch.
        limit: M2PO's bound of |log new − log engine|, from :func:`second_moment_limit`.
    """
    mask = batch.mask
    # Zero masked values before use: NaN times 0 is NaN, also in the backward pass.
    new, entropies, proximal, engine, advantages, weights = (
        torch.where(mask, value, torch.zeros_like(value))
        for value in (new, entropies, batch.proximal, batch.engine, batch.advantages, batch.weights)
    )
    held = new.detach()
    log_ratio = held - proximal
    counted = _sums(mask.to(new.dtype), batch.offsets)
    with torch.no_grad():
        importance, truncated = importance_weights(loss, proximal - engine, batch.offsets)
        if loss.kind == "gspo":
            log_ratio = _spread(_sums(log_ratio, batch.offsets) / counted.clamp(min=1), batch.offsets)
        ratio = log_ratio.exp()
        low, high = ratio < 1 - loss.clip[0], ratio > 1 + loss.clip[1]
        if loss.kind == "cispo":
            coefficient = ratio.clamp(1 - loss.clip[0], 1 + loss.clip[1])
        elif loss.kind == "rloo":
            coefficient = torch.ones_like(ratio)
            low, high = torch.zeros_like(mask), torch.zeros_like(mask)
        else:
            if loss.kind == "m2po":
                far = (held - engine).abs() >= min(limit, MAX_LOG_RATIO)
                low, high = far & (held < engine), far & (held > engine)
            low, high = low & (advantages < 0), high & (advantages > 0)
            coefficient = torch.where(low | high, torch.zeros_like(ratio), ratio)
    # All kinds have one form: the surrogate's gradient is coefficient × advantage × the gradient of log p. A ratio's
    # gradient is the ratio times that of log p (in GSPO the sequence's ratio times each token's), and 0 if clipped. The
    # value is added without gradient.
    slope = coefficient * advantages * importance * weights
    value = _value(loss, ratio, low, high, slope, advantages * importance * weights, held)
    by_token = -(value + slope * (new - held))
    share = (by_token * _per_token(loss, counted, batch.offsets, totals)).sum()
    statistics = _statistics(mask, held, proximal, engine, entropies.detach(), importance, truncated, low, high)
    statistics["loss"] = share.detach().double()
    if loss.entropy:  # otherwise skip the entropy's backward pass, which costs as much as that of log p
        share = share - loss.entropy * entropies.sum() / max(totals.tokens, 1)
    return share, statistics


def importance_weights(loss: Loss, log_weights: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the truncated weights of proximal over engine, float (T), and whether they are truncated, bool (T).

    Truncated importance sampling is by Ionides 2008. Yao et al. 2025 apply it between engine and trainer (Your
    Efficient RL Framework Secretly Brings You Off-Policy RL Training).

    Args:
        loss: ``importance`` and ``truncate`` are used.
        log_weights: float (T), log proximal − log engine, 0 for masked tokens.
        offsets: int64 (S+1), start of each sequence.
    """
    if loss.importance == "none":
        return torch.ones_like(log_weights), torch.zeros_like(log_weights, dtype=torch.bool)
    if loss.importance == "sequence":
        log_weights = _spread(_sums(log_weights, offsets), offsets)
    weights = log_weights.exp()
    return weights.clamp(max=loss.truncate), weights > loss.truncate


def second_moment_limit(batches: Iterable[Tokens], threshold: float) -> float:
    """Returns the |log ratio| from which M2PO masks tokens, so that the mean square of the others is below
    ``threshold``.

    The ratios are proximal over engine. They are known before the first gradient, so one limit holds for the whole
    minibatch, no matter how it is divided. AReaL applies a limit to each part (00d07c0, ``_apply_m2po_masking``). As in
    the authors' code (Infini-AI-Lab/M2PO, 4514ce2), only tokens whose ratio moved towards PPO's clip count.

    Args:
        batches: all micro-batches of the minibatch on all ranks.
        threshold: τ of the paper.
    """
    ratios = [torch.zeros(0)]
    for batch in batches:
        log_ratio = torch.where(batch.mask, batch.proximal - batch.engine, torch.zeros_like(batch.proximal))
        ratios.append(log_ratio[log_ratio * batch.advantages > 0].cpu())
    squares = torch.cat(ratios).double().square().sort().values
    means = squares.cumsum(0) / torch.arange(1, len(squares) + 1)
    kept = int((means <= threshold).sum())
    return math.sqrt(float(squares[kept])) if kept < len(squares) else math.inf


def add(first: Statistics, second: Statistics) -> Statistics:
    """Combines the statistics of two micro-batches."""
    return {
        name: torch.maximum(first[name], second[name]) if name in MAXIMA else first[name] + second[name]
        for name in first
    }


def report(statistics: Statistics) -> dict[str, float]:
    """Converts sums over micro-batches and ranks to readable metrics.

    ``loss`` is the minimised loss without the entropy bonus. Means over tokens: ``entropy``; ``clipped`` (share without
    a gradient, or for CISPO with a bounded weight), split into ``clipped_low`` and ``clipped_high``; ``kl`` (proximal
    to new) and ``engine_kl`` (engine to proximal), by the estimator k3 of Schulman 2020
    (joschu.net/blog/kl-approx.html); ``mismatch`` (|log engine − log proximal|); ``importance`` (the weights used) and
    ``truncated`` (share at the cap). ``effective`` is the effective sample size of the weights new / engine, as a share
    of the tokens. The maxima follow.
    """
    sums = {name: float(value) for name, value in statistics.items()}
    tokens = max(sums["tokens"], 1.0)
    means = {name: sums[name] / tokens for name in _MEANS}
    return {
        "loss": sums["loss"],
        **means,
        "clipped": means["clipped_low"] + means["clipped_high"],
        "effective": sums["drift"] ** 2 / (sums["drift_squares"] * tokens) if sums["tokens"] else 1.0,
        **{name: sums[name] for name in sorted(MAXIMA)},
    }


def sampling(statistics: Statistics) -> dict[str, float]:
    """Tests whether the engine drew tokens with the probabilities that it reported.

    For each sampled token, d is the sum of its log-probability and the entropy of the distribution, both under the
    trainer's policy, times the importance ratio of trainer to engine. If the engine drew tokens with the reported
    probabilities, d has mean 0, for any prompt and any age of the weights.

    Args:
        statistics: sums over tokens on which the policy has not been trained yet.

    Returns:
        ``sampling_z``, the sum of d in standard deviations. It is positive if likely tokens are too frequent, as at a
        lower temperature or with top-p. ``sampling_temperature``, the temperature that would explain the mean of d, as
        a multiple of the policy's. It is a first-order estimate: the derivative of the expected log-probability with
        respect to the inverse temperature is the variance of the log-probability.
    """
    sums = {name: float(statistics[name]) for name in ("tokens", "surplus", "surplus_squares") if name in statistics}
    tokens, surplus, squares = sums.get("tokens", 0.0), sums.get("surplus", 0.0), sums.get("surplus_squares", 0.0)
    variance = squares - surplus**2 / tokens if tokens else 0.0
    if not variance > 0:
        return {}
    steeper = max(1 + surplus / squares, 1e-3)
    return {
        "sampling_z": surplus / math.sqrt(variance),
        "sampling_temperature": 1 / steeper,
    }


_MEANS = ("entropy", "clipped_low", "clipped_high", "kl", "engine_kl", "mismatch", "importance", "truncated")


def _sums(values: Tensor, offsets: Tensor) -> Tensor:
    """Sums (T) per sequence to (S). Unlike ``index_add``, it adds in token order on every device."""
    return torch.segment_reduce(values, "sum", offsets=offsets, initial=0)


def _spread(values: Tensor, offsets: Tensor) -> Tensor:
    """Repeats (S) for each token, giving (T)."""
    return values.repeat_interleave(offsets.diff())


def _value(
    loss: Loss, ratio: Tensor, low: Tensor, high: Tensor, slope: Tensor, weighted: Tensor, held: Tensor
) -> Tensor:
    """Returns the surrogate of each token without gradient. ``weighted`` is the advantage times the weights."""
    if loss.kind in ("cispo", "rloo"):
        return slope * held
    if loss.kind == "m2po":
        return slope
    bounded = torch.where(high, torch.full_like(ratio, 1 + loss.clip[1]), ratio)
    return torch.where(low, torch.full_like(ratio, 1 - loss.clip[0]), bounded) * weighted


def _per_token(loss: Loss, counted: Tensor, offsets: Tensor, totals: Totals) -> Tensor:
    """Returns the loss factor of each token, as a scalar or (T)."""
    match loss.kind:
        case "grpo" | "gspo":
            return _spread(1 / counted.clamp(min=1), offsets) / max(totals.sequences, 1)
        case "dr_grpo":
            return 1 / max(totals.samples * totals.longest, 1)
        case "rloo":
            return 1 / max(totals.samples, 1)
    return 1 / max(totals.tokens, 1)


@torch.no_grad()
def _statistics(
    mask: Tensor,
    new: Tensor,
    proximal: Tensor,
    engine: Tensor,
    entropies: Tensor,
    importance: Tensor,
    truncated: Tensor,
    low: Tensor,
    high: Tensor,
) -> Statistics:
    moved, apart = (new - proximal).double(), (proximal - engine).double()
    drift = (new - engine).double().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    surplus = drift * (new + entropies).double()
    sums = {
        "tokens": mask,
        "entropy": entropies,
        "clipped_low": low,
        "clipped_high": high,
        "kl": moved.exp() - 1 - moved,
        "engine_kl": apart.exp() - 1 - apart,
        "mismatch": apart.abs(),
        "importance": importance,
        "truncated": truncated,
        "drift": drift,
        "drift_squares": drift.square(),
        "surplus": surplus,
        "surplus_squares": surplus.square(),
    }
    totals = {name: torch.where(mask, value.double(), 0.0).sum() for name, value in sums.items()}
    nothing = torch.zeros(1, dtype=torch.float64, device=mask.device)  # an empty batch has no maximum
    totals["mismatch_max"] = torch.cat([nothing, apart.abs()]).max()
    totals["log_ratio_max"] = torch.cat([nothing, moved.abs()]).max()
    return totals
