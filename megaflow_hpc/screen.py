"""Actions on a screen, as defined by Anthropic's computer tool and by BrowserGym.

The sandbox program ``screen`` executes Anthropic's actions. The agent ``computer-use`` offers them to models, and the
gateway translates other vendors' tools to them. BrowserGym's actions refer to the elements of a page by id. The agent
offers them on request, and translates each into one or two actions of ``screen``.
"""

from __future__ import annotations

import ast
import inspect
import re
import string
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar, get_type_hints

import msgspec

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
"""Fields of an action: name, an action that uses the field, and JSON schema."""


def parameters(actions: Sequence[str]) -> dict[str, Any]:
    """Returns the JSON schema of a function that performs one of these actions."""
    fields = {name: schema for name, action, schema in _FIELDS if action in actions}
    action = {"type": "string", "enum": list(actions)}
    return {"type": "object", "properties": {"action": action, **fields}, "required": ["action"]}


# --- BrowserGym's actions ---------------------------------------------------------------------------------------------

Steps = list[dict[str, Any]]
"""Actions of ``screen``, in order. ``done`` and ``fail`` are handled by the agent itself."""
Button = Literal["left", "middle", "right"]
Modifiers = Sequence[Literal["Alt", "Control", "ControlOrMeta", "Meta", "Shift"]]
_Function = TypeVar("_Function", bound=Callable[..., Steps])
EXAMPLE = "expected an action such as click('12')"
_NAMES = (
    "Enter:Return Backspace:BackSpace PageUp:Prior PageDown:Next ArrowUp:Up ArrowDown:Down ArrowLeft:Left "
    "ArrowRight:Right Space:space Backquote:grave Minus:minus Equal:equal Backslash:backslash +:plus -:minus =:equal "
    "Alt:alt Control:ctrl ControlOrMeta:ctrl Meta:super Shift:shift"
)
_KEYS = {
    **{f"Key{letter}": letter.lower() for letter in string.ascii_uppercase},
    **{f"Digit{digit}": digit for digit in string.digits},
    **dict(pair.split(":") for pair in _NAMES.split()),
}
"""Maps key names of ``KeyboardEvent`` to xdotool's names, if they differ."""


class WebAction(NamedTuple):
    """An action of BrowserGym, with its names and parameters."""

    function: Callable[..., Steps]
    needs: str
    """The observation that the action needs: ``tree`` for element ids, ``screenshot`` for coordinates, or empty."""

    def usage(self) -> str:
        """Returns the action's name, its parameters with their default values, and its purpose, in one line."""
        parameters = inspect.signature(self.function).parameters.values()
        shown = ", ".join(str(parameter.replace(annotation=parameter.empty)) for parameter in parameters)
        return f"{self.function.__name__}({shown}): {self.function.__doc__}"

    def tool(self) -> dict[str, Any]:
        """Returns the action as a function tool in OpenAI format."""
        hints, parameters = get_type_hints(self.function), inspect.signature(self.function).parameters
        schema = {
            "type": "object",
            "properties": {name: msgspec.json.schema(hints[name]) for name in parameters},
            "required": [name for name, parameter in parameters.items() if parameter.default is parameter.empty],
        }
        about = {"name": self.function.__name__, "description": self.function.__doc__, "parameters": schema}
        return {"type": "function", "function": about}

    def steps(self, positional: Sequence[Any], named: Mapping[str, Any]) -> Steps:
        """Translates a call into actions of ``screen``.

        Raises:
            ValueError: The arguments are invalid.
        """
        name, hints = self.function.__name__, get_type_hints(self.function)
        try:
            call = inspect.signature(self.function).bind(*positional, **named)
            for parameter, value in call.arguments.items():
                name = f"{self.function.__name__}: {parameter}"
                call.arguments[parameter] = msgspec.convert(value, hints[parameter])
        except (TypeError, msgspec.ValidationError) as error:
            raise ValueError(f"{name}: {error}") from None
        return self.function(*call.args, **call.kwargs)


WEB_ACTIONS: dict[str, WebAction] = {}


def _action(needs: str = "") -> Callable[[_Function], _Function]:
    def add(function: _Function) -> _Function:
        WEB_ACTIONS[function.__name__] = WebAction(function, needs)
        return function

    return add


def _pointer(kind: str, place: Mapping[str, Any], modifiers: Modifiers = ()) -> Steps:
    held = {"text": "+".join(_KEYS[name] for name in modifiers)} if modifiers else {}
    return [{"action": kind, **place, **held}]


@_action("tree")
def click(bid: str, button: Button = "left", modifiers: Modifiers = ()) -> Steps:
    """Clicks an element."""
    return _pointer(f"{button}_click", {"element": bid}, modifiers)


@_action("tree")
def dblclick(bid: str, button: Literal["left"] = "left", modifiers: Modifiers = ()) -> Steps:
    """Double-clicks an element."""
    return _pointer("double_click", {"element": bid}, modifiers)


@_action("tree")
def hover(bid: str) -> Steps:
    """Moves the pointer onto an element."""
    return _pointer("mouse_move", {"element": bid})


@_action("tree")
def fill(bid: str, value: str, enable_autocomplete_menu: bool = False) -> Steps:
    """Replaces the text of a field. If a menu of suggestions is wanted, the last character is typed."""
    typed = value[-1:] if enable_autocomplete_menu else ""
    steps: Steps = [{"action": "fill", "element": bid, "text": value.removesuffix(typed)}]
    return [*steps, *keyboard_type(typed)] if typed else steps


@_action("tree")
def clear(bid: str) -> Steps:
    """Empties a field."""
    return fill(bid, "")


@_action("tree")
def focus(bid: str) -> Steps:
    """Gives an element the focus."""
    return [{"action": "focus", "element": bid}]


@_action("tree")
def press(bid: str, key_comb: str) -> Steps:
    """Gives an element the focus and presses keys, such as 'Enter', 'ArrowDown' or 'Control+a'."""
    return [*focus(bid), *keyboard_press(key_comb)]


@_action("tree")
def select_option(bid: str, options: str | list[str]) -> Steps:
    """Selects options of a list by their texts or values."""
    return [{"action": "select", "element": bid, "options": [options] if isinstance(options, str) else options}]


@_action("tree")
def drag_and_drop(from_bid: str, to_bid: str) -> Steps:
    """Drags an element to the middle of another one."""
    return _pointer("left_click_drag", {"start_element": from_bid, "element": to_bid})


@_action("screenshot")
def mouse_move(x: float, y: float) -> Steps:
    """Moves the pointer."""
    return _pointer("mouse_move", {"coordinate": [x, y]})


@_action("screenshot")
def mouse_click(x: float, y: float, button: Button = "left") -> Steps:
    """Clicks at a point."""
    return _pointer(f"{button}_click", {"coordinate": [x, y]})


@_action("screenshot")
def mouse_dblclick(x: float, y: float, button: Literal["left"] = "left") -> Steps:
    """Double-clicks at a point."""
    return _pointer("double_click", {"coordinate": [x, y]})


@_action("screenshot")
def mouse_down(x: float, y: float, button: Literal["left"] = "left") -> Steps:
    """Moves the pointer to a point and holds its button."""
    return _pointer("left_mouse_down", {"coordinate": [x, y]})


@_action("screenshot")
def mouse_up(x: float, y: float, button: Literal["left"] = "left") -> Steps:
    """Moves the pointer to a point and releases its button."""
    return _pointer("left_mouse_up", {"coordinate": [x, y]})


@_action("screenshot")
def mouse_drag_and_drop(from_x: float, from_y: float, to_x: float, to_y: float) -> Steps:
    """Drags from one point to another."""
    return _pointer("left_click_drag", {"start_coordinate": [from_x, from_y], "coordinate": [to_x, to_y]})


@_action()
def scroll(delta_x: float, delta_y: float) -> Steps:
    """Scrolls by pixels, to the right and down, at the pointer."""
    return [{"action": "scroll", "delta": [delta_x, delta_y]}]


@_action()
def keyboard_press(key: str) -> Steps:
    """Presses keys, such as 'Enter', 'ArrowDown' or 'Control+a'."""
    if len(key) == 1:
        return keyboard_type(key)
    names = re.findall(r"[^+]+|\+$", key)
    return [{"action": "key", "text": "+".join(_KEYS.get(name, name) for name in names)}]


@_action()
def keyboard_type(text: str) -> Steps:
    """Types a text into the element that has the focus."""
    return [{"action": "type", "text": text}]


@_action()
def goto(url: str) -> Steps:
    """Opens an address."""
    return [{"action": "goto", "url": url}]


@_action()
def go_back() -> Steps:
    """Returns to the previous page."""
    return [{"action": "go_back"}]


@_action()
def go_forward() -> Steps:
    """Undoes go_back."""
    return [{"action": "go_forward"}]


@_action()
def noop(wait_ms: float = 1000) -> Steps:
    """Waits for this many milliseconds."""
    return [{"action": "wait", "duration": wait_ms / 1000}]


@_action()
def send_msg_to_user(text: str) -> Steps:
    """Ends the task with a message to the user."""
    return [{"action": "done", "text": text}]


@_action()
def report_infeasible(reason: str) -> Steps:
    """Ends a task that cannot be carried out."""
    return [{"action": "fail", "text": reason}]


def web_actions(observe: str) -> tuple[str, ...]:
    """Returns the names of the actions that a model can use with an observation: ``tree``, ``screenshot`` or
    ``both``."""
    seen = ("", "tree", "screenshot") if observe == "both" else ("", observe)
    return tuple(name for name, action in WEB_ACTIONS.items() if action.needs in seen)


def web_calls(text: str) -> list[tuple[str, list[Any], dict[str, Any]]]:
    """Parses calls with literal arguments. Nothing is evaluated.

    Returns:
        Name, positional and named arguments of each call, at least one.

    Raises:
        ValueError: The text contains anything else.
    """
    try:
        with warnings.catch_warnings(action="ignore"):  # escapes such as "\\d" cause warnings
            calls = [_call(statement) for statement in ast.parse(text).body]
    except SyntaxError as error:
        raise ValueError(f"{error.msg}: {EXAMPLE}") from None
    except (ValueError, RecursionError, MemoryError):
        raise ValueError(f"{EXAMPLE}, with literal arguments") from None
    if not calls:
        raise ValueError(EXAMPLE)
    return calls


def _call(statement: ast.stmt) -> tuple[str, list[Any], dict[str, Any]]:
    match statement:
        case ast.Expr(ast.Call(ast.Name(name), positional, named)) if all(each.arg for each in named):
            arguments = {str(each.arg): ast.literal_eval(each.value) for each in named}
            return name, [ast.literal_eval(each) for each in positional], arguments
    raise ValueError
