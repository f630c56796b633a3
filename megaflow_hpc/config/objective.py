"""The objective of a policy: its loss, and the advantage that the loss uses.

The trainer differentiates the *loss*. It is a function of new and proximal log-probabilities and advantages, with a
rule for averaging. The *advantage* is one number per rollout, computed from rewards alone. GRPO, Dr.GRPO and RLOO each
define both. The other losses work with any advantage, and the advantage ``median`` with any loss.
Sources: Schulman et al. 2017 (PPO, arXiv 1707.06347); Shao et al. 2024 (GRPO, 2402.03300); Liu et al. 2025 (Dr.GRPO,
2503.20783); Zheng et al. 2025 (GSPO, 2507.18071); Yu et al. 2025 (DAPO, 2503.14476); MiniMax 2025 (CISPO, 2506.13585);
Zheng et al. 2025 (M2PO, 2510.01161); Ahmadian et al. 2024 (RLOO, 2402.14740).
"""

from __future__ import annotations

import math
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from megaflow_hpc.config.sections import Method, Section

CLIPS: dict[str, tuple[float, float]] = {
    "ppo": (0.2, 0.2),
    "grpo": (0.2, 0.2),
    "dr_grpo": (0.2, 0.2),
    "gspo": (3e-4, 4e-4),  # section 5.1 of the paper
    "dapo": (0.2, 0.28),  # Clip-Higher, section 3.1 of the paper
    "cispo": (
        1.0,
        4.0,
    ),  # no lower bound, as in the paper; ratios up to 5, as in ScaleRL (2510.13786), which TRL's guide cites
    "m2po": (math.inf, math.inf),  # the second moment limits ratios
    "rloo": (math.inf, math.inf),  # uses no ratio
}
"""Loss → default of ``clip``: the clip range, as distances below and above 1."""


class LossConfig(Section):
    """The loss, and the number of passes over a step's data."""

    kind: Literal["ppo", "grpo", "dr_grpo", "gspo", "dapo", "cispo", "m2po", "rloo"] | Method = "dapo"
    """``ppo``, ``dapo``: clipped token ratios, averaged over all tokens. ``grpo``: averaged in each rollout, then over
    rollouts. ``dr_grpo``: summed, then divided by rollouts times ``length``. ``gspo``: one ratio per sequence, averaged
    as in ``grpo``. ``cispo``: ratios are clipped weights without gradient. ``m2po``: the second moment of ratios is
    limited. ``rloo``: log-probabilities without ratios, divided by rollouts. Or
    ``module:function``. Default: ``dapo``."""
    length: int | None = Field(None, ge=1)
    """Constant of ``dr_grpo``, which needs it: the number of sampled tokens that a rollout may have at most. Default:
    none."""
    clip: tuple[float, float] | None = None
    """Clip range of ratios, as distances from 1: ``[below, above]``, or one number for both. Default: the paper's
    values for each kind; 0.2 and 0.28 for ``dapo``."""
    entropy: float = Field(0.0, ge=0)
    """Coefficient of the entropy bonus. Raise it if the policy stops exploring. Default: 0."""
    epochs: int = Field(1, ge=1)
    """Passes over the data of each step. Default: 1."""
    minibatch: int | None = Field(None, ge=1)
    """Number of tasks in one optimizer step, each with all samples. Default: all tasks of the step, one optimizer
    step per pass."""

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
        if isinstance(self.kind, Method) and self.clip:
            raise ValueError(f"clip: {self.kind} has settings of its own; pass them as loss.kind.args")
        if self.clip and not all(side > 0 for side in self.clip):
            raise ValueError(f"clip {list(self.clip)}: how far below and above 1, both positive, such as [0.2, 0.28]")
        if self.kind in ("m2po", "rloo") and self.clip:
            why = "bounds the second moment of ratios" if self.kind == "m2po" else "takes no ratio"
            raise ValueError(f"clip: {self.kind} {why}; leave clip out")
        if self.kind == "dr_grpo" and self.length is None:
            raise ValueError(
                "length: dr_grpo divides by this constant; write the largest number of tokens that a rollout may "
                "sample, such as length: 4096"
            )
        if self.kind != "dr_grpo" and self.length is not None:
            raise ValueError(f"length: {self.kind} has no such constant; leave length out")
        return self

    @property
    def band(self) -> tuple[float, float]:
        """Clip range of ratios, as distances below and above 1."""
        return self.clip or (CLIPS[self.kind] if isinstance(self.kind, str) else (math.inf, math.inf))


class AdvantageConfig(Section):
    """How a rollout's reward is compared with the others in its group."""

    kind: Literal["grpo", "dr_grpo", "rloo", "median"] | Method = "dr_grpo"
    """``dr_grpo``: reward minus the group's mean. ``grpo``: the same, divided by the group's standard deviation.
    ``rloo``: reward minus the mean of the other rollouts. ``median``: reward minus the group's median. Or
    ``module:function``, which returns a number for each rollout, sequence or turn. Default: ``dr_grpo``."""
    rewards: dict[str, float] = Field(default_factory=dict)
    """Weights of several rewards, by the names that verifiers give them. Default: the rollout's single reward."""
    normalise: Literal["together", "apart"] = "together"
    """With several ``rewards``: ``together`` adds them up before comparing them within the group. ``apart`` compares
    each one separately, adds up the results and whitens them (GDPO, arXiv 2601.05242). Default: ``together``."""
    whiten: bool = False
    """Scale advantages to mean 0 and standard deviation 1 over the tokens of the batch. Default: false."""

    @field_validator("kind", mode="before")
    @classmethod
    def _not_a_loss(cls, value: Any) -> Any:
        if isinstance(value, str) and value in CLIPS and value not in ("grpo", "dr_grpo", "rloo"):
            raise ValueError(f"{value} is a loss; write loss: {{kind: {value}}} and the advantage that it goes with")
        return value

    @field_validator("rewards")
    @classmethod
    def _some_weight(cls, value: dict[str, float]) -> dict[str, float]:
        if value and not any(value.values()):
            raise ValueError(f"{value}: every weight is 0; nothing would be learned")
        return value

    @model_validator(mode="after")
    def _one_value(self) -> AdvantageConfig:
        if isinstance(self.kind, Method) and self.normalise == "apart":
            raise ValueError(f"normalise: apart: {self.kind} gets one reward per rollout; read sample.rewards in it")
        return self
