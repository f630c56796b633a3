"""``agents``: lists agents with their requirements, and creates new agents from a template."""

from __future__ import annotations

import argparse
from pathlib import Path

from megaflow_hpc.cli.output import print_json, print_result, say, table
from megaflow_hpc.cli.verb import Subparsers, add_group, add_verb
from megaflow_hpc.resources import docs


def register(subparsers: Subparsers) -> None:
    """Registers ``agents`` and its subcommands."""
    verbs = add_group(
        subparsers,
        "agents",
        "list agents, and create your own",
        examples=["agents list", "agents new my_agent"],
        description="Agents drive rollouts. Some come with the package; your own are Python classes.",
    )
    add_verb(
        verbs,
        "list",
        run_list,
        "print the agents that a campaign can name, and the missing requirements of each",
        examples=["agents list"],
    )
    new = add_verb(
        verbs,
        "new",
        run_new,
        "write a working agent to start from, as one Python file",
        examples=[
            "agents new my_agent                # my_agent.py, next to campaign.yaml",
            "agents new my_agent work",
        ],
        description="Writes NAME.py: a class with a loop of model calls and commands, for you to change. "
        f"Put it next to the campaign file; {docs('how-to/agents.md')} explains it.",
    )
    new.add_argument("name", metavar="NAME", help="name of the module, such as my_agent")
    new.add_argument("directory", metavar="DIR", nargs="?", default=".", help="directory of the file; default: here")


def run_list(arguments: argparse.Namespace) -> int:
    """Prints the built-in agents. Returns the exit status."""
    from megaflow_hpc.agents.registry import known_agents

    agents = known_agents()
    if arguments.json:
        print_json([vars(agent) for agent in agents])
        return 0
    rows = []
    for agent in agents:
        needs = agent.needs_args or ("see below" if agent.lacks else "")
        rows.append((agent.name, "yes" if agent.needs_model else "no", agent.about, needs))
    say(table(("agent", "model", "what it is", "needs"), rows))
    for agent in agents:
        if agent.lacks:
            say(agent.lacks)
    say("Your own: package.module:Class; create one with: megaflow-hpc agents new my_agent")
    return 0


def run_new(arguments: argparse.Namespace) -> int:
    """Writes the template of a new agent. Returns the exit status."""
    from megaflow_hpc.agents import code

    path = code.start(arguments.name, Path(arguments.directory))
    agent = f"{arguments.name}:{code.class_name(arguments.name)}"
    text = f"{path}\nin a campaign file next to it:\n  agent: {{name: {agent}, max_turns: 30}}"
    print_result(arguments.json, {"path": str(path), "agent": agent}, text)
    return 0
