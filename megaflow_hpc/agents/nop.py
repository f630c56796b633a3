"""The agent that does nothing: what it is paid is the reward of the untouched task."""

from __future__ import annotations

from megaflow_hpc.types import AgentResult, ModelEndpoint, Sandbox, Task


class NopAgent:
    async def run(self, task: Task, sandbox: Sandbox, model: ModelEndpoint | None) -> AgentResult:
        return AgentResult()
