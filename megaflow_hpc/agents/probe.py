"""Checks in a short-lived child process whether agents can be created. The child imports the same modules as a rollout.

``python -m megaflow_hpc.agents.probe`` reads ``{"agents": [{name, …}], "beside": DIR}`` as JSON on standard input and
writes ``{"agents": [{error, in_sandbox}], "code": [NAME…]}``. The agents' output goes to standard error.
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
from megaflow_hpc.agents.registry import AgentSpec, create, record_of
from megaflow_hpc.errors import ConfigError, MegaflowError

PROBE_TIMEOUT_S = 300.0
"""Timeout in seconds for all imports together. Some imports from a cold network file system take a minute."""


@dataclass(frozen=True)
class ProbeResult:
    """Outcome of creating an agent. ``error`` is empty on success."""

    error: str = ""
    in_sandbox: bool = False
    """True if the agent's program runs in the sandbox and calls the model from inside it."""


def probe(agents: Sequence[AgentSpec], beside: str = "") -> tuple[list[ProbeResult], list[str]]:
    """Tries to create agents in a child process.

    Args:
        agents: The agents to create.
        beside: Directory to search first for the agents' modules. If empty, no directory is added.

    Returns:
        One result per agent, and the names of files and directories in ``beside`` from which modules were imported.

    Raises:
        ConfigError: The child process died, or took longer than :data:`PROBE_TIMEOUT_S`.
    """
    named = ", ".join(repr(agent.name) for agent in agents)
    question = json.dumps({"agents": list(map(record_of, agents)), "beside": beside}, default=str)
    command = [sys.executable, "-m", __name__]
    try:
        done = subprocess.run(
            command, input=question, stdout=subprocess.PIPE, text=True, timeout=PROBE_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(f"agent {named}: importing it took longer than {PROBE_TIMEOUT_S:g} s") from None
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        raise ConfigError(
            f"agent {named}: importing it ended the interpreter (exit status {done.returncode})"
        ) from None
    return [ProbeResult(**made) for made in answer["agents"]], list(answer["code"])


def _make(spec: Mapping[str, Any]) -> ProbeResult:
    try:
        return ProbeResult(in_sandbox=bool(getattr(create(spec), "in_sandbox", False)))
    except MegaflowError as error:
        return ProbeResult(error=str(error))
    except BaseException as error:  # includes SystemExit, raised by a module that is a script
        return ProbeResult(error=f"agent {spec['name']!r}: {error!r}")


def main() -> None:
    """Handles one request from standard input."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    question = json.load(sys.stdin)
    if beside := question["beside"]:
        sys.path.insert(0, beside)
    made = [vars(_make(spec)) for spec in question["agents"]]
    json.dump({"agents": made, "code": code.imported_from(beside) if beside else []}, answers)
    answers.close()
    os._exit(0)  # do not wait for threads that an import started


if __name__ == "__main__":
    main()
