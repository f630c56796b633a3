"""Losses, importance weights and columns from papers, implemented like user functions.

The campaign file names them as ``megaflow_hpc.training.trainer.recipes:NAME``. docs/how-to/methods.md lists them with
their keys. In the formulas, p is the policy being trained, q the engine's policy and A the advantage.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import torch  # type: ignore[import-not-found]
from numpy.typing import NDArray

from megaflow_hpc.config.training import LossConfig
from megaflow_hpc.errors import ConfigError
from megaflow_hpc.training.trainer.columns import ColumnSequence, FrozenModels
from megaflow_hpc.training.trainer.losses import (
    Level,
    Loss,
    Tokens,
    Totals,
    importance_weights,
    mean_over_rollouts,
    mean_over_tokens,
    surrogate,
)

Values = list[NDArray[np.float32]]

# --- losses ---


def sapo(
    new: Any, entropies: Any, batch: Tokens, totals: Totals, positive: float = 1.0, negative: float = 1.05
) -> tuple[Any, dict[str, Any]]:
    """Uses a soft gate instead of a clip: −σ(τ (r − 1)) (4 / τ) A, averaged over each rollout, then over rollouts.

    r is the ratio of new to proximal. τ is ``positive`` for A > 0 and ``negative`` otherwise. At r = 1, the gradient
    equals the gradient of r A (Gao et al. 2025, SAPO, arXiv 2511.20347).
    """
    ratio = (new - batch.proximal).exp()
    temperature = torch.where(batch.advantages > 0, positive, negative)
    gate = torch.sigmoid(temperature * (ratio - 1)) * 4 / temperature
    factors = batch.advantages * batch.importance * batch.weights * mean_over_rollouts(batch, totals)
    return -(gate * factors).sum(), {}


def kl_to_reference(
    new: Any, entropies: Any, batch: Tokens, totals: Totals, beta: float = 0.001, column: str = "reference", **loss: Any
) -> tuple[Any, dict[str, Any]]:
    """Adds ``beta`` × KL(policy, reference), averaged over tokens, to a built-in loss.

    The KL is estimated as exp(d) − d − 1 with d = log reference − log p (k3: Schulman 2020,
    joschu.net/blog/kl-approx.html; GRPO, arXiv 2402.03300, equation 4). ``loss`` takes the keys ``kind``, ``clip`` and
    ``length`` of the campaign file.
    """
    share, sums = surrogate(_loss(loss), new, batch, totals)
    log_ratio = torch.where(batch.mask, batch.columns[column] - new, torch.zeros_like(new))
    penalty = log_ratio.exp() - log_ratio - 1
    share = share + beta * (penalty * batch.weights).sum() * mean_over_tokens(totals)
    return share, {**sums, "reference_kl": penalty.sum()}


def decoupled(
    new: Any, entropies: Any, batch: Tokens, totals: Totals, column: str = "average", **loss: Any
) -> tuple[Any, dict[str, Any]]:
    """Computes a built-in loss with ratios relative to a column instead of the policy before the step, as in PPO-EWMA.

    With the column :func:`average`, this is the objective of Hilton et al. 2021, arXiv 2110.00641, section 3: the
    importance weight is average / engine, and the clipped ratio is new / average. ``loss`` takes the keys ``kind``,
    ``clip`` and ``length`` of the campaign file, and also ``importance`` and ``truncate``, which replace the policy's
    settings.
    """
    return _weighted(loss, new, replace(batch, proximal=batch.columns[column]), totals)


def exact_old(
    new: Any, entropies: Any, batch: Tokens, totals: Totals, column: str = "old", **loss: Any
) -> tuple[Any, dict[str, Any]]:
    """Computes a built-in loss with importance weights relative to a column instead of the engine's probabilities.

    With the column :func:`old`, importance weights correct only for the age of the model's weights, not for the
    engine's arithmetic (decoupled PPO: Hilton et al. 2021, arXiv 2110.00641; AReaL, arXiv 2505.24298). ``loss`` takes
    the same keys as in :func:`decoupled`.
    """
    return _weighted(loss, new, replace(batch, engine=batch.columns[column]), totals)


def distill(
    new: Any, entropies: Any, batch: Tokens, totals: Totals, column: str = "teacher"
) -> tuple[Any, dict[str, Any]]:
    """Computes the loss of on-policy distillation: −r A, averaged over tokens, with A = log teacher − log proximal.

    Its gradient equals the gradient of the reverse KL(policy, teacher) at each sampled token. Rewards are ignored. See
    Agarwal et al. 2024, GKD, arXiv 2306.13649, and Lu et al. 2025, On-Policy Distillation, thinkingmachines.ai.
    """
    log_ratio = torch.where(batch.mask, batch.columns[column] - batch.proximal, torch.zeros_like(new))
    ratio = (new - batch.proximal).exp()
    factors = batch.importance * batch.weights * mean_over_tokens(totals)
    return -(ratio * log_ratio * factors).sum(), {"teacher_kl": -log_ratio.sum()}


def likelihood(new: Any, entropies: Any, batch: Tokens, totals: Totals) -> tuple[Any, dict[str, Any]]:
    """Returns −A log p, averaged over tokens. With A = 1, this is the loss of supervised fine-tuning."""
    return -(new * batch.advantages * batch.weights).sum() * mean_over_tokens(totals), {}


def dpo(
    new: Any, entropies: Any, batch: Tokens, totals: Totals, beta: float = 0.1, column: str = "pairs"
) -> tuple[Any, dict[str, Any]]:
    """Computes the DPO loss (Rafailov et al. 2023, arXiv 2305.18290, equation 7). Requires the advantage ``pairs``.

    Its gradient is −``beta`` σ(−``beta`` m) (∇ log p(best) − ∇ log p(worst)). The margin m measures how much more the
    policy prefers the best rollout than the reference does. m is the column :func:`pairs`. It is computed before the
    step, so the gradient is exact only if a step is a single update. The loss is divided by the number of rollouts with
    tokens to train on.
    """
    slope = beta * torch.sigmoid(-beta * batch.columns[column]) * batch.advantages * batch.weights
    paired = (batch.advantages != 0) & batch.mask
    return -(slope * new).sum() / max(totals.samples, 1), {"margin": (batch.columns[column] * paired).sum()}


def _loss(fields: Mapping[str, Any], **weights: Any) -> Loss:
    """Returns a built-in loss with the campaign file's defaults.

    Args:
        fields: ``kind``, ``clip`` and ``length``.
        weights: ``importance`` and ``truncate``.
    """
    if other := sorted(fields.keys() - {"kind", "clip", "length"}):
        raise ConfigError(f"args: {other[0]}: expected kind, clip or length; other settings are keys of the policy")
    config = LossConfig.model_validate({name: value for name, value in fields.items() if name != "length"})
    if config.kind == "m2po":
        raise ConfigError("args: kind: m2po: bounds the ratios of a whole minibatch; only loss.kind: m2po sees them")
    return Loss(str(config.kind), config.band, length=fields.get("length"), **weights)  # type: ignore[arg-type]


def _weighted(fields: dict[str, Any], new: Any, batch: Tokens, totals: Totals) -> tuple[Any, dict[str, Any]]:
    """Computes a built-in loss with importance weights recomputed from the batch."""
    weights = {name: fields.pop(name) for name in ("importance", "truncate") if name in fields}
    loss = _loss(fields, **weights)
    with torch.no_grad():
        batch = replace(batch, importance=importance_weights(loss, batch)[0])
    return surrogate(loss, new, batch, totals)


# --- importance weights ---


def truncated(batch: Tokens, most: float = 2.0, level: Level = "token") -> Any:
    """Returns the built-in importance weights of each token or sequence (``level``), but at most ``most``."""
    return importance_weights(Loss("dapo", importance=level, truncate=most), batch)[0]


def icepop(batch: Tokens, low: float = 0.5, high: float = 5.0) -> Any:
    """Keeps importance weights w = proximal / engine with ``low`` ≤ w ≤ ``high``, and sets the others to 0.

    The paper uses 0.5 and 5 (Ling team 2025, IcePop, arXiv 2510.18855).
    """
    weights = (batch.proximal - batch.engine).exp()
    return torch.where((weights >= low) & (weights <= high), weights, torch.zeros_like(weights))


def geometric(batch: Tokens, most: float = 2.0) -> Any:
    """Returns one weight for each sequence: the geometric mean of its tokens' proximal / engine, at most ``most``.

    Unlike the product of the ratios, this weight does not grow with the length of the sequence. GSPO's ratio uses the
    same mean (arXiv 2507.18071, equation 7).
    """
    lengths = batch.offsets.diff()
    owner = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)
    zeros = torch.zeros(len(lengths), dtype=batch.proximal.dtype, device=lengths.device)
    logs = torch.where(batch.mask, batch.proximal - batch.engine, torch.zeros_like(batch.proximal))
    counts = zeros.index_add(0, owner, batch.mask.to(zeros.dtype)).clamp(min=1)
    return (zeros.index_add(0, owner, logs) / counts).exp()[owner].clamp(max=most)


# --- columns ---


def reference(sequences: Sequence[ColumnSequence], models: FrozenModels) -> Values:
    """Returns log-probabilities under the model from which training started."""
    return models.logprobs(models.base, sequences)


def average(sequences: Sequence[ColumnSequence], models: FrozenModels, decay: float = 0.9) -> Values:
    """Returns log-probabilities under the exponential moving average of all versions (PPO-EWMA, arXiv 2110.00641)."""
    return models.logprobs(models.average(decay), sequences)


def old(sequences: Sequence[ColumnSequence], models: FrozenModels) -> Values:
    """Returns each token's log-probability under the version that sampled it, computed by the trainer."""
    values = [np.zeros(len(s.tokens), np.float32) for s in sequences]
    for version in models.versions:
        for column, s, own in zip(values, sequences, models.logprobs(models.folder(version), sequences), strict=True):
            column[s.versions == version] = own[s.versions == version]
    return values


def pairs(sequences: Sequence[ColumnSequence], models: FrozenModels) -> Values:
    """Returns, for each token, the margin of its pair: the policy's preference relative to the reference's.

    The margin is log p(best) − log p(worst) − log reference(best) + log reference(worst), summed over tokens.
    """
    current, frozen_base = models.logprobs(None, sequences), models.logprobs(models.base, sequences)
    margins: dict[int, float] = {}
    for s, new, frozen in zip(sequences, current, frozen_base, strict=True):
        gain = float(np.sum(s.advantages * (new.astype(np.float64) - frozen)))
        margins[s.group] = margins.get(s.group, 0.0) + gain
    return [np.full(len(s.tokens), margins[s.group], np.float32) for s in sequences]


def teacher(
    sequences: Sequence[ColumnSequence], models: FrozenModels, url: str, model: str, timeout_s: float = 600
) -> Values:
    """Returns log-probabilities under another model, served by vLLM at ``url`` (http://HOST:PORT) as ``model``.

    vLLM computes them as ``prompt_logprobs`` at temperature 1, and generates one more token. The teacher must have the
    policy's tokenizer. This is checked by decoding the first sequence's tokens with both.
    """
    from transformers import AutoTokenizer  # type: ignore[import-not-found]

    def ask(path: str, **fields: Any) -> Any:
        body = json.dumps({"model": model, **fields}).encode()
        request = urllib.request.Request(f"{url}{path}", body, {"Content-Type": "application/json"})
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            return json.load(opener.open(request, timeout=timeout_s))
        except urllib.error.HTTPError as error:
            answer = error.read(1000).decode("utf-8", "replace")
            raise ConfigError(
                f"teacher {url}: {path}: {error}: {answer}; correct it, and resume the training"
            ) from None
        except (OSError, ValueError) as error:
            raise ConfigError(f"teacher {url}: {path}: {error}; start it, and resume the training") from None

    def logprobs_of(sequence: ColumnSequence) -> NDArray[np.float32]:
        if sequence.images:
            raise ConfigError(f"teacher {url}: rollouts show images, which are not sent to a teacher; use a text model")
        tokens = sequence.tokens.tolist()
        answer = ask("/v1/completions", prompt=tokens, max_tokens=1, temperature=0, prompt_logprobs=0)
        rows: list[Mapping[str, Any] | None] = answer["choices"][0]["prompt_logprobs"]
        pairs = zip(tokens, rows, strict=True)
        return np.array([row[str(token)]["logprob"] if row else 0.0 for token, row in pairs], np.float32)

    if sequences:
        tokens = sequences[0].tokens[:1024].tolist()
        own = AutoTokenizer.from_pretrained(models.base, local_files_only=True, trust_remote_code=False)
        if ask("/detokenize", tokens=tokens)["prompt"] != own.decode(tokens):
            raise ConfigError(
                f"teacher {url}: {model} has another tokenizer than {models.base}; choose another teacher"
            )
    with ThreadPoolExecutor(32) as pool:
        return list(pool.map(logprobs_of, sequences))
