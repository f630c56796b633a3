"""LiteLLM as a client in a process of its own, because it is installed in Harbor's environment.

That environment's Python runs it. A line of JSON on stdin is a request, ``{"id", "kind", "options"}``, or cancels one,
``{"cancel": id}``. A line on stdout is its answer, ``{"id", "answer"}`` or ``{"id", "error"}``. The first line is
``{"ready": version}``.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import traceback
import warnings
from importlib.metadata import version
from typing import Any

os.environ |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "CRITICAL"}

LONGEST = 1500
"""Characters reported of a traceback."""


def say(line: dict[str, Any]) -> None:
    OUT.write(json.dumps(line) + "\n")
    OUT.flush()


async def ask(kind: str, options: dict[str, Any]) -> Any:
    """Makes one call. Returns its API's answer as JSON."""
    import litellm

    stream = options.get("stream")
    if kind == "chat":
        answer: Any = await litellm.acompletion(**options)
        if stream:
            answer = litellm.stream_chunk_builder([chunk async for chunk in answer])
        return answer.model_dump(mode="json")
    if kind == "responses":
        answer = await litellm.aresponses(**options)
        if stream:
            last = [event async for event in answer][-1]
            answer = last.response
        return answer.model_dump(mode="json")
    return dict(await litellm.anthropic.messages.acreate(**options))


async def serve() -> None:
    reader, tasks = asyncio.StreamReader(limit=2**26), dict[int, asyncio.Task[None]]()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)

    async def one(request: dict[str, Any]) -> None:
        try:
            say({"id": request["id"], "answer": await ask(request["kind"], request["options"])})
        except asyncio.CancelledError:
            say({"id": request["id"], "error": "cancelled"})
        except Exception as error:
            where = traceback.format_exc()[-LONGEST:]
            say({"id": request["id"], "error": f"{request['kind']}: {type(error).__name__}: {error}\n{where}"})
        tasks.pop(request["id"], None)

    while line := await reader.readline():
        request = json.loads(line)
        if "cancel" in request:
            if task := tasks.get(request["cancel"]):
                task.cancel()
        else:
            tasks[request["id"]] = asyncio.create_task(one(request))


if __name__ == "__main__":
    OUT = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    import litellm

    warnings.simplefilter("ignore")
    litellm.suppress_debug_info = True
    litellm.telemetry = False
    say({"ready": version("litellm")})
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve())
    os._exit(0)  # whatever threads its libraries keep
