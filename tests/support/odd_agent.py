"""An agent for tests, in a module of its own because the process from which agents are forked imports it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from megaflow_hpc.types import AgentResult, ModelEndpoint, Sandbox, Task


class Odd:
    """An agent that behaves as its ``args`` say."""

    def __init__(self, what: str, place: str = "") -> None:
        self.what, self.place = what, place

    async def run(self, task: Task, sandbox: Sandbox, model: ModelEndpoint | None) -> AgentResult:
        if self.what == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        if self.what == "leave":
            os._exit(3)
        if self.what == "exit":
            sys.exit(3)
        if self.what == "print":
            print("half a line", end="", flush=True)
            print(", and \x1b[2J the rest", "\udcff")
            subprocess.run(["echo", "its child"], check=True)
            print("no end" * 20_000, file=sys.stderr)
            print("beyond")
        if self.what == "share":
            Path(self.place, f"{task.id}.{os.getpid()}").touch()
            print(f"a line of {task.id},", end="")
            await until(lambda: Path(self.place, "end").exists())
            print(" and its end")
            return AgentResult()
        if self.what == "crash when shared":
            Path(self.place, f"{task.id}.{os.getpid()}").touch()
            await until(lambda: len(os.listdir(self.place)) > 3)
            os._exit(3)
        if self.what == "fill memory":
            self.held = bytearray(9 << 30)  # reserved, but not touched
        if self.what == "persist":
            Path(self.place, f"{task.id}.{os.getpid()}").touch()
            while True:
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(60)
        if self.what in ("wait, then block", "wait, then spin"):
            Path(self.place, f"{task.id}.{os.getpid()}").touch()
            await until(lambda: len(os.listdir(self.place)) > 3)
            while self.what == "wait, then spin":
                pass
            time.sleep(600)
        if self.what == "block shortly":
            Path(self.place, f"{task.id}.{os.getpid()}").touch()
            while not Path(self.place, "end").exists():
                time.sleep(0.02)
            return AgentResult()
        if self.what == "block":
            Path(self.place).write_text(str(os.getpid()))
            time.sleep(600)
        if self.what == "use CPU":
            while time.process_time() < 1:
                pass
            await asyncio.sleep(0.5)
            return AgentResult(error=str(resource.getrlimit(resource.RLIMIT_CPU)[0]))
        if self.what == "leave a daemon":
            if os.fork() == 0:
                os.setsid()
                time.sleep(20)
            os._exit(3)
        if self.what == "spawn":
            Path(self.place).write_text(str(subprocess.Popen(["sleep", "600"]).pid))
        if self.what == "raise":
            raise KeyError("no such thing")
        if self.what == "read":
            Path(self.place).read_bytes()
        if self.what == "lost":
            await sandbox.upload("/nothing/there", "/x")
        if self.what == "pipe":
            await asyncio.gather(*(sandbox.exec("sleep 0.05") for _ in range(5)))
        found = await sandbox.exec(["printf", "%s", f"{task.instruction} \udcff"], env={"A": "1"}, user_input=b"\xff")
        slow = await sandbox.exec("sleep 60", timeout_s=0.2)
        messages = [{"role": "user", "content": found.stdout}]
        return AgentResult(messages=messages, exit_code=slow.exit_code)


async def until(done: Callable[[], bool]) -> None:
    while not done():
        await asyncio.sleep(0.02)
