"""Whether agents can be made here, asked in a process of its own: that imports what a rollout would, and then is gone.

``python -m megaflow_hpc.agents.probe`` reads ``{"agents": [{name, …}], "beside": DIR}`` as JSON on standard input and
answers ``{"agents": [{error, in_sandbox}], "code": [NAME…]}``. What the agents print goes to standard error.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megaflow_hpc.agents import code
from megaflow_hpc.agents.registry import AgentSpec, create
from megaflow_hpc.errors import ConfigError, MegaflowError

ASK_S = 300.0
"""Seconds for all imports; a cold network file system takes a minute for some."""


@dataclass(frozen=True)
class Made:
    """What is known of an agent that could be made, or why it could not."""

    error: str = ""
    in_sandbox: bool = False
    """Whether its program runs in the sandbox, and calls the model from there."""


def probe(agents: Sequence[AgentSpec], beside: str = "") -> tuple[list[Made], list[str]]:
    """Makes agents in a process of its own.

    Args:
        beside: Directory that is looked in for their modules first; empty: none.

    Returns:
        What is known of each, and the names of the files and directories in ``beside`` that they imported.

    Raises:
        ConfigError: The process ended, or took longer than :data:`ASK_S`.
    """
    specs = [{"name": a.name, "max_turns": a.max_turns, "timeout_s": a.timeout_s, "args": dict(a.args)} for a in agents]
    named = ", ".join(repr(agent.name) for agent in agents)
    question = json.dumps({"agents": specs, "beside": beside}, default=str)
    command = [sys.executable, "-m", __name__]
    try:
        done = subprocess.run(command, input=question, stdout=subprocess.PIPE, text=True, timeout=ASK_S, check=False)
    except subprocess.TimeoutExpired:
        raise ConfigError(f"agent {named}: importing it took longer than {ASK_S:g} s") from None
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        raise ConfigError(
            f"agent {named}: importing it ended the interpreter (exit status {done.returncode})"
        ) from None
    return [Made(**made) for made in answer["agents"]], list(answer["code"])


def _make(spec: Mapping[str, Any]) -> Made:
    try:
        return Made(in_sandbox=bool(getattr(create(spec), "in_sandbox", False)))
    except MegaflowError as error:
        return Made(error=str(error))
    except BaseException as error:  # SystemExit of a module that is a script, too
        return Made(error=f"agent {spec['name']!r}: {error!r}")


def main() -> None:
    """Answers one question."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    question = json.load(sys.stdin)
    if beside := question["beside"]:
        sys.path.insert(0, beside)
    made = [vars(_make(spec)) for spec in question["agents"]]
    json.dump({"agents": made, "code": code.imported_from(beside) if beside else []}, answers)
    answers.close()
    os._exit(0)  # threads that an import has started are no reason to stay


if __name__ == "__main__":
    main()
