"""Data algorithms of the ``training`` section: ``data`` filters and shapes rollouts, ``prompts`` chooses tasks.

``megaflow_hpc.training.algorithms`` implements and explains them.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from megaflow_hpc.config.sections import Method, Section

Range = tuple[float, float, Literal["inclusive", "exclusive"]]


def _range(value: Any) -> Any:
    """Validates the bounds, and adds the default third element, ``inclusive``."""
    if isinstance(value, list | tuple) and len(value) == 2:
        value = (*value, "inclusive")
    if isinstance(value, list | tuple) and len(value) == 3 and not (0 <= value[0] <= value[1] <= 1):
        raise ValueError(f"{list(value)}: bounds are pass rates from 0 to 1, the lower one first")
    return value


class OverlongConfig(Section):
    """Penalty on the reward of long rollouts (soft overlong punishment: DAPO, arXiv 2503.14476, section 3.4)."""

    longest: int = Field(ge=1)
    """Number of sampled tokens from which the full penalty applies."""
    buffer: int = Field(ge=1)
    """Number of tokens before ``longest`` over which the penalty grows from 0."""
    penalty: float = -1.0
    """Full penalty, added to the reward. Default: -1."""

    @model_validator(mode="after")
    def _fits(self) -> OverlongConfig:
        if self.buffer > self.longest:
            raise ValueError(f"buffer {self.buffer} is larger than longest {self.longest}")
        return self


class OverLengthConfig(Section):
    """Treatment of rollouts with a sequence that is too long to train on. No step trains on a longer sequence."""

    longest: int = Field(ge=1)
    """Maximum number of tokens of a sequence, prompts included."""
    how: Literal["drop", "truncate", "penalise"] = "drop"
    """``drop``: drops the rollout. ``truncate``: does not train on the tokens after the first ``longest``.
    ``penalise``: truncates, and lowers the reward by 1. Default: ``drop``."""


class MaskUnfinished(Section):
    """Counts truncated rollouts in their group but does not train on them (overlong filtering: DAPO)."""


class ShuffleConfig(Section):
    """Permutes the rewards of a step's rollouts at random. For control runs: the rewards then carry no information."""


class ZeroVariance(Section):
    """Drops groups in which all rewards are equal, because their advantages are 0."""


class DataStep(Section):
    """One step of ``data``. It has exactly one key."""

    penalty: float | None = None
    """Number to add to the reward of a rollout truncated by a limit on turns, tokens or time. MegaFlow, appendix
    D.1, uses -0.5."""
    overlong: OverlongConfig | None = None
    """Lowers the rewards of long rollouts."""
    over_length: OverLengthConfig | None = None
    """Drops, truncates or penalises rollouts with a sequence that is too long to train on."""
    mask_unfinished: MaskUnfinished | None = None
    """Does not train on truncated rollouts."""
    shuffle: ShuffleConfig | None = None
    """Permutes rewards at random, for a control run."""
    zero_variance: ZeroVariance | None = None
    """Drops groups in which all rewards are equal."""
    pass_rate: Range | None = None
    """Range of pass rates, ``[from, to]``, or ``[from, to, exclusive]`` to exclude the bounds themselves. Drops
    groups outside it. A rollout passes with a reward of at least ``pass_threshold``."""
    staleness: int | None = Field(None, ge=0)
    """Maximum age of a token, in weight versions. Drops rollouts with older tokens."""
    replay: float | None = Field(None, ge=0, lt=1)
    """Maximum share of a step's groups that earlier steps already trained on. Replays the newest ones, each once."""

    method: Method | None = None
    """Function ``module:function`` that changes weights, penalties or rewards, or drops rollouts. In the list of
    steps, its name alone is enough."""

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
        """Name of the key that is set."""
        return self._given()[0]


class PromptsConfig(Section):
    """Choice of the tasks to request next. Default: all tasks in random order, each once before any is repeated."""

    order: Literal["uniform", "curriculum"] | Method = "uniform"
    """``uniform``: random order, each task once before any is repeated. ``curriculum``: prefer tasks with a pass rate
    near one half. Or ``module:function``, which chooses among the tasks that the keys below leave. Default:
    ``uniform``."""
    pass_rate: Range | None = None
    """Range of pass rates, ``[from, to]``, or ``[from, to, exclusive]`` to exclude the bounds themselves. Tasks
    outside it are not requested again. Default: no range."""
    filter_solved: float | None = Field(None, gt=0, le=1)
    """Pass rate, as a moving average, at which a task counts as solved and is not requested again. AstraFlow uses
    0.95. Default: tasks are never left out."""
    greso: bool = False
    """Request tasks less often while all rewards in their groups are equal (GRESO: Zheng et al. 2025, arXiv
    2506.02177). Default: false."""

    _bounds = field_validator("pass_rate", mode="before")(_range)

    @model_validator(mode="after")
    def _one_chooser(self) -> PromptsConfig:
        if self.greso and isinstance(self.order, Method):
            raise ValueError(f"greso: {self.order} chooses tasks itself; leave greso out")
        return self
