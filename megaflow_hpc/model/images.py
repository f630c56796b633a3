"""Processes images in model calls. Checks them on arrival, replaces them with hashes, and restores them for the engine.

::

    agent ── data:image/png;base64,… ──► named() ── sha256:ab12… ──► recorder, digests, journal
                                           └──── Image, once ──────► with_images() ── data:image/png;base64,… ──► engine

Only the header of an image is read, never its pixels. Type and size suffice to refuse a file that is not an image, or
that would take gigabytes of an engine's memory once decoded.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise, takewhile
from typing import Any

from megaflow_hpc.trajectory import IMAGE_SCHEME, Image, ImageSpan, replaced_images

MAX_PIXELS = 40_000_000
"""Maximum number of pixels in an image, which take 120 MB when decoded. An 8K screen has 33 million. vLLM gets the same
limit."""
_MAX_SEGMENTS = 1000
"""Maximum number of JPEG segments or PNG chunks before the pixels. Real files have at most a few dozen."""
_MAX_GIF_BLOCKS = 1000
"""Maximum number of blocks in a GIF before the first frame."""
_SIZES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
"""Markers of the JPEG segments that contain the image size."""
_SCAN = 0xDA
"""Marker of the JPEG segment that starts the pixel data."""
_BARE = frozenset(range(0xD0, 0xD9)) | {0x01}
"""Markers of JPEG segments without a length."""

_RESULT = "Shown by tool result {} of {}:"
"""Text before the images of a tool result. Used if there are several results."""

Message = Mapping[str, Any]


def read_image(data: bytes) -> Image:
    """Returns an image with its type and size, which are read from the header.

    Raises:
        ValueError: The data is not a PNG, JPEG, WebP or GIF, or the image has too many pixels.
    """
    try:
        media_type, width, height = _header(data)
    except (struct.error, IndexError):
        media_type, width, height = "", 0, 0
    if not media_type or not (width and height):
        raise ValueError("not a PNG, JPEG, WebP or GIF image, or one without its header")
    if width * height > MAX_PIXELS:
        raise ValueError(f"an image of {width}x{height} pixels; {MAX_PIXELS} pixels are allowed, so scale it down")
    return Image(hashlib.sha256(data).hexdigest(), media_type, width, height, data)


def read_data_url(url: str) -> Image:
    """Returns the image in a ``data:image/…;base64,…`` URL. Its type is read from the data, not from the URL.

    Raises:
        ValueError: The data is not base64, or :func:`read_image` rejects the image.
    """
    try:
        data = base64.b64decode(url.partition(",")[2], validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"not base64 ({error})") from None
    return read_image(data)


def named(messages: Sequence[Message]) -> tuple[list[dict[str, Any]], dict[str, Image]]:
    """Returns the messages with ``sha256:<hex>`` in place of each image's ``data:`` URL, and the images by SHA-256.

    Raises:
        ValueError: An image is invalid. The message names it.
    """
    images: dict[str, Image] = {}
    urls: dict[str, str] = {}

    def name(message: int, part: int, url: str) -> str:
        if url[:5].lower() == "data:" and url not in urls:
            try:
                image = read_data_url(url)
            except ValueError as error:
                raise ValueError(f"messages[{message}].content[{part}].image_url.url: {error}") from None
            images[image.sha256], urls[url] = image, IMAGE_SCHEME + image.sha256
        return urls.get(url, url)

    return [replaced_images(message, partial(name, number)) for number, message in enumerate(messages)], images


def result_images(results: Sequence[Sequence[Message]]) -> Iterator[Message]:
    """Yields the images of consecutive tool results, as parts of the user message that follows the last result.

    Tool messages may contain only text in the chat API, and strict chat templates expect all results of an answer
    before the next user message. If there are several results, text parts state which images belong to which result.

    Args:
        results: The parts of each result. Text parts are omitted.
    """
    for number, result in enumerate(results, 1):
        images = [part for part in result if part["type"] == "image_url"]
        if images and len(results) > 1:
            yield {"type": "text", "text": _RESULT.format(number, len(results))}
        yield from images


def separated_results(messages: Iterable[Message]) -> Iterator[Message]:
    """Undoes :func:`result_images`. Yields messages in which each tool result is directly followed by a user message
    with its images.

    Vendors' APIs with computer tools require this.
    """
    results: list[Message] = []
    for message in messages:
        if message["role"] == "tool":
            results.append(message)
            continue
        content = message.get("content")
        parts = [*content] if isinstance(content, list) else []
        for number, result in enumerate(results, 1):
            yield result
            if parts and parts[0].get("text") == _RESULT.format(number, len(results)):
                images = [*takewhile(lambda part: part["type"] == "image_url", parts[1:])]
                yield {"role": "user", "content": images}
                del parts[: 1 + len(images)]
        results = []
        if parts or not content or isinstance(content, str):
            yield {**message, "content": parts} if parts else message
    yield from results


def image_spans(features: Any, asked: Sequence[str], tokens: int) -> list[ImageSpan]:
    """Matches the placeholder tokens that an engine reports to the images of a request.

    An engine lists images in the order of the messages. The engine's digests are used to verify this, because equal
    images must have equal digests.

    Args:
        features: ``features`` of vLLM's rendered prompt, with ``mm_placeholders`` and ``mm_hashes``.
        asked: SHA-256 of each image in the request, in order.
        tokens: Number of tokens in the prompt.

    Raises:
        KeyError, TypeError, ValueError: The engine reports other images, or placeholders that overlap.
    """
    ranges = features["mm_placeholders"]["image"]
    hashes = features.get("mm_hashes", {}).get("image", asked)
    spans = [ImageSpan(int(one["offset"]), int(one["length"]), image) for one, image in zip(ranges, asked, strict=True)]
    pairs = set(zip(asked, map(str, hashes), strict=True))
    if len({image for image, _ in pairs}) != len(pairs):
        raise ValueError("features: different digests for the same image")
    spans.sort()
    bounds = [0, *(bound for span in spans for bound in (span.start, span.end)), tokens]
    if any(first > last for first, last in pairwise(bounds)) or any(span.length < 1 for span in spans):
        raise ValueError(f"features: placeholders that overlap, or are not among {tokens} tokens")
    return spans


# --- headers ---------------------------------------------------------------------------------------------------------


def _header(data: bytes) -> tuple[str, int, int]:
    """Returns the media type, width and height of an image. The type is empty if it is unknown.

    Sources: PNG 3rd edition, section 11.2.1; GIF89a, section 18; RFC 9649 (WebP); ITU-T T.81, annex B (JPEG).
    """
    if data.startswith(b"\x89PNG\r\n\x1a\n") and data[12:16] == b"IHDR":
        return "image/png", *_png_size(data)
    if data.startswith((b"GIF87a", b"GIF89a")):
        return "image/gif", *_gif_size(data)
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        return "image/webp", *_webp_size(data)
    if data.startswith(b"\xff\xd8\xff"):
        return "image/jpeg", *_jpeg_size(data)
    return "", 0, 0


def _png_size(data: bytes) -> tuple[int, int]:
    position = 8
    for number in range(_MAX_SEGMENTS):
        kind = data[position + 4 : position + 8]
        if number and kind == b"IHDR":  # a second size, which some decoders would use
            break
        if kind == b"IDAT" or len(kind) < 4:
            width, height = struct.unpack_from(">II", data, 16)
            return width, height
        position += 12 + int.from_bytes(data[position : position + 4], "big")
    return 0, 0


def _gif_size(data: bytes) -> tuple[int, int]:
    """Returns the size of the canvas in pixels. The first frame may enlarge the canvas."""
    width, height = struct.unpack_from("<HH", data, 6)
    flags = data[10] if len(data) > 10 else 0
    position = 13 + (6 << (flags & 7) if flags & 0x80 else 0)
    for _ in range(_MAX_GIF_BLOCKS):
        kind = data[position : position + 1]
        if kind in (b"", b";"):
            return width, height
        if kind == b",":
            left, top, right, bottom = struct.unpack_from("<4H", data, position + 1)
            return max(width, left + right), max(height, top + bottom)
        position += 1
        if kind == b"!":
            position += 1
            while size := data[position]:
                position += 1 + size
            position += 1
    return 0, 0


def _webp_size(data: bytes) -> tuple[int, int]:
    chunk = data[12:16]
    if chunk == b"VP8X" and len(data) >= 30:
        return 1 + int.from_bytes(data[24:27], "little"), 1 + int.from_bytes(data[27:30], "little")
    if chunk == b"VP8L" and data[20] == 0x2F:
        (bits,) = struct.unpack_from("<I", data, 21)
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    if chunk == b"VP8 " and data[23:26] == b"\x9d\x01\x2a":
        width, height = struct.unpack_from("<HH", data, 26)
        return width & 0x3FFF, height & 0x3FFF
    return 0, 0


def _jpeg_size(data: bytes) -> tuple[int, int]:
    position, width, height = 2, 0, 0
    for _ in range(_MAX_SEGMENTS):
        if width and position + 2 > len(data):
            return width, height
        if data[position] != 0xFF:
            break
        marker = data[position + 1]
        if marker == _SCAN:
            return width, height
        if marker in _SIZES:
            if width:  # a second size, which some decoders would use
                break
            height, width = struct.unpack_from(">HH", data, position + 5)
        if marker == 0xFF:  # padding
            position += 1
        elif marker in _BARE:
            position += 2
        else:
            position += 2 + struct.unpack_from(">H", data, position + 2)[0]
    return 0, 0
