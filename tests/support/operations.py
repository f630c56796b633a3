"""What this process asks of a file system, counted: opens, listings, links and renames below a directory."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

AUDITED = {"open": "opens", "os.listdir": "lists", "os.scandir": "lists", "os.link": "links", "os.rename": "renames"}

_counted: Counter[str] = Counter()
_watched: list[str] = []


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if _watched and event in AUDITED and str(arguments[0]).startswith(_watched[0]):
        _counted[AUDITED[event]] += 1


@contextmanager
def counted(root: Path) -> Iterator[Counter[str]]:
    """Counts the operations of this process below a directory."""
    if not getattr(counted, "hooked", False):
        sys.addaudithook(_audit)
        counted.hooked = True  # type: ignore[attr-defined]
    _counted.clear()
    _watched[:] = [str(root)]
    found: Counter[str] = Counter()
    try:
        yield found
    finally:
        _watched.clear()
        found.update(_counted)
