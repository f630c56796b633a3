"""The ``training`` section: which policies learn, with which algorithms, and from how much and how recent data.

The recipe of MegaFlow's appendix D.1 (the paper does not say the unit of the minibatch; here it is tasks, each with all
samples)::

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

from pydantic import Field, field_validator, model_validator

from megaflow_hpc.config.data_algorithms import DataStep, OverLengthConfig, PromptsConfig
from megaflow_hpc.config.objective import AdvantageConfig, LossConfig
from megaflow_hpc.config.sections import Method, Section, TaskSource


class OptimizerConfig(Section):
    """AdamW and its learning-rate schedule."""

    lr: float = Field(1e-6, ge=0)
    """Learning rate. The default suits full training of models with a few billion parameters; LoRA and small models
    need more. Default: 1e-6."""
    schedule: Literal["constant", "linear"] | Method = "constant"
    """``constant``; or ``linear``, which decays to 0 at the last step; or ``module:function``, called before each
    update with its metrics. Default: ``constant``."""
    warmup: int = Field(0, ge=0)
    """Steps over which the learning rate rises from 0. Default: 0."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay. Default: 0."""
    clip_norm: float | None = Field(1.0, gt=0)
    """Maximum gradient norm. Larger gradients are scaled down to it; null: no limit. Default: 1."""
    offload: bool = False
    """Keep float32 parameters, moments and gradients in the node's memory, and compute the optimizer step there. Needs
    16 bytes per parameter there instead of on the GPU, and makes steps slower. Default: false."""

    def rate(self, step: int, steps: int) -> float:
        """Returns the learning rate of a step (from 1) out of ``steps``. A function of the user's starts from it."""
        if step <= self.warmup:
            return self.lr * step / self.warmup
        if self.schedule != "linear" or steps <= self.warmup + 1:
            return self.lr
        done = min((step - self.warmup - 1) / (steps - self.warmup - 1), 1.0)
        return self.lr * (1 - done)


class LoraConfig(Section):
    """Low-rank adapters, trained instead of all parameters (Hu et al. 2021, arXiv 2106.09685)."""

    rank: int = Field(32, ge=1)
    """Rank of the adapters. Default: 32."""
    alpha: float = Field(64, gt=0)
    """Scale of the adapters, before division by the rank. Default: 64."""
    targets: tuple[str, ...] | Literal["all-linear"] = "all-linear"
    """Names of the modules that get adapters. Default: ``all-linear``."""


class ParallelConfig(Section):
    """How the trainer's ranks, one for each GPU, divide the model and its rows. The default, FSDP over all ranks,
    suits models whose rows fit one GPU. Replicas × context × tensor must divide the number of ranks."""

    replicas: int = Field(1, ge=1)
    """Number of groups of ranks that each store the whole model (HSDP). With one for each node, parameters are gathered
    within nodes only. Default: 1."""
    context: int = Field(1, ge=1)
    """Number of ranks that share each row of tokens, for sequences that do not fit one GPU. Default: 1."""
    tensor: int = Field(1, ge=1)
    """Number of ranks that share the heads and features of each layer (tensor parallel). Default: 1."""
    expert: int = Field(1, ge=1)
    """Number of ranks that store different experts, to which tokens are sent (expert parallel). A multiple of
    ``tensor``. Default: 1."""

    @property
    def copies(self) -> int:
        """Number of successive ranks that compute the same micro-batch."""
        return self.context * self.tensor


class PolicyTraining(Section):
    """How one policy learns."""

    base: str | None = None
    """Model directory from which training starts. Set it if engines serve another copy, such as a quantised one.
    Default: the policy's ``path``."""
    loss: LossConfig = LossConfig()
    """The loss that the optimizer minimises."""
    advantage: AdvantageConfig = AdvantageConfig()
    """How rewards are converted to advantages."""
    mix_agents: bool = False
    """Share each group's samples among the policy's agents, so that advantages compare the agents too. Default: false;
    each group has one agent, and advantages compare like with like."""
    score: Method | None = None
    """Function ``module:function`` that rewards stored rollouts, sequences or turns before their step is planned, such
    as a judge. Default: none."""
    importance: Literal["none", "token", "sequence"] | Method | None = None
    """Importance weights, which correct for the difference between the engine's and the trainer's probabilities: one
    for each ``token``, one for each ``sequence`` (the product over its tokens), or ``none`` (truncated importance
    sampling, Yao et al. 2025, Your Efficient RL Framework Secretly Brings You Off-Policy RL Training). Or
    ``module:function``. Default: ``token``; ``none`` for ``gspo``, as in its paper."""
    columns: dict[str, Method] = Field(default_factory=dict)
    """Further values of each token, by name: functions ``module:function`` that are called before a step's first
    update. A loss function reads them. Default: none."""
    truncate: float = Field(2.0, ge=1)
    """Cap on importance weights. Default: 2."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """AdamW and its learning-rate schedule."""
    lora: LoraConfig | None = None
    """Adapters to train instead of all parameters. Needs much less memory. Default: none."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Data type of the computation. Parameters and optimizer are always float32. Default: ``bfloat16``."""
    microbatch: int = Field(32768, ge=1)
    """Maximum number of tokens, prompts included, in one forward pass on one GPU, or on all GPUs that share a row
    (``parallel.context``). A longer sequence gets its own pass. If memory runs out, the trainer halves it.
    Default: 32768."""
    recompute: bool = True
    """Recompute activations in the backward pass. Saves memory but slows down steps. Default: true."""
    parallel: ParallelConfig = ParallelConfig()
    """How several GPUs divide the model."""

    @model_validator(mode="after")
    def _whole_adapters(self) -> PolicyTraining:
        if self.lora and self.parallel.expert > 1:
            raise ValueError("parallel.expert: adapters (lora) need expert: 1; FSDP divides the experts' weights")
        return self

    @property
    def engine_importance(self) -> Literal["none", "token", "sequence"] | Method:
        """Importance weights, with the default of the loss."""
        return self.importance or ("none" if self.loss.kind == "gspo" else "token")


class HeldOutConfig(Section):
    """Evaluation on held-out tasks during training."""

    tasks: tuple[TaskSource, ...]
    """Sources of the held-out tasks."""
    every: int = Field(10, ge=1)
    """Steps between evaluations. Default: 10."""
    samples: int = Field(4, ge=1)
    """Rollouts of each task in an evaluation. Default: 4."""

    @field_validator("tasks", mode="before")
    @classmethod
    def _bare_tasks(cls, value: Any) -> Any:
        items = value if isinstance(value, list | tuple) else [value]
        return [{"path": item} if isinstance(item, str) else item for item in items]


class TrainingConfig(Section):
    """Training on the campaign's rollouts as they arrive."""

    policies: dict[str, PolicyTraining]
    """Policies that learn, by name, with their settings. The policy of ``model`` is called ``default``."""
    batch: int = Field(16, ge=1)
    """Number of tasks in a step, each with all samples of the policy. Default: 16."""
    refill: int = Field(0, ge=0, le=100)
    """Number of times that a step requests further tasks to replace groups that ``data`` drops (dynamic sampling: DAPO,
    arXiv 2503.14476, section 3.2). After that, the step is smaller than ``batch``. Default: 0."""
    staleness: int | None = Field(1, ge=0)
    """Maximum age of a step's rollouts, in weight versions. 0: synchronous, each step waits for rollouts of the
    newest weights. 1 to 4: sampling continues during steps. null: asynchronous, without a limit. Tasks are requested
    once every engine that is alive has loaded the newest weights. Older rollouts, such as those of an engine that
    refuses the weights, are dropped as ``stale``. Default: 1."""
    data: tuple[DataStep, ...] = ()
    """Processing steps that filter and shape rollouts before training, in order. Default: none."""
    prompts: PromptsConfig = PromptsConfig()
    """Choice of the tasks to request next."""
    trainer: Method | None = None
    """Function ``module:function`` that trains a policy in place of this package's trainer. It is called with the
    policy's ``Dataflow``. Default: none."""
    steps: int = Field(100, ge=1)
    """Number of training steps. Default: 100."""
    checkpoint_every: int = Field(5, ge=1)
    """Steps between checkpoints of the trainer's state. The latest three are kept. Default: 5."""
    nonfinite: int = Field(3, ge=1)
    """Number of steps in a row after which training ends if none of their gradients is finite. Such a step changes no
    weights. Default: 3."""
    publish_delta: bool = False
    """Publish only the difference from the last full version of the weights, if it is much smaller. Saves time on
    slow file systems. Default: false."""
    evaluate: HeldOutConfig | None = None
    """Evaluation on held-out tasks. Default: none."""

    @property
    def over_length(self) -> OverLengthConfig | None:
        """The step ``over_length`` of ``data``."""
        return next((step.over_length for step in self.data if step.over_length), None)

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
        if not isinstance(value, list):
            return value
        named = [{"method": item} if isinstance(item, str) and ":" in item else item for item in value]
        return [{item: {}} if isinstance(item, str) else item for item in named]

    @model_validator(mode="after")
    def _fits(self) -> TrainingConfig:
        for name, policy in self.policies.items():
            asked = policy.loss.minibatch
            if asked and asked > self.batch:
                raise ValueError(f"policies.{name}.loss.minibatch: {asked} tasks are more than batch: {self.batch}")
        once = [step.name for step in self.data if step.name in ("staleness", "replay", "over_length")]
        for kind in once:
            if once.count(kind) > 1:
                raise ValueError(f"data: {kind} is given twice")
        return self
