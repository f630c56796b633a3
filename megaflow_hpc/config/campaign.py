"""Defines the top level of the campaign file: the sections, the policies, and the functions that load the file."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import Field, ValidationError, ValidationInfo, field_validator, model_validator

from megaflow_hpc.config.model import ModelConfig
from megaflow_hpc.config.quotas import QuotasConfig
from megaflow_hpc.config.reading import explain, explain_all, place_of, read_yaml
from megaflow_hpc.config.sections import (
    NAME,
    STORED,
    AgentConfig,
    EnvironmentConfig,
    LimitsConfig,
    SchedulingConfig,
    Section,
    TaskSource,
    as_list,
)
from megaflow_hpc.config.services import ServiceConfig, check_services
from megaflow_hpc.config.site_profile import Profile, completed, find
from megaflow_hpc.config.slurm import SlurmConfig
from megaflow_hpc.config.team import TeamConfig, check_team
from megaflow_hpc.config.trained import check_engine, check_limits, check_trained, trained_model
from megaflow_hpc.config.training import TrainingConfig
from megaflow_hpc.errors import ConfigError, Mistakes
from megaflow_hpc.resources import docs

AnySection = TypeVar("AnySection", bound=Section)


class CampaignConfig(Section):
    """A validated campaign file."""

    name: str
    """Name of the campaign, and of its Slurm jobs."""
    site: str | None = None
    """Name of the site profile that supplies omitted keys, such as partitions and accounts. Default: none."""
    run_dir: str = "runs"
    """Parent directory of the run directories, on a file system that all nodes mount. Default: ``runs``."""
    share: Literal["user", "group"] = "user"
    """Access to the run directory: ``user`` for its owner only, ``group`` for the owner's group too. Files that
    contain keys are never shared. For an engine pool: access to its servers. Default: ``user``."""
    tasks: tuple[TaskSource, ...] = ()
    """Sources of tasks. A campaign with neither tasks nor agents is an engine pool."""
    agent: tuple[AgentConfig, ...] = ()
    """Agent that works on the tasks, or a list of agents that each run every task. Without a model, each agent becomes
    a policy of its name. If the policy is trained, each group gets one agent, in proportion to ``share``."""
    samples: int = Field(1, ge=1)
    """Rollouts of each task under each policy. Raise it to measure pass@k or to train. Default: 1."""
    pass_threshold: float = 1.0
    """Minimum reward of a passed rollout, in pass@k, reports and training. Default: 1."""
    seed: int | None = Field(None, ge=0, lt=2**31)
    """Random seed of sampling and trainer, for repeatable runs. Default: none for sampling, which is faster, and 0 for
    the trainer."""
    model: ModelConfig | None = None
    """Model of a campaign with one policy. The policy's name is ``default``."""
    models: dict[str, ModelConfig] = Field(default_factory=dict)
    """Models of a campaign with several policies, keyed by policy name."""
    team: TeamConfig | None = None
    """Roles of the models in one rollout, by name. An agent calls a role by passing its name as the ``model`` of a
    request. The agent of the first role runs the rollouts. Default: none; each policy runs rollouts of its own."""
    pool: dict[str, Annotated[float, Field(gt=0)]] | None = None
    """For an engine pool: each user's weight, by login name. While requests are queued, users get engine time in
    proportion to their weights. ``share`` sets who may use the servers, and ``quotas.in_flight`` limits each user.
    Default: 1 for everyone."""
    environment: EnvironmentConfig = EnvironmentConfig()
    """Sandboxes: images, network, limits."""
    services: dict[str, ServiceConfig] = Field(default_factory=dict)
    """Programs that run alongside the sandboxes of each rollout. The key is the host name at which sandboxes reach
    the service."""
    slurm: SlurmConfig = SlurmConfig()
    """Resources that jobs request from Slurm."""
    scheduling: SchedulingConfig = SchedulingConfig()
    """Rules for the placement of rollouts and for their groups."""
    limits: LimitsConfig = LimitsConfig()
    """Limits on total resource use."""
    quotas: QuotasConfig = QuotasConfig()
    """Rate and concurrency limits of model calls."""
    training: TrainingConfig | None = None
    """Settings for training on rollouts as they arrive. Default: none; the campaign only collects rollouts."""

    @field_validator("name")
    @classmethod
    def _name(cls, value: str) -> str:
        if not NAME.match(value):
            raise ValueError(
                f"{value!r} must be letters, digits, dot, dash or underscore, starting with a letter or digit"
            )
        return value

    _lists = field_validator("tasks", "agent", mode="before")(as_list)

    @field_validator("services")
    @classmethod
    def _services(cls, value: dict[str, ServiceConfig]) -> dict[str, ServiceConfig]:
        check_services(value)
        return value

    @field_validator("agent")
    @classmethod
    def _distinct(cls, agents: tuple[AgentConfig, ...]) -> tuple[AgentConfig, ...]:
        _check_distinct(agents)
        return agents

    @model_validator(mode="before")
    @classmethod
    def _earlier_keys(cls, value: Any, info: ValidationInfo) -> Any:
        """Converts the keys of a run that an earlier version planned."""
        if info.context != STORED:
            return value
        fields, trainer = dict(value), value.get("slurm", {}).get("trainer", {})
        pool = value.get("pool") or {}
        if isinstance(pool.get("weights"), dict):
            fields["pool"] = pool["weights"]
            fields["quotas"] = {**value.get("quotas", {}), "in_flight": pool.get("in_flight")}
        if lead_s := value.get("slurm", {}).get("lead_s"):
            pods = value["slurm"]["pods"]
            options = {"signal": f"B:USR2@{lead_s}", **pods["extra"]}
            fields["slurm"] = {**value["slurm"], "pods": {**pods, "extra": options}}
        if fields.get("training") and trainer.get("kind", "own") != "own":
            fields["training"] = {**fields["training"], "trainer": trainer["kind"]}
        return fields

    @model_validator(mode="after")
    def _policies(self) -> CampaignConfig:
        if self.is_pool:
            if self.team:
                raise ValueError("team: an engine pool runs no rollouts; leave team out")
            if self.judges():
                raise ValueError(f"models.{self.judges()[0]}.judge: an engine pool runs no verifiers; leave judge out")
            pools = [name for name, policy in self.policies().items() if policy.model and policy.model.pool]
            if pools:
                raise ValueError(f"{', '.join(pools)}: an engine pool has servers of its own; name another engine")
            return self
        if self.pool:
            raise ValueError("pool is for a campaign without tasks and agent; leave it out, or them")
        for name in ("tasks", "agent"):
            if name not in self.model_fields_set:
                raise ValueError(f"{name!r} is missing; add it")
        if not self.tasks:
            raise ValueError("tasks is empty; name at least one source")
        if not self.agent:
            raise ValueError("agent is empty; name one, for example: agent: oracle")
        if (self.model and self.model.judge) or (self.models and len(self.judges()) == len(self.models)):
            raise ValueError("judge: a judge needs another model to judge; name both in models")
        if self.model and self.models:
            raise ValueError("give either model or models, not both")
        if self.team:
            check_team(self.team, self.models or ({"default": self.model} if self.model else {}))
            rewarded = [name for name, role in self.team.roles.items() if role.reward]
            if rewarded and self.scheduling.signal_after:
                raise ValueError(
                    "scheduling.signal_after: it compares the rollouts' own rewards, which may be equal where those of "
                    f"role {rewarded[0]!r} differ; leave it out"
                )
            titles = {agent.short_title for agent in self.policies()[self.team.owning_policy].agents}
            same = self.team.roles.keys() & titles
            if len(titles) > 1 and same:
                raise ValueError(
                    f"team: {min(same)!r} is also the name of an agent, and both have a metric of that name; "
                    "rename the role, or give the agent another name (as)"
                )
        for name in self.models:
            if not NAME.match(name):
                raise ValueError(f"policy {name!r} must be letters, digits, dot, dash or underscore")
        for model in self.models.values():
            _check_distinct(model.agent)
        for name, policy in self.policies().items():
            if policy.samples and name not in self.requested and any(agent.share != 1 for agent in policy.agents):
                raise ValueError(
                    f"share: policy {name!r} is not trained, so each of its agents runs every task; leave share out"
                )
        return self

    @model_validator(mode="after")
    def _spending(self) -> CampaignConfig:
        if self.limits.usd is None:
            return self
        models = self.models or ({"default": self.model} if self.model else {})
        unpriced = [name for name, model in models.items() if not model.price and model.is_external]
        key = f"models.{unpriced[0]}.price" if unpriced and self.models else "model.price"
        if unpriced or not any(model.price for model in models.values()):
            raise ValueError(
                f"limits.usd: without {key}, calls cost nothing and the limit is never reached; set the price, such as "
                "price: [3, 15] (US dollars per million tokens), or leave limits.usd out"
            )
        return self

    @model_validator(mode="after")
    def _shared_services(self) -> CampaignConfig:
        shared = [name for name, service in self.services.items() if service.per == "campaign"]
        if self.services and self.is_pool:
            raise ValueError("services: an engine pool runs no tasks; leave services out")
        if shared and self.slurm.together:
            raise ValueError(f"services.{shared[0]}.per: with slurm.together there is one job; leave together out")
        return self

    @model_validator(mode="after")
    def _training(self, info: ValidationInfo) -> CampaignConfig:
        if self.training:
            policies = {} if self.is_pool else self.policies()
            runs = dict(policies)
            if self.team:  # all are trained on the owner's rollouts
                runs = dict.fromkeys(policies, policies[self.team.owning_policy])
            models = {name: (p.model, runs[name].agents, runs[name].samples) for name, p in policies.items()}
            check_trained(self.training, models, "models.{}" if self.models else "model")
            if info.context != STORED:  # a campaign of an earlier version stated the limit elsewhere
                check_limits(self.training, models)
            check_engine(self.training)
            mixed = [name for name, policy in self.training.policies.items() if policy.mix_agents]
            if self.team and 0 < len(mixed) < len(self.training.policies):
                raise ValueError(
                    f"training.policies.{mixed[0]}.mix_agents: all policies of a team are trained on the same groups; "
                    "write it for each of them, or leave it out"
                )
            for name, policy in self.training.policies.items():
                key = "advantage.rewards" if policy.advantage.rewards else "score" if policy.score else ""
                if key and self.scheduling.signal_after:
                    raise ValueError(
                        "scheduling.signal_after: it compares the rollouts' own rewards, which may be equal where "
                        f"those of training.policies.{name}.{key} differ; leave it out"
                    )
            if mixed and self.scheduling.spare:
                raise ValueError(
                    f"training.policies.{mixed[0]}.mix_agents: with scheduling.spare, the samples of slow agents would "
                    "be cancelled; leave one of them out"
                )
        return self

    @property
    def is_pool(self) -> bool:
        """True if the campaign only serves models to other campaigns."""
        return not self.tasks and not self.agent and bool(self.model or self.models)

    @property
    def pool_caps(self) -> dict[str, Any]:
        """Limits of an engine pool's users at each server: ``in_flight``, and ``weights`` by login name."""
        return {"in_flight": self.quotas.in_flight, "weights": self.pool or {}}

    @property
    def run_share(self) -> Literal["user", "group"]:
        """Access to the run directory. An engine pool shares only its servers, so its directory stays private."""
        return "user" if self.is_pool else self.share

    def judges(self) -> tuple[str, ...]:
        """Returns the policies that only verifiers may call."""
        return tuple(name for name, model in self.models.items() if model.judge)

    @property
    def requested(self) -> frozenset[str]:
        """Policies whose rollouts trainers request, instead of the planner: those that are trained, and the owner of a
        team with a trained role."""
        trained = frozenset(self.training.policies if self.training else ())
        if self.team and trained & set(self.team.policies.values()):
            return trained | {self.team.owning_policy}
        return trained

    def with_ranks(self, ranks: int) -> CampaignConfig:
        """Returns the campaign with ``ranks`` MPI ranks on each node of a pod."""
        pods = self.slurm.pods.model_copy(update={"ranks_per_node": ranks})
        return self.model_copy(update={"slurm": self.slurm.model_copy(update={"pods": pods})})

    def _samples(self, name: str, model: ModelConfig | None) -> int:
        if model is not None and model.judge:
            return 0
        if self.team and name != self.team.owning_policy:
            return 0
        return self.samples if model is None or model.samples is None else model.samples

    def policies(self) -> dict[str, Policy]:
        """Returns the campaign's policies by name. In a campaign without a model, each agent is a policy."""
        if self.models:
            models = self.models
        elif self.model:
            models = {"default": self.model}
        else:
            return {agent.short_title: Policy(agents=(agent,), samples=self.samples) for agent in self.agent}
        trained = self.training.policies if self.training else {}
        policies = {}
        for name, model in models.items():
            policies[name] = Policy(
                agents=() if model.judge else model.agent or self.agent or _NO_AGENTS,
                model=trained_model(model) if name in trained else model,
                samples=self._samples(name, model),
            )
        return policies


def pass_threshold_of(campaign: Mapping[str, Any]) -> float:
    """Returns the ``pass_threshold`` of a stored campaign, from a run directory or trajectory file. Default: 1."""
    value = campaign.get("pass_threshold")
    return float(value) if isinstance(value, int | float) else 1.0


_NO_AGENTS = (AgentConfig(name="nop"),)
"""Agent in the policies of an engine pool, which runs no tasks."""


def _check_distinct(agents: Sequence[AgentConfig]) -> None:
    names = [agent.short_title for agent in agents]
    if len(set(names)) != len(names):
        raise ValueError(
            f"agents {names} are not distinct, but results are identified by these names; give each its own name, such "
            f"as {{as: careful, name: {agents[0].name}}}"
        )


class Policy(Section):
    """A set of agents and, if they need one, their model. Derived from the campaign file. Users do not write it."""

    agents: tuple[AgentConfig, ...]
    model: ModelConfig | None = None
    samples: int = 1

    def agent(self, title: str) -> AgentConfig:
        """Returns the agent with this title, as stored in :attr:`.Rollout.agent`."""
        for agent in self.agents:
            if agent.title == title:
                return agent
        raise ConfigError(f"agent {title!r}: this policy has {', '.join(agent.title for agent in self.agents)}")


@dataclass(frozen=True)
class Loaded:
    """A campaign, with the YAML positions and site profile needed for error messages."""

    config: CampaignConfig
    node: yaml.Node | None = None
    """YAML nodes of the campaign file, merged with those of the site profile. ``None`` if built from Python values."""
    profile: Profile | None = None


def load(path: str | os.PathLike[str]) -> CampaignConfig:
    """Reads and validates a campaign file.

    Raises:
        ConfigError: A value is invalid. The message names file, line, value and remedy.
    """
    return read(path).config


def read(path: str | os.PathLike[str]) -> Loaded:
    """Reads and validates a campaign file. Raises the same errors as :func:`load`."""
    value, node = read_yaml(path)
    if value is None:
        raise ConfigError(f"{path}: is empty; megaflow-hpc init writes a campaign file to begin with")
    if not isinstance(value, dict):
        kind = "a list" if isinstance(value, list) else repr(str(value)[:40])
        remedy = f"expected keys such as tasks: and agent:; {docs('tutorials/first-campaign.md')} shows a campaign file"
        raise ConfigError(f"{path}: holds {kind}; {remedy}")
    return parsed(value, str(path), node)


def parse(fields: Mapping[str, Any], source: str = "campaign", node: yaml.Node | None = None) -> CampaignConfig:
    """Builds a campaign from Python values. ``source`` and ``node`` are used in error messages."""
    return parsed(fields, source, node).config


def parsed(fields: Mapping[str, Any], source: str = "campaign", node: yaml.Node | None = None) -> Loaded:
    """Builds a campaign from Python values and its site profile.

    Raises:
        Mistakes: Values are invalid. The message names file, line, value and remedy of each.
    """
    profile = None
    if isinstance(name := fields.get("site"), str):
        profile = find(name, place_of(node, ["site"], source))
        fields, node = completed(fields, node, profile)
    try:
        return Loaded(CampaignConfig.model_validate(fields), node, profile)
    except ValidationError as error:
        raise Mistakes(explain_all(error, source, node, CampaignConfig)) from None


def resolved(section: type[AnySection], fields: Mapping[str, Any]) -> AnySection:
    """Validates a section read from a run directory. Ignores unknown keys, which newer versions may have written.

    Raises:
        ConfigError: This version cannot read the section.
    """
    try:
        return section.model_validate(fields, extra="ignore", context=STORED)
    except ValidationError as error:
        raise ConfigError(explain(error, "run.json", None, section)) from None


def schema() -> dict[str, Any]:
    """Returns the JSON Schema of the campaign file, for editors."""
    return CampaignConfig.model_json_schema()
