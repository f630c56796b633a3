"""The agent of the learning curve: one call of the model, whose answer is run as one shell command."""

from __future__ import annotations

import http.client
import json
from typing import Any
from urllib.parse import urlsplit

from megaflow_hpc.errors import ModelServiceError
from megaflow_hpc.types import AgentResult, ModelEndpoint, Sandbox, Task

COMMAND_S = 10.0
"""For a command that waits for what never comes."""


class OneCommand:
    """Asks once with the task's instruction alone.

    Args:
        max_tokens: of the answer; the commands to be learned have fewer.
    """

    def __init__(self, max_tokens: int = 24) -> None:
        self._max_tokens = max_tokens

    async def run(self, task: Task, sandbox: Sandbox, model: ModelEndpoint) -> AgentResult:
        question = {"role": "user", "content": task.instruction}
        choice = ask(model, {"model": model.model_name, "messages": [question], "max_tokens": self._max_tokens})
        command = choice["message"]["content"] or ""
        messages = [question, {"role": "assistant", "content": command}]
        if choice["finish_reason"] == "length":  # not a command yet
            return AgentResult(status="truncated", messages=messages)
        done = await sandbox.exec(command.replace("\0", ""), timeout_s=COMMAND_S)
        return AgentResult(messages=[*messages, {"role": "user", "content": done.stderr[-200:]}])


def ask(model: ModelEndpoint, body: dict[str, Any]) -> dict[str, Any]:
    """Makes one call and returns the answer's first choice. It may block: the agent has a process of its own.

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
