"""What a policy learns by: the loss, the advantage, and how the two engines' probabilities are brought together.

A *loss* is what the trainer differentiates: a function of new and proximal log-probabilities and advantages, and how it
is averaged. An *advantage* is a number for each rollout, made of rewards before any model is asked. So GRPO is the loss
``grpo`` with the advantage ``grpo``, and Dr.GRPO and RLOO, too, are both of their own; the other losses go with any
advantage, and the advantage ``median`` with any loss.
Sources: Schulman et al. 2017 (PPO, arXiv 1707.06347); Shao et al. 2024 (GRPO, 2402.03300); Liu et al. 2025 (Dr.GRPO,
2503.20783); Zheng et al. 2025 (GSPO, 2507.18071); Yu et al. 2025 (DAPO, 2503.14476); MiniMax 2025 (CISPO, 2506.13585);
Zheng et al. 2025 (M2PO, 2510.01161); Ahmadian et al. 2024 (RLOO, 2402.14740).
"""

from __future__ import annotations

import math
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from megaflow_hpc.config.sections import Section

CLIPS: dict[str, tuple[float, float]] = {
    "ppo": (0.2, 0.2),
    "grpo": (0.2, 0.2),
    "dr_grpo": (0.2, 0.2),
    "gspo": (3e-4, 4e-4),  # its section 5.1
    "dapo": (0.2, 0.28),  # its section 3.1, Clip-Higher
    "cispo": (
        1.0,
        4.0,
    ),  # no lower bound, as in the paper; ratios up to 5, as TRL's guide takes from ScaleRL 2510.13786
    "m2po": (math.inf, math.inf),  # the second moment bounds it
    "rloo": (math.inf, math.inf),  # takes no ratio
}
"""By loss: how far below and above 1 a ratio counts in full, where ``clip`` is not given."""


class LossConfig(Section):
    """What the trainer minimises, and how often it goes through a step's data."""

    kind: Literal["ppo", "grpo", "dr_grpo", "gspo", "dapo", "cispo", "m2po", "rloo"] = "dapo"
    """``ppo``, ``dapo``: clipped ratios of tokens, averaged over all tokens; ``grpo``: averaged in each sequence,
    then over sequences; ``dr_grpo``: summed, divided by rollouts times the longest; ``gspo``: one ratio a sequence;
    ``cispo``: the ratio is a clipped weight without gradient; ``m2po``: the second moment of ratios is bounded;
    ``rloo``: log-probabilities without a ratio, divided by rollouts. Default: ``dapo``."""
    clip: tuple[float, float] | None = None
    """How far below and above 1 ratios count: ``[below, above]``, or one number for both. Default: the paper's of each
    kind; 0.2 and 0.28 for ``dapo``."""
    entropy: float = Field(0.0, ge=0)
    """Coefficient of the entropy that is added to what is maximised. Default: 0."""
    epochs: int = Field(1, ge=1)
    """How often each step goes through its data. Default: 1."""
    minibatch: int | None = Field(None, ge=1)
    """Tasks of one optimizer step, each with all its samples. Default: the whole batch."""

    @field_validator("kind", mode="before")
    @classmethod
    def _not_an_advantage(cls, value: Any) -> Any:
        if value == "median":
            raise ValueError("median is an advantage; write advantage: {kind: median} and a loss that it goes with")
        return value

    @field_validator("clip", mode="before")
    @classmethod
    def _both_sides(cls, value: Any) -> Any:
        return (value, value) if isinstance(value, int | float) else value

    @model_validator(mode="after")
    def _bounds(self) -> LossConfig:
        if self.clip and not all(side > 0 for side in self.clip):
            raise ValueError(f"clip {list(self.clip)}: how far below and above 1, both positive, such as [0.2, 0.28]")
        if self.kind in ("m2po", "rloo") and self.clip:
            why = "bounds the second moment of ratios" if self.kind == "m2po" else "takes no ratio"
            raise ValueError(f"clip: {self.kind} {why}; leave clip out")
        return self

    @property
    def band(self) -> tuple[float, float]:
        """How far below and above 1 ratios count."""
        return self.clip or CLIPS[self.kind]


class AdvantageConfig(Section):
    """How much better than the others of its group a rollout counts."""

    kind: Literal["grpo", "dr_grpo", "rloo", "median"] = "dr_grpo"
    """Reward less the group's mean: divided by its standard deviation (``grpo``), as it is (``dr_grpo``), less the mean
    of the others (``rloo``), or less the median (``median``)."""
    rewards: dict[str, float] = Field(default_factory=dict)
    """Weights of several rewards, by the names that verifiers give them. Default: the rollout's one reward."""
    normalise: Literal["together", "apart"] = "together"
    """Several rewards: ``together``: added up, then compared in the group; ``apart``: compared in the group each, then
    added up, and scaled over the batch as by ``whiten`` (GDPO, arXiv 2601.05242)."""
    whiten: bool = False
    """Whether advantages are brought to mean 0 and standard deviation 1 over the batch's tokens. Default: false."""

    @field_validator("kind", mode="before")
    @classmethod
    def _not_a_loss(cls, value: Any) -> Any:
        if value in CLIPS and value not in ("grpo", "dr_grpo", "rloo"):
            raise ValueError(f"{value} is a loss; write loss: {{kind: {value}}} and the advantage that it goes with")
        return value

    @field_validator("rewards")
    @classmethod
    def _some_weight(cls, value: dict[str, float]) -> dict[str, float]:
        if value and not any(value.values()):
            raise ValueError(f"{value}: every weight is 0; nothing would be learned")
        return value
