"""The pod's event file: one JSON line per thing that happened, appended to one open file.

``status`` and ``watch`` read these files; nothing depends on them for correctness, so they are flushed, not fsynced.
Each line has ``t`` (seconds UTC) and ``event``: ``pod`` (start and end), ``claim``, ``progress`` (counts, at most one a
second), ``rollout`` (one per stored rollout), ``attempt`` (a failure that is retried), ``worker``, ``endpoints``.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any


class Events:
    def __init__(self, path: Path) -> None:
        self._file = open(path, "a", encoding="utf-8", errors="backslashreplace")  # noqa: SIM115 - lives with the pod

    def write(self, event: str, **fields: Any) -> None:
        try:
            self._file.write(json.dumps({"t": round(time.time(), 3), "event": event, **fields}) + "\n")
            self._file.flush()
        except OSError:
            pass  # a full disk must not stop the pod for the sake of its diary

    def close(self) -> None:
        try:
            self._file.close()
        except OSError:
            pass
