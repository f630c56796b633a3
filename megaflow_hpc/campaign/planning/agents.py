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
from megaflow_hpc.errors import ConfigError, Mistakes


def check_agents(policies: Mapping[str, Policy], network: str, base: Path, where: Where) -> tuple[str, ...]:
    """Checks that each policy's agent can be created, and that it has access to a model if it needs one.

    Code from outside this package is imported in a separate process, in the same way as for a rollout.

    Args:
        base: Directory of the campaign file, searched first for agents.

    Returns:
        Names of the agents' files and directories in ``base``.

    Raises:
        Mistakes: Agents cannot be created. Each message names the location in the campaign file and the agent.
    """
    asked = [name for name, policy in policies.items() if forked(policy.agent.name)]

    def refusal(name: str, error: ConfigError) -> str:
        return f"{where(f'models.{name}.agent' if policies[name].model else 'agent')}: {error}"

    try:
        made, code = probe([policies[name].agent for name in asked], str(base.absolute())) if asked else ([], [])
    except ConfigError as error:
        raise ConfigError(refusal(asked[0], error)) from None
    results = dict(zip(asked, made, strict=True))
    refused = []
    for name, policy in policies.items():
        try:
            _check(policy, results.get(name), network)
        except ConfigError as error:
            refused.append(refusal(name, error))
    if refused:
        raise Mistakes(refused)
    return tuple(code)


def _check(policy: Policy, made: ProbeResult | None, network: str) -> None:
    name = policy.agent.name
    if made is None:
        made = ProbeResult(in_sandbox=bool(getattr(create(policy.agent), "in_sandbox", False)))
    if made.error:
        raise ConfigError(made.error)
    if policy.model and network == "none" and made.in_sandbox:
        raise ConfigError(
            f"agent {name!r} calls the model from inside the sandbox, which environment.network: none does not allow; "
            "use gateway"
        )
    if policy.model is None and name not in WITHOUT_MODEL and ":" not in name:
        raise ConfigError(f"agent {name!r} needs a model; add a model: section")
