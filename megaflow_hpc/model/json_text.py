"""JSON of requests and answers; large documents are decoded and encoded a piece at a time, beside the event loop.

Decoders keep the interpreter's lock for as long as they work, so a thread alone would not let an event loop go on.
What makes a document large is long texts: :func:`decoded` takes those out first, looking at some kilobytes at a time,
decodes the rest, which is bounded, and the texts in slices; :func:`encoded` encodes them in slices. Both give way
between two slices where they are done :func:`~megaflow_hpc.model.aside.aside`. ::

    {"messages": [{"role": "user", "content": "…64 MiB…"}]}
    {"messages": [{"role": "user", "content": "<mark>0"}]}       and the text between its quotes
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator
from typing import Any

import orjson

from megaflow_hpc.model.aside import give_way
from megaflow_hpc.texts import containers_at

LARGE = 256 * 2**10
"""Bytes of a document from which on it is dealt with in pieces."""
MAX_OBJECTS, MAX_VALUES = 100_000, 1_000_000
"""Arrays and objects, and values after a comma, in one document: an empty array is 3 bytes of JSON and 80 of memory."""
MAX_SHORT = 8 * 2**20
"""Bytes of a document beside its long texts, which are decoded at once."""
DEPTH = 254
"""Arrays and objects within one another, at most: orjson encodes no more, and what is recorded is encoded again."""
_WINDOW = 16 * 2**10
"""Bytes that are looked at at once: a text in which a whole window lies is long."""
_SLICE = 128 * 2**10
_LONG = 2 * _WINDOW
_EVERY = 4
"""Windows between two pauses."""
_HIGH = re.compile(rb"\\u[dD][89abAB]..")


class TooMuch(ValueError):
    """A document would cost far more than its bytes."""


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


def decoded(raw: bytes | bytearray) -> Any:
    """Decodes somebody else's JSON as :func:`parsed` does, within bounds, in pieces if it is large.

    Raises:
        TooMuch: It has over :data:`MAX_OBJECTS` objects and arrays, or :data:`MAX_VALUES` values, or over
            :data:`MAX_SHORT` bytes beside long texts.
        ValueError, RecursionError: It is not JSON.
    """
    if len(raw) <= LARGE:
        return parsed(raw)
    spans = list(_long_texts(raw))
    mark, rest, last = secrets.token_hex(16), [], 0
    for number, (start, end) in enumerate(spans):
        rest += [raw[last:start], b"%b%d" % (mark.encode(), number)]
        last = end
    short = b"".join([*rest, raw[last:]])
    if len(short) > MAX_SHORT:
        raise TooMuch(f"over {MAX_SHORT >> 20} MiB beside texts of {_LONG >> 10} KiB and more")
    value = parsed(short)
    return _filled(value, {f"{mark}{n}": _text(raw, *span) for n, span in enumerate(spans)}) if spans else value


def check_values(raw: bytes | bytearray) -> None:
    """Raises :class:`TooMuch` if JSON holds so many values that decoding it would take far more than its bytes."""
    if len(raw) > LARGE:
        for _ in _long_texts(raw):
            pass


def encoded(value: Any, *, sort_keys: bool = False) -> list[bytes]:
    """Encodes JSON in parts, which :func:`packed` would give as one.

    Raises:
        RecursionError: It is nested more than :data:`DEPTH` deep.
    """
    mark, found = secrets.token_hex(16), list[str]()
    rest = _marked(value, mark, found)
    short = packed(rest, sort_keys=sort_keys)
    parts = re.split(mark.encode() + rb"\d+", short)
    numbers = [int(n) for n in re.findall(mark.encode() + rb"(\d+)", short)]
    whole = parts[:1]
    for number, part in zip(numbers, parts[1:], strict=True):
        text = found[number]
        for start in range(0, len(text), _SLICE):
            piece = text[start : start + _SLICE]
            whole.append(packed(piece)[1:-1])
            give_way()
        whole.append(part)
    return whole


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


def _long_texts(raw: bytes | bytearray) -> Iterator[tuple[int, int]]:
    """Yields where long texts begin and end, without their quotes; counts what stands outside of texts."""
    objects = values = 0
    inside, began, long = 0, 0, False
    for start, _, hidden in _windows(raw, 0, len(raw)):
        first = hidden.find(b'"')
        if first < 0:
            long, outside = bool(inside), b"" if inside else hidden
        else:
            if long:
                yield began, start + first
            outside = b"".join(hidden.split(b'"')[inside::2])
            inside ^= hidden.count(b'"') & 1
            began, long = start + hidden.rfind(b'"') + 1, False
        objects += outside.count(b"{") + outside.count(b"[")
        values += outside.count(b",")
        if objects > MAX_OBJECTS or values > MAX_VALUES:
            raise TooMuch(f"over {MAX_OBJECTS} objects and arrays, or {MAX_VALUES} values")


def _text(raw: bytes | bytearray, start: int, stop: int) -> str:
    """Decodes a long text."""
    return "".join(parsed(b'"%b"' % bytes(raw[begin:end])) for begin, end, _ in _windows(raw, start, stop))


def _filled(value: Any, texts: dict[str, str]) -> Any:
    """Puts long texts back where their marks stand."""
    if isinstance(value, str):
        return texts.get(value, value)
    if isinstance(value, list):
        return [_filled(item, texts) for item in value]
    if isinstance(value, dict):
        if not texts.keys().isdisjoint(value):
            raise TooMuch(f"a name of over {_LONG >> 10} KiB")
        return {key: _filled(item, texts) for key, item in value.items()}
    return value


def _marked(value: Any, mark: str, found: list[str]) -> Any:
    """Returns a value with marks for its long texts, which are added to ``found``."""
    if isinstance(value, str):
        if len(value) < _LONG:
            return value
        found.append(value)
        return f"{mark}{len(found) - 1}"
    if isinstance(value, list | tuple):
        return [_marked(item, mark, found) for item in value]
    if isinstance(value, dict):
        return {key: _marked(item, mark, found) for key, item in value.items()}
    return value
