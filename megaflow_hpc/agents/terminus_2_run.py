"""Runs Harbor's agent Terminus 2 on the task given on standard input, in the sandbox's current directory.

``launchers/agents.sh terminus-2`` copies this file into the toolbox, next to Harbor, its Python interpreter, and a tmux
for images that have none. The model is read from ``OPENAI_BASE_URL``, ``OPENAI_API_KEY`` and ``OPENAI_MODEL``.
Arguments are options of the agent, such as ``parser_name=xml``.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any


class Here:
    """The part of Harbor's environment interface that the agent uses. Commands run in this sandbox."""

    default_user = None

    async def exec(self, command: str, timeout_sec: float | None = None, **_: Any) -> Any:
        """Runs a shell command, and returns Harbor's ``ExecResult``."""
        from harbor.environments.base import ExecResult

        words = ["bash", "-c", command] if timeout_sec is None else ["timeout", str(timeout_sec), "bash", "-c", command]
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *words, stdin=asyncio.subprocess.DEVNULL, stdout=pipe, stderr=pipe
        )
        out, err = await process.communicate()
        text = (out.decode(errors="replace"), err.decode(errors="replace"))
        return ExecResult(stdout=text[0], stderr=text[1], return_code=process.returncode or 0)


async def main() -> None:
    """Runs the agent until it marks the task as complete."""
    from harbor.agents.terminus_2 import Terminus2
    from harbor.models.agent.context import AgentContext

    os.environ["PATH"] += f"{os.pathsep}{Path(__file__).parent}/python/usr/bin"
    logs = Path("/logs/agent")  # Harbor's directory for an agent's logs
    logs.mkdir(parents=True, exist_ok=True)
    options: dict[str, Any] = dict(word.split("=", 1) for word in sys.argv[1:])
    agent = Terminus2(
        logs_dir=logs,
        model_name=f"openai/{os.environ['OPENAI_MODEL']}",
        api_base=os.environ["OPENAI_BASE_URL"],
        record_terminal_session=False,  # would install asciinema
        **options,
    )
    await agent.setup(Here())
    await agent.run(sys.stdin.read(), Here(), AgentContext())


if __name__ == "__main__":
    asyncio.run(main())
    sys.stdout.flush()
    os._exit(0)  # do not wait for the client's threads
