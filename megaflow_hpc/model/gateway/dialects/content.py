"""Messages, tools and images of a chat request: what is known of each is passed on, and every other field left out.

An image is a ``data:`` URL, or lies at a host that the campaign allows (``model.media_domains``): an engine fetches
what a URL names from where the engine stands, its node's loopback included. Nothing names a file.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

from megaflow_hpc.model.gateway.dialects.base import (
    BadRequest,
    expect_list,
    expect_object,
    expect_text,
    function_tool,
    image_part,
    text_part,
)
from megaflow_hpc.model.gateway.dialects.checks import (
    TOOLS_BYTES,
    Check,
    arguments,
    bounded,
    compiled_schema,
    flag,
    text,
)
from megaflow_hpc.model.gateway.dialects.schemas import check_progress

IMAGES = 100
"""Images of one request."""
_DATA = re.compile(r"data:image/[a-z0-9.+-]{1,32};base64,", re.IGNORECASE)
_REMOTE = re.compile(r"https?://([A-Za-z0-9.-]+)(?::\d{1,5})?(?:[/?][A-Za-z0-9._~:/?@!$&'()*+,;=%-]*)?")
"""A URL of which all readers say the same: no user, no backslash, no number in brackets."""


def messages(value: Any, field: str, domains: Collection[str] = ()) -> list[dict[str, Any]]:
    """Returns a conversation with the known fields of each message.

    Args:
        value: What the request has.
        field: Its name.
        domains: Hosts from which the engine may fetch images.

    Raises:
        BadRequest: It is no list of messages of known roles and content, or an image lies elsewhere.
    """
    if not expect_list(value, field):
        raise BadRequest(f"{field}: expected a list of at least one message")
    found = [_message(message, f"{field}[{number}]", domains) for number, message in enumerate(value)]
    images = sum(
        part["type"] == "image_url" for m in found if isinstance(m.get("content"), list) for part in m["content"]
    )
    if images > IMAGES:
        raise BadRequest(f"{field}: {images} images; {IMAGES} are allowed")
    return found


def _message(message: Any, where: str, domains: Collection[str]) -> dict[str, Any]:
    role = expect_object(message, where).get("role")
    fields = FIELDS.get(role) if isinstance(role, str) else None
    if fields is None:
        raise BadRequest(f"{where}.role: expected one of {', '.join(FIELDS)}, found {role!r:.100}")
    found: dict[str, Any] = {}
    for name, value in message.items():
        if name == "content":
            plain = value is None or isinstance(value, str)
            found[name] = value if plain else _parts(value, f"{where}.content", domains)
        elif name in fields and value is not None:
            found[name] = fields[name](value, f"{where}.{name}")
    if role == "developer":
        found["role"] = "system"
    return found


def _parts(value: Any, field: str, domains: Collection[str]) -> list[dict[str, Any]]:
    return [_part(part, f"{field}[{n}]", domains) for n, part in enumerate(expect_list(value, field))]


def _part(part: Any, where: str, domains: Collection[str]) -> dict[str, Any]:
    if isinstance(part, str):
        return text_part(part)
    kind = expect_object(part, where).get("type")
    if kind in ("text", "input_text", "output_text"):
        return text_part(expect_text(part.get("text"), f"{where}.text"))
    if kind == "refusal":
        return text_part(expect_text(part.get("refusal"), f"{where}.refusal"))
    if kind == "image_url":
        image = part.get("image_url")
        url = image if isinstance(image, str) else expect_object(image, f"{where}.image_url").get("url")
        return image_part(_image(expect_text(url, f"{where}.image_url.url"), f"{where}.image_url.url", domains))
    raise BadRequest(f"{where}: content of type {kind!r:.100} is not served; text and image_url are")


def _image(url: str, field: str, domains: Collection[str]) -> str:
    if _DATA.match(url):
        return url
    remote = _REMOTE.fullmatch(url)
    if remote is None:
        raise BadRequest(f"{field}: {url[:100]!r}: expected data:image/…;base64,… or a plain http(s) URL")
    if remote[1].lower() not in domains:
        raise BadRequest(
            f"{field}: {remote[1]!r} is not a host that the campaign allows (model.media_domains); "
            "send the image itself: data:image/…;base64,…"
        )
    return url


def _tool_calls(value: Any, field: str) -> list[dict[str, Any]]:
    return [_tool_call(call, f"{field}[{number}]") for number, call in enumerate(expect_list(value, field))]


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    if expect_object(call, where).get("type", "function") != "function":
        raise BadRequest(f"{where}.type: calls of functions are served, found {call.get('type')!r:.100}")
    function = expect_object(call.get("function"), f"{where}.function")
    named = {
        "name": expect_text(function.get("name"), f"{where}.function.name"),
        "arguments": arguments(function.get("arguments") or "", f"{where}.function.arguments"),
    }
    identified = {"id": expect_text(call["id"], f"{where}.id")} if call.get("id") is not None else {}
    return {**identified, "type": "function", "function": named}


def _refuse(remedy: str, value: Any, field: str) -> Any:
    raise BadRequest(f"{field}: {remedy}")


_COMMON: Mapping[str, Check] = {"role": expect_text, "name": expect_text}
FIELDS: Mapping[str, Mapping[str, Check]] = {
    "system": _COMMON,
    "developer": _COMMON,
    "user": _COMMON,
    "assistant": {
        **_COMMON,
        "reasoning": expect_text,
        "reasoning_content": expect_text,
        "tool_calls": _tool_calls,
        "function_call": partial(_refuse, "not served; give tool_calls"),
    },
    "tool": {**_COMMON, "tool_call_id": expect_text},
}
"""Role → fields of its messages that are passed on. Content is a text, a list of parts, or missing.

Chat templates do not know ``developer``, the newer name of ``system``, so it is passed on as ``system``.
"""


def tools(value: Any, field: str) -> list[dict[str, Any]]:
    """Returns the functions that are offered to the model.

    Raises:
        BadRequest: There is a tool of another kind, or they are too large or too deep.
    """
    bounded(expect_list(value, field), field, TOOLS_BYTES)
    return [_tool(tool, f"{field}[{number}]") for number, tool in enumerate(value)]


def _tool(tool: Any, where: str) -> dict[str, Any]:
    if expect_object(tool, where).get("type") != "function":
        raise BadRequest(f"{where}.type: functions are served, found {tool.get('type')!r:.100}")
    function = expect_object(tool.get("function"), f"{where}.function")
    description, parameters = function.get("description"), function.get("parameters")
    offered = function_tool(
        text(256)(function.get("name"), f"{where}.function.name"),
        expect_text(description, f"{where}.function.description") if description is not None else None,
        expect_object(parameters, f"{where}.function.parameters") if parameters is not None else None,
    )
    if parameters is None:
        del offered["function"]["parameters"]
    else:
        check_progress(parameters, f"{where}.function.parameters", compiled=False)
    if function.get("strict") is not None:
        offered["function"]["strict"] = flag(function["strict"], f"{where}.function.strict")
    return offered


def tool_choice(value: Any, field: str) -> Any:
    """Returns ``none``, ``auto``, ``required`` or the function that the model must call."""
    if isinstance(value, str) and value in ("none", "auto", "required"):
        return value
    if not isinstance(value, Mapping) or value.get("type") != "function":
        raise BadRequest(f"{field}: none, auto, required or a function is served, found {value!r:.100}")
    function = expect_object(value.get("function"), f"{field}.function")
    return {"type": "function", "function": {"name": text(256)(function.get("name"), f"{field}.function.name")}}


def compiled_tools(request: Mapping[str, Any]) -> None:
    """Raises :class:`BadRequest` if an engine would compile a tool's schema that :func:`compiled_schema` refuses."""
    forced = request.get("tool_choice") not in (None, "none", "auto")
    for number, tool in enumerate(request.get("tools") or ()):
        function = tool["function"]
        if "parameters" in function and (forced or function.get("strict")):
            compiled_schema(function["parameters"], f"tools[{number}].function.parameters")
