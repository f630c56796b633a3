"""The trainer's losses: pure functions of log-probabilities, advantages and masks of packed tokens.

Three policies assign a log-probability to each token. The *engine* sampled the token. The *proximal* policy is the
trainer's policy before the first optimizer step on this step's data. The *new* policy is being trained. Ratios are
computed as new over proximal, so they are exactly 1 before the first optimizer step. Ratios of new to engine would not
be 1, because engine and trainer round differently: with a bfloat16 engine and a float32 trainer, 82 % of sequences were
outside a clip range of 3e-4 before any update. The ratio of proximal to engine is used as a truncated weight without
gradient, and for the metric ``mismatch``.

======== =========================================== ===================================== ================
kind     for each token                              averaged                              arXiv
======== =========================================== ===================================== ================
ppo      min(r A, clip(r) A)                         over all tokens                       1707.06347 eq. 7
dapo     the same, with a higher bound above         over all tokens                       2503.14476
grpo     the same                                    in each rollout, then over rollouts   2402.03300 eq. 3
dr_grpo  the same                                    sum / (rollouts × ``length``)         2503.20783
gspo     the same; r of the sequence: the geometric  in each rollout, then over rollouts   2507.18071 eq. 5
         mean of its tokens'
cispo    clip(r) A log p, clip(r) without gradient   over all tokens                       2506.13585
m2po     r A, without the tokens of the largest      over all tokens                       2510.01161
         |log r| among those with log r × A > 0
rloo     A log p                                     sum / rollouts                        2402.14740
======== =========================================== ===================================== ================

A rollout has several sequences if its agent rewrites the conversation, for example by removing reasoning. The papers
average over outputs. This module treats the whole rollout as one output, so each rollout has the same weight,
regardless of its number of sequences. All averages are over the whole minibatch (:class:`Totals`), so the losses and
gradients of all micro-batches and ranks add up to the minibatch's loss and gradient.

A user's function can replace the loss (:data:`LossFunction`) and the importance weights (:data:`ImportanceFunction`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, get_args

import torch  # type: ignore[import-not-found]

from megaflow_hpc.errors import ConfigError

Tensor = Any
Kind = Literal["ppo", "grpo", "dr_grpo", "dapo", "gspo", "cispo", "m2po", "rloo"]
Level = Literal["none", "token", "sequence"]
Statistics = dict[str, Tensor]
"""Statistics by name, as float64 scalars. Names in :data:`MAXIMA` are maxima over tokens, all others are sums."""

MAXIMA = {"mismatch_max", "log_ratio_max"}
"""Names of the statistics that are maxima instead of sums."""
OWN = "loss/"
"""Name prefix of the statistics that a user's loss returns."""
MAX_LOG_RATIO = math.log(20)
"""M2PO always masks a token whose ratio is below 1/20 or above 20. AstraFlow has similar bounds (343e808,
``_calculate_m2po_clip_range``). The limit also keeps metrics finite."""


class Totals(Protocol):
    """Denominators of a loss, counted over all micro-batches and ranks of a minibatch. They include rollouts without an
    advantage, although micro-batches may omit these."""

    tokens: int
    """Number of tokens to train on."""
    sequences: int
    """Number of sequences with tokens to train on."""
    samples: int
    """Number of rollouts with tokens to train on."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """S concatenated sequences with T tokens in total, on one device."""

    offsets: Tensor
    """Start of each sequence, followed by T: int64 (S+1)."""
    mask: Tensor
    """True for tokens to train on: bool (T)."""
    proximal: Tensor
    """Proximal log-probabilities, float (T). Masked tokens have arbitrary values, here and in the columns below."""
    engine: Tensor
    """The engine's log-probabilities, float (T). NaN if not sampled."""
    advantages: Tensor
    """Advantage of each token, float (T)."""
    weights: Tensor
    """Loss factor of each token, float (T)."""
    rollout_tokens: Tensor
    """For each sequence, the number of tokens to train on in its whole rollout, int64 (S)."""
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    """Extra values for each token by column name, each float (T)."""
    importance: Tensor = None
    """Importance weight of each token, float (T). Set only for a user's loss function."""


LossFunction = Callable[[Tensor, Tensor, Tokens, Totals], tuple[Tensor, Mapping[str, Tensor]]]
"""A user's loss. It is called as ``function(new, entropies, batch, totals)`` for each micro-batch with tokens:

- ``new``: float32 (T), log-probabilities under the policy being trained, with gradient.
- ``entropies``: float32 (T), entropy of the distribution of each token. It has a gradient only if ``loss.entropy`` is
  set. The trainer adds that bonus to the returned loss.
- ``batch``: the :class:`Tokens`, with ``batch.importance``. In all float columns, values of masked tokens are 0.
- ``totals``: counts of the whole minibatch, to be used as denominators. A function must not divide by counts of its
  micro-batch, because the micro-batches of all ranks are added up. :func:`mean_over_tokens` and
  :func:`mean_over_rollouts` return factors with these denominators.

It returns the sum of its micro-batch's losses, a floating-point scalar with a gradient to ``new``, and sums over tokens
by name. If the loss or its gradient is not finite, the update is skipped and counted. The function applies
``batch.importance`` and ``batch.weights`` itself. ``metrics.jsonl`` has each sum divided by the number of tokens, as
``loss/NAME``. Every call must return the same names.
"""

ImportanceFunction = Callable[[Tokens], Tensor]
"""A user's importance weights, called as ``function(batch)`` without gradient.

Values for masked tokens are 0. The function returns finite, non-negative weights, float (T). A weight of 0 masks a
token. Without truncation, the logarithm of the usual weight is ``batch.proximal - batch.engine``.
"""


SECOND_MOMENT = 0.04
"""Upper bound on the mean squared log ratio in M2PO, as in the paper."""


@dataclass(frozen=True, slots=True)
class Loss:
    """Settings of a loss.

    Raises:
        ConfigError: the kind or the level is unknown, or ``dr_grpo`` has no length.
    """

    kind: Kind | LossFunction
    clip: tuple[float, float] = (0.2, 0.2)
    """Clip range of the ratio: distances below and above 1."""
    entropy: float = 0.0
    """Coefficient of the entropy bonus, which is the mean entropy over tokens."""
    importance: Level | ImportanceFunction = "token"
    """Level of the importance weights (proximal / engine). ``token`` weights each token, ``sequence`` uses the product
    over each sequence."""
    truncate: float = 2.0
    """Upper bound on importance weights, per token or per sequence."""
    length: int | None = None
    """Dr.GRPO's constant denominator per rollout, in tokens. Required for ``dr_grpo`` only."""

    def __post_init__(self) -> None:
        for value, kinds in ((self.kind, get_args(Kind)), (self.importance, get_args(Level))):
            if not callable(value) and value not in kinds:
                raise ConfigError(f"loss: {value!r} is unknown; expected one of {', '.join(kinds)}")
        if self.kind == "dr_grpo" and not self.length:
            raise ConfigError("loss: dr_grpo needs length, the constant that it divides by")

    @property
    def needs_all_tokens(self) -> bool:
        """True if tokens without an advantage may have a gradient as well."""
        return callable(self.kind) or self.entropy > 0


def policy_loss(
    loss: Loss, new: Tensor, entropies: Tensor, batch: Tokens, totals: Totals, limit: float = math.inf
) -> tuple[Tensor, Statistics]:
    """Returns a micro-batch's share of the minibatch's loss, and statistics for :func:`report`.

    Args:
        loss: kind and bounds of the loss.
        new: float (T), log-probabilities, with gradient.
        entropies: float (T), entropy of the distribution of each token. It has a gradient if there is an entropy bonus.
        batch: the micro-batch, which may be empty.
        totals: totals of the minibatch.
        limit: M2PO's bound on |log new − log engine|, from :func:`second_moment_limit`.

    Raises:
        ConfigError: a user's function returned an invalid result.
    """
    # Zero masked values before use, because NaN times 0 is NaN, also in the backward pass.
    mask = batch.mask
    new, entropies = _zeroed(mask, new), _zeroed(mask, entropies)
    batch = replace(
        batch,
        **{name: _zeroed(mask, getattr(batch, name)) for name in ("proximal", "engine", "advantages", "weights")},
        columns={name: _zeroed(mask, column) for name, column in batch.columns.items()},
    )
    with torch.no_grad():
        weights, truncated = importance_weights(loss, batch)
        batch = replace(batch, importance=weights)
    detached = new.detach()
    statistics = _statistics(batch, detached, entropies.detach(), truncated)
    if not callable(loss.kind):
        share, sums = surrogate(loss, new, batch, totals, limit)
        statistics |= sums
    elif mask.any():
        share, sums = _checked(loss.kind, loss.kind(new, entropies, batch, totals))
        statistics |= {OWN + name: value for name, value in sums.items()}
    else:
        share = new.sum()
    statistics["loss"] = share.detach().double()
    if loss.entropy:  # its backward pass costs as much as that of log p
        share = share - loss.entropy * entropies.sum() * mean_over_tokens(totals)
    return share, statistics


def mean_over_tokens(totals: Totals) -> float:
    """Returns the factor for each token with which a sum becomes the mean over all tokens of the minibatch."""
    return 1 / max(totals.tokens, 1)


def mean_over_rollouts(batch: Tokens, totals: Totals) -> Tensor:
    """Returns factors, float (T), with which a sum over tokens becomes a mean over rollouts. Each rollout counts with
    the mean over its tokens."""
    factors = 1 / (batch.rollout_tokens.clamp(min=1).to(batch.proximal.dtype) * max(totals.samples, 1))
    return _spread(factors, batch.offsets)


def importance_weights(loss: Loss, batch: Tokens) -> tuple[Tensor, Tensor]:
    """Returns the weights (proximal / engine), float (T), and a mask of truncated or zero weights, bool (T).

    Truncated importance sampling was introduced by Ionides 2008. Yao et al. 2025 apply it between engine and trainer
    (Your Efficient RL Framework Secretly Brings You Off-Policy RL Training).

    Args:
        loss: settings, of which ``importance`` and ``truncate`` are used.
        batch: the tokens, with 0 for masked values.

    Raises:
        ConfigError: a user's function returned weights that are invalid or have the wrong shape.
    """
    log_weights = batch.proximal - batch.engine
    if callable(loss.importance):
        weights = loss.importance(batch)
        _check_weights(loss.importance, weights, log_weights)
        weights = weights.detach().to(log_weights.dtype)
        return weights, weights == 0
    if loss.importance == "none":
        return torch.ones_like(log_weights), torch.zeros_like(log_weights, dtype=torch.bool)
    if loss.importance == "sequence":
        log_weights = _spread(_sums(log_weights, batch.offsets), batch.offsets)
    weights = log_weights.exp()
    return weights.clamp(max=loss.truncate), weights > loss.truncate


def second_moment_limit(batches: Iterable[Tokens], threshold: float) -> float:
    """Returns M2PO's limit on the absolute log ratio of tokens.

    Tokens that reach the limit are masked, so that the mean square over the other tokens is below ``threshold``. The
    ratios are proximal over engine. They are known before the first gradient, so one limit applies to the whole
    minibatch, no matter how the minibatch is divided. AReaL computes a limit for each part (00d07c0,
    ``_apply_m2po_masking``). As in the authors' code (Infini-AI-Lab/M2PO, 4514ce2), the limit considers only tokens
    whose ratio has moved towards PPO's clip.

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
    """Combines the statistics of two micro-batches, which may have different names."""
    both = {
        name: torch.maximum(first[name], second[name]) if name in MAXIMA else first[name] + second[name]
        for name in first.keys() & second.keys()
    }
    return first | second | both


def report(statistics: Statistics) -> dict[str, float]:
    """Converts sums over micro-batches and ranks to metrics.

    ``entropy``, ``clipped``, ``kl``, ``engine_kl``, ``mismatch``, ``importance`` and ``truncated`` are means over
    tokens. So are the sums of a user's loss, reported as ``loss/NAME``.

    - ``loss``: the minimised loss without the entropy bonus.
    - ``clipped``: share of tokens without a gradient, or for CISPO with a bounded weight. It is split into
      ``clipped_low`` and ``clipped_high``.
    - ``kl``, ``engine_kl``: KL from proximal to new and from engine to proximal, by the estimator k3 of Schulman 2020
      (joschu.net/blog/kl-approx.html).
    - ``mismatch``: |log engine − log proximal|.
    - ``importance``: the importance weights used.
    - ``truncated``: share of tokens whose importance weight is at the cap or 0.
    - ``effective``: effective sample size of the weights new / engine, as a share of the tokens.
    - the maxima in :data:`MAXIMA`.

    Tokens that were omitted from micro-batches because they have no advantage are not included. If there were no
    tokens, the report is empty.
    """
    sums = {name: float(value) for name, value in statistics.items()}
    if not (tokens := sums.get("tokens", 0.0)):
        return {}
    means = {name: sums[name] / tokens for name in sorted(sums) if name in _MEANS or name.startswith(OWN)}
    if "clipped_low" in means:
        means["clipped"] = means["clipped_low"] + means["clipped_high"]
    return {
        "loss": sums["loss"],
        **means,
        "effective": sums["drift"] ** 2 / (sums["drift_squares"] * tokens),
        **{name: sums[name] for name in sorted(MAXIMA)},
    }


def sampling(statistics: Statistics) -> dict[str, float]:
    """Tests whether the engine drew tokens with the probabilities that it reported.

    For each sampled token, let d be the importance ratio (trainer / engine) times the sum of the token's
    log-probability and the entropy of the distribution, both under the trainer's policy. If the engine drew tokens with
    the reported probabilities, d has mean 0, for any prompt and any age of the weights.

    Args:
        statistics: sums over tokens on which the policy has not been trained yet.

    Returns:
        ``sampling_z``, the sum of d in standard deviations, which is positive if likely tokens are too frequent, for
        example because of a lower temperature or top-p. ``sampling_temperature``, the temperature that would explain
        the mean of d, as a multiple of the policy's temperature. This is a first-order estimate, since the derivative
        of the expected log-probability with respect to the inverse temperature is the variance of the log-probability.
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
    """Sums values (T) per sequence (S). Unlike ``index_add``, adds values in token order on every device."""
    return torch.segment_reduce(values, "sum", offsets=offsets, initial=0)


def _spread(values: Tensor, offsets: Tensor) -> Tensor:
    """Repeats each sequence's value (S) for its tokens (T)."""
    return values.repeat_interleave(offsets.diff())


def _zeroed(mask: Tensor, values: Tensor) -> Tensor:
    """Returns a copy of the values in which masked tokens have 0."""
    return torch.where(mask, values, torch.zeros_like(values))


def surrogate(
    loss: Loss, new: Tensor, batch: Tokens, totals: Totals, limit: float = math.inf
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the loss of a built-in kind, and the number of tokens clipped on each side.

    All kinds have the same form: the surrogate's gradient is coefficient × advantage × gradient of log p. For a ratio,
    the coefficient is the ratio itself, or 0 if it is clipped, because a ratio's gradient is the ratio times the
    gradient of log p. The surrogate's value is added without gradient.
    """
    detached, advantages = new.detach(), batch.advantages
    counted = _sums(batch.mask.to(new.dtype), batch.offsets).clamp(min=1)
    log_ratio = detached - batch.proximal
    if loss.kind == "gspo":
        log_ratio = _spread(_sums(log_ratio, batch.offsets) / counted, batch.offsets)
    ratio = log_ratio.exp()
    low, high = ratio < 1 - loss.clip[0], ratio > 1 + loss.clip[1]
    if loss.kind == "cispo":
        coefficient = ratio.clamp(1 - loss.clip[0], 1 + loss.clip[1])
    elif loss.kind == "rloo":
        coefficient = torch.ones_like(ratio)
        low, high = torch.zeros_like(low), torch.zeros_like(high)
    else:
        if loss.kind == "m2po":
            far = (detached - batch.engine).abs() >= min(limit, MAX_LOG_RATIO)
            low, high = far & (detached < batch.engine), far & (detached > batch.engine)
        low, high = low & (advantages < 0), high & (advantages > 0)
        coefficient = torch.where(low | high, torch.zeros_like(ratio), ratio)
    weighted = advantages * batch.importance * batch.weights * _averaging(loss, batch, totals)
    slope = coefficient * weighted
    if loss.kind in ("cispo", "rloo"):
        value = slope * detached
    elif loss.kind == "m2po":
        value = slope
    else:
        bounded = torch.where(high, torch.full_like(ratio, 1 + loss.clip[1]), ratio)
        value = torch.where(low, torch.full_like(ratio, 1 - loss.clip[0]), bounded) * weighted
    if loss.kind == "gspo":  # all tokens contribute equally to the sequence's ratio
        slope = _spread(_sums(slope, batch.offsets) / counted, batch.offsets)
    share = -(value + slope * (new - detached)).sum()
    clipped = {"clipped_low": low, "clipped_high": high}
    return share, {name: (side & batch.mask).double().sum() for name, side in clipped.items()}


def _averaging(loss: Loss, batch: Tokens, totals: Totals) -> Tensor | float:
    """Returns the factor for each token that the kind of loss uses for averaging, as a scalar or of shape (T)."""
    match loss.kind:
        case "grpo" | "gspo":
            return mean_over_rollouts(batch, totals)
        case "dr_grpo":
            return 1 / (max(totals.samples, 1) * (loss.length or 1))
        case "rloo":
            return 1 / max(totals.samples, 1)
    return mean_over_tokens(totals)


def _name(function: Any) -> str:
    function = getattr(function, "func", function)  # unwrap functools.partial
    return f"{function.__module__}:{function.__qualname__}"


def _checked(function: Any, returned: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Checks the result of a loss function, and converts its sums to float64."""
    name = f"loss {_name(function)}"
    match returned:
        case (share, Mapping() as sums):
            pass
        case _:
            raise ConfigError(f"{name}: returned {type(returned).__name__}; expected a loss and sums by name")
    if not torch.is_tensor(share) or share.dim() or not share.is_floating_point() or not share.requires_grad:
        found = f"{share.dtype} {tuple(share.shape)}" if torch.is_tensor(share) else type(share).__name__
        raise ConfigError(
            f"{name}: returned {found} as the loss; expected a floating-point scalar with a gradient to `new`, the sum "
            "of the micro-batch's losses"
        )
    converted = {}
    for key, value in sums.items():
        try:
            value = torch.as_tensor(value, dtype=torch.float64, device=share.device).detach()
        except (TypeError, ValueError, RuntimeError) as error:
            raise ConfigError(f"{name}: sum {key!r} is {type(value).__name__} ({error}); expected a scalar") from None
        if value.dim():
            raise ConfigError(f"{name}: sum {key!r} has the shape {tuple(value.shape)}; expected a scalar")
        converted[str(key)] = value
    return share, converted


def _check_weights(function: Any, weights: Any, like: Tensor) -> None:
    name = f"importance {_name(function)}"
    if not torch.is_tensor(weights) or weights.shape != like.shape or not weights.is_floating_point():
        found = f"{weights.dtype} {tuple(weights.shape)}" if torch.is_tensor(weights) else type(weights).__name__
        raise ConfigError(f"{name}: returned {found}; expected a floating-point weight for each of {len(like)} tokens")
    if not torch.isfinite(like).all():  # an infinite log-probability, so the update is skipped anyway
        return
    if not (torch.isfinite(weights) & (weights >= 0)).all():
        raise ConfigError(f"{name}: returned weights that are negative or not finite")


@torch.no_grad()
def _statistics(batch: Tokens, new: Tensor, entropies: Tensor, truncated: Tensor) -> Statistics:
    log_ratio, log_weight = (new - batch.proximal).double(), (batch.proximal - batch.engine).double()
    drift = (new - batch.engine).double().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    surplus = drift * (new + entropies).double()
    sums = {
        "tokens": batch.mask,
        "entropy": entropies,
        "kl": log_ratio.exp() - 1 - log_ratio,
        "engine_kl": log_weight.exp() - 1 - log_weight,
        "mismatch": log_weight.abs(),
        "importance": batch.importance,
        "truncated": truncated,
        "drift": drift,
        "drift_squares": drift.square(),
        "surplus": surplus,
        "surplus_squares": surplus.square(),
    }
    totals = {name: torch.where(batch.mask, value.double(), 0.0).sum() for name, value in sums.items()}
    nothing = torch.zeros(1, dtype=torch.float64, device=batch.mask.device)  # max() fails for an empty batch
    totals["mismatch_max"] = torch.cat([nothing, log_weight.abs()]).max()
    totals["log_ratio_max"] = torch.cat([nothing, log_ratio.abs()]).max()
    return totals
