"""Known command-line agents: their pinned versions, command lines and variables.

The programs are in a *tool box*, a directory that every sandbox sees read-only at :data:`TOOLBOX_PATH`. So images need
not contain them. ``launchers/agents.sh`` creates it (``containers/agents.def`` for sites without the npm registry)::

    TOOLBOX/bin/{node,claude,codex,qwen,openhands}    first directory of PATH
    TOOLBOX/<name>/.complete                          package@version, written last

Each preset is shell text. The instruction comes on standard input, which has no length limit. HOME is a directory in
the sandbox, because an image's own may be read-only.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from megaflow_hpc.errors import ConfigError
from megaflow_hpc.resources import resource

TOOLBOX_PATH = "/opt/megaflow-agents"
"""Path of the tool box in sandboxes."""
PACKAGES: Mapping[str, str] = {
    "claude-code": "@anthropic-ai/claude-code@2.1.329",
    "codex": "@openai/codex@0.169.0",
    "qwen-code": "@qwen-code/qwen-code@0.24.4",
}
"""Agent → npm package with pinned version."""
PYTHON_PACKAGES: Mapping[str, str] = {"openhands": "openhands-sdk@1.58.2"}
"""Agent → PyPI package with pinned version; the tool box has a Python for it (``containers/openhands.txt``)."""
HOME = 'export HOME=/tmp/megaflow-home; mkdir -p "$HOME"'
CALL_TIMEOUT_MS = 3_600_000
"""Timeout of an agent's model call in milliseconds; above the gateway's own limits."""

_CODEX_PROVIDER = (
    'name="gateway",base_url="$OPENAI_BASE_URL",env_key="OPENAI_API_KEY",wire_api="responses",'
    f"request_max_retries=1,stream_max_retries=1,stream_idle_timeout_ms={CALL_TIMEOUT_MS}"
).replace('"', '\\"')


@dataclass(frozen=True)
class Preset:
    """A known agent: its command, to which flags and the instruction's redirection are appended, and its variables."""

    command: str
    env: Mapping[str, str] = field(default_factory=dict)


PRESETS: Mapping[str, Preset] = {
    "claude-code": Preset(
        "claude -p --dangerously-skip-permissions",
        {
            "IS_SANDBOX": "1",  # without it, the program refuses to run unattended as root
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_AUTOUPDATER": "1",
            "ENABLE_TOOL_SEARCH": "false",  # tools that appear later would change every prompt
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "8192",
            "API_TIMEOUT_MS": str(CALL_TIMEOUT_MS),
        },
    ),
    "codex": Preset(
        "codex exec --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox --color never "
        f'-m "$OPENAI_MODEL" -c model_provider=gateway -c "model_providers.gateway={{{_CODEX_PROVIDER}}}"'
    ),
    "openhands": Preset(
        "openhands",
        {
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # avoids the download of a price list during import
            "OPENHANDS_SUPPRESS_BANNER": "1",
            "OTEL_SDK_DISABLED": "true",
            "MEGAFLOW_CALL_S": str(CALL_TIMEOUT_MS // 1000),
        },
    ),
    "qwen-code": Preset(
        "qwen --auth-type openai --yolo", {"QWEN_CODE_SUPPRESS_YOLO_WARNING": "1", "QWEN_TELEMETRY_ENABLED": "false"}
    ),
}


def command_of(name: str, flags: str) -> str:
    """Returns the shell text that runs a preset with further ``flags`` on ``$MEGAFLOW_INSTRUCTION_FILE``."""
    end = f' {flags} <"$MEGAFLOW_INSTRUCTION_FILE"'
    return f'{HOME}; export PATH={TOOLBOX_PATH}/bin:"$PATH"; exec {PRESETS[name].command}{end}'


def toolbox_of(name: str, given: str | None) -> Path:
    """Returns the host directory of the tool box that contains this agent in the pinned version.

    Args:
        name: The preset.
        given: The directory; default ``MEGAFLOW_AGENTS``, else ``~/.megaflow-hpc/agents``.

    Raises:
        ConfigError: The preset is unknown, or the directory lacks this version.
    """
    if name not in PRESETS:
        raise ConfigError(f"agent command: preset {name!r}: expected one of {', '.join(PRESETS)}")
    path = given or os.environ.get("MEGAFLOW_AGENTS") or "~/.megaflow-hpc/agents"
    box = Path(os.path.expandvars(os.path.expanduser(path))).absolute()
    try:
        found = (box / name / ".complete").read_text().strip()
    except OSError:
        found = "nothing"
    wanted = {**PACKAGES, **PYTHON_PACKAGES}[name]
    if found != wanted:
        raise ConfigError(
            f"agent {name}: the tool box {box} contains {found}, expected {wanted}; run bash "
            f"{resource('launchers/agents.sh')} {name}, or name another directory in args.toolbox or MEGAFLOW_AGENTS"
        )
    return box
