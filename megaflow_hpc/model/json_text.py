"""Decodes and encodes the JSON of requests and responses. Large documents are offloaded to a worker thread.

A decoder holds the GIL until it returns, and a small JSON text can become large objects: an empty array takes two bytes
as JSON and 56 bytes in memory. So :func:`decoded` counts brackets, object keys and commas before decoding. Callers
limit the number of bytes.

A single thread processes all large documents, because several threads would compete with the event loop for the GIL.
Large documents therefore wait for each other, but never delay small documents.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import orjson

from megaflow_hpc.texts import containers_at

T = TypeVar("T")
OFFLOAD_BYTES = 2**20
"""Documents up to this size are processed in the event loop."""
LARGE = 256 * 2**10
"""Documents above this size in bytes are too slow to decode leniently or to check for nesting in the event loop."""
MAX_DEPTH = 254
"""Maximum nesting, which is orjson's limit for encoding. Recorded documents are encoded again."""
_WINDOW = 16 * 2**10
_OBJECT = 512
"""Cost of decoding one object or array. The unit is the cost of decoding one byte of plain text."""
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_thread = ThreadPoolExecutor(1, "large-documents")


async def offload(size: int, work: Callable[..., T], *args: Any) -> T:
    """Calls ``work``, in the worker thread if ``size`` exceeds :data:`OFFLOAD_BYTES`.

    Args:
        size: Size of the document in bytes, or its :func:`effort`.
    """
    if size <= OFFLOAD_BYTES:
        return work(*args)
    return await asyncio.get_running_loop().run_in_executor(_thread, work, *args)


class TooMuch(ValueError):
    """A document exceeds its bounds."""


class Bounds(NamedTuple):
    """Limits on the parts of a document, or the actual counts. Brackets and commas inside strings do not count."""

    objects: int
    """Number of arrays and objects."""
    names: int
    """Number of object keys."""
    values: int
    """Number of values that follow a comma."""


REQUEST = Bounds(100_000, 200_000, 1_000_000)
ANSWER = Bounds(500_000, 1_000_000, 4_000_000)
"""Bounds on an engine's response. They are higher than :data:`REQUEST`, because engines report an object and two arrays
for every sampled or alternative token."""


def effort(raw: bytes | bytearray) -> int:
    """Estimates the cost of processing a document. The unit is the cost of processing one byte of plain text."""
    if len(raw) > OFFLOAD_BYTES:
        return len(raw)  # large enough already; the exact value is not needed
    if len(raw) + _OBJECT * (raw.count(b"[") + raw.count(b"{")) <= OFFLOAD_BYTES:
        return len(raw)
    objects = 0
    for counts in _running_counts(raw):
        objects = counts.objects
    return len(raw) + _OBJECT * objects


def packed(value: Any, *, sort_keys: bool = False) -> bytes:
    """Encodes a value as UTF-8 JSON. Lone surrogates are escaped.

    Raises:
        RecursionError: The value is nested more than :data:`MAX_DEPTH` deep.
    """
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS if sort_keys else None)
    except TypeError:  # a lone surrogate, or nested too deeply
        if containers_at(value, MAX_DEPTH):
            raise RecursionError(f"nested more than {MAX_DEPTH} deep") from None
        return json.dumps(value, sort_keys=sort_keys).encode()


def decoded(raw: bytes | bytearray, bounds: Bounds = REQUEST) -> Any:
    """Decodes untrusted JSON.

    Accepts lone surrogates, as in truncated tool output, and also ``NaN`` in small documents.

    Raises:
        TooMuch: The document exceeds its bounds.
        ValueError, RecursionError: The document is not valid JSON.
    """
    check_bounds(raw, bounds)
    try:
        return orjson.loads(raw)
    except ValueError as error:
        if len(raw) > LARGE and "surrogate" not in str(error):
            raise  # the lenient decoder is slow
        return json.loads(raw)


def check_bounds(raw: bytes | bytearray, bounds: Bounds = REQUEST) -> None:
    """Checks a document against bounds before it is decoded, to limit the time and memory of decoding.

    Raises:
        TooMuch: The document exceeds its bounds.
    """
    if len(raw) <= LARGE:
        return
    for counts in _running_counts(raw):
        if counts.objects > bounds.objects:
            raise TooMuch(f"over {bounds.objects} objects and arrays")
        if counts.names > bounds.names or counts.values > bounds.values:
            raise TooMuch(f"over {bounds.names} names, or {bounds.values} values")


def brackets(raw: bytes | bytearray) -> Iterator[tuple[bytes, int]]:
    """Yields the brackets and the number of commas outside strings, for each window of a few kilobytes.

    In a malformed document, counting is correct up to the syntax error, where a decoder stops.
    """
    for part in _outside_strings(raw):
        yield part.translate(None, _NO_BRACKETS), part.count(b",")


def _running_counts(raw: bytes | bytearray) -> Iterator[Bounds]:
    """Yields the counts of a document's parts up to the end of each window."""
    objects = names = values = 0
    for part in _outside_strings(raw):
        objects += part.count(b"{") + part.count(b"[")
        names += part.count(b":")
        values += part.count(b",")
        yield Bounds(objects, names, values)


def _outside_strings(raw: bytes | bytearray) -> Iterator[bytes]:
    """Yields a document without the contents of its strings, a few kilobytes at a time."""
    start, in_string = 0, 0
    while start < len(raw):
        end = _cut(raw, start)
        window = bytes(raw[start:end]).replace(b"\\\\", b"").replace(b'\\"', b"")
        parts = window.split(b'"')
        yield b"".join(parts[in_string::2])
        in_string ^= (len(parts) - 1) & 1
        start = end


def _cut(raw: bytes | bytearray, start: int) -> int:
    """Returns the end of the window that begins at ``start``, without splitting an escape sequence."""
    end = min(start + _WINDOW, len(raw))
    escapes = 0
    while end - escapes > start and raw[end - escapes - 1] == 0x5C:
        escapes += 1
    return end - escapes % 2 if end < len(raw) else end
