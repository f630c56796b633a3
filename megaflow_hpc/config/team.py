"""Defines the ``team`` section: the roles that a campaign's models play in each rollout.

::

    models:
      author: {engine: vllm, path: /models/Qwen3-8B}
      second: {engine: vllm, path: /models/Qwen3-8B}
    team:
      writer: author
      checker: {policy: second, reward: right}
    training: {policies: {author: {}, second: {}}}

The first role owns the rollouts. Its policy's agent runs them. If the policy is trained, its trainer requests them. The
agent calls a role by passing the role's name as the ``model`` of a request.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ConfigDict, RootModel, field_validator, model_serializer, model_validator

from megaflow_hpc.config.model import ModelConfig
from megaflow_hpc.config.sections import NAME, Section


class RoleConfig(Section):
    """A role in a rollout. The short form is only the name of its policy."""

    policy: str
    """Model that plays the role: a key of ``models``. Several roles may share a model."""
    reward: str | None = None
    """Name of the reward that this role is trained on, as given by an agent, a verifier or a scorer. Default: the
    rollout's reward."""

    @model_validator(mode="before")
    @classmethod
    def _bare_policy(cls, value: Any) -> Any:
        return {"policy": value} if isinstance(value, str) else value


class TeamConfig(RootModel[dict[str, RoleConfig]]):
    """Roles of one rollout, each played by a model of the campaign. The agent of the first role runs the rollouts."""

    model_config = ConfigDict(frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _stored(cls, value: Any) -> Any:
        """Puts the owner of a stored team first. JSON does not keep the order of roles, so a stored campaign names the
        owner."""
        roles = value.get("roles") if isinstance(value, dict) else None
        if not isinstance(roles, dict) or "policy" in roles:  # not a stored team: ``roles`` may be a role's name
            return value
        owner = value.get("owner")
        if owner not in roles:
            raise ValueError("roles: write the roles directly, the owner first: team: {writer: default}")
        return {owner: roles[owner], **roles}

    @model_serializer
    def _with_owner(self) -> dict[str, Any]:
        return {"roles": {name: role.model_dump() for name, role in self.root.items()}, "owner": self.owner}

    @field_validator("root")
    @classmethod
    def _names(cls, value: dict[str, RoleConfig]) -> dict[str, RoleConfig]:
        if not value:
            raise ValueError("names no role; write team: {writer: default}")
        for name in value:
            if not NAME.match(name):
                raise ValueError(f"role {name!r} must be letters, digits, dot, dash or underscore")
        return value

    @property
    def roles(self) -> dict[str, RoleConfig]:
        """Roles by name. An agent calls a role by passing its name as the ``model`` of a request."""
        return self.root

    @property
    def owner(self) -> str:
        """Role whose agent runs the rollouts."""
        return next(iter(self.root))

    @property
    def owning_policy(self) -> str:
        """Policy whose agent runs the rollouts."""
        return self.roles[self.owner].policy

    @property
    def policies(self) -> dict[str, str]:
        """Policy that plays each role, by role."""
        return {name: role.policy for name, role in self.roles.items()}

    def roles_of(self, policy: str) -> dict[str, str | None]:
        """Returns the name of each role's reward, by role, for the roles of a policy. ``None`` stands for the rollout's
        own reward."""
        return {name: role.reward for name, role in self.roles.items() if role.policy == policy}


def check_team(team: TeamConfig, models: Mapping[str, ModelConfig | None]) -> None:
    """Checks the roles against the models of the campaign.

    Raises:
        ValueError: a role has no model, or a model has no role. The message names the key.
    """
    names = ", ".join(name for name, model in models.items() if model and not model.judge) or "none"
    for role, config in team.roles.items():
        model = models.get(config.policy)
        if model is None:
            is_role = config.policy in team.roles
            what = "is another role, and a role needs a model" if is_role else "is not a model"
            raise ValueError(f"team.{role}.policy: {config.policy!r} {what}; the campaign's models are: {names}")
        if model.judge:
            raise ValueError(
                f"team.{role}.policy: {config.policy!r} is a judge, which agents cannot call; leave judge out"
            )
    for name, model in models.items():
        if model is None or model.judge or name == team.owning_policy:
            continue
        if name not in team.policies.values():
            raise ValueError(f"models.{name}: has no role in team; give it one, or leave the model out")
        if model.samples:
            raise ValueError(
                f"models.{name}.samples: only role {team.owner!r} runs rollouts, the first of team; leave samples out"
            )
        if model.agent:
            raise ValueError(
                f"models.{name}.agent: only role {team.owner!r} runs rollouts, the first of team; leave agent out"
            )
