"""The vocabulary of actions on a screen: that of Anthropic's computer tool.

The sandbox program ``screen`` carries out these actions, the agent ``computer-use`` offers them to models, and the
gateway translates the vendors' own tools to them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

FIRST_ACTIONS = (
    *("key", "type", "mouse_move", "left_click", "left_click_drag", "right_click", "middle_click", "double_click"),
    *("screenshot", "cursor_position"),
)
"""Actions of ``computer_20241022``."""
ACTIONS = (*FIRST_ACTIONS, "left_mouse_down", "left_mouse_up", "triple_click", "scroll", "hold_key", "wait")
"""Actions of ``computer_20250124`` and later versions."""
_POINT = {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2}
_FIELDS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("coordinate", "mouse_move", {**_POINT, "description": "[x, y] in pixels from the upper left corner."}),
    ("start_coordinate", "left_click_drag", {**_POINT, "description": "Where left_click_drag begins."}),
    ("text", "type", {"type": "string", "description": "The text of type; the keys of key and hold_key: ctrl+s."}),
    ("scroll_direction", "scroll", {"type": "string", "enum": ["up", "down", "left", "right"]}),
    ("scroll_amount", "scroll", {"type": "integer", "description": "Steps of the mouse wheel."}),
    ("duration", "wait", {"type": "number", "description": "Seconds of wait and hold_key."}),
    ("region", "zoom", {**_POINT, "minItems": 4, "maxItems": 4, "description": "[x0, y0, x1, y1] of zoom."}),
)
"""Field, an action that needs it, and its schema."""


def parameters(actions: Sequence[str]) -> dict[str, Any]:
    """Returns the JSON schema of a function that carries out one of these actions."""
    fields = {name: schema for name, action, schema in _FIELDS if action in actions}
    action = {"type": "string", "enum": list(actions)}
    return {"type": "object", "properties": {"action": action, **fields}, "required": ["action"]}
