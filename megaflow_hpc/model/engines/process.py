"""Starts an engine under a lifeline, waits for its first completion, and stops all its processes.

If an engine exits, its log is searched for the cause. An external endpoint has no process. It is checked with as few
requests as possible: ``GET …/models`` costs nothing, and an endpoint that lists the model is ready. Otherwise the check
requests a completion. This request contains only the model and a message, because some endpoints reject ``max_tokens``
and others ``max_completion_tokens``.
"""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import re
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp

from megaflow_hpc.errors import ModelServiceError
from megaflow_hpc.model.engine_api import CHAT, CLASSIFY, COMPLETIONS, MODELS
from megaflow_hpc.model.engines.launch import Launch

WARM_UP_TOKENS = 3
"""Number of tokens in the first completion. A single token would make the engine compile prefill but not decode."""
LOG_TAIL_BYTES = 200_000
"""Number of bytes at the end of the engine's log that are searched for a cause. The number is large, because the first
error may cause many more."""
FATAL = b"EngineCore encountered a fatal error"
"""Log text before the traceback of vLLM's core. After it, vLLM logs a traceback for each request in flight, which may
take megabytes."""
END_TIMEOUT_S = 20.0
"""Seconds that the lifeline gets to stop the engine before the lifeline is killed."""
NOT_PASSED = ("PMI_", "PMIX_", "APPTAINER", "SINGULARITY")
"""Prefixes of environment variables that engines do not get: MPI's, and binds from a site's Apptainer module."""
BACKOFF_S, MAX_BACKOFF_S = 1.0, 30.0
"""Initial and maximum seconds between retries while an external endpoint is unavailable. The pause doubles each
time."""
TEMPORARY = frozenset({408, 425, 429})
"""HTTP statuses below 500 for which a request to an external endpoint is retried."""
QUESTION = "Are you ready?"
"""Prompt of the first completion."""
Ask = Callable[[str, dict[str, Any] | None, float], Awaitable[tuple[int, str]]]
"""Function that sends a request to an engine and returns the status and the response text. Its arguments are the path,
the JSON body (``None`` for a GET) and a timeout in seconds."""


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
                async with asyncio.timeout(END_TIMEOUT_S):
                    await engine.wait()
            except TimeoutError:
                engine.kill()
                await engine.wait()

    def cause(self) -> str:
        """Returns the reason why the process ended as one line of text."""
        try:
            with self.log_file.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as log:
                start = log.rfind(FATAL, self._log_start)
                if start < 0:
                    start = max(self._log_start, len(log) - LOG_TAIL_BYTES)
                tail = log[start : start + LOG_TAIL_BYTES].decode("utf-8", "replace")
        except (OSError, ValueError):  # ValueError: the log is empty
            tail = ""
        return cause(tail, self._process.returncode if self._process else None)

    async def until_healthy(self, ask: Ask, report: Callable[[str], None]) -> None:
        """Waits until the engine returns a completion.

        Args:
            ask: Sends one request to the engine.
            report: Called with the reason if an external engine is unavailable.

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
        scores = launch.protocol != "text"  # the gateway requests them too, so everything is compiled in advance
        requests: list[tuple[str, dict[str, Any]]] = [
            (CHAT, {"messages": messages, **({"logprobs": True} if scores else {})}),
            (COMPLETIONS, {"prompt": QUESTION, **({"logprobs": 1} if scores else {})}),
        ]
        limit = {"max_tokens": WARM_UP_TOKENS}
        if launch.protocol == "reward":
            requests, limit = [(CLASSIFY, {"messages": messages})], {}
        while time.monotonic() < deadline:
            for path, body in requests:
                try:
                    request = {"model": launch.model_name, **limit, **body}
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
        refusals.append(f"{launch.url(path)} {REFUSED}: HTTP {status}: {_short(text)}")
    remedy = "check model.base_url, to which /chat/completions is added, and model.path"
    if listed:
        remedy = f"it lists {', '.join(listed[:20])}: check model.path"
    raise ModelServiceError(f"{refusals[0]}; {remedy}")


def _check(launch: Launch, path: str, status: int, text: str) -> None:
    """Checks the status of a response. Raises :class:`_Unavailable` if it is temporary, and ModelServiceError if the
    key is rejected."""
    answer = f"HTTP {status}: {_short(text)}"
    if status in (401, 403):
        raise ModelServiceError(f"{launch.url(path)} {KEY} of model.api_key_file: {answer}")
    if status in TEMPORARY or status >= 500:
        raise _Unavailable(f"{launch.url(path)}: {answer}")


def _short(text: str) -> str:
    return " ".join(text.split())[:300]


# --- why an engine ended ----------------------------------------------------------------------------------------------

KEY, REFUSED = "refuses the key", "refuses the request"
"""Causes of failure at an external endpoint."""
CAUSES: tuple[tuple[str, str, bool], ...] = (
    (r"CUDA out of memory|OutOfMemoryError|No available memory for the cache blocks|Free memory on device",
     "out of GPU memory", False),
    (r"Cannot allocate memory|std::bad_alloc|MemoryError", "out of memory on the node", False),
    (r"No space left on device", "no space left on a disk", False),
    (r"[Aa]ddress already in use", "its port was taken", False),
    (r"No module named '?([\w.]+)'?", "its virtual environment lacks a module", True),
    (r"unrecognized arguments: .*|invalid choice: .*|No such option", "it does not know an option", True),
    (r"local_files_only|LocalEntryNotFoundError|couldn't connect to 'https://huggingface\.co'|OfflineModeIsEnabled",
     "the model is not in the node's cache, and an engine fetches nothing", True),
    (r"(is not a valid model identifier|Repo id must be|Can't load the configuration|does not appear to have a file"
     r"|No such file or directory: '.*(safetensors|config\.json)|Invalid repository ID)",
     "the model cannot be found", True),
    (r"SafetensorError|HeaderTooLarge|InvalidHeader|MetadataIncompleteBuffer|not initialized from checkpoint",
     "its weights cannot be read", True),
    (r"^error: invalid script: ", "its script cannot be used", True),
    (r"^FATAL( ERROR)?:", "its image cannot be started", False),
    (r"max seq len|KV cache is needed|max_model_len", "the context length does not fit", True),
)  # fmt: skip
"""Known causes: pattern of a log line, text of the cause, and whether a restart would fail too. The first match
applies."""
LASTING = (KEY, REFUSED, *(cause for _, cause, lasting in CAUSES if lasting))
"""Causes that a restart would not fix."""
REJECTED = (
    r"^exit code \d+: \S*\b(ValueError|TypeError|KeyError|AttributeError|NameError|ImportError|NotImplementedError"
    r"|ValidationError|SyntaxError)\b: "
)
"""Matches the last error of an engine that rejects its configuration. The node is not at fault then."""

MAX_LENGTH = 600
"""Maximum length of a cause, in characters."""

ERROR = r"\b\w*(Error|Exception)\b: |^error: "
NEXT = r"^(Traceback|During handling|The above exception|For further information|File )"
"""Matches lines that follow an error but are not part of it."""
FOLLOWS = r"EngineDeadError|Engine core initialization failed|See (stack trace|root cause)"
"""Matches errors that only point to another error."""

IGNORED = r"^(\([^)]*\)\s*)?(DEBUG|INFO|WARNING)\b|^slurmstepd-\S+: error: \*\*\* STEP|^srun: launch"
"""Matches log lines that never name a cause. A running engine writes them, or a job step of which one task exited."""


def cause(log_tail: str, exit_code: int | None) -> str:
    """Returns the reason why an engine ended as one line of text. It is a known cause with its log line, or else the
    last error line.

    Args:
        log_tail: The end of the engine's log, from its latest start on.
        exit_code: Exit code of the engine's process, or ``None`` if it has no process.
    """
    lines = [x.strip() for x in log_tail.splitlines() if x.strip() and not re.search(IGNORED, x)]
    for pattern, meaning, _ in CAUSES:
        for number in reversed(range(len(lines))):
            if re.search(pattern, lines[number]):
                return f"{meaning}: {_complete_message(lines, number)}"
    errors = [n for n, x in enumerate(lines) if re.search(ERROR, x) and not re.search(FOLLOWS, x)]
    last = _complete_message(lines, errors[-1] if errors else len(lines) - 1) if lines else "it printed nothing"
    return f"exit code {exit_code}: {last}" if exit_code is not None else last


def _complete_message(lines: list[str], number: int) -> str:
    """Returns a complete error message. Joins following lines if the first ends with a colon or is a pydantic error."""
    text = _without_prefix(lines[number])
    if not re.search(r":$|\d validation errors? for \w+$", text):
        return text
    for line in lines[number + 1 : number + 4]:
        following = _without_prefix(line).strip()
        if re.search(rf"{ERROR}|{NEXT}", following):
            break
        text = f"{text} {following}"
    return _shortened(text)


def is_lasting(cause: str) -> bool:
    """Returns whether an engine that never served would fail again for the same cause if restarted."""
    return any(meaning in cause for meaning in LASTING) or re.match(REJECTED, cause) is not None


def _without_prefix(line: str) -> str:
    """Strips the process name, level and time from a log line."""
    return _shortened(re.sub(r"^(\([^)]*\)\s*)?((INFO|WARNING|ERROR)\s+[\d-]+ [\d:]+ (\[[^]]*\]\s*)?)?", "", line))


def _shortened(text: str) -> str:
    """Shortens a long text to its beginning and end. Either may name the cause."""
    return text if len(text) <= MAX_LENGTH else f"{text[: MAX_LENGTH // 2]} … {text[-MAX_LENGTH // 2 :]}"
