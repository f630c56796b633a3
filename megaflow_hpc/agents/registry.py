"""Creates agents by short name (``oracle``) or dotted name (``package.module:Class``).

A user's class is called with the spec's ``args`` as keyword arguments. ``max_turns`` and ``timeout_s`` are passed too
if its constructor accepts them. The class needs ``async def run(self, task, sandbox, model)``, which returns an
``AgentResult``, or ``None`` for a completed rollout.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from megaflow_hpc.errors import ConfigError, MegaflowError, UserCodeError
from megaflow_hpc.types import TURN_REWARD, VERIFIED, Agent, AgentResult, checked_rewards

NAMES: Mapping[str, str] = {
    "oracle": "megaflow_hpc.agents.without_model:OracleAgent",
    "nop": "megaflow_hpc.agents.without_model:NopAgent",
    "mini-swe-agent": "megaflow_hpc.agents.mini_swe:MiniSweAgent",
    "computer-use": "megaflow_hpc.agents.computer_use:ComputerUseAgent",
    "command": "megaflow_hpc.agents.command:CommandAgent",
    "aider": "megaflow_hpc.agents.command:aider",
    "claude-code": "megaflow_hpc.agents.command:claude_code",
    "codex": "megaflow_hpc.agents.command:codex",
    "gemini-cli": "megaflow_hpc.agents.command:gemini_cli",
    "goose": "megaflow_hpc.agents.command:goose",
    "opencode": "megaflow_hpc.agents.command:opencode",
    "openhands": "megaflow_hpc.agents.command:openhands",
    "pi": "megaflow_hpc.agents.command:pi",
    "qwen-code": "megaflow_hpc.agents.command:qwen_code",
    "terminus-2": "megaflow_hpc.agents.command:terminus_2",
    "replay": "megaflow_hpc.agents.without_model:ReplayAgent",
}
WITHOUT_MODEL = frozenset({"oracle", "nop", "replay"})
"""Agents that never call a model."""
IN_RUNNER = frozenset({*WITHOUT_MODEL, *(name for name, path in NAMES.items() if ".command:" in path)})
"""Built-in agents that run in the runner's event loop, because they mostly wait."""
NEEDED_ARGS: Mapping[str, str] = {
    "command": "args.command (shell text), or args.preset",
    "replay": "args.messages_file, or args.commands",
}
"""Maps each agent to the arguments that it requires, as shown to users."""


class AgentSpec(Protocol):
    """The resolved configuration of one agent, such as ``config.AgentConfig``."""

    @property
    def name(self) -> str:
        """The agent's name, short or dotted."""

    @property
    def max_turns(self) -> int | None:
        """Maximum number of model calls. ``None`` means no limit."""

    @property
    def timeout_s(self) -> float | None:
        """Time limit of the agent in seconds. If ``None``, the task's timeout applies."""

    @property
    def args(self) -> Mapping[str, Any]:
        """Keyword arguments for the agent."""


def create(spec: AgentSpec | Mapping[str, Any]) -> Agent:
    """Creates an agent for one rollout.

    Args:
        spec: Name, ``max_turns``, ``timeout_s`` (enforced by the caller) and ``args``. As keys, only the name is
            required.

    Raises:
        ConfigError: The name is unknown or cannot be imported, or the agent does not accept these ``args``.
    """
    given = spec if isinstance(spec, Mapping) else record_of(spec)
    name, args = str(given["name"]), dict(given.get("args") or {})
    factory = _find(name)
    signature = inspect.signature(factory)
    parameters = signature.parameters
    try:
        for limit in ("max_turns", "timeout_s"):
            if limit in parameters and limit not in args:
                args[limit] = given.get(limit)
        signature.bind(**args)
    except TypeError as error:
        raise ConfigError(f"agent {name!r}: args: {error}; it takes {', '.join(parameters) or 'none'}") from error
    try:
        agent: Agent = factory(**args)
    except MegaflowError:
        raise
    except Exception as error:
        raise ConfigError(f"agent {name!r} cannot be created: {error!r}{_at(error)}") from error
    if not inspect.iscoroutinefunction(getattr(agent, "run", None)):
        raise ConfigError(f"agent {name!r}: has no 'async def run(self, task, sandbox, model)'")
    return agent


@dataclass(frozen=True)
class KnownAgent:
    """A built-in agent."""

    name: str
    about: str
    needs_model: bool
    needs_args: str
    lacks: str
    """Reason why the agent cannot run in this installation. Empty if it can."""


def known_agents() -> list[KnownAgent]:
    """Returns all built-in agents, with the error message of each that cannot be created on this machine."""
    agents = []
    for name in NAMES:
        lacks = ""
        try:
            if name not in NEEDED_ARGS:
                create({"name": name})
        except ConfigError as error:
            lacks = str(error)
        about = (inspect.getdoc(_find(name)) or "").partition("\n")[0].rstrip(".")
        agents.append(KnownAgent(name, about, name not in WITHOUT_MODEL, NEEDED_ARGS.get(name, ""), lacks))
    return agents


def forked(name: str) -> bool:
    """Returns whether the named agent runs in its own process."""
    return name not in IN_RUNNER


def result_of(name: str, returned: Any) -> AgentResult:
    """Converts the return value of an agent's ``run`` to a result. ``None`` means that the rollout completed.

    Raises:
        UserCodeError: ``run`` returned anything else, or a value that a trajectory cannot store. The message names the
            agent and the expected value.
    """
    if returned is None:
        return AgentResult()
    if not isinstance(returned, AgentResult):
        raise UserCodeError(
            f"agent {name}: run returned {type(returned).__name__} {returned!r:.80}; return a "
            "megaflow_hpc.types.AgentResult, or None if it is completed"
        )
    if returned.status not in VERIFIED:
        raise UserCodeError(
            f"agent {name}: run returned AgentResult(status={returned.status!r}); expected completed, or truncated by "
            "a limit; raise other failures, or set error and exit_code"
        )
    if not isinstance(returned.error, str) or not all(isinstance(message, dict) for message in returned.messages):
        raise UserCodeError(f"agent {name}: expected a text as error, and a list of dicts as messages")
    try:
        turns = checked_rewards({f"{TURN_REWARD}{number}": value for number, value in enumerate(returned.turn_rewards)})
        rewards = checked_rewards(returned.rewards)
    except ValueError as error:
        raise UserCodeError(f"agent {name}: rewards and turn_rewards: {error}") from None
    for reward in rewards:
        if reward in ("reward", "score") or "." in reward:
            raise UserCodeError(
                f"agent {name}: rewards {reward!r:.80}: expected names without a dot, other than reward and score"
            )
    return replace(returned, turn_rewards=list(turns.values()), rewards=rewards)


def record_of(spec: AgentSpec) -> dict[str, Any]:
    """Returns a specification as plain data, which :func:`create` takes in another process."""
    return {"name": spec.name, "max_turns": spec.max_turns, "timeout_s": spec.timeout_s, "args": dict(spec.args)}


def _find(name: str) -> Callable[..., Agent]:
    target = NAMES.get(name, name)
    module_name, colon, attribute = target.partition(":")
    if not colon:
        near = "".join(f" (did you mean {close}?)" for close in difflib.get_close_matches(name, NAMES, 1))
        raise ConfigError(
            f"agent {name!r} is unknown{near}; expected one of {', '.join(NAMES)}, or package.module:Class"
        )
    try:
        module = importlib.import_module(module_name)
    except MegaflowError:
        raise
    except Exception as error:
        hint = ""
        if isinstance(error, ModuleNotFoundError) and error.name == module_name.partition(".")[0]:
            hint = f"; put {error.name}.py next to the campaign file, or its directory on PYTHONPATH"
        raise ConfigError(f"agent {name!r} cannot be imported: {error!r}{_at(error)}{hint}") from error
    agent = getattr(module, attribute, None)
    if agent is None:
        public = [each for each in vars(module) if not each.startswith("_")]
        near = "".join(f"; did you mean {close}?" for close in difflib.get_close_matches(attribute, public, 1))
        near = near or "; name a class of that file"
        raise ConfigError(f"agent {name!r}: {module.__file__ or module_name} has no {attribute}{near}")
    if not callable(agent):
        raise ConfigError(f"agent {name!r}: {attribute} is not a class or function")
    factory: Callable[..., Agent] = agent
    return factory


def _at(error: BaseException) -> str:
    """Returns the location in the user's code that raised an error. Empty if importlib or this module raised it."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith("<frozen")]
    last = frames[-1] if frames else None
    return (
        "" if last is None or last.filename in (__file__, importlib.__file__) else f" at {last.filename}:{last.lineno}"
    )
