"""Runs a command-line agent inside the sandbox, with the model's address in its environment.

The command is a shell command line. It finds the instruction in the file ``$MEGAFLOW_INSTRUCTION_FILE``, and the model
in ``OPENAI_BASE_URL``, ``OPENAI_API_KEY``, ``OPENAI_MODEL`` and the variables that other clients read. If the
task has MCP servers, ``$MEGAFLOW_MCP_SERVERS`` lists them as JSON. The standard input is empty. A non-zero exit code is
the agent's own failure: the rollout is ``completed`` with that code.

Instead of a command, a preset can select a known program, such as ``claude-code`` or ``opencode``. The presets' names
(:data:`PRESETS`) also work as agent names.
"""

from __future__ import annotations

import json
import os
import string
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.resources import resource
from megaflow_hpc.types import AgentResult, McpServer, ModelEndpoint, Sandbox, Task

INSTRUCTION = "/tmp/megaflow-instruction.md"
MAX_OUTPUT_CHARACTERS = 2000
"""Maximum number of characters to keep of a failed command's output."""


class CommandAgent:
    """Runs one command in the sandbox.

    Args:
        command: Shell command, run with ``/bin/sh -c`` in the task's working directory.
        preset: Name of a known program, instead of a command.
        flags: Additional command-line flags for the preset, in shell syntax.
        toolbox: Directory with the presets' programs. Default: ``MEGAFLOW_AGENTS``, else ``~/.megaflow-hpc/agents``.
        env: Additional environment variables.
    """

    in_sandbox = True

    def __init__(
        self,
        *,
        command: str | None = None,
        preset: str | None = None,
        flags: str = "",
        toolbox: str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        if (command is None) == (preset is None):
            raise ConfigError("agent command: args: expected either command (shell text) or preset")
        self._preset = preset or ""
        self.binds: tuple[str, ...] = ()
        """Host paths to bind-mount into the sandbox, in Apptainer's syntax."""
        self.env = {str(k): str(v) for k, v in (env or {}).items()}
        if preset is not None:
            self.binds = (f"{toolbox_of(preset, toolbox)}:{TOOLBOX_PATH}:ro",)
            self.env = {**PRESETS[preset].env, **self.env}
            command = command_of(preset, flags)
        if not isinstance(command, str) or not command.strip():
            raise ConfigError(f"agent command: args.command must be shell text, found {command!r}")
        self.command = command

    async def run(self, task: Task, sandbox: Sandbox, model: ModelEndpoint | None) -> AgentResult:
        """Runs the command and waits for it.

        Raises:
            ConfigError: The sandbox cannot reach the model.
        """
        variables = {**environment(model), **mcp_variable(task.mcp_servers), **self.env}
        with tempfile.TemporaryDirectory(prefix="megaflow-") as folder:
            file = Path(folder) / "instruction.md"
            file.write_text(task.instruction)
            os.chmod(file, 0o644)
            await sandbox.upload(str(file), INSTRUCTION)
            files = PRESETS[self._preset].files if self._preset else {}
            for path, content in files.items():
                settings = Path(folder) / "settings"
                settings.write_text(json.dumps(_filled(content, variables)))
                await sandbox.upload(str(settings), f"{HOME_PATH}/{path}")
            mcp_file = MCP_FILES.get(self._preset)
            if task.mcp_servers and mcp_file:
                servers = Path(folder) / "servers"
                servers.write_text(mcp_text(self._preset, task.mcp_servers))
                await sandbox.upload(str(servers), f"{HOME_PATH}/{mcp_file}")
        result = await sandbox.exec(self.command, cwd=task.workdir, env=variables, user_input=b"")
        error = ""
        if result.exit_code != 0:
            output = (result.stdout + result.stderr).strip()[-MAX_OUTPUT_CHARACTERS:]
            error = f"the agent's command ended with exit code {result.exit_code}: {output}"
        return AgentResult(exit_code=result.exit_code, error=error)


def environment(model: ModelEndpoint | None) -> dict[str, str]:
    """Returns environment variables that describe the task and the model.

    Raises:
        ConfigError: The model cannot be reached from inside the sandbox.
    """
    variables = {"MEGAFLOW_INSTRUCTION_FILE": INSTRUCTION}
    if model is None:
        return variables
    if not model.sandbox_url:
        raise ConfigError(
            "agent command: its program calls the model from inside the sandbox, but network 'none' forbids it; "
            "use environment.network: gateway (or host)"
        )
    return {
        **variables,
        "OPENAI_BASE_URL": model.sandbox_url,
        "OPENAI_API_BASE": model.sandbox_url,
        "OPENAI_API_KEY": model.api_key,
        "OPENAI_MODEL": model.model_name,
        "ANTHROPIC_BASE_URL": model.sandbox_url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": model.api_key,
        "ANTHROPIC_MODEL": model.model_name,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": model.model_name,
        "GOOGLE_GEMINI_BASE_URL": model.sandbox_url.removesuffix("/v1"),
        "GEMINI_API_KEY": model.api_key,
        "GEMINI_MODEL": model.model_name,
    }


TOOLBOX_PATH = "/opt/megaflow-agents"
"""Path of the toolbox inside sandboxes."""
PACKAGES: Mapping[str, str] = {
    "claude-code": "@anthropic-ai/claude-code@2.1.329",
    "codex": "@openai/codex@0.169.0",
    "gemini-cli": "@google/gemini-cli@0.61.0",
    "goose": "@aaif/goose-binary-linux-x64@1.52.0",
    "opencode": "opencode-ai@1.18.33",
    "pi": "@mariozechner/pi-coding-agent@0.73.1",
    "qwen-code": "@qwen-code/qwen-code@0.24.4",
}
"""Maps each agent to its npm package, with a pinned version."""
PYTHON_PACKAGES: Mapping[str, str] = {
    "aider": "aider-chat@0.86.2",
    "openhands": "openhands-sdk@1.58.2",
    "terminus-2": "harbor@0.25.0",
}
"""Maps each agent to its PyPI package, with a pinned version. Each has its own Python interpreter in the toolbox, with
the dependencies in ``containers/NAME.txt``."""
HOME_PATH = "/tmp/megaflow-home"
HOME = f'export HOME={HOME_PATH}; mkdir -p "$HOME"'
CALL_TIMEOUT_MS = 3_600_000
"""Timeout of an agent's model call in milliseconds. It exceeds the gateway's own limits."""

_CODEX_PROVIDER = (
    'name="gateway",base_url="$OPENAI_BASE_URL",env_key="OPENAI_API_KEY",wire_api="responses",'
    f"request_max_retries=1,stream_max_retries=1,stream_idle_timeout_ms={CALL_TIMEOUT_MS}"
).replace('"', '\\"')


@dataclass(frozen=True)
class Preset:
    """Command, environment variables and configuration of a known agent. :func:`command_of` appends flags to the
    command, and redirects the instruction to its standard input."""

    about: str
    command: str
    env: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, Any] = field(default_factory=dict)
    """Maps paths below the home directory to JSON contents. Variables of :func:`environment`, such as
    ``$OPENAI_BASE_URL``, are substituted in all strings."""


PRESETS: Mapping[str, Preset] = {
    "aider": Preset(
        "Runs aider.",
        # Outside a repository, aider would create one.
        "aider $(git rev-parse --git-dir >/dev/null 2>&1 || echo --no-git) "
        '--model "openai/$OPENAI_MODEL" --message-file "$MEGAFLOW_INSTRUCTION_FILE"',
        {"LITELLM_LOCAL_MODEL_COST_MAP": "True"},  # avoids downloading a price list at import
        {
            ".aider.conf.yml": {
                "yes-always": True,
                "auto-commits": False,
                "dirty-commits": False,
                "gitignore": False,
                "pretty": False,
                "fancy-input": False,
                "analytics": False,
                "check-update": False,
                "show-model-warnings": False,
                "detect-urls": False,  # would fetch URLs with a browser
                "disable-playwright": True,
                "timeout": CALL_TIMEOUT_MS // 1000,
                "input-history-file": f"{HOME_PATH}/.aider.input.history",
                "chat-history-file": f"{HOME_PATH}/.aider.chat.history.md",
            },
            ".aider.model.settings.yml": [
                {
                    "name": "openai/$OPENAI_MODEL",
                    "edit_format": "diff",
                    "use_repo_map": True,
                    "use_temperature": False,  # the campaign sets the sampling parameters
                }
            ],
        },
    ),
    "claude-code": Preset(
        "Runs Anthropic's Claude Code.",
        "claude -p --dangerously-skip-permissions",
        {
            "IS_SANDBOX": "1",  # without it, the program refuses to run unattended as root
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_AUTOUPDATER": "1",
            "ENABLE_TOOL_SEARCH": "false",  # tools discovered later would change every prompt
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "8192",
            "API_TIMEOUT_MS": str(CALL_TIMEOUT_MS),
        },
    ),
    "codex": Preset(
        "Runs OpenAI's Codex.",
        "codex exec --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox --color never "
        f'-m "$OPENAI_MODEL" -c model_provider=gateway -c "model_providers.gateway={{{_CODEX_PROVIDER}}}"',
    ),
    "gemini-cli": Preset(
        "Runs Google's Gemini CLI.",
        'gemini --yolo -m "$GEMINI_MODEL"',
        {
            "GEMINI_SANDBOX": "false",
            "GEMINI_CLI_TRUST_WORKSPACE": "true",
            "GEMINI_TELEMETRY_ENABLED": "false",
        },
        {
            ".gemini/settings.json": {
                "security": {"auth": {"selectedType": "gemini-api-key"}, "folderTrust": {"enabled": False}},
                "general": {"enableAutoUpdate": False, "enableAutoUpdateNotification": False},
                "privacy": {"usageStatisticsEnabled": False},
                "model": {"disableLoopDetection": True, "skipNextSpeakerCheck": True},
                "modelConfigs": {"customAliases": {"chat-base": {"modelConfig": {}}}},  # the campaign sets sampling
            }
        },
    ),
    "goose": Preset(
        "Runs Goose.",
        'goose run --no-session --quiet --provider openai --model "$OPENAI_MODEL" --instructions -',
        {
            "GOOSE_MODE": "auto",
            "GOOSE_DISABLE_KEYRING": "1",
            "GOOSE_DISABLE_SESSION_NAMING": "true",  # naming a session would call the model
            "GOOSE_TOOL_PAIR_SUMMARIZATION": "false",  # summaries of earlier turns would call the model
            "GOOSE_TELEMETRY_OFF": "1",
        },
    ),
    "opencode": Preset(
        "Runs OpenCode.",
        "opencode run --model gateway/$OPENAI_MODEL",
        {
            "OPENCODE_DISABLE_AUTOUPDATE": "1",
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
            "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
        },
        {
            ".config/opencode/opencode.json": {
                "provider": {
                    "gateway": {
                        "npm": "@ai-sdk/openai-compatible",
                        "name": "gateway",
                        "options": {"baseURL": "$OPENAI_BASE_URL", "apiKey": "$OPENAI_API_KEY", "timeout": False},
                        "models": {"$OPENAI_MODEL": {"name": "model"}},
                    }
                },
                "permission": {"*": "allow"},
                "agent": {"title": {"disable": True}},  # titling a session would call the model
                "small_model": "gateway/$OPENAI_MODEL",
                "share": "disabled",
                "autoupdate": False,
            }
        },
    ),
    "openhands": Preset(
        "Runs OpenHands' default agent through the OpenHands SDK.",
        "openhands",
        {
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # avoids downloading a price list at import
            "OPENHANDS_SUPPRESS_BANNER": "1",
            "OTEL_SDK_DISABLED": "true",
            "MEGAFLOW_CALL_S": str(CALL_TIMEOUT_MS // 1000),
        },
    ),
    "pi": Preset(
        "Runs the Pi coding agent.",
        'pi --print --no-session --provider gateway --model "$OPENAI_MODEL"',
        {"PI_OFFLINE": "1", "PI_SKIP_VERSION_CHECK": "1", "PI_TELEMETRY": "0"},
        {
            ".pi/agent/models.json": {
                "providers": {
                    "gateway": {
                        "baseUrl": "$OPENAI_BASE_URL",
                        "api": "openai-completions",
                        "apiKey": "OPENAI_API_KEY",
                        "models": [{"id": "$OPENAI_MODEL", "contextWindow": 128_000, "maxTokens": 16_384}],
                    }
                }
            }
        },
    ),
    "qwen-code": Preset(
        "Runs Qwen Code.",
        "qwen --auth-type openai --yolo",
        {"QWEN_CODE_SUPPRESS_YOLO_WARNING": "1", "QWEN_TELEMETRY_ENABLED": "false"},
    ),
    "terminus-2": Preset(
        "Runs Harbor's agent Terminus 2.",
        "terminus-2",
        {"LITELLM_LOCAL_MODEL_COST_MAP": "True"},  # avoids downloading a price list at import
    ),
}


def command_of(name: str, flags: str) -> str:
    """Returns the shell command that runs a preset with additional ``flags``. It reads ``$MEGAFLOW_INSTRUCTION_FILE``
    from standard input."""
    end = f' {flags} <"$MEGAFLOW_INSTRUCTION_FILE"'
    return f'{HOME}; export PATH={TOOLBOX_PATH}/bin:"$PATH"; exec {PRESETS[name].command}{end}'


def _filled(content: Any, variables: Mapping[str, str]) -> Any:
    """Replaces ``$NAME`` in all strings of a JSON value."""
    if isinstance(content, dict):
        return {_filled(name, variables): _filled(value, variables) for name, value in content.items()}
    if isinstance(content, list):
        return [_filled(value, variables) for value in content]
    return string.Template(content).safe_substitute(variables) if isinstance(content, str) else content


def _named(name: str) -> Callable[..., CommandAgent]:
    """Returns a constructor for the agent that is named after a preset."""

    def create(*, flags: str = "", toolbox: str | None = None, env: Mapping[str, str] | None = None) -> CommandAgent:
        return CommandAgent(preset=name, flags=flags, toolbox=toolbox, env=env)

    create.__doc__ = PRESETS[name].about
    return create


aider, claude_code, codex, gemini_cli = map(_named, ("aider", "claude-code", "codex", "gemini-cli"))
goose, opencode, openhands, pi = map(_named, ("goose", "opencode", "openhands", "pi"))
qwen_code, terminus_2 = map(_named, ("qwen-code", "terminus-2"))

MCP_FILES: Mapping[str, str] = {
    "claude-code": ".claude.json",
    "codex": ".codex/config.toml",
    "qwen-code": ".qwen/settings.json",
}
"""Maps presets to their MCP configuration files, below the home directory. Other presets do not support MCP servers."""


def mcp_text(preset: str, servers: Sequence[McpServer]) -> str:
    """Returns the content of a preset's MCP configuration file."""
    if preset == "codex":  # JSON strings and lists of strings are also valid TOML
        lines = []
        for server in servers:
            lines.append(f"[mcp_servers.{json.dumps(server.name)}]")
            if server.command:
                lines.append(f"command = {json.dumps(server.command[0])}\nargs = {json.dumps(server.command[1:])}")
            else:
                lines.append(f"url = {json.dumps(server.url)}")
        return "\n".join(lines) + "\n"
    entries = {}
    for server in servers:
        if server.command:
            entries[server.name] = {"command": server.command[0], "args": list(server.command[1:])}
        elif preset == "qwen-code":
            entries[server.name] = {"url" if server.transport == "sse" else "httpUrl": server.url}
        else:
            entries[server.name] = {"type": "sse" if server.transport == "sse" else "http", "url": server.url}
    return json.dumps({"mcpServers": entries})


def mcp_variable(servers: Sequence[McpServer]) -> dict[str, str]:
    """Returns the environment variable that lists the MCP servers as JSON, or an empty mapping if there are none."""
    return {"MEGAFLOW_MCP_SERVERS": mcp_text("", servers)} if servers else {}


def toolbox_of(name: str, given: str | None) -> Path:
    """Returns the host directory of the toolbox that contains the pinned version of this agent.

    Args:
        name: The preset's name.
        given: The toolbox directory. Default: ``MEGAFLOW_AGENTS``, else ``~/.megaflow-hpc/agents``.

    Raises:
        ConfigError: The preset is unknown, or the directory lacks this version.
    """
    if name not in PRESETS:
        raise ConfigError(f"agent command: preset {name!r}: expected one of {', '.join(PRESETS)}")
    path = given or os.environ.get("MEGAFLOW_AGENTS") or "~/.megaflow-hpc/agents"
    box = Path(os.path.expandvars(os.path.expanduser(path))).absolute()
    try:
        version = (box / name / ".complete").read_text().strip()
    except OSError:
        version = "nothing"
    wanted = {**PACKAGES, **PYTHON_PACKAGES}[name]
    if version != wanted:
        raise ConfigError(
            f"agent {name}: the tool box {box} contains {version}, expected {wanted}; run bash "
            f"{resource('launchers/agents.sh')} {name}, or name another directory in args.toolbox or MEGAFLOW_AGENTS"
        )
    return box
