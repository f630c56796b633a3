"""Data algorithms of the ``training`` section: ``data``, what is done with rollouts; ``prompts``, what is asked for.

Each is described where it is computed, in ``megaflow_hpc.training.algorithms``.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from megaflow_hpc.config.sections import RUN_DIRECTORY, Section

Range = tuple[float, float, Literal["inclusive", "exclusive"]]


def _range(value: Any) -> Any:
    """Lets the third part be left out: bounds are then inside."""
    if isinstance(value, list | tuple) and len(value) == 2:
        value = (*value, "inclusive")
    if isinstance(value, list | tuple) and len(value) == 3 and not (0 <= value[0] <= value[1] <= 1):
        raise ValueError(f"{list(value)}: bounds are pass rates from 0 to 1, the lower one first")
    return value


class OverlongConfig(Section):
    """What is added to the reward of long rollouts (soft over-long punishment: DAPO, arXiv 2503.14476, section 3.4)."""

    longest: int = Field(ge=1)
    """Sampled tokens from which the whole penalty is added."""
    buffer: int = Field(ge=1)
    """Tokens below ``longest`` over which the penalty grows from 0."""
    penalty: float = -1.0
    """Added to the reward of the longest. Default: -1."""

    @model_validator(mode="after")
    def _fits(self) -> OverlongConfig:
        if self.buffer > self.longest:
            raise ValueError(f"buffer {self.buffer} is larger than longest {self.longest}")
        return self


class MaskUnfinished(Section):
    """Rollouts that a limit has cut off count in their group, and are not trained on (DAPO's over-long filtering)."""


class ShuffleConfig(Section):
    """Gives each rollout of a step the rewards of another one, by lot: a control run, whose rewards teach nothing."""


class ZeroVariance(Section):
    """Drops groups whose rewards are all equal: they have nothing to teach."""


class DataStep(Section):
    """One step of ``data``; exactly one key."""

    penalty: float | None = None
    """Number that is added to the reward of a rollout that a limit of turns, tokens or time ended. MegaFlow, appendix
    D.1, uses -0.5."""
    overlong: OverlongConfig | None = None
    """Lowers the reward of long rollouts."""
    mask_unfinished: MaskUnfinished | None = None
    """Does not train on unfinished rollouts."""
    shuffle: ShuffleConfig | None = None
    """Shuffles rewards: a control run."""
    zero_variance: ZeroVariance | None = None
    """Drops groups with equal rewards."""
    pass_rate: Range | None = None
    """Drops groups whose share of passed rollouts is outside ``[from, to]``, or ``[from, to, exclusive]`` without the
    bounds themselves. A rollout passes with a reward of at least ``pass_threshold``."""
    staleness: int | None = Field(None, ge=0)
    """Drops rollouts with tokens that are more than this number of versions old."""
    replay: float | None = Field(None, ge=0, lt=1)
    """Trains once more on the latest groups of earlier steps, up to this share of a step's groups."""

    @field_validator("penalty", "pass_rate", "staleness", "replay", mode="before")
    @classmethod
    def _earlier_form(cls, value: Any, info: ValidationInfo) -> Any:
        """Reads the section that run directories of earlier versions have in place of the plain value."""
        if info.context == RUN_DIRECTORY and isinstance(value, dict):
            names = {"penalty": "unfinished", "pass_rate": "range", "staleness": "max", "replay": "ratio"}
            return value.get(names[str(info.field_name)])
        return value

    _bounds = field_validator("pass_rate", mode="before")(_range)

    @model_validator(mode="after")
    def _one(self) -> DataStep:
        if len(self._given()) != 1:
            raise ValueError("one name with its settings, such as {penalty: -0.5} or zero_variance")
        return self

    def _given(self) -> list[str]:
        return [name for name in type(self).model_fields if getattr(self, name) is not None]

    @property
    def name(self) -> str:
        """Which one it is."""
        return self._given()[0]


class PromptsConfig(Section):
    """Which tasks are asked for next. Default: all, in random order, each once before any comes again."""

    order: Literal["uniform", "curriculum"] = "uniform"
    """``uniform``: in random order, each task once before any comes again; ``curriculum``: the more often, the nearer
    its pass rate is to a half. Default: ``uniform``."""
    pass_rate: Range | None = None
    """Pass rates of the tasks that are asked for again: ``[from, to]``, or ``[from, to, exclusive]`` without the bounds
    themselves. A task that was not tried is asked for. Default: all."""
    filter_solved: float | None = Field(None, gt=0, le=1)
    """Moving average of the pass rate from which a task counts as solved and is not asked for again. AstraFlow uses
    0.95. Default: every task is asked for."""
    greso: bool = False
    """Whether tasks whose groups had equal rewards are asked for less often (Zheng et al. 2025, arXiv 2506.02177).
    Default: false."""

    _bounds = field_validator("pass_rate", mode="before")(_range)
