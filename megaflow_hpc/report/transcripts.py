"""Selects the transcripts for a page: all of them if they fit, otherwise the most interesting ones. Includes their
images.

Messages keep their tool calls and text. Long text is shortened in the middle. The page states how many transcripts it
contains and how many were omitted. A transcript states how many of its images were omitted.
"""

from __future__ import annotations

import itertools
import json
import math
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import numpy as np

from megaflow_hpc.report.rollouts import RolloutColumns
from megaflow_hpc.texts import NO_LABELS
from megaflow_hpc.trajectories.reading.conversations import heading
from megaflow_hpc.trajectories.reading.store import Row, TrajectoryStore
from megaflow_hpc.trajectory import Image, image_label, image_parts, shown_images

VERIFIER_LOG = "verifier.log"
Wanted = int | Literal["all", "some", "none"]
"""Number of transcripts to include. ``some`` includes as many as fit in the default limit."""

MAX_BYTES = 1_000_000
"""Maximum size in bytes of a page's compressed transcripts. It does not apply if the user requests a number or all.
Base64 adds a third."""
MAX_IMAGE_BYTES = 20_000_000
"""Maximum size in bytes of the images in a page. Each image is embedded once, and base64 adds a third."""
IMAGE_SHARES = 8
"""A transcript uses at most 1/IMAGE_SHARES of a run's image bytes, so that a long transcript leaves space for
others."""
MAX_TRANSCRIPTS = 2000
"""Maximum number of transcripts in a page. Each requires a separate read."""
MAX_MESSAGE_CHARS = 12_000
"""Maximum number of characters in a message. Longer messages keep their beginning and end."""
MAX_MESSAGES = 400
"""Maximum number of messages in a transcript. Longer transcripts keep their first and last messages."""


def chosen(rows: RolloutColumns) -> Iterator[int]:
    """Yields every row once, most interesting first.

    Each round yields the next failed, best, worst, truncated, longest and slowest rollout.
    """
    rated = np.flatnonzero(~np.isnan(rows.reward))
    groups = (
        np.flatnonzero(rows.status.where("failed", "cancelled")),
        rated[np.argsort(-rows.reward[rated], kind="stable")],
        rated[np.argsort(rows.reward[rated], kind="stable")],
        np.flatnonzero(rows.status.where("truncated")),
        np.argsort(-rows.turns, kind="stable"),
        np.argsort(-rows.seconds, kind="stable"),
    )
    seen: set[int | None] = {None}  # fill value of zip_longest
    for one_of_each in itertools.zip_longest(*(group.tolist() for group in groups)):
        for row in one_of_each:
            if row not in seen:
                seen.add(row)
                yield row


Transcript = list[dict[str, Any]]
"""Messages with the keys ``role`` and ``text``, and optionally ``thought``, ``calls`` and ``images`` (labels by
SHA-256)."""


def transcripts(
    store: TrajectoryStore, rows: RolloutColumns, wanted: Wanted, sharing: int = 1
) -> tuple[dict[int, Transcript], dict[str, Image]]:
    """Returns the transcripts to include, by row number, and the images that fit, by SHA-256.

    Args:
        sharing: Number of runs in the page. They share its limits.
    """
    if wanted == "none":
        return {}, {}
    limit, space = len(rows), math.inf
    if isinstance(wanted, int):
        limit = wanted
    elif wanted == "some":
        limit, space = MAX_TRANSCRIPTS // sharing, MAX_BYTES // sharing
    by_row: dict[int, Transcript] = {}
    images: dict[str, Image] = {}
    left = MAX_IMAGE_BYTES // sharing
    share = left // max(1, min(IMAGE_SHARES, limit, len(rows)))
    for row in itertools.islice(chosen(rows), limit):
        messages = transcript_of(one := store[row])
        if wanted == "some":
            space -= len(zlib.compress(json.dumps(messages).encode(), 6))
            if space < 0 and by_row:
                break
        left -= _add_images(one, messages, images, min(left, share))
        by_row[row] = messages
    return by_row, images


def _add_images(row: Row, messages: Transcript, images: dict[str, Image], space: int) -> int:
    """Adds a transcript's images to ``images``, from both ends towards the middle, until one does not fit.

    Returns:
        The number of bytes used. If an image did not fit, this is all of ``space``, so that few further rows are read.
    """
    names = list(dict.fromkeys(name for message in messages for name in message.get("images", ())))
    new = [name for name in names if name not in images]
    used = 0
    if new and space:
        stored = row.images
        for name in dict.fromkeys(itertools.chain.from_iterable(zip(new, reversed(new), strict=True))):
            used += len(stored[name].data)
            if used > space:
                break
            images[name] = stored[name]
    if missing := sum(name not in images for name in names):
        count = f"{missing} of {len(names)} images are not in this page"
        remedy = f"megaflow-hpc show RUN {row.id} --images DIR writes them to files"
        messages.insert(0, {"role": "report", "text": f"{count}; {remedy}."})
    return min(used, space)


def transcript_of(row: Row) -> Transcript:
    """Returns all conversations of a rollout as a single transcript, followed by the verifier's log.

    Each conversation has a heading if there are several.
    """
    conversations, labels = row.conversations, row.image_labels
    messages: Transcript = []
    for number, conversation in enumerate(conversations):
        if len(conversations) > 1:
            messages.append({"role": "report", "text": heading(number, conversation)})
        own = conversation.messages[conversation.shared if len(conversations) > 1 else 0 :]
        messages += messages_of(own, labels)
    logs = [artifact.data.strip() for artifact in row.artifacts if artifact.name == VERIFIER_LOG]
    if logs and logs[-1]:
        messages.append({"role": "verifier", "text": cut(logs[-1].decode("utf-8", "backslashreplace"))})
    return messages


def messages_of(messages: list[dict[str, Any]], labels: Mapping[str, str] = NO_LABELS) -> Transcript:
    """Converts OpenAI messages to a transcript.

    In the text, images are replaced by their ``labels``, and other non-text content by JSON. Images with a label are
    also listed.
    """
    if len(messages) > MAX_MESSAGES:
        left_out = f"{len(messages) - MAX_MESSAGES} messages are omitted"
        middle = {"role": "report", "content": left_out}
        messages = [*messages[: MAX_MESSAGES // 2], middle, *messages[-(MAX_MESSAGES // 2) :]]
    return [_message(message, labels) for message in messages]


def _message(message: dict[str, Any], labels: Mapping[str, str]) -> dict[str, Any]:
    content = message.get("content")
    if images := image_parts(message):
        content = [image_label(part, labels) if part in images else part for part in message["content"]]
    shown: dict[str, Any] = {"role": str(message.get("role", ""))[:40], "text": cut(_text(content))}
    stored = {name: labels[name] for name in shown_images([message]) if name and name in labels}
    if stored:
        shown["images"] = stored
    thought = message.get("reasoning") or message.get("reasoning_content")
    if thought:
        shown["thought"] = cut(_text(thought))
    calls = message.get("tool_calls")
    if isinstance(calls, list) and calls:
        shown["calls"] = cut("\n".join(map(_call, calls)))
    return shown


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        parts = [part.get("text", part) if isinstance(part, dict) else part for part in content]
        return "\n".join(map(_text, parts))
    return "" if content is None else json.dumps(content, indent=1, default=str)


def _call(call: Any) -> str:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return _text(call)
    arguments = function.get("arguments")
    return f"{function.get('name', '')}({arguments if isinstance(arguments, str) else json.dumps(arguments)})"


def cut(text: str) -> str:
    """Shortens long text by removing its middle."""
    if len(text) <= MAX_MESSAGE_CHARS:
        return text
    half = MAX_MESSAGE_CHARS // 2
    return f"{text[:half]}\n… {len(text) - 2 * half} characters are omitted …\n{text[-half:]}"
