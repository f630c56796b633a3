"""Stands in for the program ``screen`` in tests without a desktop: one page with a button, a field and a list.

Its state is a JSON file in the sandbox. It takes the same arguments and prints the same lines as the real program.
"""

from __future__ import annotations

import json
import struct
import zlib
from pathlib import Path
from typing import Any

from megaflow_hpc.types import ExecResult
from tests.support.local_sandbox import LocalSandbox

WIDTH, HEIGHT = 320, 200
BUTTON = (100, 60, 180, 100)
"""The button's left, top, right and bottom in pixels."""


class ScreenSandbox(LocalSandbox):
    """A sandbox whose program ``screen`` runs in this process."""

    async def exec(self, command: Any, **options: Any) -> ExecResult:
        if command[0] != "screen":
            return await super().exec(command, **options)
        status, line = _screen(command[1:], self.root)
        return ExecResult(status, f"{line}\n".encode())


def png(width: int, height: int, rows: bytes) -> bytes:
    """Encodes rows of RGB pixels, each after a zero byte."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def picture(state: dict[str, Any]) -> bytes:
    """Draws the page: the button is green once it was clicked, and typed text makes the last row darker."""
    left, top, right, bottom = BUTTON
    colour = b"\x20\xa0\x20" if state["clicked"] else b"\x30\x60\xc0"
    plain = b"\0" + b"\xf0\xf0\xf0" * WIDTH
    button = b"\0" + b"\xf0\xf0\xf0" * left + colour * (right - left) + b"\xf0\xf0\xf0" * (WIDTH - right)
    text = state["text"].encode()[: WIDTH * 3].ljust(WIDTH * 3, b"\xff")
    rows = [button if top <= y < bottom else plain for y in range(HEIGHT - 1)]
    return png(WIDTH, HEIGHT, b"".join(rows) + b"\0" + text)


def do(action: dict[str, Any], state: dict[str, Any]) -> str:
    """Carries out an action. Returns what is wrong with it."""
    name, point = action.get("action"), action.get("coordinate")
    if action.get("element") not in (None, "12"):
        return f"element {action['element']!r} is not on the page"
    if name == "left_click" and "element" in action:
        state["clicked"] = True
    elif name == "left_click":
        if not (isinstance(point, list) and len(point) == 2):
            return "left_click: coordinate: expected [x, y]"
        x, y = point
        if not (0 <= x < WIDTH and 0 <= y < HEIGHT):
            return f"coordinate {point}: outside of the screen of {WIDTH}x{HEIGHT}"
        left, top, right, bottom = BUTTON
        state["clicked"] = state["clicked"] or (left <= x < right and top <= y < bottom)
    elif name == "type":
        state["text"] += action["text"]
    elif name == "fill":
        state["text"] = action["text"]
    return ""


def _screen(words: list[str], home: Path) -> tuple[int, str]:
    """Returns the exit status and the line that the program prints."""
    file = home / "screen.json"
    if words[0] == "start":
        file.write_text(json.dumps({"clicked": False, "text": "", "started": words[1:]}))
        return 0, json.dumps({"ok": True, "size": [WIDTH, HEIGHT]})
    if not file.exists():
        return 1, '{"ok": false, "error": "the display does not answer"}'
    state = json.loads(file.read_text())
    if words == ["tree", "--ids"]:
        return 0, f"[12] button 'Go'{', pressed' if state['clicked'] else ''}"
    if words[0] == "tree":
        return 0, f'button "Go" {BUTTON[0] + 40},{BUTTON[1] + 20}{" pressed" if state["clicked"] else ""}'
    problem = do(json.loads(words[1]), state)
    file.write_text(json.dumps(state))
    answer: dict[str, Any] = {"ok": False, "error": problem} if problem else {"ok": True}
    if "--screenshot" in words and not problem:
        answer["screenshot"] = words[words.index("--screenshot") + 1]
        file, broken = home / answer["screenshot"].lstrip("/"), home / "broken.png"
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(broken.read_bytes() if broken.exists() else picture(state))
    return int(bool(problem)), json.dumps(answer)
