"""Detects how the served chat template changes earlier messages, by rendering two short conversations.

::

    user → answer with reasoning → user
    user → answer with reasoning and a tool call → tool → answer → user

If two different reasoning texts render to the same tokens, the template drops reasoning. If a rendering does not begin
with the previous rendering, the template rewrites earlier messages. The gateway decides for each call
(:mod:`megaflow_hpc.model.gateway.continuation`). The probe only tells the user in advance where sequences will end.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import aiohttp

from megaflow_hpc.model.engine_api import RENDER
from megaflow_hpc.model.engines.adapters import options_of
from megaflow_hpc.model.engines.launch import Launch
from megaflow_hpc.model.engines.process import Ask

APPENDS = "append-only"
DROPS = "drops the thoughts of earlier answers"
DROPS_AT_USER = "drops thoughts at the next user message"
REWRITES = "rewrites earlier messages"
TIMEOUT_S = 30.0
Message = dict[str, Any]


def parses_thoughts(model: Mapping[str, Any]) -> bool:
    """Returns whether the engine of a ``model`` section reports reasoning in a separate field. vLLM needs an option
    for it."""
    return model.get("engine", "vllm") != "vllm" or bool(options_of(model).get("reasoning-parser"))


async def probe(ask: Ask, launch: Launch, parsed: bool) -> str:
    """Describes the template's behaviour. Returns an empty string if the engine cannot render these conversations.

    Args:
        ask: Posts one request to the engine.
        launch: The engine's launch.
        parsed: True if the engine reports reasoning in a separate field, false if it is part of the text.
    """
    if launch.protocol != "split":
        return ""

    async def rendered(*messages: Message) -> list[int]:
        body = {"model": launch.model_name, "messages": messages}
        status, text = await ask(RENDER, body, TIMEOUT_S)
        return list(json.loads(text)["token_ids"]) if status == 200 else []

    try:
        asks, again = {"role": "user", "content": "Which colour?"}, {"role": "user", "content": "And then?"}
        one, other = ([asks, _answer(thought, parsed), again] for thought in ("A red one.", "A blue one."))
        renderings = [await rendered(asks), await rendered(*one)]
        at_user = await rendered(*other) == renderings[-1]
        at_tool = at_user
        call, result = _tool("A red one.", parsed)
        if in_turn := await rendered(asks, call, result):
            at_tool = await rendered(asks, *_tool("A blue one.", parsed)) == in_turn
        renderings.append(await rendered(*one, _answer("A green one.", parsed), again))
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError, KeyError, TypeError):
        return ""
    if not all(renderings):
        return ""
    if at_user or at_tool:
        return DROPS if at_tool else DROPS_AT_USER
    turns = [renderings, [renderings[0], in_turn]] if in_turn else [renderings]
    return APPENDS if all(_grows(prompts) for prompts in turns) else REWRITES


def _answer(thought: str, parsed: bool) -> Message:
    if parsed:
        return {"role": "assistant", "content": "This one.", "reasoning": thought}
    return {"role": "assistant", "content": f"<think>\n{thought}\n</think>\n\nThis one."}


def _tool(thought: str, parsed: bool) -> tuple[Message, Message]:
    function = {"name": "look", "arguments": "{}"}
    call = {**_answer(thought, parsed), "tool_calls": [{"id": "call00001", "type": "function", "function": function}]}
    return call, {"role": "tool", "tool_call_id": "call00001", "content": "Nothing."}


def _grows(prompts: Sequence[list[int]]) -> bool:
    return all(late[: len(early)] == early for early, late in pairwise(prompts))
