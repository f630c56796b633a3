"""The scripted engine's tokenizer and chat template.

Tokens are UTF-8 bytes (ids 0 to 255); 256 ends a turn and 257 starts one. Log-probabilities are a function of id and
position. Reasoning and tool calls are tagged text, as models write them. So each prompt of a conversation extends the
previous one, and the recording has a single sequence.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from megaflow_hpc.model.engines.scripted.script import text_of

END, START, OTHER = 256, 257, 512
"""Ids from :data:`OTHER` on are alternative ids of bytes, sampled only by engines with drift."""


def answer_text(message: Mapping[str, Any]) -> str:
    """Returns an assistant message as the text that a model would generate."""
    thought = message.get("reasoning")
    calls = [
        f"\n<tool_call>{call['function']['name']} {call['function']['arguments']}</tool_call>"
        for call in message.get("tool_calls") or ()
    ]
    return (f"<think>{thought}</think>\n" if thought else "") + text_of(message) + "".join(calls)


def render(messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] = ()) -> list[int]:
    """Renders a prompt: ``START role NEWLINE content END NEWLINE`` per message, then the answer's head.

    Tools come first, as in most chat templates, so a changed tool list changes the prompt.
    """
    tokens: list[int] = [START, *f"tools\n{json.dumps(tools)}".encode(), END, 10] if tools else []
    for message in messages:
        text = answer_text(message) if message.get("role") == "assistant" else text_of(message)
        tokens += [START, *f"{message.get('role', 'user')}\n".encode(), *text.encode("utf-8", "replace"), END, 10]
    return [*tokens, START, *b"assistant\n"]


def logprob(token: int, position: int) -> float:
    """Returns a fake log-probability in (-2, 0), determined by id and position."""
    return -(1 + (token * 31 + position * 17) % 199) / 100


def text_of_tokens(tokens: Sequence[int]) -> str:
    """Decodes token ids to text. Turn markers have no text."""
    return bytes(t % OTHER for t in tokens if t not in (END, START)).decode("utf-8", "replace")


def parse_prompt(tokens: Sequence[int]) -> tuple[list[dict[str, str]], list[str]]:
    """Parses a prompt. Returns its messages, and the names of the tools that it offers."""
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
