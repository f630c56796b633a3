"""Messages, tools and images of a chat request. Only known fields are passed on; all others are dropped.

An image must be a ``data:`` URL. An engine would fetch other URLs from its own node, and could reach that node's
loopback. No field names a file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from megaflow_hpc.model.gateway.dialects.base import (
    BadRequest,
    bounded,
    bounded_arguments,
    image_part,
    text_part,
    typed,
)
from megaflow_hpc.model.gateway.dialects.schemas import check_progress, compiled_schema

MAX_IMAGES = 100
"""Maximum number of images in a request."""
MAX_TOOLS_BYTES = 2**21
"""Maximum size of the tools list, as JSON, in bytes."""
_DATA = re.compile(r"data:image/[a-z0-9.+-]{1,32};base64,", re.IGNORECASE)
FunctionName = Annotated[str, Meta(max_length=256)]


# --- parts of a message ----------------------------------------------------------------------------------------------


class Text(Struct, tag="text"):
    text: str


class InputText(Text, tag="input_text"):
    """User text in the responses API."""


class OutputText(Text, tag="output_text"):
    """Model text in the responses API."""


class Refusal(Struct, tag="refusal"):
    refusal: str


class ImageUrl(Struct):
    url: str


class ImagePart(Struct, tag="image_url"):
    image_url: ImageUrl | str


Part = str | Text | InputText | OutputText | Refusal | ImagePart


# --- messages --------------------------------------------------------------------------------------------------------


class CalledFunction(Struct):
    """The function that a tool call names, with its arguments."""

    name: str
    arguments: str | None = None

    def __post_init__(self) -> None:
        self.arguments = bounded_arguments(self.arguments or "", "arguments")


class ChatToolCall(Struct, tag_field="type", tag="function", omit_defaults=True):
    function: CalledFunction
    id: str | None = None


class ChatMessage(Struct, tag_field="role", omit_defaults=True):
    """Fields common to all messages."""

    content: str | list[Part] | UnsetType | None = UNSET
    name: str | None = None


class SystemMessage(ChatMessage, tag="system"):
    """Instructions to the model."""


class DeveloperMessage(ChatMessage, tag="developer"):
    """A system message with the newer role ``developer``, which chat templates do not support."""


class UserMessage(ChatMessage, tag="user"):
    """Text and images from the agent or the task."""


class AssistantMessage(ChatMessage, tag="assistant"):
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ChatToolCall] | None = None
    function_call: Any = None

    def __post_init__(self) -> None:
        if self.function_call is not None:
            raise BadRequest("function_call: not served; give tool_calls")


class AcknowledgedCheck(Struct, omit_defaults=True):
    """A safety check of OpenAI's computer tool that the client acknowledges."""

    id: str
    code: str | None = None
    message: str | None = None


class ToolMessage(ChatMessage, tag="tool"):
    tool_call_id: str | None = None
    acknowledged_safety_checks: Annotated[list[AcknowledgedCheck], Meta(max_length=64)] | None = None


AnyMessage = SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage


def messages(value: Any, field: str) -> list[dict[str, Any]]:
    """Validates a conversation and keeps the known fields of each message.

    Args:
        value: The field's value in the request.
        field: The field's name.

    Raises:
        BadRequest: ``value`` is not a list of messages with known roles and content, or an image is not sent as data.
    """
    given: list[AnyMessage] = typed(value, list[AnyMessage], field)
    if not given:
        raise BadRequest(f"{field}: expected a list of at least one message")
    passed = [_passed(message, f"{field}[{number}]") for number, message in enumerate(given)]
    lists = [message["content"] for message in passed if isinstance(message.get("content"), list)]
    images = sum(part["type"] == "image_url" for parts in lists for part in parts)
    if images > MAX_IMAGES:
        raise BadRequest(f"{field}: {images} images; {MAX_IMAGES} are allowed")
    return passed


def _passed(message: AnyMessage, where: str) -> dict[str, Any]:
    passed: dict[str, Any] = msgspec.to_builtins(message)
    if isinstance(message, DeveloperMessage):
        passed["role"] = "system"
    if isinstance(message.content, list):
        parts = enumerate(message.content)
        passed["content"] = [_part(part, f"{where}.content[{number}]") for number, part in parts]
    return passed


def _part(part: Part, where: str) -> dict[str, Any]:
    if isinstance(part, ImagePart):
        url = part.image_url if isinstance(part.image_url, str) else part.image_url.url
        if not _DATA.match(url):
            problem = f"{url[:100]!r}: expected data:image/…;base64,…; send the image itself, not its address"
            raise BadRequest(f"{where}.image_url.url: {problem}")
        return image_part(url)
    if isinstance(part, Refusal):
        return text_part(part.refusal)
    return text_part(part if isinstance(part, str) else part.text)


# --- tools -----------------------------------------------------------------------------------------------------------


class Function(Struct, omit_defaults=True):
    """A function offered to the model."""

    name: FunctionName
    parameters: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None

    def __post_init__(self) -> None:
        self.description = self.description or None


class ChatTool(Struct):
    type: Literal["function"]
    function: Function


class NamedFunction(Struct):
    name: FunctionName


class ToolChoice(Struct):
    """The function that the model must call."""

    type: Literal["function"]
    function: NamedFunction


def tools(value: Any, field: str) -> list[dict[str, Any]]:
    """Validates the functions offered to the model.

    Raises:
        BadRequest: A tool is of another kind, or the tools are too large or too deeply nested.
    """
    bounded(value, field, MAX_TOOLS_BYTES)
    offered: list[ChatTool] = typed(value, list[ChatTool], field)
    for number, tool in enumerate(offered):
        if tool.function.parameters is not None:
            check_progress(tool.function.parameters, f"{field}[{number}].function.parameters", compiled=False)
    return list(msgspec.to_builtins(offered))


def tool_choice(value: Any, field: str) -> Any:
    """Returns ``none``, ``auto``, ``required`` or the function that the model must call."""
    return msgspec.to_builtins(typed(value, Literal["none", "auto", "required"] | ToolChoice, field))


def compiled_tools(request: Mapping[str, Any]) -> None:
    """Raises :class:`BadRequest` if the engine would compile a tool's schema that :func:`compiled_schema` refuses."""
    forced = request.get("tool_choice") not in (None, "none", "auto")
    for number, tool in enumerate(request.get("tools") or ()):
        function = tool["function"]
        if "parameters" in function and (forced or function.get("strict")):
            compiled_schema(function["parameters"], f"tools[{number}].function.parameters")
