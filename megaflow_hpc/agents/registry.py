"""Makes agents by name, short (``oracle``) or dotted (``package.module:Class``).

A user's class is called with the spec's ``args`` as keywords, and with ``max_turns`` and ``timeout_s`` if its
constructor names them; it needs ``async def run(self, task, sandbox, model) -> AgentResult``.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.types import Agent

NAMES: Mapping[str, str] = {
    "oracle": "megaflow_hpc.agents.oracle:OracleAgent",
    "nop": "megaflow_hpc.agents.nop:NopAgent",
    "mini-swe-agent": "megaflow_hpc.agents.mini_swe:MiniSweAgent",
    "command": "megaflow_hpc.agents.command:CommandAgent",
    "claude-code": "megaflow_hpc.agents.command:claude_code",
    "codex": "megaflow_hpc.agents.command:codex",
    "openhands": "megaflow_hpc.agents.command:openhands",
    "qwen-code": "megaflow_hpc.agents.command:qwen_code",
    "replay": "megaflow_hpc.agents.replay:ReplayAgent",
}
WITHOUT_MODEL = frozenset({"oracle", "nop", "replay"})
"""Agents that never call a model."""


class AgentSpec(Protocol):
    """The resolved section of a campaign file for one agent, such as ``config.AgentConfig``."""

    @property
    def name(self) -> str:
        """The agent's name, short or dotted."""

    @property
    def max_turns(self) -> int | None:
        """The maximum number of model calls; ``None``: no limit."""

    @property
    def timeout_s(self) -> float | None:
        """The agent's maximum run time in seconds; ``None``: the task's."""

    @property
    def args(self) -> Mapping[str, Any]:
        """The keyword arguments that the agent is called with."""


def create(spec: AgentSpec | Mapping[str, Any]) -> Agent:
    """Returns a new agent for one rollout.

    Args:
        spec: Name, ``max_turns``, ``timeout_s`` (enforced by the caller) and ``args``, as attributes or keys.

    Raises:
        ConfigError: The name is unknown, cannot be imported, or does not take these ``args``.
    """
    name, args = str(_get(spec, "name")), dict(_get(spec, "args") or {})
    factory = _find(name)
    signature = inspect.signature(factory)
    parameters = signature.parameters
    try:
        for limit in ("max_turns", "timeout_s"):
            if limit in parameters and limit not in args:
                args[limit] = _get(spec, limit)
        signature.bind(**args)
    except TypeError as error:
        raise ConfigError(f"agent {name!r}: args: {error}; it takes {', '.join(parameters) or 'none'}") from error
    agent: Agent = factory(**args)
    if not inspect.iscoroutinefunction(getattr(agent, "run", None)):
        raise ConfigError(f"agent {name!r}: has no 'async def run(self, task, sandbox, model)'")
    return agent


def _get(spec: AgentSpec | Mapping[str, Any], key: str) -> Any:
    return spec.get(key) if isinstance(spec, Mapping) else getattr(spec, key)


def _find(name: str) -> Callable[..., Agent]:
    target = NAMES.get(name, name)
    module_name, colon, attribute = target.partition(":")
    if not colon:
        raise ConfigError(f"agent {name!r} is unknown; expected one of {', '.join(NAMES)}, or package.module:Class")
    try:
        found = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"agent {name!r} cannot be imported: {error}") from error
    if not callable(found):
        raise ConfigError(f"agent {name!r}: {attribute} is not a class or function")
    factory: Callable[..., Agent] = found
    return factory
