"""Agents that do not call a model: ``oracle`` and ``nop`` check a task, and ``replay`` repeats recorded commands."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from megaflow_hpc.environments.sandbox.sandbox import ApptainerSandbox
from megaflow_hpc.errors import ConfigError
from megaflow_hpc.tasks.formats import format_of
from megaflow_hpc.tasks.sandboxes import network_hint
from megaflow_hpc.types import AgentResult, ModelEndpoint, Sandbox, Task

MAX_OUTPUT_CHARACTERS = 2000
"""Maximum number of characters to keep of a failed solution's output."""
BLOCK = re.compile(r"```(?:mswea_bash_command|bash|sh)\s*\n(.*?)\n```", re.DOTALL)
"""Matches a code block with one recorded command."""
COMMAND_TIMEOUT_S = 120.0


class OracleAgent:
    """Runs the task's reference solution."""

    async def run(self, task: Task, sandbox: Sandbox, model: ModelEndpoint | None) -> AgentResult:
        """Runs the solution. If it fails, the result's ``error`` says why.

        Raises:
            ConfigError: The task has no solution.
        """
        result = await format_of(task).solve(task, cast(ApptainerSandbox, sandbox))
        if result.exit_code == 0:
            return AgentResult()
        output = (result.stdout + result.stderr).strip()[-MAX_OUTPUT_CHARACTERS:]
        spec = getattr(sandbox, "spec", None)  # tasks without a sandbox have none
        hint = network_hint(output, spec.network) if spec else ""
        return AgentResult(
            exit_code=result.exit_code,
            error=f"the task's solution ended with exit code {result.exit_code}: {output}{hint}",
        )


class NopAgent:
    """Does nothing, so the verifier scores the unmodified task."""

    async def run(self, task: Task, sandbox: Sandbox, model: ModelEndpoint | None) -> AgentResult:
        return AgentResult()


class ReplayAgent:
    """Runs recorded commands in order.

    Args:
        messages_file: JSON file with a list of OpenAI messages, or with a mapping from task ids to lists of messages.
        commands: The commands to run, instead of a file.
        command_timeout_s: Timeout of one command in seconds.
    """

    def __init__(
        self,
        *,
        messages_file: str | None = None,
        commands: Sequence[str] | None = None,
        command_timeout_s: float = COMMAND_TIMEOUT_S,
    ) -> None:
        if (messages_file is None) == (commands is None):
            raise ConfigError("agent replay: args: expected either messages_file or commands")
        self.command_timeout_s = command_timeout_s
        self._commands = list(commands) if commands is not None else None
        self._recorded: Any = _read(Path(messages_file)) if messages_file is not None else None

    async def run(self, task: Task, sandbox: Sandbox, model: ModelEndpoint | None) -> AgentResult:
        """Runs the commands in the task's working directory.

        Raises:
            ConfigError: The file has no messages for this task.
        """
        messages = []
        for command in self._for(task):
            result = await sandbox.exec(command, timeout_s=self.command_timeout_s, cwd=task.workdir)
            messages += [
                {"role": "assistant", "content": f"```bash\n{command}\n```"},
                {"role": "user", "content": result.stdout + result.stderr},
            ]
        return AgentResult(messages=messages)

    def _for(self, task: Task) -> list[str]:
        if self._commands is not None:
            return self._commands
        messages = self._recorded.get(task.id) if isinstance(self._recorded, dict) else self._recorded
        if not isinstance(messages, list):
            raise ConfigError(f"agent replay: the file has no messages for task {task.id}")
        answers = [str(m.get("content") or "") for m in messages if m.get("role") == "assistant"]
        return [command for answer in answers for command in BLOCK.findall(answer)]


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"agent replay: {path}: {error}") from error
