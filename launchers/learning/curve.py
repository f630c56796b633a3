"""Draws learning curves: as text for a terminal, and as an SVG picture, with nothing but the standard library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

BLOCKS = " ▁▂▃▄▅▆▇█"
ROWS = 8
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 400, 50, 20, 34, 44
COLOURS = ("#3366cc", "#dc3912", "#109618", "#ff9900", "#990099", "#0099c6", "#5c4033")
MEAN = 5
"""Steps of the running mean that is drawn over the points."""


def mean(values: Sequence[float]) -> float:
    """Returns the mean of at least one value."""
    return sum(values) / len(values)


def running(values: Sequence[float], width: int = MEAN) -> list[float]:
    """Returns the mean of each value and those before it, ``width`` at most."""
    return [mean(values[max(0, end - width) : end]) for end in range(1, len(values) + 1)]


def text(values: Sequence[float]) -> str:
    """Returns a bar for each value between 0 and 1, over an axis of steps from 1."""
    lines = []
    for row in reversed(range(ROWS)):
        fills = [min(max(round((value * ROWS - row) * (len(BLOCKS) - 1)), 0), len(BLOCKS) - 1) for value in values]
        label = f"{(row + 1) / ROWS:.2f}" if row % 2 else " " * 4
        lines.append(f"{label} │{''.join(BLOCKS[fill] for fill in fills)}".rstrip())
    lines.append(f"     └{'─' * len(values)}")
    lines.append(f"      1{str(len(values)).rjust(len(values) - 1)}" if len(values) > 3 else "")
    return "\n".join(lines)


def svg(curves: Mapping[str, Sequence[float]], title: str) -> str:
    """Returns a picture of rewards between 0 and 1 by step: points, and their running mean as a line.

    Args:
        curves: by name.
    """
    steps = max(2, *(len(values) for values in curves.values()))

    def x(step: float) -> float:
        return round(LEFT + (step - 1) / (steps - 1) * (WIDTH - LEFT - RIGHT), 1)

    def y(value: float) -> float:
        return round(HEIGHT - BOTTOM - value * (HEIGHT - TOP - BOTTOM), 1)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="12"><rect width="100%" height="100%" fill="white"/>',
        f'<text x="{WIDTH / 2}" y="20" text-anchor="middle" font-size="14">{escape(title)}</text>',
    ]
    for tenth in range(0, 11, 2):
        at = y(tenth / 10)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at}" y2="{at}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{at + 4}" text-anchor="end">{tenth / 10:.1f}</text>')
    for step in sorted({1, *range(10, steps + 1, 10)}):
        parts.append(f'<text x="{x(step)}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{step}</text>')
    parts.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 8}" text-anchor="middle">step</text>')
    for number, (name, values) in enumerate(curves.items()):
        colour = COLOURS[number % len(COLOURS)]
        dots = "".join(f'<circle cx="{x(step)}" cy="{y(value)}" r="2"/>' for step, value in enumerate(values, 1))
        line = " ".join(f"{x(step)},{y(value)}" for step, value in enumerate(running(values), 1))
        parts.append(f'<g fill="{colour}" fill-opacity="0.45">{dots}</g>')
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        at = f'x="{WIDTH - RIGHT - 8}" y="{HEIGHT - BOTTOM - 14 * (len(curves) - number)}"'
        parts.append(f'<text {at} text-anchor="end" fill="{colour}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>", ""])
