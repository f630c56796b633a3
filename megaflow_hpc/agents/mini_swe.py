"""Runs mini-swe-agent's ``DefaultAgent`` in text mode (no tools, no litellm) on this package's sandbox and gateway.

Prompts come from the installed package's ``config/mini_textbased.yaml``, or from a similar file. The agent is
synchronous, so it runs in a thread. Its sandbox and model are used in the event loop. Cancelling a rollout kills the
agent's process, and with it the thread.

A response in the wrong format stays in the conversation, followed by the error message. mini-swe-agent's own model
classes drop such responses. Because this conversation only grows, a rollout is one token sequence.

If the gateway refuses a model call because the allocation is ending, the agent is suspended. Its state is the
conversation. In the next allocation it continues by repeating that call.

Submitting ends the rollout as ``completed``. A limit of turns, time, tokens or context ends it as ``truncated``.
Repeated format errors end it as ``completed`` with exit code 1. If no engine responds or the sandbox is lost, the agent
raises an error.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megaflow_hpc.agents.asking import BudgetExceeded, CallRefused, Suspended, complete
from megaflow_hpc.errors import ConfigError, MegaflowError
from megaflow_hpc.host.loop import blocking
from megaflow_hpc.resources import install
from megaflow_hpc.types import AgentResult, ExecResult, ModelEndpoint, Sandbox, Task

MARK = "mswea_bash_command"
"""Info string of the code block that contains an answer's command, unless ``model.action_regex`` is set."""
COMMAND_TIMEOUT_S = 120.0
"""Default timeout of one command in seconds."""
SAMPLING = ("temperature", "top_p", "max_tokens")
"""Keys of ``model.model_kwargs`` that this agent reads from a configuration file. The other keys configure litellm."""
SUBMIT = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


class MiniSweAgent:
    """Runs mini-swe-agent for one rollout.

    Args:
        max_turns: Maximum number of model calls before the rollout is truncated. ``None`` means no limit.
        command_timeout_s: Timeout of one command in seconds. The default is :data:`COMMAND_TIMEOUT_S`.
        model: Options for every model call: ``temperature``, ``max_tokens``, …
        config: Configuration file for mini-swe-agent's text mode, used instead of the installed file. Its
            ``agent.step_limit``, ``environment.timeout`` and ``model.model_kwargs`` (those in :data:`SAMPLING`) apply
            unless the arguments above are given.
        max_format_errors: Number of consecutive malformed responses after which the agent gives up.
    """

    def __init__(
        self,
        *,
        max_turns: int | None = None,
        command_timeout_s: float | None = None,
        model: Mapping[str, Any] | None = None,
        config: str | None = None,
        max_format_errors: int = 3,
    ) -> None:
        self._config = _load_config(config)
        own_timeout_s = self._config.get("environment", {}).get("timeout")
        own_model = self._config["model"].get("model_kwargs") or {}
        self.max_turns = max_turns or self._config["agent"].get("step_limit") or None
        self.command_timeout_s: float = command_timeout_s or own_timeout_s or COMMAND_TIMEOUT_S
        self.model_options = {key: own_model[key] for key in SAMPLING if key in own_model} | dict(model or {})
        self.max_format_errors = max_format_errors
        self._saved: dict[str, Any] = {}

    def resume(self, state: Mapping[str, Any]) -> None:
        """Restores the state of a suspended rollout, from which :meth:`run` continues."""
        self._saved = dict(state)

    async def run(self, task: Task, sandbox: Sandbox, model: ModelEndpoint | None) -> AgentResult:
        """Runs the agent until it ends, reaches a limit or is suspended.

        Raises:
            ConfigError: ``model`` is ``None``.
            ModelServiceError, SandboxError: No engine responded, or the sandbox was lost.
        """
        if model is None:
            raise ConfigError("agent mini-swe-agent needs a model, but the campaign has none")
        loop = asyncio.get_running_loop()
        system = await _uname(sandbox)
        model_part = _Model(model, self.model_options, loop, self._config["model"])
        settings = {**self._config.get("environment", {}), "timeout": self.command_timeout_s}
        environment = _Environment(sandbox, loop, settings, task, system)
        templates = {k: v for k, v in self._config["agent"].items() if k.endswith("_template")}
        agent = _package().Agent(
            model_part,
            environment,
            saved=self._saved,
            **templates,
            step_limit=self.max_turns or 0,
            cost_limit=0.0,
            max_consecutive_format_errors=self.max_format_errors,
        )
        error = ""
        try:
            outcome = await asyncio.to_thread(agent.run, task.instruction)
            ended = str(outcome.get("exit_status", ""))
        except BudgetExceeded as budget:
            ended, error = "LimitsExceeded", str(budget)
        except CallRefused as refusal:
            ended, error = ("LimitsExceeded" if refusal.too_long else "CallRefused"), str(refusal)
        except Suspended:
            return AgentResult(state=agent.state())
        messages = [_openai(m) for m in agent.messages if m.get("role") in ("system", "user", "assistant", "tool")]
        limited = ended in ("LimitsExceeded", "TimeExceeded")
        failed = not limited and ended != "Submitted"
        return AgentResult(
            status="truncated" if limited else "completed",
            exit_code=1 if failed else 0,
            error=error or ("" if ended == "Submitted" else ended),
            messages=messages,
        )


class _Model:
    """Implements mini-swe-agent's model interface. A response is text that contains one shell command."""

    def __init__(
        self,
        model: ModelEndpoint,
        options: Mapping[str, Any],
        loop: asyncio.AbstractEventLoop,
        settings: Mapping[str, Any],
    ) -> None:
        self._model, self._options, self._loop, self._settings = model, options, loop, settings
        self.config = SimpleNamespace(model_name=model.model_name)

    def query(self, messages: Sequence[Mapping[str, Any]], **_: Any) -> dict[str, Any]:
        """Returns the model's response to a conversation, with its command in ``extra["actions"]``.

        Raises:
            FormatError: The response does not contain exactly one command. The exception carries the response and the
                error message.
        """
        sent = [_openai(m) for m in messages]
        choice = blocking(complete(self._model, sent, self._options), self._loop)
        content = choice["message"].get("content") or ""
        package = _package()
        message = {"role": "assistant", "content": content}
        try:
            actions = package.parse_regex_actions(
                content,
                action_regex=self._settings.get("action_regex", rf"```{MARK}\s*\n(.*?)\n```"),
                format_error_template=self._settings["format_error_template"],
                template_kwargs={"finish_reason": choice.get("finish_reason")},
            )
        except package.FormatError as error:  # keep the sampled response in the conversation
            raise package.FormatError(message, *error.messages) from None
        return {**message, "extra": {"actions": actions, "cost": 0.0}}

    def format_message(self, **message: Any) -> dict[str, Any]:
        """Returns a message with the given fields."""
        return message

    def format_observation_messages(
        self, message: Mapping[str, Any], outputs: list[dict[str, Any]], template_vars: dict[str, Any] | None = None
    ) -> list[dict[str, Any]]:
        """Returns messages that show the model the output of its commands."""
        observations: list[dict[str, Any]] = _package().format_observation_messages(
            outputs, observation_template=self._settings["observation_template"], template_vars=template_vars
        )
        return observations

    def get_template_vars(self, **_: Any) -> dict[str, Any]:
        """Returns the model's name, as a variable for prompt templates."""
        return {"model_name": self.config.model_name}

    def serialize(self) -> dict[str, Any]:
        """Returns an empty dictionary, because the model adds nothing to a saved trajectory."""
        return {}


class _Environment:
    """Implements mini-swe-agent's environment interface. Runs commands in the sandbox, and merges stdout and stderr."""

    def __init__(
        self,
        sandbox: Sandbox,
        loop: asyncio.AbstractEventLoop,
        config: Mapping[str, Any],
        task: Task,
        system: Mapping[str, str],
    ) -> None:
        self._sandbox, self._loop, self._system = sandbox, loop, system
        self._env = {str(k): str(v) for k, v in (config.get("env") or {}).items()}
        # Some images activate their environment through BASH_ENV, which only bash reads. /bin/sh may be another shell.
        default = ("bash", "-c") if {"BASH_ENV"} & (self._env.keys() | task.env.keys()) else ()
        self._interpreter = [str(word) for word in config.get("interpreter") or default]
        self._cwd = task.workdir
        self._timeout_s: float = config["timeout"]
        self.config = SimpleNamespace(cwd=task.workdir or "", timeout=self._timeout_s)

    def execute(self, action: Mapping[str, Any], cwd: str = "") -> dict[str, Any]:
        """Runs an action's command and returns its ``output``, ``returncode`` and ``exception_info``.

        Raises:
            Submitted: The command succeeded and the first line of its output is :data:`SUBMIT`.
        """
        command = "exec 2>&1\n" + str(action.get("command", ""))
        execution = self._sandbox.exec(
            [*self._interpreter, command] if self._interpreter else command,
            timeout_s=self._timeout_s,
            cwd=cwd or self._cwd,
            env=self._env,
        )
        result: ExecResult = blocking(execution, self._loop)
        text = result.stdout_bytes.decode("utf-8", "replace") + result.stderr_bytes.decode("utf-8", "replace")
        output: dict[str, Any] = {"output": text, "returncode": result.exit_code, "exception_info": ""}
        if result.timed_out:
            output["exception_info"] = f"The command was ended after {self._timeout_s:g} seconds."
        first, _, rest = text.lstrip().partition("\n")
        if first.strip() == SUBMIT and result.exit_code == 0:
            extra = {"exit_status": "Submitted", "submission": rest}
            raise _package().Submitted({"role": "exit", "content": rest, "extra": extra})
        return output

    def get_template_vars(self, **_: Any) -> dict[str, Any]:
        """Returns the sandbox's system information and ``cwd``, as variables for prompt templates."""
        return {**self._system, "cwd": self._cwd or ""}

    def serialize(self) -> dict[str, Any]:
        """Returns an empty dictionary, because the sandbox adds nothing to a saved trajectory."""
        return {}


async def _uname(sandbox: Sandbox) -> dict[str, str]:
    """Returns the sandbox's ``system``, ``release``, ``version`` and ``machine``, for the prompt."""
    keys = ("system", "release", "version", "machine")
    result = await sandbox.exec("uname -s; uname -r; uname -v; uname -m", timeout_s=30)
    return dict(zip(keys, [*result.stdout.splitlines(), *[""] * 4], strict=False))


def _openai(message: Mapping[str, Any]) -> dict[str, Any]:
    return {"role": message["role"], "content": message.get("content") or ""}


@cache
def _package() -> SimpleNamespace:
    """Imports mini-swe-agent without its startup banner and configuration directory. Returns the names that this module
    uses.

    Raises:
        ConfigError: mini-swe-agent is not installed.
    """
    os.environ.setdefault("MSWEA_SILENT_STARTUP", "1")
    folder = tempfile.mkdtemp(prefix="megaflow-mswea-")
    os.environ["MSWEA_GLOBAL_CONFIG_DIR"] = folder
    try:
        import minisweagent
        from minisweagent.agents.default import DefaultAgent
        from minisweagent.exceptions import FormatError, Submitted
        from minisweagent.models.utils.actions_text import format_observation_messages, parse_regex_actions
    except ImportError as error:
        raise ConfigError(f"agent mini-swe-agent: {error}; install it with: {install('agents')}") from error
    finally:
        os.rmdir(folder)

    class Agent(DefaultAgent):
        """mini-swe-agent's ``DefaultAgent``, extended to continue a saved conversation."""

        def __init__(self, *args: Any, saved: Mapping[str, Any], **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._saved = saved

        def step(self) -> list[dict[str, Any]]:
            saved, self._saved = self._saved, {}
            if saved:
                self.messages = [dict(message) for message in saved["messages"]]
                self.n_calls, self.n_consecutive_format_errors = saved["calls"], saved["format_errors"]
            result: list[dict[str, Any]] = super().step()
            return result

        def state(self) -> dict[str, Any]:
            """Returns the state to save after a refused call. Subtracts that call, because the agent has already
            counted it."""
            messages = [_openai(message) for message in self.messages]
            return {"messages": messages, "calls": self.n_calls - 1, "format_errors": self.n_consecutive_format_errors}

    return SimpleNamespace(
        Agent=Agent,
        FormatError=FormatError,
        Submitted=Submitted,
        format_observation_messages=format_observation_messages,
        parse_regex_actions=parse_regex_actions,
        config=Path(minisweagent.__file__).parent / "config" / "mini_textbased.yaml",
    )


@cache
def _load_config(path: str | None) -> dict[str, Any]:
    import yaml

    file = Path(path) if path else _package().config
    try:
        text = file.read_text()
        config = yaml.safe_load(text)
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"agent mini-swe-agent: config {file}: {error}") from error
    if not isinstance(config, dict) or not {"agent", "model"} <= set(config):
        raise MegaflowError(f"{file}: expected the sections agent and model of mini-swe-agent's text form")
    model = config["model"] if isinstance(config["model"], dict) else {}
    if "action_regex" not in model and MARK not in json.dumps(config, default=str):  # a comment does not count
        raise ConfigError(
            f"agent mini-swe-agent: config {file}: has neither model.action_regex nor {MARK} in its prompts; expected "
            "a text-based configuration of mini-swe-agent (such as mini_textbased.yaml), because this agent offers the "
            "model no tools"
        )
    return config
