"""Count this process's file-system operations: opens, listings, links, renames, removals and stats."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

AUDITED = {
    "open": "opens",
    "os.listdir": "lists",
    "os.scandir": "lists",
    "os.link": "links",
    "os.rename": "renames",
}
SELDOM = {"os.remove": "removes", "os.mkdir": "makes"}

_counted: Counter[str] = Counter()
_watched: list[str] = []
_kinds = AUDITED


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if _watched and event in _kinds and str(arguments[0]).startswith(_watched[0]):
        _counted[_kinds[event]] += 1


@contextmanager
def counted(root: Path, whole: bool = False) -> Iterator[Counter[str]]:
    """Count the operations of this process in a directory and below it.

    Args:
        whole: also count removals, new directories and stats.
    """
    global _kinds
    if not getattr(counted, "hooked", False):
        sys.addaudithook(_audit)
        counted.hooked = True  # type: ignore[attr-defined]
    _kinds = {**AUDITED, **SELDOM} if whole else AUDITED
    _counted.clear()
    _watched[:] = [str(root)]
    found: Counter[str] = Counter()
    stat = os.stat

    def looked(path: Any, *arguments: Any, **named: Any) -> os.stat_result:
        if not isinstance(path, int) and str(path).startswith(_watched[0]):
            _counted["looks"] += 1
        return stat(path, *arguments, **named)

    if whole:
        os.stat = looked  # no audit event reports it
    try:
        yield found
    finally:
        os.stat = stat
        _watched.clear()
        found.update(_counted)


def so_far() -> int:
    """Return the number of operations of the active count so far."""
    return _counted.total()
