"""Make hostile inputs from valid ones.

:func:`edited` changes bytes. :func:`with_other_value` decodes a document, changes one value and encodes it again, so
that the code behind the decoder is reached.
"""

from __future__ import annotations

import json
from random import Random
from typing import Any

import msgpack
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from tests.fuzz.contract import LONGEST_INPUT, Target

_NUMBERS = (0, 1, -1, 2**7, 2**8 - 1, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1)
_TEXTS = (
    "", "\0", "a\0b", "\ud800", "é🦔", "\u2028", "١٢٣", "²", "\x1b[31m", "\n", "\r\n", "../../x", "/etc/passwd", "/",
    ".", "..", "~", "%s%n", "${HOME}", "$(id)", "`id`", "{", "{0.__class__}", "-rf", "--", "*" * 40, "[" * 2000,
    "a" * 300, "a/" * 200, "a" * 70_000,
)  # fmt: skip
_OPENINGS = (b"[", b"{", b"(", b"${", b'{"a":', b"\x91", b"\x81\xa1a", b"- ", b"<<A ", b"]", b"}", b")")
_DECIMALS = (b"1e308", b"1e999", b"-0", b"9" * 30, b"9" * 5000, b"0x7f", b"nan", b"inf")
_PIECES = (
    *(text.encode("utf-8", "surrogatepass") for text in _TEXTS),
    *(str(number).encode() for number in _NUMBERS),
    *((number % 2**64).to_bytes(8, order) for number in _NUMBERS for order in ("little", "big")),  # type: ignore[arg-type]
    *_DECIMALS,
    *_OPENINGS,
)
_VALUES: tuple[Any, ...] = (
    *_NUMBERS, *_TEXTS, None, True, False, 1e308, float("nan"), float("inf"), -0.0, 0.5,
    [], {}, [[]], [None], {"": None}, [0] * 100, {str(number): number for number in range(100)}, ["\0", 2**63, None],
)  # fmt: skip


def explore(target: Target, examples: int, *, derandomize: bool) -> None:
    """Feed a target. Hypothesis raises the smallest input that is a defect."""
    run = given(hostile(target))(lambda data: target.feed(data))
    for data in (*target.known(), *target.seeds()):
        run = example(data)(run)
    settings(
        max_examples=examples,
        deadline=None,
        derandomize=derandomize,
        database=None,
        phases=(Phase.explicit, Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )(run)()


def hostile(target: Target) -> st.SearchStrategy[bytes]:
    """Return the inputs of a target: any bytes, edited seeds, and seeds with another value."""
    seeds = [seed[:LONGEST_INPUT] for seed in target.seeds()]
    lines = [line for seed in seeds for line in seed.splitlines(keepends=True)]
    piece = st.sampled_from([*target.words, *_PIECES]) | st.sampled_from([*seeds, *lines]) | st.binary(max_size=4)
    edit = st.tuples(
        st.integers(0, LONGEST_INPUT),
        st.sampled_from((0, 0, 1, 1, 4, 16, 100, LONGEST_INPUT)),
        piece,
        st.sampled_from((1, 1, 1, 2, 40, 300, 20_000)),
    )
    inputs = st.binary() | st.builds(edited, st.sampled_from(seeds), st.lists(edit, min_size=1, max_size=4))
    if target.form:
        random = st.integers(0, 2**32).map(Random)
        inputs |= st.builds(with_other_value, st.sampled_from(seeds), st.just(target.form), random)
    return inputs


def edited(data: bytes, edits: list[tuple[int, int, bytes, int]]) -> bytes:
    """Apply edits. Each one replaces some bytes at a position by a piece, which is repeated."""
    for position, removed, piece, times in edits:
        start = position % (len(data) + 1)
        times = min(times, LONGEST_INPUT // (len(piece) + 1) + 1)
        data = data[:start] + piece * times + data[start + removed :]
        data = data[:LONGEST_INPUT]
    return data


def with_other_value(data: bytes, form: str, random: Random) -> bytes:
    """Return a document with one or two changed places. Data that is no document stays as it is."""
    for _ in range(random.choice((1, 1, 2))):
        try:
            data = _json(data, random) if form == "json" else _msgpack(data, random)
        except (ValueError, TypeError, OverflowError, RecursionError, msgpack.exceptions.UnpackException):
            break
    return data[:LONGEST_INPUT]


def _json(data: bytes, random: Random) -> bytes:
    """Change one line, which is a document of its own."""
    lines = data.split(b"\n")
    at = random.randrange(len(lines))
    lines[at] = json.dumps(_changed(json.loads(lines[at]), random)).encode()
    return b"\n".join(lines)


def _msgpack(data: bytes, random: Random) -> bytes:
    value = msgpack.unpackb(data, strict_map_key=False, unicode_errors="surrogatepass")
    return msgpack.packb(_changed(value, random), unicode_errors="surrogatepass")  # type: ignore[no-any-return]


def _changed(value: Any, random: Random) -> Any:
    """Change one place of a value: remove it, repeat it, rename it, or put another value there."""
    if not isinstance(value, dict | list) or not value or random.random() < 0.15:
        return _other(value, random)
    kind = random.choice(("remove", "repeat", "inside", "inside", "inside", "inside", "inside", "inside"))
    if isinstance(value, dict):
        key = random.choice(list(value))
        if kind == "remove":
            return {name: item for name, item in value.items() if name != key}
        if kind == "repeat":
            return {**value, random.choice((*_TEXTS, *value)): value[key]}
        return {**value, key: _changed(value[key], random)}
    at = random.randrange(len(value))
    if kind == "remove":
        return value[:at] + value[at + 1 :]
    if kind == "repeat":
        return value[:at] + value[at : at + 1] * random.choice((2, 50)) + value[at + 1 :]
    return [*value[:at], _changed(value[at], random), *value[at + 1 :]]


def _other(value: Any, random: Random) -> Any:
    if isinstance(value, bytes) and value and random.random() < 0.7:
        at = random.randrange(len(value))
        return value[:at] + random.choice((b"", random.randbytes(1) + value[at + 1 :]))
    if isinstance(value, str) and value and random.random() < 0.5:
        at = random.randint(0, len(value))
        return value[:at] + random.choice(_TEXTS) + value[at:]
    if random.random() < 0.15:
        for _ in range(random.choice((3, 50, 400))):
            value = random.choice(([value], {"a": value}))
        return value
    return random.choice(_VALUES)
