"""The sections ``model`` and ``pool``: what answers a policy's calls, and what users may ask of an engine pool.

A campaign with nothing but models is an engine pool, whose servers other campaigns name.
"""

from __future__ import annotations

import re
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from megaflow_hpc.config.sections import AgentConfig, Section


class ServerCount(Section):
    """The number of engine servers of a policy."""

    min: int = Field(1, ge=0)
    """Servers started with the campaign. Default: 1."""
    max: int = Field(1, ge=1)
    """Maximum number of servers; those above ``min`` are queued held, and released on demand. Default: 1."""

    @model_validator(mode="after")
    def _ordered(self) -> ServerCount:
        if self.min > self.max:
            raise ValueError(f"servers.min {self.min} is larger than servers.max {self.max}; lower it, or raise max")
        return self


class WeightsConfig(Section):
    """How running servers load newly published weights."""

    update: Literal["rolling", "together"] = "rolling"
    """``rolling``: the servers of a policy load one after the other; ``together``: all at once."""
    running: Literal["finish", "continue"] = "finish"
    """Requests in progress: ``finish`` on the old version, or ``continue`` on the new one."""
    poll_s: float | None = Field(None, gt=0)
    """Seconds between two looks for a new version. A look costs the file system one open of each server. Default: 0.5
    for a policy that is trained, more with over 50 servers, 100 looks a second in all; else 5."""


class SamplingConfig(Section):
    """Sampling settings of a policy. The gateway adds them to calls that do not set them. Calls that set other values
    are stored with loss mask 0."""

    temperature: float = Field(1.0, ge=0, le=2)
    """Divisor of the logits; 0 always takes the most likely token. Default: 1."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Sample only from the most likely tokens with this total probability. Default: 1, all tokens."""
    top_k: int = Field(-1, ge=-1)
    """Sample only from this many most likely tokens; -1 and 0: from all. Default: -1."""
    min_p: float = Field(0.0, ge=0, le=1)
    """Minimum probability of a token, relative to the most likely one. Default: 0."""
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    """Subtracted once from the logit of each token that the answer already has. Default: 0."""
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    """Subtracted from a token's logit once per occurrence in the answer so far. Default: 0."""
    repetition_penalty: float = Field(1.0, gt=0, le=100)
    """Divisor of the logits of tokens that the prompt or the answer already has. Default: 1."""

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


ALSO = (
    *("engine", "path", "servers", "gpus", "nodes", "args", "python", "image", "binds"),
    *("base_url", "name", "api_key_file", "script", "weight"),
)
"""What further servers of a policy may have of their own."""


class ModelConfig(Section):
    """The model of one policy, and the servers that run it."""

    engine: Literal["vllm", "sglang", "transformers", "scripted", "external", "replay"] = "vllm"
    """Inference engine. ``external`` is an existing endpoint, ``replay`` a recorded campaign."""
    path: str | None = None
    """Model directory or Hugging Face name; for ``replay`` a run directory or a trajectories file."""
    pool: str | None = None
    """Run directory of an engine pool that answers in place of servers of this campaign."""
    servers: ServerCount = ServerCount()
    """Number of engine servers."""
    gpus: int = Field(1, ge=0)
    """GPUs of each server on each of its nodes; used for tensor parallelism. Default: 1; always 0 for ``external``."""
    nodes: int = Field(1, ge=1)
    """Nodes of each server; used for pipeline parallelism (``vllm`` only). Default: 1."""
    weights: WeightsConfig = WeightsConfig()
    """How published weights are loaded."""
    sampling: SamplingConfig = SamplingConfig()
    """Sampling settings. Default: sample from the model's own distribution."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Command-line options of the engine, without the dashes."""
    thoughts: Literal["template", "keep"] = "template"
    """Form of earlier answers in a prompt. ``template``: as the model's chat template renders them; if it drops
    thoughts, a new sequence starts. ``keep``: as they were sampled, so that a conversation is one sequence (``vllm``
    only)."""
    media_domains: tuple[str, ...] = ()
    """Hosts from which engines may fetch images that agents name by URL. Default: none; agents send images as data."""
    python: str | None = None
    """Interpreter or virtual environment of the engine. Default: ``MEGAFLOW_ENGINE_VENV``; python3 in images."""
    image: str | None = None
    """Apptainer image (SIF file or directory) that contains the engine. Default: none; it runs on the host."""
    binds: tuple[str, ...] = ()
    """Further host paths visible to an engine in an image: ``SRC[:DEST[:ro]]``."""
    base_url: str | None = None
    """``external`` only: address of the endpoint, to which ``/chat/completions`` is added; a bare host gets ``/v1``."""
    name: str | None = None
    """``external`` only: name of the model at the endpoint. Default: ``path``, else the policy's name."""
    api_key_file: str | None = None
    """``external`` only: file with the API key, which nobody else may read (mode 0600). Default: no key."""
    script: str | None = None
    """``scripted`` only: YAML file with the answers."""
    agent: AgentConfig | None = None
    """Agent of this policy, in place of the campaign's."""
    samples: int | None = Field(None, ge=0)
    """Samples per task of this policy, in place of the campaign's. 0: it runs no tasks and only answers agents of other
    policies, under its name."""
    weight: float = Field(1.0, gt=0)
    """Relative share of requests that each of these servers gets among its policy's servers. Default: 1."""
    also: tuple[dict[str, Any], ...] = ()
    """Further kinds of servers of this policy; each states what differs from this section (engine, gpus, servers,
    weight, …)."""
    include: tuple[str, ...] = ()
    """Shell patterns on task ids; this policy runs only matching tasks. Default: every task."""

    @field_validator("agent", mode="before")
    @classmethod
    def _bare_agent(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @model_validator(mode="before")
    @classmethod
    def _without_gpus(cls, value: Any) -> Any:
        """An endpoint that exists already takes no GPU of this campaign, whatever the servers beside it take."""
        return {**value, "gpus": 0} if isinstance(value, dict) and value.get("engine") == "external" else value

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

    @field_validator("media_domains")
    @classmethod
    def _hosts(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for host in value:
            if not re.fullmatch(r"[A-Za-z0-9-]+(\.[A-Za-z0-9-]+)*", host):
                raise ValueError(f"{host!r} is not the name of a host, such as images.site.edu")
        return tuple(host.lower() for host in value)

    @model_validator(mode="after")
    def _complete(self) -> ModelConfig:
        field = "pool" if self.pool else {"scripted": "script", "external": "base_url"}.get(self.engine, "path")
        if getattr(self, field) is None:
            raise ValueError(f"engine {self.engine} needs {field!r}")
        if self.nodes > 1 and self.engine not in ("vllm", "scripted"):
            raise ValueError(f"nodes: engine {self.engine} is started on one node; vllm runs over several")
        if self.name and "external" not in (self.engine, *(other.get("engine") for other in self.also)):
            raise ValueError("name: is for engine external; others serve a model by the name of its policy")
        kinds = {self.engine, *(str(other.get("engine", self.engine)) for other in self.also)}
        if (
            self.thoughts == "keep"
            and not self.pool
            and (lacking := kinds - {"vllm", "scripted", "external", "replay"})
        ):
            raise ValueError(f"thoughts: keep is not possible with engine {min(lacking)}; use vllm, or leave it out")
        if self.image and self.engine in ("external", "replay"):
            raise ValueError(f"image: engine {self.engine} starts nothing that could run in one")
        for name in sorted({name for other in self.also for name in other} - set(ALSO)):
            raise ValueError(f"also: {name!r} belongs to the whole policy; further servers may have {', '.join(ALSO)}")
        self.kinds()
        return self

    def kinds(self) -> list[ModelConfig]:
        """The kinds of servers of this policy; none for ``replay``, which needs none."""
        if self.engine == "replay":
            return []
        common = {"also": (), "agent": None}
        return [
            self.model_copy(update=common),
            *(ModelConfig.model_validate({**self.model_dump(), **common, **other}) for other in self.also),
        ]


class UserCaps(Section):
    """What one user may ask of each server of an engine pool."""

    in_flight: int | None = Field(None, ge=1)
    """Maximum number of concurrent requests. Default: no limit."""


class UserShare(UserCaps):
    """Caps and share of one user; a cap that it does not state is that of all users."""

    weight: float = Field(1.0, gt=0)
    """Relative share of engine time while users ask for more than there is. Default: 1."""


class EnginePoolConfig(UserCaps):
    """Access to an engine pool; its caps apply to every user who is not listed."""

    share: Literal["user", "group"] = "user"
    """Whose campaigns may use the pool: its owner's (``user``), or also those of the owner's ``group``."""
    users: dict[str, UserShare] = Field(default_factory=dict)
    """Caps and shares of single users, by login name."""
