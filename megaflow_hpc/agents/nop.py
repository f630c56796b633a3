"""The agent that does nothing, whose reward is that of the untouched task."""

from __future__ import annotations

from megaflow_hpc.types import AgentResult, ModelEndpoint, Sandbox, Task


class NopAgent:
    """Leaves the sandbox as it is."""

    async def run(self, task: Task, sandbox: Sandbox, model: ModelEndpoint | None) -> AgentResult:
        """Returns at once."""
        return AgentResult()
