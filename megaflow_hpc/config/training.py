"""The ``training`` section: which policies learn, by which algorithms, from how much and how fresh data.

The recipe of MegaFlow's appendix D.1 (its unit of the minibatch is not said; tasks are meant here)::

    samples: 16
    training:
      policies:
        default:
          loss: {kind: gspo, clip: [2.0e-4, 4.0e-4], epochs: 2, minibatch: 64}
          advantage: {kind: grpo}
          optimizer: {lr: 1.0e-6}
      batch: 64
      staleness: 0
      data: [{penalty: -0.5}, zero_variance]
      prompts: {order: uniform, pass_rate: [0.0, 1.0, exclusive]}
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from megaflow_hpc.config.data_algorithms import DataStep, PromptsConfig
from megaflow_hpc.config.objective import AdvantageConfig, LossConfig
from megaflow_hpc.config.sections import RUN_DIRECTORY, Section, TaskSource


class OptimizerConfig(Section):
    """AdamW and its schedule."""

    lr: float = Field(1e-6, ge=0)
    """Learning rate. Default: 1e-6, for all parameters of a model of some billions; LoRA and small models take more."""
    schedule: Literal["constant", "linear"] = "constant"
    """``constant``, or ``linear``: falls to 0 at the last step. Default: ``constant``."""
    warmup: int = Field(0, ge=0)
    """Steps in which the rate first rises from 0. Default: 0."""
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
        return self.lr * (1 - done)


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
    importance: Literal["none", "token", "sequence"] = "token"
    """Importance weights, which correct for the difference between the engine's and the trainer's probabilities
    (truncated importance sampling, Yao et al. 2025, Your Efficient RL Framework Secretly Brings You Off-Policy RL
    Training): one for each ``token``, one for each ``sequence`` (the product over its tokens), or ``none``. Default:
    ``token``."""
    truncate: float = Field(2.0, ge=1)
    """Upper bound of an importance weight. Default: 2."""
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

    @model_validator(mode="before")
    @classmethod
    def _earlier_form(cls, value: Any, info: ValidationInfo) -> Any:
        """Reads the section ``importance`` in run directories of earlier versions."""
        if info.context == RUN_DIRECTORY and isinstance(value, dict) and isinstance(value.get("importance"), dict):
            weights = value["importance"]
            return {**value, "importance": weights.get("level", "token"), "truncate": weights.get("truncate", 2.0)}
        return value


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
    batch: int = Field(16, ge=1)
    """Tasks that one step trains on, each with all samples of the policy. Default: 16."""
    refill: int = Field(0, ge=0, le=100)
    """Number of times that a step requests further tasks to replace groups that ``data`` drops (dynamic sampling: DAPO,
    arXiv 2503.14476, section 3.2). After that, the step is smaller than ``batch``. Default: 0."""
    staleness: int | None = Field(1, ge=0)
    """Maximum age of a step's rollouts, in weight versions. 0: synchronous, each step waits for rollouts of the newest
    weights. null: asynchronous, without a limit. Tasks are requested late enough to keep it; no rollout is discarded.
    Default: 1."""
    data: tuple[DataStep, ...] = ()
    """What is done with rollouts before they are trained on, in this order. Default: nothing."""
    prompts: PromptsConfig = PromptsConfig()
    """Which tasks are asked for."""
    steps: int = Field(100, ge=1)
    """Steps of the whole training. Default: 100."""
    checkpoint_every: int = Field(5, ge=1)
    """Steps between two checkpoints of the trainer's state; the latest three are kept. Default: 5."""
    publish_delta: bool = False
    """Whether a step's weights are published as their difference from the last whole version. Default: false."""
    evaluate: HeldOutConfig | None = None
    """Evaluation on held-out tasks. Default: none."""

    @model_validator(mode="before")
    @classmethod
    def _earlier_form(cls, value: Any, info: ValidationInfo) -> Any:
        """Reads ``mode`` and the section ``batch`` in run directories of earlier versions."""
        if info.context != RUN_DIRECTORY or not isinstance(value, dict):
            return value
        value = dict(value)
        if isinstance(batch := value.get("batch"), dict):
            value |= {"batch": batch.get("tasks", 16), "refill": batch.get("refill", 0)}
        if isinstance(mode := value.get("mode"), dict):
            bounds: dict[Any, int | None] = {"synchronous": 0, "asynchronous": None}
            bounded = 1 if mode.get("staleness") is None else mode["staleness"]
            value["staleness"] = bounds.get(mode.get("kind"), bounded)
        return value

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

    @field_validator("data", mode="before")
    @classmethod
    def _bare_steps(cls, value: Any) -> Any:
        return [{item: {}} if isinstance(item, str) else item for item in value] if isinstance(value, list) else value

    @model_validator(mode="after")
    def _fits(self) -> TrainingConfig:
        for name, policy in self.policies.items():
            asked = policy.loss.minibatch
            if asked and asked > self.batch:
                raise ValueError(f"policies.{name}.loss.minibatch: {asked} tasks are more than batch: {self.batch}")
        once = [step.name for step in self.data if step.name in ("staleness", "replay")]
        for kind in once:
            if once.count(kind) > 1:
                raise ValueError(f"data: {kind} is given twice")
        return self
