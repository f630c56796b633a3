"""The APIs an agent may speak to the gateway, one module each.

An engine is only ever asked for a chat completion (or a plain one), so that recording, routing and going on from the
ids that were sampled are the same whatever the agent speaks::

    agent's request ── request() ──► chat request ──► engine ──► chat answer ── answer() ──► agent's answer
                                                                              └─ events() ──► the same as a stream

All of it is pure. What an agent hands back of earlier answers is recognised afterwards, in
:meth:`~megaflow_hpc.model.gateway.recorder.Recorder.restore`, so a conversion may lose how an answer was written
(spaces in a tool call's arguments, reasoning that the API does not carry) but never what it says.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from megaflow_hpc.model.gateway.dialects import chat, messages, responses
from megaflow_hpc.model.gateway.dialects.base import BadRequest, Event

__all__ = ["DIALECTS", "BadRequest", "Dialect", "Event", "dialect_of", "messages"]


class Dialect(Protocol):
    """What a module of this package offers."""

    def request(self, body: Mapping[str, Any], /) -> dict[str, Any]:
        """The chat request that asks the same; :class:`BadRequest` where there is none."""

    def answer(self, reply: Mapping[str, Any], body: Mapping[str, Any], /) -> dict[str, Any]:
        """The answer to ``body``, made of the engine's ``reply``."""

    def events(self, answer: Mapping[str, Any], body: Mapping[str, Any], /) -> Iterator[Event]:
        """``answer`` as the events of a stream."""

    def error(self, status: int, message: str, kind: str, /) -> dict[str, Any]:
        """An error's body."""

    def error_event(self, status: int, message: str, kind: str, /) -> Event:
        """An error inside a stream that has begun."""


DIALECTS: Mapping[str, Dialect] = {
    "/chat/completions": chat,
    "/completions": chat,
    "/messages": messages,
    "/responses": responses,
}
"""By path, below ``/v1``."""


def dialect_of(path: str, headers: Mapping[str, str]) -> Dialect:
    """Whose error shape a request expects, whatever it asks for."""
    tail = path.partition("/v1")[2]
    if tail.startswith("/messages") or "anthropic-version" in headers:
        return messages
    return responses if tail.startswith("/responses") else chat
