"""The transcripts that a page carries: all of them while they fit, else those that a reader would ask for first.

Of each message its text is kept, cut in the middle where it is long, with its calls of tools. What does not fit is
counted, never silently dropped: the page says how many of how many it has.
"""

from __future__ import annotations

import itertools
import json
import zlib
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np

from megaflow_hpc.report.rollouts import Rollouts
from megaflow_hpc.trajectories.reading.conversations import heading
from megaflow_hpc.trajectories.reading.row import Row
from megaflow_hpc.trajectories.reading.store import TrajectoryStore

Wanted = int | Literal["all", "some", "none"]
"""A number; all there are; those that fit the page; none."""

MOST_BYTES = 1_000_000
"""Of the transcripts in a page, packed, unless all or a number are asked for; in base64 they take a third more."""
MOST = 2000
"""Of them, as many at most: each is read by itself, and nobody reads more."""
MESSAGE_CHARS = 12_000
"""Of one message; beyond it beginning and end."""
MESSAGES = 400
"""Of one transcript; beyond it the first and the last."""


def chosen(rows: Rollouts) -> Iterator[int]:
    """Yields every row once, those first that a reader would ask for: in turn a failure, the best, the worst, one that
    was cut short, the longest and the slowest, and so on, the rest in their order."""
    rewards = rows.reward
    known = ~np.isnan(rewards)
    order = np.arange(len(rows))
    groups = (
        order[rows.status.where("failed", "cancelled")],
        order[known][np.argsort(-rewards[known], kind="stable")],
        order[known][np.argsort(rewards[known], kind="stable")],
        order[rows.status.where("truncated")],
        order[np.argsort(-rows.turns, kind="stable")],
        order[np.argsort(-rows.seconds, kind="stable")],
    )
    seen: set[int] = set()
    for row in itertools.chain.from_iterable(itertools.zip_longest(*(group.tolist() for group in groups))):
        if row is not None and row not in seen:
            seen.add(row)
            yield row


Transcript = list[dict[str, str]]
"""Messages: ``role``, ``text``, and maybe ``thought`` and ``calls``."""


def transcripts(store: TrajectoryStore, rows: Rollouts, wanted: Wanted, sharing: int = 1) -> dict[int, Transcript]:
    """Returns the transcripts of the chosen rows, by row number.

    Args:
        sharing: runs that share a page.
    """
    if wanted == "none":
        return {}
    limit = wanted if isinstance(wanted, int) else MOST // sharing if wanted == "some" else len(rows)
    left = MOST_BYTES // sharing if wanted == "some" else None
    found: dict[int, Transcript] = {}
    for row in itertools.islice(chosen(rows), limit):
        messages = transcript_of(store[row])
        if left is not None:
            left -= len(zlib.compress(json.dumps(messages).encode(), 6))
            if left < 0 and found:
                break
        found[row] = messages
    return found


def transcript_of(row: Row) -> Transcript:
    """Returns the conversations of a rollout. If there are several, each has a heading."""
    found = row.conversations
    if len(found) == 1:
        return messages_of(found[0].messages)
    messages: Transcript = []
    for number, conversation in enumerate(found):
        messages.append({"role": "report", "text": heading(number, conversation)})
        messages += messages_of(conversation.messages[conversation.shared :])
    return messages


def messages_of(messages: list[dict[str, Any]]) -> Transcript:
    """Returns the texts of a conversation in OpenAI message form; whatever else a message may hold, as JSON."""
    if len(messages) > MESSAGES:
        left_out = f"{len(messages) - MESSAGES} messages are left out"
        middle = {"role": "report", "content": left_out}
        messages = [*messages[: MESSAGES // 2], middle, *messages[-(MESSAGES // 2) :]]
    return [_message(message) for message in messages]


def _message(message: dict[str, Any]) -> dict[str, str]:
    found = {"role": str(message.get("role", ""))[:40], "text": cut(_text(message.get("content")))}
    for key in ("reasoning_content", "reasoning"):
        if thought := message.get(key):
            found["thought"] = cut(_text(thought))
    calls = message.get("tool_calls")
    if isinstance(calls, list) and calls:
        found["calls"] = cut("\n".join(map(_call, calls)))
    return found


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n".join(_text(part.get("text", part)) if isinstance(part, dict) else _text(part) for part in content)
    return "" if content is None else json.dumps(content, indent=1, default=str)


def _call(call: Any) -> str:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return _text(call)
    arguments = function.get("arguments")
    return f"{function.get('name', '')}({arguments if isinstance(arguments, str) else json.dumps(arguments)})"


def cut(text: str) -> str:
    """Returns a text, its middle left out where it is long."""
    if len(text) <= MESSAGE_CHARS:
        return text
    half = MESSAGE_CHARS // 2
    return f"{text[:half]}\n… {len(text) - 2 * half} characters are left out …\n{text[-half:]}"
