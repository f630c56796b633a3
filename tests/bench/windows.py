"""Small windows with buttons, for ``tests.bench.clicking``: their screenshots, tasks, agent and demonstrations.

A task shows the model a screenshot and asks for a click on the button with a label, or on one button and then, in the
window that this opens, on another. The model answers with a point, such as ``31,70``. A click that misses leaves the
window as it is. Each task has a window of its own, drawn by its seed; tasks of a campaign are seen once.

Needs only the standard library, as workers and the engine's environment import it.
"""

from __future__ import annotations

import base64
import random
import re
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

SIDE = 56
"""Pixels of a window's side: two by two tokens of the tiny model."""
COLUMNS, ROWS = 2, 2
"""Places for buttons."""
BUTTONS = 4
"""Number of buttons in a window."""
WIDTH, HEIGHT = 26, 24
"""Size of a button in pixels."""
LABELS = {
    "SAVE": "a0e0ff",
    "OPEN": "ffe060",
    "QUIT": "ff5050",
    "HELP": "40c040",
    "COPY": "ffffff",
    "FIND": "c080ff",
    "UNDO": "ff9020",
    "EDIT": "3060ff",
}
"""Label → colour of its button."""
GLYPHS = {
    "A": "0e11111f111111",
    "C": "0e11101010110e",
    "D": "1e11111111111e",
    "E": "1f10101e10101f",
    "F": "1f10101e101010",
    "H": "1111111f111111",
    "I": "0e04040404040e",
    "L": "1010101010101f",
    "N": "11191513111111",
    "O": "0e11111111110e",
    "P": "1e11111e101010",
    "Q": "0e11111115120d",
    "S": "0f10100e01011e",
    "T": "1f040404040404",
    "U": "1111111111110e",
    "V": "11111111110a04",
    "Y": "11110a04040404",
}
"""Letters of five by seven pixels: seven rows in hexadecimal, of five bits each."""
POINT = re.compile(r"(\d{1,3}),(\d{1,3})")
ANSWER = 10
"""Maximum number of tokens of an answer."""


@dataclass(frozen=True)
class Window:
    """A window.

    Attributes:
        places: label → left upper corner of its button, in pixels.
    """

    places: Mapping[str, tuple[int, int]]

    @classmethod
    def draw(cls, chance: random.Random) -> Window:
        """Draws the buttons of a window."""
        cells = chance.sample([(x, y) for x in range(COLUMNS) for y in range(ROWS)], BUTTONS)
        side, height = SIDE // COLUMNS, SIDE // ROWS
        return cls(
            {
                label: (x * side + (side - WIDTH) // 2, y * height + (height - HEIGHT) // 2)
                for label, (x, y) in zip(chance.sample(list(LABELS), BUTTONS), cells, strict=True)
            }
        )

    def at(self, point: tuple[int, int] | None) -> str | None:
        """Returns the label of the button at a point, or ``None``."""
        if point is None:
            return None
        x, y = point
        return next(
            (label for label, (a, b) in self.places.items() if 0 <= x - a < WIDTH and 0 <= y - b < HEIGHT), None
        )

    def png(self) -> bytes:
        """Returns the screenshot."""
        pixels = [bytearray(b"\xd0\xd8\xe8" * SIDE) for _ in range(SIDE)]
        for label, (left, top) in self.places.items():
            for row in pixels[top : top + HEIGHT]:
                row[3 * left : 3 * (left + WIDTH)] = bytes.fromhex(LABELS[label]) * WIDTH
            for number, letter in enumerate(label):
                for y, bits in enumerate(bytes.fromhex(GLYPHS[letter])):
                    for x in range(5):
                        if bits >> (4 - x) & 1:
                            place = 3 * (left + 2 + 6 * number + x)
                            pixels[top + 9 + y][place : place + 3] = bytes(3)
        rows = b"".join(b"\x00" + bytes(row) for row in pixels)
        header = struct.pack(">IIBBBBB", SIDE, SIDE, 8, 2, 0, 0, 0)
        chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
        return b"\x89PNG\r\n\x1a\n" + b"".join(
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
            for kind, data in chunks
        )

    def part(self) -> dict[str, Any]:
        """Returns the screenshot as a part of a message."""
        url = f"data:image/png;base64,{base64.b64encode(self.png()).decode()}"
        return {"type": "image_url", "image_url": {"url": url}}


@lru_cache(4096)
def desktop(seed: int, steps: int) -> tuple[tuple[Window, str], ...]:
    """Returns the windows of a task in order, each with the label to click."""
    chance = random.Random(seed)
    windows = [Window.draw(chance) for _ in range(steps)]
    return tuple((window, chance.choice(sorted(window.places))) for window in windows)


def point_of(answer: str) -> tuple[int, int] | None:
    """Returns the point that an answer names, or ``None``."""
    found = POINT.fullmatch(answer.strip())
    return (int(found[1]), int(found[2])) if found else None


def clicks(seed: int, steps: int, answers: list[str]) -> tuple[int, Window]:
    """Returns how many windows the answers got through, and the window that is then shown, which may be the last."""
    windows = desktop(seed, steps)
    done = 0
    for answer in answers:
        window, label = windows[min(done, steps - 1)]
        if done < steps and window.at(point_of(answer)) == label:
            done += 1
    return done, windows[min(done, steps - 1)][0]


class ClickTask:
    """Click the button with a label."""

    image = "none"
    timeout_s = 120
    steps: ClassVar[int] = 1
    count: ClassVar[int] = 1000
    """Number of tasks. A campaign needs one for each group of rollouts."""

    @classmethod
    def instances(cls) -> dict[str, dict[str, int]]:
        return {f"click-{seed}": {"seed": seed} for seed in range(cls.count)}

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self.instruction = " ".join(label for _, label in desktop(seed, self.steps))

    async def score(self, sandbox: Any, messages: list[dict[str, Any]]) -> float:
        answers = [str(message["content"]) for message in messages if message["role"] == "assistant"]
        return float(clicks(self._seed, self.steps, answers)[0] == self.steps)


class TwoClicks(ClickTask):
    """Click one button, then another in the window that opens."""

    steps: ClassVar[int] = 2
    count: ClassVar[int] = 2000


class Clicker:
    """Asks the model for one click on each screenshot.

    Args:
        steps: number of screenshots.
    """

    def __init__(self, steps: int = 1) -> None:
        self._steps = steps

    async def run(self, task: Any, sandbox: Any, model: Any) -> Any:
        from megaflow_hpc.agents import ask
        from megaflow_hpc.types import AgentResult

        seed = int(task.metadata["python"]["arguments"]["seed"])
        messages: list[dict[str, Any]] = []
        answers: list[str] = []
        for _ in range(self._steps):
            _, window = clicks(seed, self._steps, answers)
            text = [{"type": "text", "text": task.instruction}] if not messages else []
            messages.append({"role": "user", "content": [*text, window.part()]})
            answer = await ask(model, messages, max_tokens=ANSWER)
            answers.append(answer.text)
            messages.append({"role": "assistant", "content": answer.text})
        return AgentResult()


def caption(chance: random.Random, steps: int) -> list[dict[str, Any]]:
    """Returns a conversation that names the buttons of new windows, row by row."""
    messages: list[dict[str, Any]] = []
    for window, _ in desktop(chance.getrandbits(48) + 10**6, steps):  # none of a campaign's
        text = [{"type": "text", "text": "NAME"}] if not messages else []
        labels = sorted(window.places, key=lambda label: window.places[label][::-1])
        messages += [
            {"role": "user", "content": [*text, window.part()]},
            {"role": "assistant", "content": " ".join(labels)},
        ]
    return messages


def demonstration(chance: random.Random, steps: int, right: float, spoiled: float) -> list[dict[str, Any]]:
    """Returns a sloppy conversation about a new window.

    Args:
        right: share of clicks on the button asked for. The others are on another button.
        spoiled: share of clicks that miss their button, by a few pixels below it.
    """
    windows = desktop(chance.getrandbits(48) + 10**6, steps)  # none of a campaign's
    messages: list[dict[str, Any]] = []
    for window, label in windows:
        text = [{"type": "text", "text": " ".join(name for _, name in windows)}] if not messages else []
        aimed = label if chance.random() < right else chance.choice(sorted(window.places))
        left, top = window.places[aimed]
        x, y = left + WIDTH // 2, top + HEIGHT // 2
        if chance.random() < spoiled:
            y += HEIGHT // 2 + 2
        messages += [
            {"role": "user", "content": [*text, window.part()]},
            {"role": "assistant", "content": f"{x},{y}"},
        ]
    return messages
