"""What a campaign may use, over all its pods: ``limits.core_hours`` and ``limits.wall``.

Every pod says in its events how many core-seconds its allocation has cost so far; each sums up what all have said. So a
limit holds within what the pods use between two looks, without a word between pods and without asking Slurm.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megaflow_hpc.rundir import RunDir

LOOK_S = 30.0
TAIL = 1 << 16
"""Bytes at the end of an event file within which the last progress is looked for."""
_PER_NODE = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def cores_of(environment: Mapping[str, str] = os.environ) -> int:
    """CPUs of the whole allocation: what accounting charges for, used or not."""
    said = environment.get("SLURM_JOB_CPUS_PER_NODE", "")
    if not said:
        return len(os.sched_getaffinity(0))
    return sum(int(cpus) * int(times or 1) for cpus, times in _PER_NODE.findall(said))


class Budget:
    """
    Args:
        core_hours, wall_h: ``None`` without that limit.
    """

    def __init__(self, run: RunDir, core_hours: float | None, wall_h: float | None) -> None:
        self._run, self._core_hours, self._wall_h = run, core_hours, wall_h
        self._began: dict[Path, float] = {}
        self._ended: dict[Path, tuple[int, float]] = {}
        """File → (its size, core-seconds in it)."""

    @property
    def limited(self) -> bool:
        return self._core_hours is not None or self._wall_h is not None

    def exceeded(self) -> str:
        """Reads what the pods have said; which limit is passed, or nothing."""
        files = sorted(self._run.events.glob("*.jsonl"))
        used_h = sum(self._core_s(file) for file in files) / 3600
        if self._core_hours is not None and used_h >= self._core_hours:
            return f"{used_h:.2f} core-hours are used, limits.core_hours is {self._core_hours:g}"
        began = min((self._first(file) for file in files), default=time.time())
        wall_h = (time.time() - began) / 3600
        if self._wall_h is not None and wall_h >= self._wall_h:
            return f"the first pod started {wall_h:.2f} hours ago, limits.wall is {self._wall_h:g}"
        return ""

    def _first(self, file: Path) -> float:
        if file not in self._began:
            with open(file, "rb") as lines:
                event = _decoded(lines.readline())
            if event is None:
                return time.time()
            self._began[file] = float(event["t"])
        return self._began[file]

    def _core_s(self, file: Path) -> float:
        with open(file, "rb") as lines:
            size = lines.seek(0, os.SEEK_END)
            known, core_s = self._ended.get(file, (-1, 0.0))
            if size == known:
                return core_s
            lines.seek(max(0, size - TAIL))
            for line in reversed(lines.read().splitlines()):
                event = _decoded(line)
                if event is not None and "core_s" in event:
                    core_s = float(event["core_s"])
                    break
        self._ended[file] = size, core_s
        return core_s


def _decoded(line: bytes) -> dict[str, Any] | None:
    """An event; ``None`` for half a line."""
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) else None
