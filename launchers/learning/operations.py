"""The ten operations on a text file that the learning curve is about: what is asked, what does it, what must come out.

Needs nothing but the standard library: the demonstrations import it in the engine's environment, the tasks in the
workers'.
"""

from __future__ import annotations

import itertools
import random
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Operation:
    """One operation on the file ``in``."""

    request: str
    """What is asked for."""
    command: str
    """What does it, up to the name of the file."""
    result: Callable[[list[str]], list[str]]
    """Lines of the file → lines that must come out, each compared by its words."""

    @property
    def instruction(self) -> str:
        """What the agent is told."""
        return f"{self.request} of in into out"

    @property
    def solution(self) -> str:
        """A command that does it."""
        return f"{self.command} in > out"


OPERATIONS: Mapping[str, Operation] = {
    "lines": Operation("count the lines", "wc -l <", lambda lines: [str(len(lines))]),
    "words": Operation("count the words", "wc -w <", lambda lines: [str(sum(len(line.split()) for line in lines))]),
    "bytes": Operation("count the bytes", "wc -c <", lambda lines: [str(sum(len(line) + 1 for line in lines))]),
    "first": Operation("show the first line", "head -n 1", lambda lines: lines[:1]),
    "last": Operation("show the last line", "tail -n 1", lambda lines: lines[-1:]),
    "sort": Operation("sort the lines", "sort", sorted),
    "reverse": Operation("reverse the lines", "tac", lambda lines: lines[::-1]),
    "unique": Operation("drop the repeats", "uniq", lambda lines: [line for line, _ in itertools.groupby(lines)]),
    "mirror": Operation("mirror each line", "rev", lambda lines: [line[::-1] for line in lines]),
    "number": Operation("number the lines", "nl", lambda lines: [f"{n} {line}" for n, line in enumerate(lines, 1)]),
}
"""By the name of their tasks."""


def content(random: random.Random) -> str:
    """Returns a text of which no operation makes the text itself, or what another makes."""
    while True:
        words = ["".join(random.choices(string.ascii_lowercase, k=random.randint(2, 6))) for _ in range(18)]
        lines, start = [], 0
        for length in random.choices((1, 2, 3), k=random.randint(4, 6)):
            lines += [" ".join(words[start : start + length])] * random.choice((1, 1, 2))
            start += length
        found = [tuple(lines), *(tuple(operation.result(lines)) for operation in OPERATIONS.values())]
        if len(set(found)) == len(found):
            return "".join(f"{line}\n" for line in lines)


def is_done(operation: Operation, content: str, output: str) -> bool:
    """Whether ``output`` is what the operation makes of ``content``; blanks at the beginning and end of lines and how
    many there are in a row do not count, as programs pad numbers."""
    expected = operation.result(content.splitlines())
    return [line.split() for line in output.splitlines()] == [line.split() for line in expected]
