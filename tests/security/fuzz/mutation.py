"""Makes new inputs of valid ones: bytes flipped, cut, spliced and repeated, numbers made huge, brackets nested deep.

Documents (JSON, msgpack) are also decoded, changed in one place as values, and encoded again, so that what lies behind
the decoder is reached.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

import msgpack

LARGEST = 1 << 17
"""Bytes of an input."""

_NUMBERS = (
    0,
    1,
    -1,
    2**7,
    2**8 - 1,
    2**15,
    2**16 - 1,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**53 + 1,
    2**63 - 1,
    2**63,
    2**64 - 1,
)
_DECIMALS = (
    *(str(number).encode() for number in _NUMBERS),
    b"1e308",
    b"1e999",
    b"-0",
    b"9" * 30,
    b"9" * 5000,
    b"0x7f",
    b"nan",
    b"inf",
)
_TEXTS = (
    "",
    "\0",
    "a\0b",
    "\ud800",
    "é🦔",
    "../../x",
    "/etc/passwd",
    "/",
    ".",
    "..",
    "~",
    "%s%n",
    "${HOME}",
    "$(id)",
    "`id`",
    "\x1b[31m",
    "{",
    "{0.__class__}",
    "-rf",
    "--",
    "a" * 300,
    "a/" * 200,
    "a" * 70000,
    "\n",
    "\r\n",
    "\u2028",
    "١٢٣",
    "²",
    "*" * 40,
    "[" * 2000,
)
_NESTS = (
    (b"[", b"]"),
    (b"{", b"}"),
    (b"(", b")"),
    (b"${", b"}"),
    (b'{"a":', b"}"),
    (b"\x91", b""),
    (b"\x81\xa1a", b""),
    (b"- ", b""),
    (b"<<A ", b""),
)


def mutated(
    data: bytes, draw: random.Random, seeds: Sequence[bytes], form: str = "", words: Sequence[bytes] = ()
) -> bytes:
    """Returns ``data`` with one to five changes."""
    for _ in range(draw.choice((1, 1, 1, 2, 3, 5))):
        if form and draw.random() < 0.5:
            data = _CHANGES_OF_FORM[form](data, draw)
        elif words and draw.random() < 0.2:
            data = _inserted(data, draw, draw.choice(words))
        else:
            data = draw.choice(_CHANGES)(data, draw, seeds)
        data = data[:LARGEST]
    return data


def _often(piece: bytes, count: int) -> int:
    """How often a piece may stand in an input, at most ``count`` times."""
    return min(count, LARGEST // (len(piece) + 1) + 1)


# --- bytes ------------------------------------------------------------------------------------------------------------


def _place(data: bytes, draw: random.Random) -> int:
    return draw.randint(0, len(data))


def _inserted(data: bytes, draw: random.Random, piece: bytes) -> bytes:
    at = _place(data, draw)
    return data[:at] + piece + data[at:]


def _flip(data: bytes, draw: random.Random, _: Sequence[bytes]) -> bytes:
    changed = bytearray(data or b"\0")
    for _each in range(draw.choice((1, 1, 2, 8))):
        changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def _replace(data: bytes, draw: random.Random, _: Sequence[bytes]) -> bytes:
    at = _place(data, draw)
    return (
        data[:at]
        + bytes([draw.choice((0, 9, 10, 13, 32, 34, 39, 92, 127, 128, 255, draw.randrange(256)))])
        + data[at + 1 :]
    )


def _truncate(data: bytes, draw: random.Random, _: Sequence[bytes]) -> bytes:
    return data[: _place(data, draw)]


def _delete(data: bytes, draw: random.Random, _: Sequence[bytes]) -> bytes:
    at = _place(data, draw)
    return data[:at] + data[at + draw.choice((1, 2, 4, 16, 100, 512)) :]


def _repeat(data: bytes, draw: random.Random, _: Sequence[bytes]) -> bytes:
    at = _place(data, draw)
    end = at + draw.choice((1, 1, 2, 4, 16, 100, 512))
    piece = data[at:end]
    return data[:at] + piece * _often(piece, draw.choice((2, 2, 3, 10, 100, 2000))) + data[end:]


def _line(data: bytes, draw: random.Random, _: Sequence[bytes]) -> bytes:
    """A line twice, away, elsewhere, or very often."""
    lines = data.split(b"\n")
    one = draw.randrange(len(lines))
    other = draw.randrange(len(lines))
    kind = draw.randrange(4)
    if kind == 0:
        lines.insert(other, lines[one])
    elif kind == 1:
        del lines[one]
    elif kind == 2:
        lines[one], lines[other] = lines[other], lines[one]
    else:
        lines[one:one] = [lines[one]] * _often(lines[one], draw.choice((5, 50, 3000)))
    return b"\n".join(lines)


def _splice(data: bytes, draw: random.Random, seeds: Sequence[bytes]) -> bytes:
    other = draw.choice(seeds) if seeds else data
    start = _place(other, draw)
    piece = other[start : start + draw.choice((4, 32, 256, len(other)))]
    return _inserted(data, draw, piece)


def _cross(data: bytes, draw: random.Random, seeds: Sequence[bytes]) -> bytes:
    other = draw.choice(seeds) if seeds else data
    return data[: _place(data, draw)] + other[_place(other, draw) :]


def _length(data: bytes, draw: random.Random, _: Sequence[bytes]) -> bytes:
    """A binary number, as lengths and offsets are."""
    size, order = draw.choice((1, 2, 4, 8)), draw.choice(("little", "big"))
    value = draw.choice(_NUMBERS) % (1 << 8 * size)
    at = _place(data, draw)
    return data[:at] + value.to_bytes(size, order) + data[at + size :]  # type: ignore[arg-type]


def _decimal(data: bytes, draw: random.Random, _: Sequence[bytes]) -> bytes:
    """A number written in digits."""
    found = list(re.finditer(rb"[0-9]+", data))
    if not found:
        return _inserted(data, draw, draw.choice(_DECIMALS))
    one = draw.choice(found)
    return data[: one.start()] + draw.choice(_DECIMALS) + data[one.end() :]


def _nest(data: bytes, draw: random.Random, _: Sequence[bytes]) -> bytes:
    opening, closing = draw.choice(_NESTS)
    depth = draw.choice((2, 10, 40, 300, 1100, 20000))
    return _inserted(data, draw, opening * depth + closing * (depth if draw.random() < 0.7 else 0))


def _text(data: bytes, draw: random.Random, _: Sequence[bytes]) -> bytes:
    return _inserted(data, draw, draw.choice(_TEXTS).encode("utf-8", "surrogatepass"))


_Change = Callable[[bytes, random.Random, Sequence[bytes]], bytes]
_CHANGES: tuple[_Change, ...] = (
    _flip,
    _flip,
    _replace,
    _truncate,
    _delete,
    _repeat,
    _line,
    _splice,
    _cross,
    _length,
    _decimal,
    _nest,
    _text,
)


# --- values -----------------------------------------------------------------------------------------------------------


def _hostile(draw: random.Random) -> Any:
    kind = draw.randrange(6)
    if kind == 0:
        return draw.choice(_NUMBERS)
    if kind == 1:
        return draw.choice(_TEXTS)
    if kind == 2:
        return draw.choice((None, True, False, 1e308, float("nan"), float("inf"), -0.0, 0.5))
    if kind == 3:
        return draw.choice(([], {}, [[]], [None], {"": None}, [0] * 100, {str(n): n for n in range(100)}))
    if kind == 4:
        nested: Any = "x"
        for _ in range(draw.choice((3, 50, 400))):
            nested = [nested] if draw.random() < 0.5 else {"a": nested}
        return nested
    return [draw.choice(_TEXTS), draw.choice(_NUMBERS), None]


def _changed(value: Any, draw: random.Random, depth: int = 0) -> Any:
    """The value with one place of it changed."""
    if isinstance(value, dict) and value and depth < 40 and draw.random() < 0.85:
        key = draw.choice(list(value))
        kind = draw.random()
        if kind < 0.1:
            return {name: item for name, item in value.items() if name != key}
        if kind < 0.2:
            return {**value, draw.choice((*_TEXTS, *list(value))): value[key]}
        return {**value, key: _changed(value[key], draw, depth + 1)}
    if isinstance(value, list) and value and depth < 40 and draw.random() < 0.85:
        at = draw.randrange(len(value))
        kind = draw.random()
        if kind < 0.1:
            return value[:at] + value[at + 1 :]
        if kind < 0.2:
            return value[:at] + value[at : at + 1] * draw.choice((2, 50)) + value[at + 1 :]
        return [*value[:at], _changed(value[at], draw, depth + 1), *value[at + 1 :]]
    if isinstance(value, bytes) and draw.random() < 0.7:
        return _flip(value, draw, ()) if draw.random() < 0.5 else _truncate(value, draw, ())
    if isinstance(value, str) and value and draw.random() < 0.5:
        at = draw.randint(0, len(value))
        return value[:at] + draw.choice(_TEXTS) + value[at:]
    return _hostile(draw)


def _json(data: bytes, draw: random.Random) -> bytes:
    """One of the lines, as a value."""
    lines = data.split(b"\n")
    at = draw.randrange(len(lines))
    try:
        lines[at] = json.dumps(_changed(json.loads(lines[at]), draw)).encode()
    except (ValueError, RecursionError):
        return _flip(data, draw, ())
    return b"\n".join(lines)


def _msgpack(data: bytes, draw: random.Random) -> bytes:
    try:
        value = msgpack.unpackb(data, strict_map_key=False, unicode_errors="surrogatepass")
        return msgpack.packb(_changed(value, draw), unicode_errors="surrogatepass")  # type: ignore[no-any-return]
    except (ValueError, TypeError, OverflowError, msgpack.exceptions.UnpackException):
        return _flip(data, draw, ())


_CHANGES_OF_FORM: dict[str, Callable[[bytes, random.Random], bytes]] = {"json": _json, "msgpack": _msgpack}
