"""Solves MiniWoB++ pages using their accessibility tree. Serves as the reference solution for the imported tasks.

Each task's ``solution/solve.py`` is a copy of this file. It runs in the sandbox and only needs the standard library:
``python3 solve.py PAGE UTTERANCE``.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

QUERY_PIXELS = 150
"""Height, in display pixels, of the bar at the top that shows the page's instruction."""
ANIMATION_S = 0.6
"""Maximum seconds that a page takes to open a section."""
LINE = re.compile(
    r'^(?P<indent> *)(?P<role>\S+) (?P<name>"(?:[^"\\]|\\.)*")'
    r"(?: \((?P<x>-?\d+),(?P<y>-?\d+)\) (?P<width>\d+)x(?P<height>\d+))?(?: (?P<details>.*))?$"
)


@dataclass(frozen=True)
class Element:
    """An element in the output of ``screen tree``, with the centre of its box."""

    role: str
    name: str
    x: int
    y: int
    height: int
    details: str


def look() -> list[Element]:
    """Returns the elements of the page, from top to bottom and from left to right, without the bar at the top."""
    text = subprocess.run(["screen", "tree"], capture_output=True, text=True, check=True).stdout
    nodes = []
    for match in filter(None, map(LINE.match, text.splitlines())):
        if match["x"] is not None and int(match["y"]) >= QUERY_PIXELS:
            box = int(match["x"]), int(match["y"]), int(match["height"])
            nodes.append(Element(match["role"], json.loads(match["name"]), *box, match["details"] or ""))
    return nodes


def do(**action: Any) -> None:
    """Performs one action."""
    subprocess.run(["screen", "do", json.dumps(action)], stdout=subprocess.DEVNULL, check=True)


def find(*roles: str, name: str | None = None) -> list[Element]:
    """Returns the elements with one of the roles, and with this name if given, from top to bottom."""
    found = [node for node in look() if node.role in roles and (name is None or node.name.strip() == name.strip())]
    return sorted(found, key=lambda node: (node.y, node.x))


def click(node: Element) -> None:
    """Clicks the centre of an element."""
    do(action="left_click", coordinate=[node.x, node.y])


def press(name: str) -> None:
    """Clicks the button with this name."""
    click(find("button", name=name)[0])


def fill(box: Element, text: str) -> None:
    """Types into a text field."""
    click(box)
    do(action="type", text=text)


def quoted(utterance: str) -> list[str]:
    """Returns the quoted parts of the page's instruction."""
    return re.findall(r'"([^"]*)"', utterance)


# --- pages ----------------------------------------------------------------------------------------------------------


def _click_named_button(utterance: str) -> None:
    press(quoted(utterance)[0])


def _click_test(utterance: str) -> None:
    click(find("button")[0])


def _click_test_2(utterance: str) -> None:
    press(utterance.rstrip(".").split()[-1])


def _click_sequence(utterance: str) -> None:
    for name in re.findall(r"button (\w+)", utterance):
        press(name)


def _click_link(utterance: str) -> None:
    click(find("StaticText", name=quoted(utterance)[0])[0])


def _click_option(utterance: str) -> None:
    wanted = re.fullmatch(r"Select (.*) and click Submit\.", utterance)
    assert wanted
    click(find("radio", name=wanted[1])[0])
    press("Submit")


def _click_checkboxes(utterance: str) -> None:
    wanted = re.fullmatch(r"Select (.*) and click Submit\.", utterance)
    assert wanted
    for name in [] if wanted[1] == "nothing" else wanted[1].split(", "):
        click(find("checkbox", name=name)[0])
    press("Submit")


def _click_dialog(utterance: str) -> None:
    press("Close")


def _click_dialog_2(utterance: str) -> None:
    name = quoted(utterance)[0]
    press("Close" if name == "x" else name)


def _click_tab(utterance: str) -> None:
    click(find("tab", "link", name=utterance.removeprefix("Click on ").rstrip("."))[0])


def _click_widget(utterance: str) -> None:
    kind = quoted(utterance)[0]
    roles = {"text": "textbox", "textarea": "textbox"}
    boxes = sorted(find(roles.get(kind, kind)), key=lambda node: node.height)
    click(boxes[-1 if kind == "textarea" else 0])


def _click_collapsible(utterance: str) -> None:
    click(find("tab")[0])
    time.sleep(ANIMATION_S)
    press("Submit")


def _find_link_in_sections(utterance: str) -> None:
    name = quoted(utterance)[0]
    for number in range(len(find("tab"))):
        if not find("StaticText", name=name):
            click(find("tab")[number])
            time.sleep(ANIMATION_S)
    _click_link(utterance)


def _choose_list(utterance: str) -> None:
    wanted = re.fullmatch(r"Select (.*) from the list and click Submit\.", utterance)
    assert wanted
    click(find("combobox")[0])
    time.sleep(ANIMATION_S)
    do(action="type", text=wanted[1])
    do(action="key", text="Return")
    press("Submit")


def _focus_text(utterance: str) -> None:
    place = re.search(r"(\d)", utterance)
    click(find("textbox")[int(place[1]) - 1 if place else 0])


def _enter_text(utterance: str) -> None:
    text = quoted(utterance)[0]
    if "upper case" in utterance:
        text = text.upper()
    elif "lower case" in utterance:
        text = text.lower()
    fill(find("textbox")[0], text)
    press("Submit")


def _enter_password(utterance: str) -> None:
    for box in find("textbox"):
        fill(box, quoted(utterance)[0])
    press("Submit")


def _login(utterance: str) -> None:
    for box, text in zip(find("textbox"), quoted(utterance), strict=True):
        fill(box, text)
    press("Login")


def _arithmetic(utterance: str) -> None:
    problem = re.search(r"(\d+) ([-+x]) (\d+) =", " ".join(node.name for node in find("StaticText")))
    assert problem
    one, two = int(problem[1]), int(problem[3])
    fill(find("textbox")[0], str({"+": one + two, "-": one - two, "x": one * two}[problem[2]]))
    press("Submit")


def _algebra(utterance: str) -> None:
    problem = re.search(r"(x|\d+) ([-+]) (x|\d+) = (\d+)", " ".join(node.name for node in find("StaticText")))
    assert problem
    result = int(problem[4])
    if problem[2] == "+":
        answer = result - int(problem[3] if problem[1] == "x" else problem[1])
    else:
        answer = result + int(problem[3]) if problem[1] == "x" else int(problem[1]) - result
    fill(find("textbox")[0], str(answer))
    press("Submit")


def _odd_or_even(utterance: str) -> None:
    for number in [node for node in find("StaticText") if re.fullmatch(r"-?\d+", node.name)]:
        wanted = find("button", name="Odd" if int(number.name) % 2 else "Even")
        click(min(wanted, key=lambda button: abs(button.y - number.y)))
    press("Submit")


def _find_word(utterance: str) -> None:
    place = re.search(r"(\d+)(?:st|nd|rd|th) word", utterance)
    assert place
    words = " ".join(node.name for node in find("StaticText") if node.name != "Submit").split()
    fill(find("textbox")[0], re.sub("[^a-zA-Z]", "", words[int(place[1]) - 1]))
    press("Submit")


def _read_table(utterance: str) -> None:
    wanted = re.fullmatch(r"Enter the value of (.*) into the text field and press Submit\.", utterance)
    assert wanted
    texts = find("StaticText")
    key = next(node for node in texts if node.name == wanted[1])
    fill(find("textbox")[0], next(node.name for node in texts if abs(node.y - key.y) < 5 and node.x > key.x))
    press("Submit")


def _value(box: Element) -> str:
    match = re.search(r'value=("(?:[^"\\]|\\.)*")', box.details)
    return json.loads(match[1]) if match else ""


def _copy_paste(utterance: str) -> None:
    answer, source = sorted(find("textbox"), key=_value)
    fill(answer, _value(source))
    press("Submit")


def _scroll_text(utterance: str) -> None:
    answer, source = sorted(find("textbox"), key=_value)
    fill(answer, _value(source).split()[-1].replace(".", ""))
    press("Submit")


PAGES: dict[str, Callable[[str], None]] = {
    "choose-list": _choose_list,
    "click-button": _click_named_button,
    "click-button-sequence": _click_sequence,
    "click-checkboxes": _click_checkboxes,
    "click-checkboxes-large": _click_checkboxes,
    "click-checkboxes-transfer": _click_checkboxes,
    "click-collapsible": _click_collapsible,
    "click-collapsible-2": _find_link_in_sections,
    "click-dialog": _click_dialog,
    "click-dialog-2": _click_dialog_2,
    "click-link": _click_link,
    "click-option": _click_option,
    "click-tab": _click_tab,
    "click-tab-2-easy": _find_link_in_sections,
    "click-test": _click_test,
    "click-test-2": _click_test_2,
    "click-test-transfer": _click_test_2,
    "click-widget": _click_widget,
    "copy-paste": _copy_paste,
    "enter-password": _enter_password,
    "enter-text": _enter_text,
    "enter-text-2": _enter_text,
    "enter-text-dynamic": _enter_text,
    "find-word": _find_word,
    "focus-text": _focus_text,
    "focus-text-2": _focus_text,
    "login-user": _login,
    "odd-or-even": _odd_or_even,
    "read-table": _read_table,
    "scroll-text": _scroll_text,
    "simple-algebra": _algebra,
    "simple-arithmetic": _arithmetic,
    "unicode-test": _click_named_button,
}
"""Maps the pages that can be solved to their solvers, which take the page's instruction."""

if __name__ == "__main__":
    PAGES[sys.argv[1]](sys.argv[2])
