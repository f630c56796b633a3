"""The agent of the learning curve: it runs each answer of the model as one shell command and shows the output."""

from __future__ import annotations

import http.client
import json
from typing import Any
from urllib.parse import urlsplit

from megaflow_hpc.errors import ModelServiceError
from megaflow_hpc.types import AgentResult, ModelEndpoint, Sandbox, Task

COMMAND_S = 10.0
"""Time limit of a command in seconds, for commands that wait for input for ever."""
SHOWN = 100
"""Number of characters of a command's output that the model sees: the last ones."""


class ShellAgent:
    """Asks the model for one command in each turn.

    Args:
        turns: number of commands.
        max_tokens: maximum length of an answer. An answer that reaches it ends the rollout as truncated.
        preface: text before the instruction.
    """

    def __init__(self, turns: int = 1, max_tokens: int = 24, preface: str = "") -> None:
        self._turns, self._max_tokens, self._preface = turns, max_tokens, preface

    async def run(self, task: Task, sandbox: Sandbox, model: ModelEndpoint) -> AgentResult:
        messages = [{"role": "user", "content": self._preface + task.instruction}]
        for _ in range(self._turns):
            choice = ask(model, {"model": model.model_name, "messages": messages, "max_tokens": self._max_tokens})
            command = choice["message"]["content"] or ""
            messages.append({"role": "assistant", "content": command})
            if choice["finish_reason"] == "length":  # not a whole command
                return AgentResult(status="truncated", messages=messages)
            done = await sandbox.exec(command.replace("\0", ""), timeout_s=COMMAND_S)
            messages.append({"role": "user", "content": (done.stdout + done.stderr)[-SHOWN:]})
        return AgentResult(messages=messages)


def ask(model: ModelEndpoint, body: dict[str, Any]) -> dict[str, Any]:
    """Makes one call and returns the answer's first choice. It may block, because each agent has its own process.

    Raises:
        ModelServiceError: no engine could answer.
    """
    address = urlsplit(model.base_url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=600)
    headers = {"Authorization": f"Bearer {model.api_key}", "Content-Type": "application/json"}
    try:
        connection.request("POST", f"{address.path}/chat/completions", json.dumps(body), headers)
        response = connection.getresponse()
        raw = response.read()
    except (OSError, http.client.HTTPException) as error:
        raise ModelServiceError(f"the model's address does not answer: {error!r}") from error
    finally:
        connection.close()
    if response.status != 200:
        raise ModelServiceError(f"HTTP {response.status}: {raw[:300].decode('utf-8', 'replace')}")
    choice: dict[str, Any] = json.loads(raw)["choices"][0]
    return choice
