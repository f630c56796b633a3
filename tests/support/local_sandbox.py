"""A Sandbox for tests of agents that runs real commands in a directory of the host, as the user who runs the test.

It implements :class:`megaflow_hpc.types.Sandbox` without isolation. Absolute targets of uploads (``/solution``) are
stored below the directory, and such paths in commands are mapped to it.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from megaflow_hpc.errors import SandboxError
from megaflow_hpc.types import ExecResult


class LocalSandbox:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.work = root / "work"
        self.work.mkdir(parents=True)
        self.groups: set[int] = set()
        self.stopped = False

    def inside(self, path: str) -> Path:
        return self.root / path.lstrip("/")

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        timeout_s: float | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user_input: bytes | str | None = None,
    ) -> ExecResult:
        if self.stopped:
            raise SandboxError("the sandbox is gone")
        words = ["/bin/sh", "-c", command] if isinstance(command, str) else list(command)
        words = [str(self.inside(w)) if w.startswith("/solution") else w for w in words]
        began = time.monotonic()
        process = await asyncio.create_subprocess_exec(
            *words,
            cwd=self.inside(cwd) if cwd else self.work,
            env={"PATH": os.environ["PATH"], "HOME": str(self.root), **(env or {})},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        self.groups.add(process.pid)
        given = user_input.encode() if isinstance(user_input, str) else user_input or b""
        talking = asyncio.create_task(process.communicate(given))
        timed_out = False
        try:
            await asyncio.wait_for(asyncio.shield(talking), timeout_s)
        except TimeoutError:
            timed_out = True
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
            out, err = await talking
            self.groups.discard(process.pid)
        code = process.returncode or 0
        return ExecResult(
            124 if timed_out else 128 - code if code < 0 else code,
            out,
            err,
            timed_out=timed_out,
            duration_s=time.monotonic() - began,
        )

    async def upload(self, source: str, target: str) -> None:
        place = self.inside(target)
        place.parent.mkdir(parents=True, exist_ok=True)
        if Path(source).is_dir():
            shutil.copytree(source, place, dirs_exist_ok=True)
        else:
            shutil.copy(source, place)

    async def download(self, source: str, target: str) -> None:
        shutil.copy(self.inside(source), target)

    async def kill_processes(self) -> None:
        for group in self.groups:
            os.killpg(group, signal.SIGKILL)

    async def stop(self) -> None:
        self.stopped = True
