"""Checks with few requests whether an external endpoint is usable.

``GET …/models`` costs nothing, and an endpoint that lists the model is ready. Otherwise the check requests a
completion. The request contains only the model and a message, because some endpoints reject ``max_tokens`` and others
``max_completion_tokens``.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp

from megaflow_hpc.errors import ModelServiceError
from megaflow_hpc.model.api import CHAT, COMPLETIONS, MODELS
from megaflow_hpc.model.engines import failure
from megaflow_hpc.model.engines.launch import Launch

BACKOFF_S, MAX_BACKOFF_S = 1.0, 30.0
"""Initial and maximum seconds between retries if the endpoint is unreachable or rate-limited; doubled each time."""
TEMPORARY = frozenset({408, 425, 429})
"""HTTP statuses below 500 that are worth a retry."""
QUESTION = "Are you ready?"


Ask = Callable[[str, dict[str, Any] | None, float], Awaitable[tuple[int, str]]]
"""(path, JSON body or ``None`` for a GET, timeout in seconds) → (status, response text)."""


class _Unavailable(Exception):
    """The endpoint is temporarily unavailable."""


async def until_answering(launch: Launch, ask: Ask, report: Callable[[str], None]) -> None:
    """Waits until the endpoint lists the model or returns a completion.

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
