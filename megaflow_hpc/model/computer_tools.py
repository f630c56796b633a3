"""Translates Anthropic's and OpenAI's computer tools to functions that any model can use, and back.

If an agent requests its vendor's tool, an ordinary engine gets an equivalent function, whose description names the tool
and its settings. An endpoint of the same vendor gets the original tool, restored from that function
(:func:`anthropic_tool`, :func:`openai_tool`).

=============================  =======================================================================================
Anthropic, ``computer_*``      one function ``computer`` in its own vocabulary (:mod:`megaflow_hpc.screen`)
``computer_toolset_20260801``  the same function; its calls are named after their actions in this API
``bash_*``, ``text_editor_*``  functions, because agents offer them together with the computer
OpenAI                         one function ``computer``, whose arguments are an ``action``; for the tool ``computer``,
                               the list ``actions``
=============================  =======================================================================================

The tool types are those in the packages ``anthropic`` 2.6 and ``openai`` 3.46.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megaflow_hpc.screen import ACTIONS, FIRST_ACTIONS, parameters

COMPUTER = "computer"
"""Name of the function that replaces a vendor's computer tool."""
TOOLSET = "computer_toolset_20260801"
BETAS: Mapping[str, str] = {
    "computer_20241022": "computer-use-2024-10-22",
    "computer_20250124": "computer-use-2025-01-24",
    "computer_20251124": "computer-use-2025-11-24",
}
"""Value of the ``anthropic-beta`` header that each Anthropic tool requires, by tool type."""
ZOOM = "zoom"


# --- Anthropic --------------------------------------------------------------------------------------------------------

_BASH: dict[str, Any] = {
    "type": "object",
    "properties": {
        "command": {"type": "string"},
        "restart": {"type": "boolean", "description": "Starts the shell again."},
    },
}
_TEXTS = ("path", "file_text", "old_str", "new_str", "insert_text")
_EDITOR: dict[str, Any] = {
    "type": "object",
    "properties": {
        "command": {"type": "string", "enum": ["view", "create", "str_replace", "insert"]},
        **{name: {"type": "string"} for name in _TEXTS},
        "insert_line": {"type": "integer"},
        "view_range": {"type": "array", "items": {"type": "integer"}},
    },
    "required": ["command", "path"],
}
_NAMED = re.compile(r"\(Anthropic's (\w{1,64})(?:, (\d{1,5})x(\d{1,5}) pixels)?\)\Z")


def anthropic_function(tool: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the function that replaces an Anthropic tool. Returns ``None`` for tools that the client does not
    execute."""
    kind = str(tool.get("type") or "")
    if kind in BETAS:
        actions = FIRST_ACTIONS if kind == "computer_20241022" else ACTIONS
        if kind == "computer_20251124" and tool.get("enable_zoom"):
            actions = (*actions, ZOOM)
        width, height = tool.get("display_width_px"), tool.get("display_height_px")
        return _computer(f"(Anthropic's {kind}, {width}x{height} pixels)", actions)
    if kind == TOOLSET:
        configs = tool.get("configs") or {}
        enabled = [name for name in (*ACTIONS, ZOOM) if (configs.get(name) or {}).get("enabled") is not False]
        return _computer(f"(Anthropic's {kind})", enabled)
    name = tool.get("name")
    if re.fullmatch(r"bash_\d{8}", kind):
        return _function(name or "bash", f"Runs a command in a shell. (Anthropic's {kind})", _BASH)
    if re.fullmatch(r"text_editor_\d{8}", kind):
        described = f"Shows, creates and edits files. (Anthropic's {kind})"
        return _function(name or "str_replace_based_edit_tool", described, _EDITOR)
    return None


def anthropic_tool(function: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the Anthropic tool that a function replaces. Returns ``None`` for any other function."""
    match = _NAMED.search(function.get("description") or "")
    if match is None:
        return None
    kind, width, height = match.groups()
    tool: dict[str, Any] = {"type": kind, "name": function["name"]}
    if kind in BETAS:
        tool |= {"display_width_px": int(width or 0), "display_height_px": int(height or 0)}
        tool |= {"enable_zoom": True} if ZOOM in _actions(function) else {}
    elif kind == TOOLSET:
        disabled = {name: {"enabled": False} for name in (*ACTIONS, ZOOM) if name not in _actions(function)}
        tool = {"type": kind, **({"configs": disabled} if disabled else {})}
    return tool if anthropic_function(tool) == function else None


def is_toolset(tool: Mapping[str, Any]) -> bool:
    """Returns whether the tool's calls are named after their actions."""
    return tool.get("type") == TOOLSET


def toolset_actions(tools: Sequence[Mapping[str, Any]]) -> Sequence[str] | None:
    """Returns the actions of the toolset among the tools, or ``None`` if there is no toolset."""
    toolset = next(filter(is_toolset, tools), None)
    return None if toolset is None else _actions(anthropic_function(toolset) or {})


def _computer(settings: str, actions: Sequence[str]) -> dict[str, Any]:
    return _function(COMPUTER, f"Controls the mouse and the keyboard of a screen. {settings}", parameters(actions))


def _function(name: str, description: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": name, "parameters": dict(schema), "description": description}


def _actions(function: Mapping[str, Any]) -> Sequence[str]:
    properties = (function.get("parameters") or {}).get("properties") or {}
    return (properties.get("action") or {}).get("enum") or ()


# --- OpenAI -----------------------------------------------------------------------------------------------------------

_X_Y = ("x", "y")
_NUMBERS = (*_X_Y, "scroll_x", "scroll_y")
_MAX_PIXELS = 2**31
OPENAI_ACTIONS: Mapping[str, tuple[str, ...]] = {
    "click": ("button", *_X_Y),
    "double_click": _X_Y,
    "drag": ("path",),
    "keypress": ("keys",),
    "move": _X_Y,
    "screenshot": (),
    "scroll": (*_X_Y, "scroll_x", "scroll_y"),
    "type": ("text",),
    "wait": (),
}
"""Required fields of each action of OpenAI's computer tool, by action."""
_POINT = {"type": "object", "properties": {name: {"type": "integer"} for name in _X_Y}, "required": list(_X_Y)}
_NEEDED = "; ".join(f"{name}: {', '.join(fields)}" for name, fields in OPENAI_ACTIONS.items() if fields)
_ACTION: dict[str, Any] = {
    "type": "object",
    "properties": {
        "type": {"type": "string", "enum": list(OPENAI_ACTIONS), "description": f"Needs these fields: {_NEEDED}."},
        **{name: {"type": "integer"} for name in _NUMBERS},
        "button": {"type": "string", "enum": ["left", "right", "wheel", "back", "forward"]},
        "keys": {"type": "array", "items": {"type": "string"}},
        "path": {"type": "array", "items": _POINT},
        "text": {"type": "string"},
    },
    "required": ["type"],
}
_ACTION_LIST: dict[str, Any] = {
    "type": "object",
    "properties": {"actions": {"type": "array", "items": _ACTION, "minItems": 1}},
    "required": ["actions"],
}
_PREVIEW = re.compile(r"\(OpenAI's computer_use_preview, (\w{1,32}), (\d{1,5})x(\d{1,5}) pixels\)\Z")
OPENAI_TOOLS = ("computer", "computer_use_preview")


def openai_function(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the function for one of :data:`OPENAI_TOOLS`."""
    about = "Controls the mouse and the keyboard of a screen."
    if tool["type"] == "computer":
        return _function(COMPUTER, f"{about} (OpenAI's computer)", _ACTION_LIST)
    size = f"{tool.get('display_width')}x{tool.get('display_height')}"
    settings = f"(OpenAI's computer_use_preview, {tool.get('environment')}, {size} pixels)"
    return _function(COMPUTER, f"{about} {settings}", _ACTION)


def openai_tool(function: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the OpenAI tool that a function replaces. Returns ``None`` for any other function."""
    tool: dict[str, Any] = {"type": "computer"}
    if match := _PREVIEW.search(function.get("description") or ""):
        width, height = int(match[2]), int(match[3])
        tool = {"type": "computer_use_preview", "environment": match[1]}
        tool |= {"display_width": width, "display_height": height}
    return tool if openai_function(tool) == function else None


def openai_actions(arguments: Mapping[str, Any]) -> dict[str, Any] | None:
    """Converts the function's arguments to the field ``action`` or ``actions`` of OpenAI's ``computer_call``.

    Returns ``None`` if the client could not execute an action. This is the case if the action is unknown, or if a field
    is missing or has the wrong type.
    """
    if set(arguments) == {"actions"}:
        actions = arguments["actions"]
        known = isinstance(actions, list) and bool(actions) and all(map(_is_action, actions))
        return {"actions": actions} if known else None
    return {"action": dict(arguments)} if _is_action(arguments) else None


def openai_arguments(item: Mapping[str, Any]) -> dict[str, Any]:
    """Converts an OpenAI ``computer_call`` to the function's arguments. Omits empty fields, which clients add."""
    if item.get("actions"):
        return {"actions": [dict(_filled(action)) for action in item["actions"]]}
    return dict(_filled(item.get("action") or {}))


def _filled(action: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    return ((name, value) for name, value in action.items() if value is not None)


def _is_action(action: Any) -> bool:
    if not isinstance(action, Mapping) or not isinstance(action.get("type"), str):
        return False
    needed = OPENAI_ACTIONS.get(action["type"])
    given = dict(_filled(action))
    return needed is not None and set(needed) <= set(given) and all(map(_is_field, given, given.values()))


def _is_field(name: str, value: Any) -> bool:
    """Returns whether a value has the right type for a field. For unknown fields any value is valid, because clients
    ignore them."""
    if name in ("button", "text"):
        return isinstance(value, str)
    if name == "keys":
        return isinstance(value, list) and all(isinstance(key, str) for key in value)
    if name == "path":
        return isinstance(value, list) and all(map(_is_place, value))
    return name not in _NUMBERS or _is_pixels(value)


def _is_place(value: Any) -> bool:
    return isinstance(value, Mapping) and all(_is_pixels(value.get(axis)) for axis in _X_Y)


def _is_pixels(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _MAX_PIXELS


def safety_checks_of(call: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the safety checks that OpenAI attached to a chat tool call. The client must acknowledge them."""
    openai = (call.get("extra_content") or {}).get("openai") or {}
    return list(openai.get("pending_safety_checks") or ())
