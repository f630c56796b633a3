"""A target: what is fed with bytes, and the bytes to begin with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

Feed = Callable[[bytes], None]
"""Takes one input. What it raises, other than a MegaflowError, is a fault."""

PART = b"\x1e"
"""Between the files of an input that stands for several."""


@dataclass(frozen=True)
class Target:
    """One reader under test.

    Args:
        name: as on the command line.
        opened: gets an empty directory; gives the feed, and cleans up after it.
        seeds: makes valid inputs, the same ones each time.
        form: ``json`` or ``msgpack`` where inputs are such documents, which are then also changed as values.
        count: inputs of a short run, some seconds' worth.
        words: parts of the input's language, put in here and there.
    """

    name: str
    opened: Callable[[Path], AbstractContextManager[Feed]]
    seeds: Callable[[], Sequence[bytes]]
    form: str = ""
    count: int = 300
    words: Sequence[bytes] = ()


class Broken(AssertionError):
    """A target broke its contract without raising.

    Args:
        kind: short; faults of one kind are one fault.
        details: the rest.
    """

    def __init__(self, kind: str, details: object = "") -> None:
        super().__init__(f"{kind}: {details}" if details else kind)
        self.kind = kind


def parts(data: bytes, count: int) -> list[bytes]:
    """The first ``count`` files of an input; missing ones are empty."""
    found = data.split(PART, count - 1)
    return [*found, *[b""] * (count - len(found))]
