"""Checks that a campaign's agents can be created, and finds the files that they consist of."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from megaflow_hpc.agents import create
from megaflow_hpc.agents.probe import ProbeResult, probe
from megaflow_hpc.agents.registry import WITHOUT_MODEL
from megaflow_hpc.agents.remote import forked
from megaflow_hpc.campaign.planning.model_paths import Where
from megaflow_hpc.config import Policy
from megaflow_hpc.config.sections import AgentConfig
from megaflow_hpc.errors import ConfigError, Mistakes


def check_agents(policies: Mapping[str, Policy], network: str, base: Path, where: Where) -> tuple[str, ...]:
    """Checks that the agents of each policy can be created, and have access to a model if they need one.

    Code from outside this package is imported in a separate process, in the same way as for a rollout.

    Args:
        base: Directory of the campaign file, searched first for agents.

    Returns:
        Names of the agents' files and directories in ``base``.

    Raises:
        Mistakes: Agents cannot be created. Each message names the location in the campaign file and the agent.
    """
    agents = [(name, agent) for name, policy in policies.items() for agent in policy.agents]
    asked = [number for number, (_, agent) in enumerate(agents) if forked(agent.name)]

    def refusal(name: str, error: ConfigError) -> str:
        return f"{where(f'models.{name}.agent' if policies[name].model else 'agent')}: {error}"

    try:
        made, code = probe([agents[number][1] for number in asked], str(base.absolute())) if asked else ([], [])
    except ConfigError as error:
        raise ConfigError(refusal(agents[asked[0]][0], error)) from None
    results = dict(zip(asked, made, strict=True))
    refused = []
    for number, (name, agent) in enumerate(agents):
        try:
            _check(agent, policies[name].model is not None, results.get(number), network)
        except ConfigError as error:
            refused.append(refusal(name, error))
    if refused:
        raise Mistakes(refused)
    return tuple(code)


def _check(agent: AgentConfig, has_model: bool, made: ProbeResult | None, network: str) -> None:
    name = agent.name
    if made is None:
        made = ProbeResult(in_sandbox=bool(getattr(create(agent), "in_sandbox", False)))
    if made.error:
        raise ConfigError(made.error)
    if has_model and network == "none" and made.in_sandbox:
        raise ConfigError(
            f"agent {name!r} calls the model from inside the sandbox, which environment.network: none does not allow; "
            "use gateway"
        )
    if not has_model and name not in WITHOUT_MODEL and ":" not in name:
        raise ConfigError(f"agent {name!r} needs a model; add a model: section")
