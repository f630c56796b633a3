"""Recorded calls of programs: their text form in files, and how to read it.

A line ``$ WORDS`` is a call, ``! STATUS`` its exit status unless 0, and ``? LINE`` a line of standard error. All other
lines are lines of output.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Call:
    """One call of a program and its answer."""

    words: str
    """Quoted as in a shell."""
    status: int
    out: str
    err: str

    def text(self) -> str:
        lines = [f"$ {self.words}"]
        lines += [f"! {self.status}"] if self.status else []
        return "\n".join([*lines, *(f"? {line}" for line in self.err.splitlines()), *self.out.splitlines()])


def read_calls(file: Path) -> Iterator[Call]:
    """Yields the calls of a recorded scene in order."""
    for part in re.split(r"^\$ ", file.read_text(), flags=re.MULTILINE)[1:]:
        words, *lines = part.splitlines()
        status = sum(int(line[2:]) for line in lines if line.startswith("! "))
        err = "".join(f"{line[2:]}\n" for line in lines if line.startswith("? "))
        out = "".join(f"{line}\n" for line in lines if not line.startswith(("! ", "? ")))
        yield Call(words, status, out, err)
