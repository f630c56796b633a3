"""Command-line agents that are known: where their program is, how it is started, how it finds its model.

The programs lie in a *tool box*, one directory that every sandbox sees read-only at :data:`INSIDE`, so that an image
needs nothing of them. ``launchers/agents.sh`` makes it (``containers/agents.def`` for sites without the npm registry)::

    TOOLBOX/bin/{node,claude,codex,qwen,openhands}    what PATH begins with
    TOOLBOX/<name>/.complete                          package@version, written last

Each preset is shell text. The task comes on standard input, which has no limit of length; HOME is a directory of the
sandbox, since images may have none that can be written.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from megaflow_hpc.errors import ConfigError

INSIDE = "/opt/megaflow-agents"
PACKAGES: Mapping[str, str] = {
    "claude-code": "@anthropic-ai/claude-code@2.1.329",
    "codex": "@openai/codex@0.169.0",
    "qwen-code": "@qwen-code/qwen-code@0.24.4",
}
"""Package and pinned version of each in the npm registry."""
PYTHON_PACKAGES: Mapping[str, str] = {"openhands": "openhands-sdk@1.58.2"}
"""The same of agents from PyPI, which have a Python of their own in the tool box; ``containers/openhands.txt``."""
HOME = 'export HOME=/tmp/megaflow-home; mkdir -p "$HOME"'
CALL_MS = 3_600_000
"""Milliseconds an agent's client waits for one answer: the gateway's own limits come first."""

_CODEX_PROVIDER = (
    'name="gateway",base_url="$OPENAI_BASE_URL",env_key="OPENAI_API_KEY",wire_api="responses",'
    f"request_max_retries=1,stream_max_retries=1,stream_idle_timeout_ms={CALL_MS}"
).replace('"', '\\"')


@dataclass(frozen=True)
class Preset:
    """One agent. ``command`` is completed by further flags and the redirection of the task."""

    command: str
    env: Mapping[str, str] = field(default_factory=dict)


PRESETS: Mapping[str, Preset] = {
    "claude-code": Preset(
        "claude -p --dangerously-skip-permissions",
        {
            "IS_SANDBOX": "1",  # it refuses to work without questions as root anywhere else
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_AUTOUPDATER": "1",
            "ENABLE_TOOL_SEARCH": "false",  # tools that appear during the work would change every prompt
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "8192",
            "API_TIMEOUT_MS": str(CALL_MS),
        },
    ),
    "codex": Preset(
        "codex exec --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox --color never "
        f'-m "$OPENAI_MODEL" -c model_provider=gateway -c "model_providers.gateway={{{_CODEX_PROVIDER}}}"'
    ),
    "openhands": Preset(
        "openhands",
        {
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # a list of prices that it would fetch while it is imported
            "OPENHANDS_SUPPRESS_BANNER": "1",
            "OTEL_SDK_DISABLED": "true",
            "MEGAFLOW_CALL_S": str(CALL_MS // 1000),
        },
    ),
    "qwen-code": Preset(
        "qwen --auth-type openai --yolo", {"QWEN_CODE_SUPPRESS_YOLO_WARNING": "1", "QWEN_TELEMETRY_ENABLED": "false"}
    ),
}


def command_of(name: str, flags: str) -> str:
    """The shell text that runs a preset on ``$MEGAFLOW_INSTRUCTION_FILE``."""
    end = f' {flags} <"$MEGAFLOW_INSTRUCTION_FILE"'
    return f'{HOME}; export PATH={INSIDE}/bin:"$PATH"; exec {PRESETS[name].command}{end}'


def toolbox_of(name: str, given: str | None) -> Path:
    """The tool box's directory on the host, which holds this agent in the pinned version.

    Raises:
        ConfigError: It does not.
    """
    if name not in PRESETS:
        raise ConfigError(f"agent command: no preset {name!r}; there are {', '.join(PRESETS)}")
    path = given or os.environ.get("MEGAFLOW_AGENTS") or "~/.megaflow-hpc/agents"
    box = Path(os.path.expandvars(os.path.expanduser(path))).absolute()
    try:
        found = (box / name / ".complete").read_text().strip()
    except OSError:
        found = "nothing"
    wanted = {**PACKAGES, **PYTHON_PACKAGES}[name]
    if found != wanted:
        raise ConfigError(
            f"agent {name}: the tool box {box} should hold {wanted} and holds {found}; run launchers/agents.sh "
            f"{name}, or name another directory in args.toolbox or MEGAFLOW_AGENTS"
        )
    return box
