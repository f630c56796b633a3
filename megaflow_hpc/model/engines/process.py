"""Starts an engine under a lifeline, waits for its first completion, and stops it with all its processes."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp

from megaflow_hpc.errors import ModelServiceError
from megaflow_hpc.model.api import CHAT, COMPLETIONS
from megaflow_hpc.model.engines import external, failure
from megaflow_hpc.model.engines.launch import Launch

WARM_UP_TOKENS = 3
"""Length of the first completion in tokens. With a single token, the engine would compile prefill but not decode."""
LOG_TAIL_BYTES = 200_000
"""Bytes at the end of the engine's log searched for a cause. Large, because the first error may cause many others."""
END_TIMEOUT_S = 20.0
"""Seconds that the lifeline gets to stop the engine before it is killed."""
NOT_PASSED = ("PMI_", "PMIX_", "APPTAINER", "SINGULARITY")
"""Prefixes of environment variables withheld from engines: MPI's, and binds added by a site's Apptainer module."""


class EngineProcess:
    """The process of a :class:`~megaflow_hpc.model.engines.launch.Launch`. An external engine has no process.

    Args:
        launch: The engine's launch.
        log_file: File to which the engine's output is appended.
    """

    def __init__(self, launch: Launch, log_file: Path) -> None:
        self.launch, self.log_file = launch, log_file
        self._process: asyncio.subprocess.Process | None = None
        self._log_start = 0

    async def start(self) -> None:
        """Starts the process, if any, and appends its output to the log."""
        if self.launch.uds:
            Path(self.launch.uds).unlink(missing_ok=True)
        if not self.launch.command:
            return
        environment = {k: v for k, v in os.environ.items() if not k.startswith(NOT_PASSED)}
        descriptor = os.open(self.log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._log_start = os.fstat(descriptor).st_size
        try:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "megaflow_hpc.model.engines.lifeline", *self.launch.command),
                stdin=asyncio.subprocess.PIPE,
                stdout=descriptor,
                stderr=descriptor,
                env={**environment, **self.launch.env},
                start_new_session=True,
            )
        finally:
            os.close(descriptor)

    async def wait(self) -> None:
        """Waits until the process exits. Never returns for an external engine."""
        await (self._process.wait() if self._process else asyncio.Event().wait())

    async def end(self) -> None:
        """Stops the process and its descendants: closes the lifeline's standard input, then sends SIGKILL if
        necessary."""
        engine = self._process
        if engine is not None and engine.returncode is None:
            if engine.stdin is not None:
                engine.stdin.close()
            try:
                await asyncio.wait_for(engine.wait(), END_TIMEOUT_S)
            except TimeoutError:
                engine.kill()
                await engine.wait()

    def cause(self) -> str:
        """Returns why the process ended, in one line."""
        try:
            with self.log_file.open("rb") as file:
                file.seek(max(self._log_start, self.log_file.stat().st_size - LOG_TAIL_BYTES))
                tail = file.read().decode("utf-8", "replace")
        except OSError:
            tail = ""
        return failure.cause(tail, self._process.returncode if self._process else None)

    async def until_healthy(self, ask: external.Ask, report: Callable[[str], None]) -> None:
        """Waits until the engine returns a completion.

        Args:
            ask: Sends one request to the engine.
            report: Called with the reason why an external engine is unavailable.

        Raises:
            ModelServiceError: There was no completion within ``start_timeout_s``, or an external engine rejects it.
        """
        launch = self.launch
        if not launch.command:
            return await external.until_answering(launch, ask, report)
        deadline = time.monotonic() + launch.start_timeout_s
        pause, last = 0.05, "it did not listen"
        messages = [{"role": "user", "content": external.QUESTION}]
        scores = launch.protocol != "text"  # as the gateway requests, so everything is compiled in advance
        requests: list[tuple[str, dict[str, Any]]] = [
            (CHAT, {"messages": messages, **({"logprobs": True} if scores else {})}),
            (COMPLETIONS, {"prompt": external.QUESTION, **({"logprobs": 1} if scores else {})}),
        ]
        while time.monotonic() < deadline:
            for path, body in requests:
                try:
                    request = {"model": launch.model_name, "max_tokens": WARM_UP_TOKENS, **body}
                    status, text = await ask(path, request, 120.0)
                except (aiohttp.ClientError, OSError, TimeoutError) as error:
                    last = f"{type(error).__name__}: {error}"
                    break
                if status == 200:
                    return None
                last = f"HTTP {status} for a completion: {text[:300]}"
            await asyncio.sleep(pause)
            pause = min(pause * 1.5, 1.0)
        raise ModelServiceError(f"not healthy after {launch.start_timeout_s:g} s: {last}")
