"""JSON of requests and answers; large documents are decoded and encoded a piece at a time, beside the event loop.

Decoders keep the interpreter's lock for as long as they work, so a thread alone would not let an event loop go on.
What makes a document large is long texts: :func:`decoded` takes those out first, looking at some kilobytes at a time,
decodes them in slices, and the rest, which is bounded, in pieces (:mod:`.json_pieces`); :func:`encoded` encodes long
texts and lists in slices. Both give way between two slices where they are done by :mod:`.aside`. ::

    {"messages": [{"role": "user", "content": "…64 MiB…"}]}
    {"messages": [{"role": "user", "content": "<mark>0"}]}       and the text between its quotes
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator
from typing import Any, NamedTuple

import orjson

from megaflow_hpc.model.aside import ASIDE, give_way
from megaflow_hpc.model.json_pieces import Pieces, TooMuch
from megaflow_hpc.texts import containers_at

LARGE = 256 * 2**10
"""Bytes of a document from which on it is dealt with in pieces."""
DEPTH = 254
"""Arrays and objects within one another, at most: orjson encodes no more, and what is recorded is encoded again."""
_WINDOW = 16 * 2**10
"""Bytes that are looked at at once: a text in which a whole window lies is long."""
_SLICE = 128 * 2**10
_LONG = 2 * _WINDOW
_LONG_TEXT = 4096
"""Characters of a text that is encoded by itself: escapes make one a sixth as long as it was in JSON."""
_ITEMS = 256
"""Items of a list that are encoded at once."""
_EVERY = 4
"""Windows between two pauses."""
_HIGH = re.compile(rb"\\u[dD][89abAB]..")
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_BETWEEN = re.compile(rb"[][{},:]")
_DENSE = 64 * 2**10
"""Bytes of a document from which on its arrays and objects are counted."""
_OBJECT = 512
_QUOTES = 50_000
"""Quotes of a document from which on what lies between them is not looked at."""


class Bounds(NamedTuple):
    """What one large document may hold: an empty array is 3 bytes of JSON and 80 of memory."""

    objects: int
    """Arrays and objects."""
    values: int
    """Values after a comma."""
    short: int
    """Bytes beside long texts."""


REQUEST = Bounds(100_000, 1_000_000, 8 * 2**20)
ANSWER = Bounds(1_000_000, 4_000_000, 48 * 2**20)
"""An engine tells an object and two arrays of each sampled token, and of each of the likeliest beside it."""


def effort(raw: bytes | bytearray) -> int:
    """Returns of how many bytes of text a document is, by the time that it takes to decode it and deal with it.

    An array or object, such as a message or a part of one, takes as long as :data:`_OBJECT` bytes.
    """
    if not _DENSE <= len(raw) <= ASIDE:
        return len(raw)
    if raw.count(b'"') > _QUOTES:
        return len(raw) + _OBJECT * _QUOTES
    if _OBJECT * (raw.count(b"[") + raw.count(b"{")) <= ASIDE:
        return len(raw)
    hidden = bytes(raw).replace(b"\\\\", b"__").replace(b'\\"', b"__")
    outside = b"".join(hidden.split(b'"')[::2])
    return len(raw) + _OBJECT * (outside.count(b"[") + outside.count(b"{"))


def parsed(raw: bytes | bytearray) -> Any:
    """Decodes JSON, also what strict readers refuse: half a surrogate pair from a cut-off tool output; small, ``NaN``.

    Raises:
        ValueError, RecursionError: It is not JSON.
    """
    try:
        return orjson.loads(raw)
    except ValueError as error:
        if len(raw) > LARGE and "surrogate" not in str(error):
            raise  # the lenient decoder is slow
        return json.loads(raw)


def packed(value: Any, *, sort_keys: bool = False) -> bytes:
    """Encodes JSON as UTF-8; half a surrogate pair is escaped.

    Raises:
        RecursionError: It is nested more than :data:`DEPTH` deep.
    """
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS if sort_keys else None)  # refuses such a depth by itself
    except TypeError:
        if containers_at(value, DEPTH):
            raise RecursionError(f"nested more than {DEPTH} deep") from None
        return json.dumps(value, sort_keys=sort_keys).encode()


def decoded(raw: bytes | bytearray, bounds: Bounds = REQUEST) -> Any:
    """Decodes somebody else's JSON as :func:`parsed` does, within bounds, in pieces if it is large.

    Raises:
        TooMuch: It holds more.
        ValueError, RecursionError: It is not JSON.
    """
    if effort(raw) <= LARGE:
        return parsed(raw)
    spans = list(_long_texts(raw, bounds))
    mark, rest, last = secrets.token_hex(16), [], 0
    for number, (start, end) in enumerate(spans):
        rest += [raw[last:start], b"%bt%d" % (mark.encode(), number)]
        last = end
    short = b"".join([*rest, raw[last:]])
    kept = {}
    for number, span in enumerate(spans):
        kept[f"{mark}t{number}"] = _text(raw, *span)
        give_way()
    return Pieces(short, mark, kept, parsed).value()


def check_values(raw: bytes | bytearray) -> None:
    """Raises :class:`TooMuch` if JSON holds so many values that decoding it would take far more than its bytes."""
    if len(raw) > LARGE:
        for _ in _long_texts(raw, REQUEST):
            pass


def brackets(raw: bytes | bytearray) -> Iterator[tuple[bytes, int]]:
    """Yields the brackets of a JSON text, some kilobytes of it at a time, with the number of commas among them.

    Those in texts are left out. What is no JSON has them as a decoder sees them up to its mistake.
    """
    inside = 0
    for _, _, hidden in _windows(raw, 0, len(raw)):
        parts = hidden.split(b'"')
        outside = b"".join(parts[inside::2])
        inside ^= (len(parts) - 1) & 1
        yield outside.translate(None, _NO_BRACKETS), outside.count(b",")


def encoded(value: Any, *, sort_keys: bool = False) -> list[bytes]:
    """Encodes JSON in parts, which :func:`packed` would give as one.

    Raises:
        RecursionError: It is nested more than :data:`DEPTH` deep.
    """
    mark, found = secrets.token_hex(16), list[Any]()
    short = packed(_marked(value, mark, found), sort_keys=sort_keys)
    where = re.compile(rb'"%bl(\d+)"|%bt(\d+)' % (mark.encode(), mark.encode()))

    def expanded(part: bytes) -> Iterator[bytes]:
        last = 0
        for place in where.finditer(part):
            yield part[last : place.start()]
            last, stands_for = place.end(), found[int(place[1] or place[2])]
            step = _SLICE if isinstance(stands_for, str) else _ITEMS
            for start in range(0, len(stands_for), step):
                piece = packed(stands_for[start : start + step], sort_keys=sort_keys)[1:-1]
                give_way()
                if isinstance(stands_for, str):
                    yield piece
                else:
                    yield b"," if start else b"["
                    yield from expanded(piece)
            if not isinstance(stands_for, str):
                yield b"]"
        yield part[last:]

    return list(expanded(short))


def _windows(raw: bytes | bytearray, start: int, stop: int) -> Iterator[tuple[int, int, bytes]]:
    """Yields parts that cut no escape and no character; their bytes have escapes of quotes and backslashes hidden."""
    number = 0
    while start < stop:
        window = bytes(raw[start : min(start + _WINDOW, stop)])
        hidden = window.replace(b"\\\\", b"__").replace(b'\\"', b"__")
        if (end := start + len(window)) < stop:
            at = hidden.rfind(b"\\", max(1, len(hidden) - 12))
            if at > 6 and _HIGH.match(hidden, at - 6):
                at -= 6
            if at > 0:
                end = start + at
            else:
                while raw[end] & 0xC0 == 0x80 and end > start + _WINDOW - 4:
                    end -= 1
            hidden = hidden[: end - start]
        yield start, end, hidden
        start, number = end, number + 1
        if number % _EVERY == 0:
            give_way()


def _long_texts(raw: bytes | bytearray, bounds: Bounds) -> Iterator[tuple[int, int]]:
    """Yields where long texts begin and end, without their quotes; counts what stands beside them and between texts."""
    objects = values = of_long = 0
    inside, began, long = 0, 0, False
    for start, end, hidden in _windows(raw, 0, len(raw)):
        first = hidden.find(b'"')
        if first < 0:
            long, outside = bool(inside), b"" if inside else hidden
            if len(outside) > _WINDOW // 2 and not _BETWEEN.search(outside):
                raise TooMuch(f"a number, or space, of {_WINDOW >> 11} KiB and more")
        else:
            if long:
                yield began, start + first
                of_long += start + first - began
            outside = b"".join(hidden.split(b'"')[inside::2])
            inside ^= hidden.count(b'"') & 1
            began, long = start + hidden.rfind(b'"') + 1, False
        objects += outside.count(b"{") + outside.count(b"[")
        values += outside.count(b",")
        if objects > bounds.objects or values > bounds.values:
            raise TooMuch(f"over {bounds.objects} objects and arrays, or {bounds.values} values")
        if (began if inside else end) - of_long > bounds.short:
            raise TooMuch(f"over {bounds.short >> 20} MiB beside texts of {_LONG >> 10} KiB and more")


def _text(raw: bytes | bytearray, start: int, stop: int) -> str:
    """Decodes a long text."""
    return "".join(parsed(b'"%b"' % bytes(raw[begin:end])) for begin, end, _ in _windows(raw, start, stop))


def _marked(value: Any, mark: str, found: list[Any]) -> Any:
    """Returns a value with marks for its long texts and lists, which are added to ``found``."""
    if isinstance(value, str):
        if len(value) < _LONG_TEXT:
            return value
        found.append(value)
        return f"{mark}t{len(found) - 1}"
    if isinstance(value, list | tuple):
        items = list[Any]()
        for start in range(0, len(value), _ITEMS):
            items += [_marked(item, mark, found) for item in value[start : start + _ITEMS]]
            give_way()
        if len(items) < _ITEMS:
            return items
        found.append(items)
        return f"{mark}l{len(found) - 1}"
    if isinstance(value, dict):
        return {key: _marked(item, mark, found) for key, item in value.items()}
    return value
