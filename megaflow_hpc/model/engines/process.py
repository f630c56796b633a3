"""Starts an engine under a lifeline, waits for its first completion, and stops it with all its processes.

An external endpoint has no process. It is checked with few requests: ``GET …/models`` costs nothing, and an endpoint
that lists the model is ready. Otherwise the check requests a completion. The request contains only the model and a
message, because some endpoints reject ``max_tokens`` and others ``max_completion_tokens``.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp

from megaflow_hpc.errors import ModelServiceError
from megaflow_hpc.model.engine_api import CHAT, COMPLETIONS, MODELS
from megaflow_hpc.model.engines import failure
from megaflow_hpc.model.engines.launch import Launch

WARM_UP_TOKENS = 3
"""Length of the first completion in tokens. With a single token, the engine would compile prefill but not decode."""
LOG_TAIL_BYTES = 200_000
"""Bytes at the end of the engine's log searched for a cause. It is large because the first error may cause many
more."""
END_TIMEOUT_S = 20.0
"""Seconds that the lifeline gets to stop the engine before it is killed."""
NOT_PASSED = ("PMI_", "PMIX_", "APPTAINER", "SINGULARITY")
"""Prefixes of environment variables withheld from engines: MPI's, and binds added by a site's Apptainer module."""
BACKOFF_S, MAX_BACKOFF_S = 1.0, 30.0
"""Initial and maximum seconds between retries if an external endpoint is unavailable. The pause doubles each time."""
TEMPORARY = frozenset({408, 425, 429})
"""HTTP statuses below 500 for which a request to an external endpoint is retried."""
QUESTION = "Are you ready?"
"""Prompt of the first completion."""
Ask = Callable[[str, dict[str, Any] | None, float], Awaitable[tuple[int, str]]]
"""Sends a request to an engine. Takes the path, the JSON body (``None`` for a GET) and a timeout in seconds, and
returns the status and the response text."""


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
        """Returns the reason why the process ended, in one line."""
        try:
            with self.log_file.open("rb") as file:
                file.seek(max(self._log_start, self.log_file.stat().st_size - LOG_TAIL_BYTES))
                tail = file.read().decode("utf-8", "replace")
        except OSError:
            tail = ""
        return failure.cause(tail, self._process.returncode if self._process else None)

    async def until_healthy(self, ask: Ask, report: Callable[[str], None]) -> None:
        """Waits until the engine returns a completion.

        Args:
            ask: Sends one request to the engine.
            report: Called with the reason why an external engine is unavailable.

        Raises:
            ModelServiceError: There was no completion within ``start_timeout_s``, or an external engine rejected the
                request.
        """
        launch = self.launch
        if not launch.command:
            return await _until_answering(launch, ask, report)
        deadline = time.monotonic() + launch.start_timeout_s
        pause, last = 0.05, "it did not listen"
        messages = [{"role": "user", "content": QUESTION}]
        scores = launch.protocol != "text"  # as the gateway requests, so everything is compiled in advance
        requests: list[tuple[str, dict[str, Any]]] = [
            (CHAT, {"messages": messages, **({"logprobs": True} if scores else {})}),
            (COMPLETIONS, {"prompt": QUESTION, **({"logprobs": 1} if scores else {})}),
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


# --- external endpoints ----------------------------------------------------------------------------------------------


class _Unavailable(Exception):
    """The endpoint is temporarily unavailable."""


async def _until_answering(launch: Launch, ask: Ask, report: Callable[[str], None]) -> None:
    """Waits until an external endpoint lists the model or returns a completion.

    Args:
        report: Called with the reason when the endpoint is unavailable, and again whenever the reason changes.

    Raises:
        ModelServiceError: The endpoint rejects the key or the request, or is not ready within ``start_timeout_s``.
    """
    deadline, pause = time.monotonic() + launch.start_timeout_s, BACKOFF_S
    reported = ""
    while True:
        try:
            listed = await _listed(launch, ask)
            if launch.model_name not in listed:
                await _complete(launch, ask, listed)
            return
        except _Unavailable as error:
            last = str(error)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            last = f"{launch.url(MODELS)}: {type(error).__name__}: {error}"
        if last != reported:
            reported = last
            report(last)
        if time.monotonic() + pause > deadline:
            raise ModelServiceError(f"not ready after {launch.start_timeout_s:g} s: {last}")
        await asyncio.sleep(pause)
        pause = min(2 * pause, MAX_BACKOFF_S)


async def _listed(launch: Launch, ask: Ask) -> list[str]:
    """Returns the names of the models that the endpoint lists."""
    status, text = await ask(MODELS, None, 30.0)
    _check(launch, MODELS, status, text)
    try:
        return [str(model["id"]) for model in json.loads(text)["data"]] if status == 200 else []
    except (ValueError, LookupError, TypeError, RecursionError):
        return []


async def _complete(launch: Launch, ask: Ask, listed: list[str]) -> None:
    """Requests a chat completion or, if the endpoint rejects that, a plain completion."""
    requests: dict[str, dict[str, Any]] = {
        CHAT: {"messages": [{"role": "user", "content": QUESTION}]},
        COMPLETIONS: {"prompt": QUESTION},
    }
    refusals = []
    for path, body in requests.items():
        status, text = await ask(path, {"model": launch.model_name, **body}, 120.0)
        if status == 200:
            return
        _check(launch, path, status, text)
        refusals.append(f"{launch.url(path)} {failure.REFUSED}: HTTP {status}: {_short(text)}")
    remedy = "check model.base_url, to which /chat/completions is added, and model.path"
    if listed:
        remedy = f"it lists {', '.join(listed[:20])}: check model.path"
    raise ModelServiceError(f"{refusals[0]}; {remedy}")


def _check(launch: Launch, path: str, status: int, text: str) -> None:
    """Raises :class:`_Unavailable` for a temporary status, and ModelServiceError if the key is rejected."""
    answer = f"HTTP {status}: {_short(text)}"
    if status in (401, 403):
        raise ModelServiceError(f"{launch.url(path)} {failure.KEY} of model.api_key_file: {answer}")
    if status in TEMPORARY or status >= 500:
        raise _Unavailable(f"{launch.url(path)}: {answer}")


def _short(text: str) -> str:
    return " ".join(text.split())[:300]
