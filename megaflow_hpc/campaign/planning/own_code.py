"""Tries a campaign's own agents and ``training`` functions. Finds the source files that they import."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from megaflow_hpc.agents import create
from megaflow_hpc.agents.probe import ProbeResult, probe
from megaflow_hpc.agents.registry import WITHOUT_MODEL, forked
from megaflow_hpc.campaign.job_environment import trainer_python
from megaflow_hpc.campaign.planning.model_paths import Where
from megaflow_hpc.config import Policy
from megaflow_hpc.config.sections import AgentConfig
from megaflow_hpc.config.team import TeamConfig
from megaflow_hpc.config.training import TrainingConfig
from megaflow_hpc.errors import ConfigError, Mistakes
from megaflow_hpc.training.methods import Digests, methods_of

TIMEOUT_S = 300.0
"""Timeout in seconds for all functions together. Importing torch from a cold network file system may take a minute."""
PROGRAM = "import sys; sys.path.append(sys.argv.pop(1)); from megaflow_hpc.training.trainer.probe import main; main()"


def check_agents(policies: Mapping[str, Policy], network: str, base: Path, where: Where) -> tuple[str, ...]:
    """Checks that each policy's agents can be created, and have access to a model if they need one.

    Code from outside this package is imported in a separate process, in the same way as for a rollout.

    Args:
        base: Directory of the campaign file, searched first for agents.

    Returns:
        Names of the agents' files and directories in ``base``.

    Raises:
        Mistakes: Agents cannot be created. Each message names the agent and its location in the campaign file.
    """
    agents = [(name, agent) for name, policy in policies.items() for agent in policy.agents]
    asked = [number for number, (_, agent) in enumerate(agents) if forked(agent.name)]

    def refusal(name: str, error: ConfigError) -> str:
        return f"{where(f'models.{name}.agent' if policies[name].model else 'agent')}: {error}"

    made: list[ProbeResult] = []
    code: list[str] = []
    try:
        if asked:
            made, code = probe([agents[number][1] for number in asked], str(base.absolute()))
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


@dataclass
class Tried:
    """Result of a trial call of a campaign's own functions."""

    code: tuple[str, ...] = ()
    """Names of the functions' files and directories next to the campaign file."""
    digests: Digests = field(default_factory=dict)
    """Digests of the functions' source files."""
    warnings: list[str] = field(default_factory=list)
    """Warnings about functions that this machine cannot try because it lacks a library. Trainers try them again."""


def check_methods(training: TrainingConfig, team: TeamConfig | None, base: Path, where: Where) -> Tried:
    """Calls each function on a small example, in a separate process with the trainer's interpreter.

    If this machine lacks that interpreter, the current one is used, which may lack libraries such as torch.

    Args:
        training: The ``training`` section.
        team: The ``team`` section.
        base: Directory of the campaign file, searched first.

    Raises:
        Mistakes: A function cannot be imported or called, or returns an invalid value.
    """
    methods = methods_of(training)
    if not methods:
        return Tried()
    python = trainer_python()
    is_trainers = python != sys.executable and Path(python).exists()
    sections = {"training": training.model_dump(mode="json"), "team": team.model_dump(mode="json") if team else None}
    question = json.dumps({**sections, "beside": str(base.absolute())})
    command = [python if is_trainers else sys.executable, "-c", PROGRAM, str(Path(__file__).parents[3])]
    names = ", ".join(sorted({method.name for method in methods.values()}))
    try:
        done = subprocess.run(
            command, input=question, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_S, check=False
        )
        answer = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        raise ConfigError(f"training: {names}: trying them took longer than {TIMEOUT_S:g} s") from None
    except ValueError:
        raise ConfigError(f"training: {names}: trying them ended {command[0]} (exit {done.returncode})") from None
    tried = Tried(tuple(answer["code"]), answer["digests"] if is_trainers else {})
    mistakes = []
    for key, (error, lacks) in answer["errors"].items():
        line = f"{where(key)}: {key}: {error}"
        if lacks and not is_trainers:
            tried.warnings.append(f"{line}: not tried here; trainers try it before their first step")
        else:
            mistakes.append(line)
    if mistakes:
        raise Mistakes(mistakes)
    return tried
