"""A user's agent that can be resumed, in a module of its own like the agents of campaigns."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

from megaflow_hpc.types import AgentResult, ModelEndpoint, Sandbox, Task


class Careful:
    """Runs the commands that the model writes in blocks, until it submits."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []

    def resume(self, state: Mapping[str, Any]) -> None:
        self.messages = list(state["messages"])

    async def run(self, task: Task, sandbox: Sandbox, model: ModelEndpoint) -> AgentResult:
        self.messages = self.messages or [{"role": "user", "content": task.instruction}]
        while True:
            try:
                answer = await asyncio.to_thread(self.ask, model)
            except urllib.error.HTTPError as refusal:
                if json.load(refusal)["error"]["type"] != "rollout_suspended":
                    raise
                return AgentResult(state={"messages": self.messages})
            self.messages.append({"role": "assistant", "content": answer})
            command = answer.split("```")[1].partition("\n")[2]
            if "COMPLETE" in command:
                return AgentResult(messages=self.messages)
            done = await sandbox.exec(command)
            self.messages.append({"role": "user", "content": done.stdout})

    def ask(self, model: ModelEndpoint) -> str:
        body = json.dumps({"model": model.model_name, "messages": self.messages}).encode()
        headers = {"Authorization": f"Bearer {model.api_key}", "Content-Type": "application/json"}
        request = urllib.request.Request(f"{model.base_url}/chat/completions", body, headers)
        with urllib.request.urlopen(request) as response:
            text: str = json.load(response)["choices"][0]["message"]["content"]
            return text
