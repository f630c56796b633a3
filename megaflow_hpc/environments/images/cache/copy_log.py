"""The log of a node's image cache: one line for every copy that was made, so that one can see what is copied twice.

Nothing depends on it. Processes append to it at once; beyond :data:`MOST_BYTES` it is put aside and begun anew.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

MOST_BYTES = 1 << 20


class CopyLog:
    """The log, ``made.jsonl`` below ``root``, and ``made.old.jsonl`` before it."""

    def __init__(self, root: Path) -> None:
        self._path = root / "made.jsonl"
        self._old = root / "made.old.jsonl"

    def add(self, name: str, image: str, began: float, by: str, *, ahead: bool) -> None:
        """Notes that a copy ``name`` of ``image`` is there. ``began`` in seconds UTC; ``ahead``: nobody waited for
        it."""
        line = {"t": time.time(), "began": began, "name": name, "image": image, "ahead": ahead, "by": by}
        with suppress(OSError):
            if self._path.exists() and self._path.stat().st_size > MOST_BYTES:
                os.replace(self._path, self._old)
            descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.write(descriptor, json.dumps(line).encode() + b"\n")
            finally:
                os.close(descriptor)

    def lines(self) -> list[dict[str, Any]]:
        """Returns ``t`` (when the copy was there), ``began``, ``name``, ``image``, ``ahead`` and ``by`` of each, oldest
        first."""
        found: list[dict[str, Any]] = []
        for path in (self._old, self._path):
            with suppress(OSError):
                for line in path.read_bytes().splitlines():
                    with suppress(ValueError):  # half written
                        found.append(json.loads(line))
        return found
