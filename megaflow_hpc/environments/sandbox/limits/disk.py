"""Measures a sandbox's writable layer and its other writable directories with ``du``.

Each file counts as at least one block, because even empty files use up inodes.
"""

from __future__ import annotations

import math
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

BLOCK = 4096
"""Minimum size in bytes to count per file, because file systems have one inode per 4 to 16 KB."""

MAX_SHARE_OF_TIME = 1 / 30
"""Maximum fraction of the time for which ``du`` may run."""
MIN_INTERVAL_S = 2.0
"""Minimum interval in seconds between measurements, unless much has been written."""
QUIET_INTERVAL_S = 30.0
"""Interval in seconds between measurements of a sandbox that writes almost nothing."""
QUIET_BYTES = 100_000
"""Smaller writes count as idle. Commands and the runner print that many bytes without using the disk."""
MANY_FILES = 1000
"""Count files too once the file system has this many new inodes. Files are not counted every time, because counting
takes as long as measuring bytes."""

_WITH_FILES = 'du -s -x -c --block-size=1 -- "$@" | tail -n 1; du -s -x -c --inodes -- "$@" | tail -n 1'

TOLERATED_BYTES = 1_000_000
"""Bytes that later commands may add to a layer that is already full, because a verifier writes its logs there."""


class Free(NamedTuple):
    """Free space of a file system."""

    bytes: int
    """Free bytes, not including blocks reserved for delayed writes."""
    inodes: int | None
    """Free inodes, or ``None`` if the file system allocates inodes on demand."""

    def lost(self, later: Free) -> int:
        """Returns the bytes used between this measurement and ``later``. Each new file counts as at least one block."""
        used = self.bytes - later.bytes
        return max(used, BLOCK * (self.files(later) - max(used, 0) // 512))

    def files(self, later: Free) -> int:
        """Returns the number of files created between this measurement and ``later``. Estimates it from bytes if inodes
        are not counted."""
        if self.inodes is None or later.inodes is None:
            return max(0, self.bytes - later.bytes) // 512
        return self.inodes - later.inodes


def free_disk(path: str) -> Free:
    """Returns the free space of the file system that contains ``path``, or zeros if it cannot be read."""
    try:
        status = os.statvfs(path)
    except OSError:
        return Free(0, None)
    return Free(status.f_bfree * status.f_frsize, status.f_ffree if status.f_files else None)


class DiskUse:
    """Disk usage of one sandbox as of the last measurement.

    Args:
        layer: The writable layer.
    """

    def __init__(self, layer: str) -> None:
        self.directories = [layer]
        """The layer, and other directories that the sandbox may write to."""
        self.occupied = 0
        """Bytes in ``directories`` that the sandbox did not write, such as a copy of the image or files for its
        verifier."""
        self.bytes = 0
        self.peak: int | None = None
        """Largest measured size in bytes. ``None`` before the first measurement."""
        self._du: subprocess.Popen[bytes] | None = None
        self._began = self._due = self._cost_s = 0.0
        self._written = 0
        self._free = Free(0, 0)
        self._files = 0
        self._files_counted = 0.0
        self._free_at_count: Free | None = None
        self._excuse_requested = False
        self._tolerated: float = 0
        """Bytes tolerated even above the limit, because earlier processes wrote them. Infinite after :meth:`excuse`,
        until the next measurement has finished."""

    def excuse(self) -> None:
        """Stops counting the files that exist now against later processes. Thread-safe."""
        self._excuse_requested = True

    def wanted(self, allowed: int, free: Free) -> bool:
        """Returns whether a poll is due.

        A poll is due if a measurement has finished, or if the node has lost half of the sandbox's remaining bytes.
        """
        if self._du is not None:
            return self._du.poll() is not None
        return self._is_much(self._free.lost(free), allowed)

    def _is_much(self, lost: int, allowed: int) -> bool:
        return lost > max((allowed - self.bytes) / 2, 1e6)

    def exceeds(
        self, allowed: int, init: int, written: int, deleted: Callable[[], int], now: float, free: Free
    ) -> bool:
        """Measures in the background. Returns whether running processes have written more than allowed.

        Args:
            allowed: Limit in bytes.
            init: The container's first process.
            written: Bytes that the sandbox's processes have passed to ``write``.
            deleted: Returns the size in bytes of deleted files that are still open.
        """
        if self._free_at_count is None:
            self._free_at_count, self._files_counted = free, now
        if self._excuse_requested:
            self._excuse_requested = False
            self._tolerated = math.inf
            self.end()
            self._due = self._began = -math.inf
        if self._du is None:
            if self._should_start(allowed, written, now, free):
                self._start(init, written, now, free)
            return False
        if self._du.poll() is None:
            return False
        return self._finish(allowed, deleted, now)

    def _should_start(self, allowed: int, written: int, now: float, free: Free) -> bool:
        lost = max(written - self._written, self._free.lost(free))
        if self._is_much(lost, allowed) and now >= self._began + 4 * self._cost_s:
            return True
        is_quiet = lost < QUIET_BYTES and now < self._began + QUIET_INTERVAL_S
        return now >= self._due and not is_quiet

    def _start(self, init: int, written: int, now: float, free: Free) -> None:
        assert self._free_at_count is not None
        count_files = now > self._files_counted + QUIET_INTERVAL_S or self._free_at_count.files(free) > MANY_FILES
        self._du, self._began = _start_du(self.directories, init, count_files), now
        self._written, self._free = written, free
        if count_files:
            self._free_at_count, self._files_counted = free, now

    def _finish(self, allowed: int, deleted: Callable[[], int], now: float) -> bool:
        assert self._du is not None
        totals, self._du = _totals(self._du), None
        self._cost_s = max(0.05, now - self._began)
        self._due = now + max(MIN_INTERVAL_S, self._cost_s / MAX_SHARE_OF_TIME)
        if totals is None:
            return False
        size, files = totals
        self._files = files or self._files
        self.bytes = max(0, max(size, BLOCK * self._files) - self.occupied) + deleted()
        self.peak = max(self.peak or 0, self.bytes)
        self._tolerated = min(self._tolerated, self.bytes + TOLERATED_BYTES)
        if self.bytes > allowed:
            self._due = now + 4 * self._cost_s
        if self.bytes <= max(allowed, self._tolerated):
            return False
        self._tolerated = math.inf  # killed processes may still write until they exit
        return True

    def end(self) -> None:
        """Cancels the running measurement, if any."""
        du, self._du = self._du, None
        if du is not None:
            with suppress(ProcessLookupError):
                os.killpg(du.pid, signal.SIGKILL)
            du.wait()
            _totals(du)


def _start_du(directories: Sequence[str], init: int, count_files: bool) -> subprocess.Popen[bytes] | None:
    """Starts ``du`` in the container's user namespace. Returns ``None`` if it cannot run.

    In that namespace the caller is root, so a directory without permissions (``chmod 000``) hides nothing. ``du`` also
    handles trees deeper than the maximum path length.
    """
    nsenter, du = shutil.which("nsenter"), shutil.which("du")
    if du is None:
        return None
    inside = [nsenter, "--preserve-credentials", "-U", "-t", str(init), "--"] if nsenter and os.geteuid() else []
    measuring = [du, "-s", "-x", "-c", "--block-size=1", "--"]
    if count_files:
        measuring = ["/bin/sh", "-c", _WITH_FILES, "sh"]
    try:
        return subprocess.Popen(
            [*inside, *measuring, *directories],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={"PATH": f"{os.path.dirname(du)}:/usr/bin:/bin", "LC_ALL": "C"},
            start_new_session=True,
        )
    except OSError:
        return None


def _totals(process: subprocess.Popen[bytes]) -> tuple[int, int] | None:
    """Returns the bytes and files of a finished measurement, or ``None`` if it failed. The number of files is 0 if they
    were not counted."""
    assert process.stdout is not None
    with process.stdout as output:
        totals = [line.split()[0] for line in output.read(65536).splitlines() if line.endswith(b"\ttotal")]
    if not totals or not all(total.isdigit() for total in totals):
        return None
    return int(totals[0]), int(totals[-1]) if len(totals) > 1 else 0
