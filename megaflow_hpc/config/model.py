"""Defines the ``model`` section, which configures the engines of a policy."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple
from urllib.parse import urlsplit

from pydantic import Field, ValidationInfo, WithJsonSchema, field_validator, model_validator

from megaflow_hpc.config.sections import STORED, AgentConfig, Section, as_list
from megaflow_hpc.config.slurm import GpuType
from megaflow_hpc.types import ENDPOINTS

MAX_SERVERS = 10_000
"""Maximum number of engine servers of a policy. A larger number is assumed to be a typo."""


class ServerCount(NamedTuple):
    """Minimum and maximum number of engine servers of a policy."""

    min: int = 1
    max: int = 1


SERVER_COUNT_SCHEMA = {"anyOf": [{"type": "integer", "minimum": 1}, {"type": "array", "items": {"type": "integer"}}]}


class SamplingConfig(Section):
    """Sampling settings of a policy. The gateway adds them to model calls that omit them. It answers calls with
    other values too, but gives their tokens loss mask 0."""

    temperature: float = Field(1.0, ge=0, le=2)
    """Divisor of the logits. 0 selects greedy decoding. Default: 1."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Sample only from the smallest set of most likely tokens whose probabilities sum to this value. Default: 1, all
    tokens."""
    top_k: int = Field(-1, ge=-1)
    """Sample only from the k most likely tokens. -1 or 0: no limit. Default: -1."""
    min_p: float = Field(0.0, ge=0, le=1)
    """Minimum probability of a token, relative to the most likely token. Default: 0."""
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    """Value subtracted once from the logit of each token that already occurs in the answer. Default: 0."""
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    """Value subtracted from the logit of a token for each earlier occurrence in the answer. Default: 0."""
    repetition_penalty: float = Field(1.0, gt=0, le=100)
    """Factor that lowers the logits of tokens that already occur in the prompt or answer. Default: 1."""

    @field_validator("temperature")
    @classmethod
    def _engines_can(cls, value: float) -> float:
        if 0 < value < 0.01:
            raise ValueError(f"{value}: engines raise it to 0.01; write 0.01, or 0 for the most likely token")
        return value

    @field_validator("top_k")
    @classmethod
    def _all_words(cls, value: int) -> int:
        return value or -1


class TokenPrice(NamedTuple):
    """Price of a million prompt tokens and of a million sampled tokens, in US dollars."""

    input: Annotated[float, Field(ge=0)]
    output: Annotated[float, Field(ge=0)]

    def of(self, prompt_tokens: int, sampled_tokens: int) -> float:
        """Returns the cost of the given numbers of prompt and sampled tokens in US dollars."""
        return (self.input * prompt_tokens + self.output * sampled_tokens) / 1e6


ALSO = (
    *("engine", "path", "servers", "gpus", "gpu_type", "nodes", "args", "python", "image", "binds"),
    *("base_url", "api_key_file", "script"),
)
"""Keys that entries of ``also`` may set."""


def _of_earlier_version(kind: dict[str, Any]) -> dict[str, Any]:
    """Converts a stored section of an earlier version. It had the keys ``pool`` and ``api`` instead of ``engine``."""
    if kind.get("pool"):
        return {**kind, "engine": "pool", "path": kind["pool"]}
    return {**kind, "engine": kind["api"]} if kind.get("api") else kind


class ModelConfig(Section):
    """Model of one policy and the servers that run it."""

    engine: Literal[
        "vllm", "sglang", "transformers", "external", "openai", "anthropic", "gemini", "pool", "replay", "scripted"
    ] = "vllm"
    """Inference engine. ``external``: a running endpoint that is compatible with OpenAI's API, and gets calls as the
    agent makes them. ``openai``, ``anthropic``, ``gemini``: an endpoint of OpenAI itself (whose newer models refuse
    ``max_tokens``), of Anthropic's messages, or of Gemini's generateContent; calls in any other format are converted.
    ``pool``: the servers of an engine pool. ``replay``: responses from a recorded campaign. ``scripted``: responses
    from a file, for tests. Default: ``vllm``."""
    path: str | None = None
    """Model directory or Hugging Face name. For an endpoint: the model's name there (default: the policy's name). For
    ``pool``: its run directory. For ``replay``: a run directory or trajectories file."""
    servers: Annotated[ServerCount, WithJsonSchema(SERVER_COUNT_SCHEMA)] = Field(
        ServerCount(), json_schema_extra={"default": 1}
    )
    """Number of engine servers, or ``[min, max]``: ``min`` start with the campaign, more start while requests wait and
    stop when idle. Default: 1."""
    gpus: int = Field(1, ge=0)
    """GPUs of each server on each node, for tensor parallelism. Always 0 for endpoints. Default: 0 for ``scripted``
    and ``replay``, else 1."""
    gpu_type: GpuType | None = None
    """Slurm's name for the type of these GPUs, such as ``a100``. ``sinfo -o %G`` prints the names. Default: any
    type."""
    nodes: int = Field(1, ge=1)
    """Nodes of each server, for models that need pipeline parallelism (``vllm`` only). Default: 1."""
    weights: Literal["rolling", "together", "continue"] = "rolling"
    """How servers load new weights. ``rolling``: one after another, so that some are always available. ``together``:
    all at once, which takes less time. In both cases, requests in progress are completed with the old weights first.
    ``continue``: all at once, and requests in progress continue with the new weights (``vllm`` only). Default:
    ``rolling``."""
    sampling: SamplingConfig = SamplingConfig()
    """Sampling settings. Default: sample from the model's own distribution."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Command-line options of the engine, without leading dashes."""
    thoughts: Literal["template", "keep"] = "template"
    """Earlier answers in a prompt. ``template``: rendered with the chat template; if it drops thoughts, a new sequence
    starts. ``keep``: inserted as sampled, so that a conversation stays one sequence (``vllm`` only). Default:
    ``template``."""
    python: str | None = None
    """Python interpreter or virtual environment in which the engine is installed. Default: ``MEGAFLOW_ENGINE_VENV``;
    in an ``image``, python3."""
    image: str | None = None
    """Apptainer image (SIF file or directory) in which the engine is installed. Default: none; the engine runs on
    the host."""
    binds: tuple[str, ...] = ()
    """Additional host paths to mount in ``image``: ``SRC[:DEST[:ro]]``."""
    base_url: str | None = None
    """URL of the endpoint, without ``/chat/completions``. If it has no path, ``/v1`` is added, or ``/v1beta`` for
    ``gemini``."""
    api_key_file: str | None = None
    """File with the API key of the endpoint. Only its owner may read it (mode 0600). Default: no key."""
    script: str | None = None
    """YAML file with the responses of a ``scripted`` engine."""
    agent: tuple[AgentConfig, ...] = ()
    """Agent or list of agents of this policy. Default: the campaign's ``agent``."""
    samples: int | None = Field(None, ge=0)
    """Rollouts of each task under this policy. With 0, the policy only serves calls that name it; if it is trained, it
    learns from the groups of the other trained policies' steps. Default: the campaign's ``samples``."""
    price: TokenPrice | None = None
    """Prices in US dollars per million prompt tokens and per million sampled tokens, such as ``[3, 15]``. Used for
    costs in reports and for ``limits.usd``. Default: none."""
    judge: bool | Literal["reward"] = False
    """Reserve the model for verifiers that judge rollouts; agents cannot call it. ``reward``: the same, for a reward
    model with one class (``vllm`` only), which rates conversations by a number. Default: false."""
    also: tuple[dict[str, Any], ...] = ()
    """More kinds of servers for this policy. Each entry sets only the keys that differ, such as ``gpus`` or
    ``servers``. Servers get requests in proportion to their GPUs."""

    @field_validator("also", mode="before")
    @classmethod
    def _earlier_keys(cls, value: Any, info: ValidationInfo) -> Any:
        if info.context != STORED:
            return value
        return [{key: kind[key] for key in ALSO if key in kind} for kind in map(_of_earlier_version, value)]

    @field_validator("weights", mode="before")
    @classmethod
    def _earlier_weights(cls, value: Any, info: ValidationInfo) -> Any:
        if info.context == STORED and isinstance(value, dict):
            return "continue" if value["running"] == "continue" else value["update"]
        return value

    @field_validator("servers", mode="before")
    @classmethod
    def _count(cls, value: Any) -> Any:
        bounds = tuple(value) if isinstance(value, list | tuple) else (value, value)
        are_integers = all(isinstance(bound, int) and not isinstance(bound, bool) for bound in bounds)
        if len(bounds) != 2 or not are_integers or not 0 <= bounds[0] <= bounds[1] or bounds[1] < 1:
            raise ValueError("expected a number of servers, or [min, max] such as [1, 4]")
        if bounds[1] > MAX_SERVERS:
            raise ValueError(f"expected at most {MAX_SERVERS} servers")
        return bounds

    _agents = field_validator("agent", mode="before")(as_list)

    @model_validator(mode="before")
    @classmethod
    def _without_gpus(cls, value: Any, info: ValidationInfo) -> Any:
        """Sets ``gpus`` to 0 for external endpoints. Defaults ``gpus`` to 0 for engines that run no model."""
        if not isinstance(value, dict):
            return value
        if info.context == STORED:
            value = _of_earlier_version(value)
        engine = value.get("engine")
        if engine in ENDPOINTS:
            return {**value, "gpus": 0, "gpu_type": None}
        if engine in ("scripted", "replay") and "gpus" not in value:
            return {**value, "gpus": 0}
        return value

    @field_validator("base_url")
    @classmethod
    def _address(cls, value: str | None) -> str | None:
        if value is not None:
            parts = urlsplit(value)
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise ValueError(f"{value!r}: expected http:// or https:// with a host, such as http://HOST:PORT/v1")
            if parts.query or parts.fragment:
                raise ValueError(f"{value!r}: expected an address without a query")
        return value

    @model_validator(mode="after")
    def _complete(self) -> ModelConfig:
        field = "base_url" if self.engine in ENDPOINTS else "script" if self.engine == "scripted" else "path"
        if getattr(self, field) is None:
            raise ValueError(f"engine {self.engine} needs {field!r}; add model.{field}")
        if self.nodes > 1 and self.engine not in ("vllm", "scripted", "pool"):
            raise ValueError(f"nodes: engine {self.engine} is started on one node; vllm runs over several")
        if self.judge and (self.samples or self.agent):
            raise ValueError("judge: a judge runs no tasks; leave samples and agent out")
        if self.judge == "reward" and self.engine not in ("vllm", "pool"):
            raise ValueError(f"judge: reward: engine {self.engine} serves no reward models; use vllm")
        if self.judge and self.engine == "replay":
            raise ValueError("judge: answers of judges are not recorded, so engine replay has none; use another engine")
        if self.gpu_type and not self.gpus:
            raise ValueError(f"gpu_type: {self.gpu_type}: gpus is 0; raise it, or leave gpu_type out")
        kinds = {self.engine, *(str(other.get("engine", self.engine)) for other in self.also)}
        lacking = kinds - {"vllm", "scripted", "pool", "replay", *ENDPOINTS}
        if self.thoughts == "keep" and lacking:
            raise ValueError(f"thoughts: keep is not possible with engine {min(lacking)}; use vllm, or leave it out")
        if self.image and self.engine in ("replay", *ENDPOINTS):
            raise ValueError(f"image: engine {self.engine} starts nothing that could run in one")
        for name in sorted({name for other in self.also for name in other} - set(ALSO)):
            raise ValueError(f"also: {name!r} belongs to the whole policy; further servers may have {', '.join(ALSO)}")
        self.kinds()
        return self

    @property
    def pool(self) -> str | None:
        """Run directory of the engine pool that serves the model. ``None`` if the campaign has servers of its own."""
        return self.path if self.engine == "pool" else None

    @property
    def is_external(self) -> bool:
        """True if any server of this policy is an external endpoint."""
        return any(kind.engine in ENDPOINTS for kind in self.kinds())

    def kinds(self) -> list[ModelConfig]:
        """Returns a section for each kind of server of this policy. Empty for ``replay``, which needs no servers."""
        if self.engine == "replay":
            return []
        common: dict[str, Any] = {"also": (), "agent": ()}
        return [
            self.model_copy(update=common),
            *(ModelConfig.model_validate({**dict(self), **common, **other}) for other in self.also),
        ]
