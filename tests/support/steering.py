"""Texts that control a terminal on which they are printed."""

from __future__ import annotations

ATTACKS = {
    "colour": "\x1b[31mred",
    "title": "\x1b]0;owned\x07",
    "clipboard": "\x1b]52;c;ZXZpbA==\x07",
    "eight bits": "\x9b31m\x9d0;owned\x9c",
    "back": "secret\r\x08\x08gone",
    "direction": "\u202egpj.exe",
    "isolates": "\u2066if\u2069",
    "line of its own": "\u2028fake: line",
    "half a character": "\udc9b31m",
    "delete": "\x7f",
}
EVIL = "".join(text for name, text in ATTACKS.items() if name != "half a character")
"""All attacks that are valid UTF-8."""
STEERING = set(map(chr, range(32))) - set("\n\t") | set(map(chr, range(127, 160))) | set("\u202e\u2066\u2069\u2028")


def harmless(text: str) -> bool:
    """Return whether a terminal prints a text without obeying anything in it."""
    return not STEERING & set(text) and not any(0xD800 <= ord(character) < 0xE000 for character in text)
