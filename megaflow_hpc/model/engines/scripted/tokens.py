"""The scripted engine's tokenizer and chat template.

Tokens are UTF-8 bytes (ids 0 to 255) with 256 as end of turn and 257 as start of turn; log-probabilities are a function
of id and position. Reasoning and tool calls are text too, between marks, as models write them. So every invariant of
the recording holds: a conversation's prompt extends the one before.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from megaflow_hpc.model.engines.scripted.script import text_of

END, START, OTHER = 256, 257, 512
"""Ids of :data:`OTHER` and above are bytes too; only the engine in three requests samples them."""


def written(message: Mapping[str, Any]) -> str:
    """An assistant message as the model writes it."""
    thought = message.get("reasoning")
    calls = [
        f"\n<tool_call>{call['function']['name']} {call['function']['arguments']}</tool_call>"
        for call in message.get("tool_calls") or ()
    ]
    return (f"<think>{thought}</think>\n" if thought else "") + text_of(message) + "".join(calls)


def render(messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] = ()) -> list[int]:
    """A conversation's prompt: ``START role NEWLINE content END NEWLINE`` per message, then the head of the answer.

    Tools come first, as in most chat templates: a list that changes makes another prompt.
    """
    tokens: list[int] = [START, *f"tools\n{json.dumps(tools)}".encode(), END, 10] if tools else []
    for message in messages:
        text = written(message) if message.get("role") == "assistant" else text_of(message)
        tokens += [START, *f"{message.get('role', 'user')}\n".encode(), *text.encode("utf-8", "replace"), END, 10]
    return [*tokens, START, *b"assistant\n"]


def logprob(token: int, position: int) -> float:
    """A made-up log-probability in (-2, 0)."""
    return -(1 + (token * 31 + position * 17) % 199) / 100


def decoded(tokens: Sequence[int]) -> tuple[list[dict[str, str]], list[str]]:
    """The messages of a prompt, and the names of the tools that it offers."""
    messages, tools = [], []
    part = bytearray()
    for token in tokens:
        if token == START:
            part = bytearray()
        elif token == END:
            head, _, text = part.decode("utf-8", "replace").partition("\n")
            if head == "tools":
                tools = [tool["function"]["name"] for tool in json.loads(text)]
            else:
                messages.append({"role": head, "content": text})
        else:
            part.append(token - OTHER if token >= OTHER else token)
    return messages, tools
