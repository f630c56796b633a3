"""Measures a sandbox's writable layer and its other directories with ``du``.

Every file counts as one block or more, because empty files take the file system's inodes.
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
"""Minimum bytes that a file counts as. File systems have an inode for every 4 to 16 KB."""

MAX_SHARE_OF_TIME = 1 / 30
"""Share of the time that ``du`` may run."""
MIN_INTERVAL_S = 2.0
"""Minimum seconds between two measurements, unless much was written."""
QUIET_INTERVAL_S = 30.0
"""Seconds between two measurements of a sandbox that writes nothing."""
QUIET_BYTES = 100_000
"""Bytes that commands and the runner print without writing to disk."""
MANY_FILES = 1000
"""If the file system lost this many inodes, files are counted too. Counting takes as long as measuring bytes."""

_WITH_FILES = 'du -s -x -c --block-size=1 -- "$@" | tail -n 1; du -s -x -c --inodes -- "$@" | tail -n 1'

TOLERATED_BYTES = 1_000_000
"""Bytes that later commands may write to a layer that was full before, because a verifier leaves its logs there."""


class Free(NamedTuple):
    """Free space of a file system."""

    bytes: int
    """Blocks reserved for delayed writes are not free."""
    inodes: int | None
    """``None`` if the file system creates inodes as they are needed."""

    def lost(self, later: Free) -> int:
        """Returns the bytes that were used since, with each new file as one block or more."""
        used = self.bytes - later.bytes
        return max(used, BLOCK * (self.files(later) - max(used, 0) // 512))

    def files(self, later: Free) -> int:
        """Returns how many files were created since. Estimates them from bytes if inodes are not counted."""
        if self.inodes is None or later.inodes is None:
            return max(0, self.bytes - later.bytes) // 512
        return self.inodes - later.inodes


def free_disk(path: str) -> Free:
    """Returns the free space of the file system of ``path``."""
    try:
        status = os.statvfs(path)
    except OSError:
        return Free(0, None)
    return Free(status.f_bfree * status.f_frsize, status.f_ffree if status.f_files else None)


class DiskUse:
    """The disk space of one sandbox, as of the last measurement.

    Args:
        layer: the writable layer.
    """

    def __init__(self, layer: str) -> None:
        self.directories = [layer]
        """The layer, and other directories that the sandbox may write to."""
        self.occupied = 0
        """Bytes in them that the sandbox did not write: a copy of the image, files for its verifier."""
        self.bytes = 0
        self.peak: int | None = None
        """The largest measured size; ``None`` before the first measurement."""
        self._du: subprocess.Popen[bytes] | None = None
        self._began = self._due = self._cost_s = 0.0
        self._written = 0
        self._free = Free(0, 0)
        self._files = 0
        self._files_counted = 0.0
        self._free_at_count: Free | None = None
        self._excuse_requested = False
        self._tolerated: float = 0
        """Bytes that are no breach even above the limit, because earlier processes wrote them. Infinite until a
        measurement that began after :meth:`excuse` has ended."""

    def excuse(self) -> None:
        """Does not blame later processes for the present files. May be called from any thread."""
        self._excuse_requested = True

    def wanted(self, allowed: int, free: Free) -> bool:
        """Returns whether to look now: a measurement has ended, or the node lost half of the sandbox's remaining
        bytes."""
        if self._du is not None:
            return self._du.poll() is not None
        return self._is_much(self._free.lost(free), allowed)

    def _is_much(self, lost: int, allowed: int) -> bool:
        return lost > max((allowed - self.bytes) / 2, 1e6)

    def exceeds(
        self, allowed: int, init: int, written: int, deleted: Callable[[], int], now: float, free: Free
    ) -> bool:
        """Measures in the background. Returns whether running processes wrote more than is allowed.

        Args:
            init: the container's first process.
            written: bytes that the sandbox's processes passed to ``write``.
            deleted: returns the bytes of deleted files that are open.
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
        self._tolerated = math.inf  # the killed processes write until they have ended
        return True

    def end(self) -> None:
        """Cancels a running measurement."""
        du, self._du = self._du, None
        if du is not None:
            with suppress(ProcessLookupError):
                os.killpg(du.pid, signal.SIGKILL)
            du.wait()
            _totals(du)


def _start_du(directories: Sequence[str], init: int, count_files: bool) -> subprocess.Popen[bytes] | None:
    """Starts ``du`` in the container's user namespace; ``None`` if it cannot run.

    There the caller is root over its own files, so a directory without any right (``chmod 000``) hides nothing. ``du``
    also walks trees that are deeper than the longest path.
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
    """Returns bytes and files of a finished measurement; ``None`` if it failed. Files are 0 if not counted."""
    assert process.stdout is not None
    with process.stdout as output:
        totals = [line.split()[0] for line in output.read(65536).splitlines() if line.endswith(b"\ttotal")]
    if not totals or not all(total.isdigit() for total in totals):
        return None
    return int(totals[0]), int(totals[-1]) if len(totals) > 1 else 0
