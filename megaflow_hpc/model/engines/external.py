"""Whether an endpoint that somebody else runs can be used: asked gently, and once where the answer is no.

``GET …/models`` costs nothing, and an endpoint that lists the model answers. One that does not is asked for a
completion, with nothing in the request but the model and a message: some endpoints refuse ``max_tokens``, others
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

PAUSE_S, PAUSE_MAX_S = 1.0, 30.0
"""Seconds before an endpoint that is away, or limits its rate, is asked again; doubled each time."""
PASSING = frozenset({408, 425, 429})
"""HTTP statuses below 500 that may be others a little later."""
QUESTION = "Are you ready?"


Ask = Callable[[str, dict[str, Any] | None, float], Awaitable[tuple[int, str]]]
"""Path, JSON body (``None``: a GET) and timeout in seconds → status and text of the answer."""


class _Away(Exception):
    """It does not answer now, and may later."""


async def until_answering(launch: Launch, ask: Ask) -> None:
    """Waits until the endpoint lists the model, or answers.

    Raises:
        ModelServiceError: It refuses the key or the request, or did not answer within ``start_timeout_s``.
    """
    deadline, pause = time.monotonic() + launch.start_timeout_s, PAUSE_S
    while True:
        try:
            listed = await _listed(launch, ask)
            if launch.model_name not in listed:
                await _complete(launch, ask, listed)
            return
        except _Away as error:
            last = str(error)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            last = f"{launch.url(MODELS)}: {type(error).__name__}: {error}"
        if time.monotonic() + pause > deadline:
            raise ModelServiceError(f"not ready after {launch.start_timeout_s:g} s: {last}")
        await asyncio.sleep(pause)
        pause = min(2 * pause, PAUSE_MAX_S)


async def _listed(launch: Launch, ask: Ask) -> list[str]:
    """Returns the names of the models that it lists; none where it lists none."""
    status, text = await ask(MODELS, None, 30.0)
    _check(launch, MODELS, status, text)
    try:
        return [str(model["id"]) for model in json.loads(text)["data"]] if status == 200 else []
    except (ValueError, LookupError, TypeError, RecursionError):
        return []


async def _complete(launch: Launch, ask: Ask, listed: list[str]) -> None:
    """Asks for a completion, of a chat or, from a model without chats, a plain one."""
    asked: dict[str, dict[str, Any]] = {
        CHAT: {"messages": [{"role": "user", "content": QUESTION}]},
        COMPLETIONS: {"prompt": QUESTION},
    }
    refusals = []
    for path, body in asked.items():
        status, text = await ask(path, {"model": launch.model_name, **body}, 120.0)
        if status == 200:
            return
        _check(launch, path, status, text)
        refusals.append(f"{launch.url(path)} {failure.REFUSED}: HTTP {status}: {_short(text)}")
    known = f"it lists {', '.join(listed[:20])}: check model.path"
    unknown = "check model.base_url, to which /chat/completions is added, and model.path"
    raise ModelServiceError(f"{refusals[0]}; {known if listed else unknown}")


def _check(launch: Launch, path: str, status: int, text: str) -> None:
    """Raises :class:`_Away` for what may pass, and ModelServiceError where the key is refused."""
    said = f"HTTP {status}: {_short(text)}"
    if status in (401, 403):
        raise ModelServiceError(f"{launch.url(path)} {failure.KEY} of model.api_key_file: {said}")
    if status in PASSING or status >= 500:
        raise _Away(f"{launch.url(path)}: {said}")


def _short(text: str) -> str:
    return " ".join(text.split())[:300]
