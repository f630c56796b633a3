"""Converts recorded chat messages to text and JSON that strict readers accept."""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megaflow_hpc.texts import NO_LABELS, containers_at, joined_parts
from megaflow_hpc.trajectory import IMAGE_SCHEME, Image, image_parts
from megaflow_hpc.types import round_of

if TYPE_CHECKING:
    from megaflow_hpc.trajectories.reading.store import Row

MAX_SECONDS = 253_402_300_799
"""Unix timestamp of the last second of the year 9999."""
MAX_DEPTH = 64
"""Maximum nesting of a tool call's arguments. Readers of exports process them recursively."""


def as_text(content: Any, labels: Mapping[str, str] = NO_LABELS) -> str:
    """Converts any message content to valid Unicode text. ``labels`` is passed to
    :func:`~megaflow_hpc.texts.joined_parts`."""
    content = joined_parts(content, labels)
    text = "" if content is None else str(content)
    return text.encode("utf-8", "backslashreplace").decode()


def text_and_images(content: Any, images: Mapping[str, Image]) -> list[str | Image]:
    """Splits a message's content into texts and images, in order. A label replaces an image that was not stored."""
    if not isinstance(content, list):
        return [as_text(content)]
    shown = image_parts({"content": content})
    parts: list[str | Image] = []
    for part in content:
        name = str(part["image_url"].get("url", "")).removeprefix(IMAGE_SCHEME) if part in shown else ""
        parts.append(images.get(name) or as_text([part]))
    return parts


def as_json(value: Any) -> Any:
    """Makes a parsed JSON value encodable as strict UTF-8 JSON."""
    if isinstance(value, dict):
        return {as_text(key): as_json(item) for key, item in value.items()}
    if isinstance(value, list):
        return [as_json(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return as_text(value) if isinstance(value, str) else value


def reasoning_of(message: Mapping[str, Any]) -> str:
    """Returns the reasoning of an assistant's message. Returns an empty string if there is none."""
    return as_text(message.get("reasoning_content") or message.get("reasoning"))


@dataclass
class RecordedToolCall:
    """A tool call of a message."""

    id: str
    name: str
    arguments: dict[str, Any]
    """Parsed arguments. Empty if they are not a JSON object or are nested deeper than :data:`MAX_DEPTH`."""
    unparsed: str
    """Arguments as text, if they could not be parsed into ``arguments``. Otherwise empty."""


def tool_calls(message: Mapping[str, Any]) -> list[RecordedToolCall]:
    """Returns the tool calls of a message."""
    calls = message.get("tool_calls")
    return [_tool_call(call, number) for number, call in enumerate(calls if isinstance(calls, list) else ())]


def _tool_call(call: Any, number: int) -> RecordedToolCall:
    call = call if isinstance(call, dict) else {}
    function = call.get("function")
    if not isinstance(function, dict):
        function = {}
    given = function.get("arguments")
    try:
        arguments = json.loads(given) if isinstance(given, str) else given
        shallow = not any(containers_at(arguments, MAX_DEPTH))
    except (ValueError, RecursionError):
        arguments, shallow = None, False
    is_object = isinstance(arguments, dict) and shallow
    return RecordedToolCall(
        id=as_text(call.get("id") or f"call_{number}"),
        name=as_text(function.get("name") or "unknown"),
        arguments=as_json(arguments) if is_object else {},
        unparsed="" if is_object or not given else as_text(given),
    )


def finite_rewards(row: Row) -> dict[str, float]:
    """Returns the finite rewards of a row by name, because strict JSON has no NaN. The main reward is named
    ``reward``."""
    rewards = {name: value for name, value in row.rewards.items() if math.isfinite(value)}
    if math.isfinite(row.reward):
        rewards.setdefault("reward", row.reward)
    return {as_text(name): value for name, value in rewards.items()}


def round_suffix(row: Row) -> str:
    """Returns the part of a name that distinguishes the rounds of a task. It is empty for the first round."""
    number = round_of(row.task_id, row.group_id)
    return f"@{number}" if number else ""


def iso_time(seconds: float) -> str:
    """Formats a Unix timestamp as ISO 8601 in UTC. A time before 1970 or after 9999 becomes the start of 1970."""
    seconds = seconds if 0 <= seconds < MAX_SECONDS else 0.0
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat().replace("+00:00", "Z")
