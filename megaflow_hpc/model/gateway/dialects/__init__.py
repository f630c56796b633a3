"""Converts between the APIs that agents use and chat completions, with one module per API.

Engines only receive chat completions (or plain ones), so recording and routing are the same for every API::

    agent's request ── request() ──► chat request ──► engine ──► chat reply ── answer() ──► agent's response
                                                                             └─ events() ──► the same as a stream

All functions are pure. A conversion may change the form of an answer but never its meaning, because
:meth:`~megaflow_hpc.model.gateway.recorder.Recorder.restore` has to recognise answers that an agent sends back. It may
change whitespace in a tool call's arguments, for instance, or drop reasoning that the API does not carry.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from megaflow_hpc.model.gateway.dialects import chat, gemini, messages, options, responses
from megaflow_hpc.model.gateway.dialects.base import BadRequest, Event

__all__ = ["DIALECTS", "TABLES", "BadRequest", "Dialect", "Event", "dialect_of", "gemini", "messages"]


class Dialect(Protocol):
    """Interface of a dialect module."""

    def request(self, body: Mapping[str, Any], /) -> dict[str, Any]:
        """Returns the equivalent chat request.

        Raises:
            BadRequest: The request cannot be converted.
        """

    def answer(self, reply: Mapping[str, Any], body: Mapping[str, Any], /) -> dict[str, Any]:
        """Converts the engine's ``reply`` to this API's response to ``body``."""

    def events(self, answer: Mapping[str, Any], body: Mapping[str, Any], /) -> Iterator[Event]:
        """Converts ``answer`` to stream events."""

    def error(self, status: int, message: str, kind: str, /) -> dict[str, Any]:
        """Returns the body of an error response."""

    def error_event(self, status: int, message: str, kind: str, /) -> Event:
        """Returns the event that reports an error in a stream that has already started."""


DIALECTS: Mapping[str, Dialect] = {
    "/chat/completions": chat,
    "/completions": chat,
    "/messages": messages,
    "/responses": responses,
    "/models/MODEL:generateContent": gemini,
}
"""Dialect of each path below ``/v1``. Gemini's paths contain the model (:data:`.gemini.PATH`)."""
TABLES: Mapping[str, Mapping[str, options.Option]] = {
    "/chat/completions": options.CHAT,
    "/completions": options.COMPLETIONS,
    "/messages": messages.MESSAGES,
    "/responses": responses.RESPONSES,
    "/models/MODEL:generateContent": gemini.GEMINI,
}
"""Table of options for each path below ``/v1``."""


def dialect_of(path: str, headers: Mapping[str, str]) -> Dialect:
    """Returns the dialect in which errors of a request are reported. A path that does not exist has one too."""
    if "/v1beta/" in path or "x-goog-api-key" in headers:
        return gemini
    tail = path.partition("/v1")[2]
    if tail.startswith("/messages") or "anthropic-version" in headers:
        return messages
    return responses if tail.startswith("/responses") else chat
