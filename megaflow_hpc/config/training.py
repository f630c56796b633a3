"""The ``training`` section: trained policies, their algorithms, and the amount and age of their data.

This example is the recipe of MegaFlow's appendix D.1. The paper does not state the unit of ``minibatch``. This
package counts tasks, each with all samples::

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

The objective of a policy has two parts, the loss and the advantage. The trainer differentiates the loss, a function
of new log-probabilities, proximal log-probabilities and advantages. The advantage is a number per rollout, computed
from rewards alone. GRPO, Dr.GRPO and RLOO each define both parts. The other losses work with any advantage, and the
advantage ``median`` works with any loss.

Sources: Schulman et al. 2017 (PPO, arXiv 1707.06347); Shao et al. 2024 (GRPO, 2402.03300); Liu et al. 2025 (Dr.GRPO,
2503.20783); Zheng et al. 2025 (GSPO, 2507.18071); Yu et al. 2025 (DAPO, 2503.14476); MiniMax 2025 (CISPO,
2506.13585); Zheng et al. 2025 (M2PO, 2510.01161); Ahmadian et al. 2024 (RLOO, 2402.14740).

:mod:`megaflow_hpc.training.algorithms` implements ``data``, which filters and shapes rollouts, and ``prompts``,
which selects tasks.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BeforeValidator, Field, ValidationInfo, WithJsonSchema, field_validator, model_validator

from megaflow_hpc.config.sections import STORED, Method, Section, TaskSource, as_list

CLIPS: dict[str, tuple[float, float]] = {
    "ppo": (0.2, 0.2),
    "grpo": (0.2, 0.2),
    "dr_grpo": (0.2, 0.2),
    "gspo": (3e-4, 4e-4),  # section 5.1 of the paper
    "dapo": (0.2, 0.28),  # Clip-Higher, section 3.1 of the paper
    # No lower bound, as in the paper. Ratios up to 5, as in ScaleRL (2510.13786), which TRL's guide cites.
    "cispo": (1.0, 4.0),
    "m2po": (math.inf, math.inf),  # the second moment limits ratios
    "rloo": (math.inf, math.inf),  # uses no ratio
}
"""Default of ``clip`` for each loss: distances of the clip range below and above 1."""


class LossConfig(Section):
    """The loss, and the number of passes over a step's data."""

    kind: Literal["ppo", "grpo", "dr_grpo", "gspo", "dapo", "cispo", "m2po", "rloo"] | Method = "dapo"
    """``ppo``, ``dapo``: clipped token ratios, averaged over all tokens. ``grpo``: averaged within each rollout,
    then over rollouts. ``dr_grpo``: summed, then divided by rollouts times the agent's
    ``max_tokens``. ``gspo``: one ratio per sequence, averaged as in ``grpo``. ``cispo``: clipped ratios as weights
    without gradient. ``m2po``: limits the second moment of the ratios. ``rloo``: log-probabilities without ratios,
    divided by the number of rollouts. Or ``module:function``. Default: ``dapo``."""
    clip: tuple[float, float] | None = None
    """Clip range of ratios, as distances from 1: ``[below, above]``, or a single number for both. Default: the
    paper's values for each kind; 0.2 and 0.28 for ``dapo``."""
    entropy: float = Field(0.0, ge=0)
    """Coefficient of the entropy bonus. Raise it if the policy stops exploring. Default: 0."""
    epochs: int = Field(1, ge=1)
    """Number of passes over the data of each step. Default: 1."""
    minibatch: int | None = Field(None, ge=1)
    """Number of tasks in each optimizer step, with all of their samples. Default: all tasks of the step, so each
    pass is one optimizer step."""

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
        return self

    @property
    def band(self) -> tuple[float, float]:
        """Clip range of ratios, as distances below and above 1, with the default resolved."""
        return self.clip or (CLIPS[self.kind] if isinstance(self.kind, str) else (math.inf, math.inf))


class AdvantageConfig(Section):
    """Comparison of a rollout's reward with the other rewards in its group."""

    kind: Literal["grpo", "dr_grpo", "rloo", "median"] | Method = "dr_grpo"
    """``dr_grpo``: reward minus the group's mean. ``grpo``: the same, divided by the group's standard deviation.
    ``rloo``: reward minus the mean of the other rollouts. ``median``: reward minus the group's median. Or
    ``module:function``, which returns a number for each rollout, sequence or turn. Default: ``dr_grpo``."""
    rewards: dict[str, float] = Field(default_factory=dict)
    """Reward name, as reported by verifiers → weight. Default: the rollout's single reward."""
    whiten: bool | Literal["apart"] = False
    """Scale advantages to mean 0 and standard deviation 1 over the tokens of the batch. ``apart``: the same, after each
    of several ``rewards`` was compared within its group separately, instead of their sum (GDPO, arXiv 2601.05242).
    Default: false."""

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
        if isinstance(self.kind, Method) and self.whiten == "apart":
            raise ValueError(f"whiten: apart: {self.kind} gets one reward per rollout; read sample.rewards in it")
        return self


class OptimizerConfig(Section):
    """AdamW and its learning-rate schedule."""

    lr: float = Field(1e-6, ge=0)
    """Learning rate. The default suits full training of a few billion parameters. LoRA and small models need more.
    Default: 1e-6."""
    schedule: Literal["constant", "linear"] | Method = "constant"
    """``linear`` decays to 0 at the last step. Or ``module:function``, called before each update with its metrics.
    Default: ``constant``."""
    warmup: int = Field(0, ge=0)
    """Steps over which the learning rate rises from 0. Default: 0."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay. Default: 0."""
    clip_norm: float | None = Field(1.0, gt=0)
    """Maximum gradient norm. Larger gradients are scaled down. null: no limit. Default: 1."""
    offload: bool = False
    """Keep float32 parameters, moments and gradients (16 bytes per parameter) in the node's memory, and compute the
    optimizer step on the CPU, which is slower. Default: false."""

    def rate(self, step: int, steps: int) -> float:
        """Returns the learning rate of a step (from 1) out of ``steps``. Does not apply a user's schedule function."""
        if step <= self.warmup:
            return self.lr * step / self.warmup
        if self.schedule != "linear" or steps <= self.warmup + 1:
            return self.lr
        done = min((step - self.warmup - 1) / (steps - self.warmup - 1), 1.0)
        return self.lr * (1 - done)


class ParallelConfig(Section):
    """Division of the model and its rows among the trainer's ranks. The default, FSDP over all ranks, suits models
    whose rows fit on one GPU. Replicas × context × tensor must divide the number of ranks."""

    replicas: int = Field(1, ge=1)
    """Groups of ranks that each store the whole model (HSDP). With one per node, parameters are gathered only within
    nodes. Default: 1."""
    context: int = Field(1, ge=1)
    """Ranks that share each row of tokens, for sequences that do not fit on one GPU. Default: 1."""
    tensor: int = Field(1, ge=1)
    """Number of ranks that share the heads and features of each layer. Default: 1."""
    expert: int = Field(1, ge=1)
    """Ranks among which experts are divided. Must be a multiple of ``tensor``. Default: 1."""

    @property
    def copies(self) -> int:
        """Number of consecutive ranks that compute the same micro-batch."""
        return self.context * self.tensor


class PolicyTraining(Section):
    """Training settings of one policy."""

    base: str | None = None
    """Model directory from which training starts, if engines serve another copy, such as a quantised one. Default: the
    policy's ``path``."""
    loss: LossConfig = LossConfig()
    """Loss that the optimizer minimises."""
    advantage: AdvantageConfig = AdvantageConfig()
    """Computation of advantages from rewards."""
    mix_agents: bool = False
    """Divide each group's samples among the policy's agents, so that advantages compare the agents too. Default:
    false; each group has one agent."""
    score: Method | None = None
    """Function ``module:function``, such as a judge, that rewards stored rollouts, sequences or turns before their
    step is planned. Default: none."""
    importance: Literal["none", "token", "sequence"] | Method | None = None
    """Importance weights, at most 2, which correct for the difference between the engine's and the trainer's
    probabilities (Yao et al. 2025). ``sequence``: one per sequence, the product over its tokens. Or
    ``module:function``. Default: ``token``; ``none`` for ``gspo``, as in its paper."""
    columns: dict[str, Method] = Field(default_factory=dict)
    """Name → function ``module:function`` that computes an extra value of each token before a step's first update, for
    loss functions. Default: none."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """AdamW and its learning-rate schedule."""
    lora: int | None = Field(None, ge=1)
    """Rank of low-rank adapters on all linear layers, such as 32, to train instead of all parameters, with much less
    memory (arXiv 2106.09685). Their alpha is twice the rank. Default: none."""
    vision: Literal["trained", "frozen"] = "trained"
    """Training of an image-text model's tower and projection. Adapters (``lora``) are of the language model only.
    Default: ``trained``."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Data type of the computation. Parameters and optimizer are always float32. Default: ``bfloat16``."""
    microbatch: int = Field(32768, ge=1)
    """Tokens, prompts included, in one forward pass on a GPU, or on all GPUs that share a row (``parallel.context``). A
    longer sequence gets a pass of its own. If memory runs out, the trainer halves the value. Default: 32768."""
    recompute: bool = True
    """Recompute activations in the backward pass: less memory, slower steps. Default: true."""
    parallel: ParallelConfig = ParallelConfig()
    """Division of the model among the trainer's ranks, each with one GPU."""
    snapshot: dict[str, Annotated[int, Field(ge=1)]] = Field(default_factory=dict)
    """Policy that gets this policy's weights → number of steps between updates. For example, an opponent in self-play.
    It has a model of its own, of the same shape, and is not trained."""

    @field_validator("lora", "snapshot", mode="before")
    @classmethod
    def _earlier_forms(cls, value: Any, info: ValidationInfo) -> Any:
        if info.context != STORED:
            return value
        if info.field_name == "lora":
            return value["rank"] if isinstance(value, dict) else value
        return {value["to"]: value["every"]} if value and "to" in value else value or {}

    @model_validator(mode="after")
    def _whole_adapters(self) -> PolicyTraining:
        if self.lora and self.parallel.expert > 1:
            raise ValueError("parallel.expert: adapters (lora) need expert: 1; FSDP divides the experts' weights")
        return self

    @property
    def engine_importance(self) -> Literal["none", "token", "sequence"] | Method:
        """Kind of importance weights, with the default for the loss."""
        return self.importance or ("none" if self.loss.kind == "gspo" else "token")


def _range(value: Any) -> Any:
    """Validates a range. Adds the default third element, ``inclusive``."""
    if isinstance(value, list | tuple) and len(value) == 2:
        value = (*value, "inclusive")
    if isinstance(value, list | tuple) and len(value) == 3 and not (0 <= value[0] <= value[1] <= 1):
        raise ValueError(f"{list(value)}: bounds are pass rates from 0 to 1, the lower one first")
    return value


Range = Annotated[tuple[float, float, Literal["inclusive", "exclusive"]], BeforeValidator(_range)]


class OverLength(NamedTuple):
    """Maximum number of tokens of a trained sequence, and the treatment of rollouts with a longer one."""

    longest: Annotated[int, Field(ge=1)]
    how: Literal["drop", "truncate", "penalise"] = "drop"


def _over_length(value: Any) -> Any:
    return (value,) if isinstance(value, int) and not isinstance(value, bool) else value


_TOKENS = {"type": "integer", "minimum": 1}
OVER_LENGTH_SCHEMA = {
    "anyOf": [_TOKENS, {"type": "array", "prefixItems": [_TOKENS, {"enum": ["drop", "truncate", "penalise"]}]}]
}


class ZeroVariance(Section):
    """Drops groups without a signal."""


class DataStep(Section):
    """A processing step of ``data``. Set exactly one key."""

    penalty: float | None = None
    """Number added to the reward of a rollout that a limit on turns, tokens or time truncated. MegaFlow, appendix
    D.1, uses -0.5."""
    over_length: Annotated[OverLength, BeforeValidator(_over_length), WithJsonSchema(OVER_LENGTH_SCHEMA)] | None = None
    """Maximum number of tokens of a sequence, prompts included. Rollouts with a longer one are dropped. With
    ``[tokens, truncate]``, their first tokens are trained on. With ``[tokens, penalise]``, their reward is also lowered
    by 1."""
    zero_variance: ZeroVariance | None = None
    """Drops groups in which all rewards are equal, because their advantages are 0."""
    pass_rate: Range | None = None
    """Range of pass rates outside which groups are dropped: ``[from, to]``, or ``[from, to, exclusive]`` to exclude
    the bounds. A rollout passes if its reward is at least ``pass_threshold``."""
    replay: float | None = Field(None, ge=0, lt=1)
    """Maximum share of a step's groups that are replayed from earlier steps: the newest, each at most once."""
    method: Method | None = None
    """Function ``module:function`` that changes weights, penalties or rewards, or drops rollouts. The short form of the
    step is only its name."""

    @model_validator(mode="after")
    def _one(self) -> DataStep:
        if len(self._given()) != 1:
            raise ValueError("one name with its settings, such as {penalty: -0.5} or zero_variance")
        return self

    def _given(self) -> list[str]:
        return [name for name in type(self).model_fields if getattr(self, name) is not None]

    @property
    def name(self) -> str:
        """The key that is set."""
        return self._given()[0]


class PromptsConfig(Section):
    """Selection of the tasks to request next. By default, all tasks are requested in random order before any is
    repeated."""

    order: Literal["uniform", "curriculum", "greso"] | Method = "uniform"
    """``uniform``: random order, all tasks before any is repeated. ``curriculum``: prefer tasks with a pass rate
    near one half. ``greso``: as ``uniform``, but request tasks less often while all rewards in their groups are equal
    (GRESO: Zheng et al. 2025, arXiv 2506.02177). Or ``module:function``, which selects among the tasks that
    ``pass_rate`` allows. Default: ``uniform``."""
    pass_rate: Range | None = None
    """Range of pass rates outside which tasks are not requested again: ``[from, to]``, or ``[from, to, exclusive]``
    to exclude the bounds. Default: no range."""


class HeldOutConfig(Section):
    """Settings for evaluation on held-out tasks during training."""

    tasks: tuple[TaskSource, ...]
    """Sources of the held-out tasks."""
    every: int = Field(10, ge=1)
    """Number of steps between evaluations. Default: 10."""
    samples: int = Field(4, ge=1)
    """Number of rollouts of each task in an evaluation. Default: 4."""

    _list = field_validator("tasks", mode="before")(as_list)


class TrainingConfig(Section):
    """Settings for training on the campaign's rollouts as they arrive."""

    policies: dict[str, PolicyTraining]
    """Trained policies, by name, with their settings. The policy of ``model`` is called ``default``."""
    batch: int = Field(16, ge=1)
    """Tasks in a step, each with all of the policy's samples. Default: 16."""
    refill: int = Field(0, ge=0, le=100)
    """How often a step may request more tasks for groups that ``data`` dropped (dynamic sampling: DAPO, arXiv
    2503.14476, section 3.2). After that, it runs with fewer than ``batch`` tasks. Default: 0."""
    staleness: int | None = Field(1, ge=0)
    """Maximum age of a step's rollouts, in weight versions. 0: each step waits for rollouts of the newest weights. 1 to
    4: sampling continues during steps. null: no limit. New tasks are requested once all live engines have loaded the
    newest weights. Older rollouts are dropped as ``stale``. Default: 1."""
    data: tuple[DataStep, ...] = ()
    """Processing steps, applied in order, that filter and shape rollouts before training. Default: none."""
    prompts: PromptsConfig = PromptsConfig()
    """Selection of the tasks to request next."""
    trainer: Literal["own", "veomni"] | Method = "own"
    """``own`` trains with transformers and this package. ``veomni`` uses VeOmni and its kernels, which must be
    installed in the trainer's environment. Both write the same checkpoints. ``module:function`` names your own
    trainer, which is called with the policy's ``Dataflow``. Default: ``own``."""
    steps: int = Field(100, ge=1)
    """Number of training steps. Default: 100."""
    checkpoint_every: int = Field(5, ge=1)
    """Number of steps between checkpoints of the trainer's state. The latest three are kept. Default: 5."""
    publish_delta: bool = False
    """Publish weights as a difference from the last full version if that is much smaller, for slow file systems.
    Default: false."""
    evaluate: HeldOutConfig | None = None
    """Evaluation on held-out tasks. Default: none."""

    @property
    def over_length(self) -> OverLength | None:
        """Settings of the ``over_length`` step of ``data``. ``None`` if ``data`` has no such step."""
        return next((step.over_length for step in self.data if step.over_length), None)

    @field_validator("trainer", mode="before")
    @classmethod
    def _earlier_trainer(cls, value: Any, info: ValidationInfo) -> Any:
        return "own" if value is None and info.context == STORED else value

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
    def _bare_steps(cls, value: Any, info: ValidationInfo) -> Any:
        if not isinstance(value, list):
            return value
        if info.context == STORED:  # an earlier version may have stored steps that this one does not know
            value = [item for item in value if any(item.get(name) is not None for name in DataStep.model_fields)]
        named = [{"method": item} if isinstance(item, str) and ":" in item else item for item in value]
        return [{item: {}} if isinstance(item, str) else item for item in named]

    @model_validator(mode="after")
    def _fits(self) -> TrainingConfig:
        for name, policy in self.policies.items():
            asked = policy.loss.minibatch
            if asked and asked > self.batch:
                raise ValueError(f"policies.{name}.loss.minibatch: {asked} tasks are more than batch: {self.batch}")
        once = [step.name for step in self.data if step.name in ("replay", "over_length")]
        for kind in once:
            if once.count(kind) > 1:
                raise ValueError(f"data: {kind} is given twice")
        return self
