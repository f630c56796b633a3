"""The ``training`` section: which policies learn, by which algorithms, from how much and how fresh data.

A *loss* is what the trainer differentiates: a function of new and proximal log-probabilities and advantages, and how it
is averaged. An *advantage* is a number for each rollout, made of rewards before any model is asked. So GRPO is the loss
``grpo`` with the advantage ``grpo``, and Dr.GRPO and RLOO, too, are both of their own; the other losses go with any
advantage, and the advantage ``median`` with any loss.
Sources: Schulman et al. 2017 (PPO, arXiv 1707.06347); Shao et al. 2024 (GRPO, 2402.03300); Liu et al. 2025 (Dr.GRPO,
2503.20783); Zheng et al. 2025 (GSPO, 2507.18071); Yu et al. 2025 (DAPO, 2503.14476); MiniMax 2025 (CISPO, 2506.13585);
Zheng et al. 2025 (M2PO, 2510.01161); Ahmadian et al. 2024 (RLOO, 2402.14740).

The recipe of MegaFlow's appendix D.1 (its unit of the minibatch is not said; tasks are meant here)::

    samples: 16
    training:
      policies:
        default:
          loss: {kind: gspo, clip: [2.0e-4, 4.0e-4], epochs: 2, minibatch: {tasks: 64}}
          advantage: {kind: grpo}
          optimizer: {lr: 1.0e-6}
      batch: {tasks: 64}
      mode: synchronous
      data: [{penalty: {unfinished: -0.5}}, zero_variance]
      prompts: {order: uniform, pass_rate: [0.0, 1.0, exclusive]}
"""

from __future__ import annotations

import math
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from megaflow_hpc.config.data_algorithms import DataStep, PromptsConfig
from megaflow_hpc.config.sections import Section, TaskSource

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


class Minibatch(Section):
    """How much one optimizer step takes; exactly one unit."""

    tasks: int | None = Field(None, ge=1)
    """Groups, each with all its samples."""
    samples: int | None = Field(None, ge=1)
    """Rollouts."""
    tokens: int | None = Field(None, ge=1)
    """Sampled tokens: rollouts are added until there are as many."""

    @model_validator(mode="after")
    def _one_unit(self) -> Minibatch:
        if sum(amount is not None for amount in (self.tasks, self.samples, self.tokens)) != 1:
            raise ValueError("say the unit of a minibatch once: {tasks: 16}, {samples: 128} or {tokens: 500000}")
        return self


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
    second_moment: float = Field(0.04, gt=0)
    """``m2po`` only: bound of the mean squared logarithm of the ratios. Default: 0.04."""
    entropy: float = Field(0.0, ge=0)
    """Coefficient of the entropy that is added to what is maximised. Default: 0."""
    epochs: int = Field(1, ge=1)
    """How often each step goes through its data. Default: 1."""
    minibatch: Minibatch | None = None
    """Data of one optimizer step: {tasks: n}, {samples: n} or {tokens: n}. Default: the whole batch."""

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
            why = "bounds ratios by second_moment" if self.kind == "m2po" else "takes no ratio"
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
        if not all(map(math.isfinite, value.values())):
            raise ValueError(f"{value}: weights are finite numbers")
        return value


class ImportanceConfig(Section):
    """Weights that correct for how the engine's probabilities differ from the trainer's (truncated importance sampling,
    Yao et al. 2025, Your Efficient RL Framework Secretly Brings You Off-Policy RL Training)."""

    level: Literal["none", "token", "sequence"] = "token"
    """``token``: a weight for each token; ``sequence``: the product over one; ``none``. Default: ``token``."""
    truncate: float = Field(2.0, ge=1)
    """Largest weight. Default: 2."""


class OptimizerConfig(Section):
    """AdamW and its schedule."""

    lr: float = Field(1e-6, ge=0)
    """Learning rate. Default: 1e-6, for all parameters of a model of some billions; LoRA and small models take more."""
    schedule: Literal["constant", "linear"] = "constant"
    """``constant``, or ``linear``: falls to ``end`` at the last step. Default: ``constant``."""
    warmup: int = Field(0, ge=0)
    """Steps in which the rate first rises from 0. Default: 0."""
    end: float = Field(0.0, ge=0, le=1)
    """``linear`` only: share of ``lr`` at the last step. Default: 0."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of the first and second moment. Default: 0.9 and 0.999."""
    eps: float = Field(1e-8, gt=0)
    """What is added to the divisor. Default: 1e-8."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay. Default: 0."""
    clip_norm: float | None = Field(1.0, gt=0)
    """Largest norm of the gradient; null: no limit. Default: 1."""

    def rate(self, step: int, steps: int) -> float:
        """Returns the learning rate of a step (from 1) of ``steps`` in all."""
        if step <= self.warmup:
            return self.lr * step / self.warmup
        if self.schedule == "constant" or steps <= self.warmup + 1:
            return self.lr
        done = min((step - self.warmup - 1) / (steps - self.warmup - 1), 1.0)
        return self.lr * (1 - (1 - self.end) * done)


class LoraConfig(Section):
    """Low-rank adapters in place of all parameters (Hu et al. 2021, arXiv 2106.09685)."""

    rank: int = Field(32, ge=1)
    """Rank. Default: 32."""
    alpha: float = Field(64, gt=0)
    """Scale times rank. Default: 64."""
    targets: tuple[str, ...] | Literal["all-linear"] = "all-linear"
    """Names of the modules that get one. Default: ``all-linear``."""


class PolicyTraining(Section):
    """How one policy learns."""

    base: str | None = None
    """Model directory from which training starts. Default: the policy's ``path``."""
    loss: LossConfig = LossConfig()
    """What is minimised."""
    advantage: AdvantageConfig = AdvantageConfig()
    """What rewards count for."""
    importance: ImportanceConfig = ImportanceConfig()
    """Correction between engine and trainer."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """AdamW and its schedule."""
    lora: LoraConfig | None = None
    """Adapters that are trained in place of all parameters. Default: none."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """What the model computes in; parameters and optimizer are kept in float32. Default: ``bfloat16``."""
    microbatch: int = Field(32768, ge=1)
    """Tokens, prompts included, of one forward pass on one GPU; a longer rollout gets one of its own. Default:
    32768."""
    recompute: bool = True
    """Whether activations are computed again in the backward pass, to save memory. Default: true."""


class BatchConfig(Section):
    """What one step trains on, and what is asked for at a time."""

    tasks: int = Field(16, ge=1)
    """Groups. Default: 16."""
    samples: int | None = Field(None, ge=1)
    """Rollouts of each group. Default: the policy's ``samples``."""


class ModeConfig(Section):
    """How far rollouts may lag behind the trainer; kept by when tasks are asked for, not by discarding."""

    kind: Literal["synchronous", "bounded", "asynchronous"] = "bounded"
    """``synchronous``: each step waits for rollouts of the newest version; ``bounded``: up to ``staleness`` versions
    behind; ``asynchronous``: no bound. Default: ``bounded``."""
    staleness: int | None = Field(None, ge=0)
    """Versions that a step's rollouts may be behind: ``bounded`` only. Default: 1."""

    @model_validator(mode="after")
    def _one_number(self) -> ModeConfig:
        if self.kind == "bounded" and self.staleness == 0:
            raise ValueError("staleness 0 is mode: synchronous")
        if self.kind != "bounded" and self.staleness is not None:
            raise ValueError(f"staleness is for mode bounded; {self.kind} has none to set")
        return self

    @property
    def bound(self) -> int | None:
        """The mode as one number: 0 synchronous, k bounded, ``None`` asynchronous."""
        lags = {"synchronous": 0, "bounded": 1 if self.staleness is None else self.staleness}
        return lags.get(self.kind)


class CheckpointConfig(Section):
    """The trainer's own state, from which it resumes."""

    every: int = Field(5, ge=1)
    """Steps from one to the next. Default: 5."""
    keep: int = Field(3, ge=1)
    """How many are kept. Default: 3."""


class PublishConfig(Section):
    """The weights that engines load."""

    every: int = Field(1, ge=1)
    """Steps from one version to the next. Default: 1."""
    keep: int = Field(3, ge=1)
    """Versions that are kept. Default: 3."""
    delta: bool = False
    """Whether only what has changed is written. Default: false."""


class HeldOutConfig(Section):
    """Evaluation while training, on tasks that are not trained on."""

    tasks: tuple[TaskSource, ...]
    """Sources of these tasks."""
    every: int = Field(10, ge=1)
    """Steps from one evaluation to the next. Default: 10."""
    samples: int = Field(4, ge=1)
    """Rollouts of each task. Default: 4."""

    @field_validator("tasks", mode="before")
    @classmethod
    def _bare_tasks(cls, value: Any) -> Any:
        items = value if isinstance(value, list | tuple) else [value]
        return [{"path": item} if isinstance(item, str) else item for item in items]


class TrainingConfig(Section):
    """Training on the campaign's rollouts while they come in."""

    policies: dict[str, PolicyTraining]
    """Which of the campaign's policies learn, and how; ``default`` is the one of ``model``."""
    batch: BatchConfig = BatchConfig()
    """What one step trains on."""
    mode: ModeConfig = ModeConfig()
    """How far rollouts may lag behind the trainer."""
    data: tuple[DataStep, ...] = ()
    """What is done with rollouts before they are trained on, in this order. Default: nothing."""
    prompts: PromptsConfig = PromptsConfig()
    """Which tasks are asked for."""
    steps: int = Field(100, ge=1)
    """Steps of the whole training. Default: 100."""
    seed: int = Field(0, ge=0)
    """Seed of every random choice. Default: 0."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """The trainer's own state."""
    publish: PublishConfig = PublishConfig()
    """The weights that engines load."""
    evaluate: HeldOutConfig | None = None
    """Evaluation on held-out tasks. Default: none."""

    @field_validator("policies", mode="before")
    @classmethod
    def _plain_policies(cls, value: Any) -> Any:
        if isinstance(value, dict):
            return {name: {} if policy is None else policy for name, policy in value.items()}
        return value

    @field_validator("policies")
    @classmethod
    def _some(cls, value: dict[str, PolicyTraining]) -> dict[str, PolicyTraining]:
        if not value:
            raise ValueError("names no policy; write policies: {default: {}}")
        return value

    @field_validator("mode", mode="before")
    @classmethod
    def _bare_mode(cls, value: Any) -> Any:
        return {"kind": value} if isinstance(value, str) else value

    @field_validator("data", mode="before")
    @classmethod
    def _bare_steps(cls, value: Any) -> Any:
        return [{item: {}} if isinstance(item, str) else item for item in value] if isinstance(value, list) else value

    @model_validator(mode="after")
    def _fits(self) -> TrainingConfig:
        for name, policy in self.policies.items():
            asked = policy.loss.minibatch
            if asked and asked.tasks and asked.tasks > self.batch.tasks:
                raise ValueError(
                    f"policies.{name}.loss.minibatch: {asked.tasks} tasks are more than the {self.batch.tasks} of "
                    "batch.tasks"
                )
        once = [step.name for step in self.data if step.name in ("staleness", "replay")]
        for kind in once:
            if once.count(kind) > 1:
                raise ValueError(f"data: {kind} is given twice")
        return self
