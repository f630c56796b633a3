"""The pod's event file: one JSON line per thing that happened, appended to one open file.

``status`` and ``watch`` read these files; nothing depends on them for correctness, so they are flushed, not fsynced,
and written by whoever flushes: what happens is said by a loop that must not wait for a disk.
Each line has ``t`` (seconds UTC) and ``event``: ``pod`` (start and end), ``claim``, ``progress`` (counts, at most one a
second), ``rollout`` (one per stored rollout), ``attempt`` (a failure that is retried), ``worker``, ``endpoints``.
"""

from __future__ import annotations

import json
import os
import time
from collections import deque
from pathlib import Path
from typing import Any

from megaflow_hpc.pod.outcome import Outcome
from megaflow_hpc.rundir.layout import file_mode

_text = json.encoder.encode_basestring_ascii


class Events:
    """:meth:`write` may be called by any thread; :meth:`flush` and :meth:`close` by one."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "a", encoding="utf-8", errors="backslashreplace")  # noqa: SIM115 - lives with the pod
        os.fchmod(self._file.fileno(), file_mode(path.parent))
        self._lines: deque[str] = deque()
        self._encode = json.JSONEncoder(check_circular=False).encode

    def write(self, event: str, **fields: Any) -> None:
        self._lines.append(self._encode({"t": round(time.time(), 3), "event": event, **fields}) + "\n")

    def rollout(self, outcome: Outcome) -> None:
        """One stored rollout: the most frequent line by far, so it is put together by hand."""
        reward = "null" if outcome.reward is None else repr(float(outcome.reward)).replace("nan", "NaN")
        self._lines.append(
            f'{{"t": {time.time():.3f}, "event": "rollout", "id": {_text(outcome.id)}, '
            f'"status": "{outcome.status}", "kind": {_text(outcome.error_kind)}, '
            f'"error": {_text(outcome.error[:300])}, "reward": {reward}, '
            f'"seconds": {outcome.seconds:.2f}, "turns": {outcome.turns}, "inexact": {outcome.inexact}}}\n'
        )

    def flush(self) -> None:
        if not self._lines:
            return
        lines = [self._lines.popleft() for _ in range(len(self._lines))]
        try:
            self._file.write("".join(lines))
            self._file.flush()
        except OSError:
            pass  # a full disk must not stop the pod for the sake of its diary

    def close(self) -> None:
        self.flush()
        try:
            self._file.close()
        except OSError:
            pass
