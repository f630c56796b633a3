"""Calls of a judge or of a model with a price, counted apart from the tokens of policies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec


class ModelUse(msgspec.Struct, omit_defaults=True):
    """Calls of one model, and their price."""

    calls: int = 0
    prompt_tokens: int = 0
    sampled_tokens: int = 0
    usd: float | None = None
    """Price in US dollars. ``None`` without a price in the campaign file."""

    def __add__(self, other: ModelUse) -> ModelUse:
        usd = None if self.usd is None and other.usd is None else (self.usd or 0.0) + (other.usd or 0.0)
        tokens = self.prompt_tokens + other.prompt_tokens, self.sampled_tokens + other.sampled_tokens
        return ModelUse(self.calls + other.calls, *tokens, usd)


Used = dict[str, ModelUse]
"""Model → its calls."""


def total(uses: Iterable[Mapping[str, ModelUse]]) -> Used:
    """Returns the sum of several counts, model by model."""
    sums: Used = {}
    for use in uses:
        for model, one in use.items():
            sums[model] = sums.get(model, ModelUse()) + one
    return sums


def use_lines(used: Mapping[str, Mapping[str, object]]) -> list[str]:
    """Describes the calls of models, one line each, for a person."""
    lines = []
    for model, use in used.items():
        usd = use.get("usd")
        price = f", {usd:.4g} USD" if isinstance(usd, float) else ""
        tokens = f"{use.get('prompt_tokens', 0)} prompt and {use.get('sampled_tokens', 0)} sampled tokens"
        lines.append(f"model {model}: {use.get('calls', 0)} calls, {tokens}{price}")
    return lines
