"""What a sandbox has on disk: its writable layer and further directories of its own, measured by ``du``.

Every file counts as at least a block, so that empty ones count too: they take the file system's inodes.
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
"""Bytes that a file counts as at least: file systems have an inode for every 4 to 16 KB."""

MEASURE_SHARE = 30
"""``du`` runs at most a thirtieth of the time."""
MEASURE_S = 2.0
"""Seconds between two measurements at least, unless much was written."""
QUIET_S = 30.0
"""Seconds between two where nothing was written, by the kernel's count or by what the file system lost."""
WRITTEN_BY_NOTHING = 100_000
"""Bytes that commands print and the runner answers with."""
MANY_FILES = 1000
"""Files are counted where the file system has lost so many, and every :data:`QUIET_S`: that takes as long again."""

_WITH_FILES = 'du -s -x -c --block-size=1 -- "$@" | tail -n 1; du -s -x -c --inodes -- "$@" | tail -n 1'


LITTLE = 1_000_000
"""Bytes that may be written in a layer that somebody has filled: tests that judge it leave their logs."""


class Free(NamedTuple):
    """What a file system has left."""

    bytes: int
    """Blocks promised to delayed writes are not free."""
    inodes: int | None
    """``None`` where it makes them as they are needed."""

    def lost(self, later: Free) -> int:
        """Returns the bytes that are gone, a file as a block; what makes its inodes of blocks shows them as bytes."""
        gone = self.bytes - later.bytes
        return max(gone, BLOCK * (self.files(later) - max(gone, 0) // 512))

    def files(self, later: Free) -> int:
        """Returns how many files were made in between; those of a file system that does not count them by its bytes."""
        if self.inodes is None or later.inodes is None:
            return max(0, self.bytes - later.bytes) // 512
        return self.inodes - later.inodes


def free_disk(path: str) -> Free:
    """Returns what is left on the file system of ``path``."""
    try:
        found = os.statvfs(path)
    except OSError:
        return Free(0, None)
    return Free(found.f_bfree * found.f_frsize, found.f_ffree if found.f_files else None)


class DiskUse:
    """What one sandbox has on disk, as of the last measurement."""

    def __init__(self) -> None:
        self.bytes = 0
        self.peak: int | None = None
        """The most that was measured; ``None`` before the first measurement."""
        self._du: subprocess.Popen[bytes] | None = None
        self._files = 0
        self._began = self._due = self._cost = self._counted = 0.0
        self._written = 0
        self._free = Free(0, 0)
        self._free_counted: Free | None = None
        self._begun_anew = False
        """A measurement that began before that says nothing of those who run now."""
        self._bearable: float = 0
        """Bytes that count against nobody who runs now, were they more than is allowed: what stood there, and a
        little. Infinite until a measurement has said what stands there."""

    def excuse(self) -> None:
        """Begins anew: what is there now was written by others than those who run from now on. From any thread."""
        self._begun_anew = True

    def wanted(self, allowed: int, free: Free) -> bool:
        """Whether to look now: a measurement has ended, or the node lost half of what the sandbox may still take."""
        if self._du is not None:
            return self._du.poll() is not None
        return self._is_much(self._free.lost(free), allowed)

    def _is_much(self, lost: int, allowed: int) -> bool:
        return lost > max((allowed - self.bytes) / 2, 1e6)

    def grows_over(
        self,
        allowed: int,
        directories: Sequence[str],
        occupied: int,
        init: int,
        written: int,
        deleted: Callable[[], int],
        now: float,
        free: Free,
    ) -> bool:
        """Measures beside the caller's other work; returns whether those who run now wrote more than is allowed.

        Args:
            occupied: bytes that were there at the start.
            written: bytes that the sandbox's processes passed to ``write``.
            deleted: asks for the bytes of deleted files that are open.
        """
        if self._free_counted is None:
            self._free_counted, self._counted = free, now
        if self._begun_anew:
            self._begun_anew, self._bearable = False, math.inf
            self.end()
            self._due = self._began = -math.inf
        if self._du is None:
            lost = max(written - self._written, self._free.lost(free))
            quiet = lost < WRITTEN_BY_NOTHING and now < self._began + QUIET_S
            if (now >= self._due and not quiet) or (
                self._is_much(lost, allowed) and now >= self._began + 4 * self._cost
            ):
                counts_files = now > self._counted + QUIET_S or self._free_counted.files(free) > MANY_FILES
                self._du, self._began = _start(directories, init, counts_files), now
                self._written, self._free = written, free
                if counts_files:
                    self._free_counted, self._counted = free, now
            return False
        if self._du.poll() is None:
            return False
        found, self._du = _measured(self._du), None
        self._cost = max(0.05, now - self._began)
        self._due = now + max(MEASURE_S, MEASURE_SHARE * self._cost)
        if found is None:
            return False
        self._files = found[1] or self._files
        self.bytes = max(0, max(found[0], BLOCK * self._files) - occupied) + deleted()
        self.peak = max(self.peak or 0, self.bytes)
        self._bearable = min(self._bearable, self.bytes + LITTLE)
        if self.bytes > allowed:
            self._due = now + 4 * self._cost
        if self.bytes <= max(allowed, self._bearable):
            return False
        self._bearable = math.inf  # who is ended now writes on until then
        return True

    def end(self) -> None:
        """Gives up a measurement under way."""
        du, self._du = self._du, None
        if du is not None:
            with suppress(ProcessLookupError):
                os.killpg(du.pid, signal.SIGKILL)
            du.wait()
            _measured(du)


def _start(directories: Sequence[str], init: int, files: bool) -> subprocess.Popen[bytes] | None:
    """``du``, if it can be run, in the container's user namespace, where the caller is root over its own files: a
    directory without any right (``chmod 000``) hides nothing. It walks trees deeper than any path may be long."""
    nsenter, du = shutil.which("nsenter"), shutil.which("du")
    if du is None:
        return None
    inside = [nsenter, "--preserve-credentials", "-U", "-t", str(init), "--"] if nsenter and os.geteuid() else []
    counting = ["/bin/sh", "-c", _WITH_FILES, "sh"] if files else [du, "-s", "-x", "-c", "--block-size=1", "--"]
    try:
        return subprocess.Popen(
            [*inside, *counting, *directories],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={"PATH": f"{os.path.dirname(du)}:/usr/bin:/bin", "LC_ALL": "C"},
            start_new_session=True,
        )
    except OSError:
        return None


def _measured(process: subprocess.Popen[bytes]) -> tuple[int, int] | None:
    """The bytes that a finished measurement found, and the files if it counted them, else 0; ``None`` if it failed."""
    assert process.stdout is not None
    with process.stdout as output:
        totals = [line.split()[0] for line in output.read(65536).splitlines() if line.endswith(b"\ttotal")]
    if not totals or not all(total.isdigit() for total in totals):
        return None
    return int(totals[0]), int(totals[-1]) if len(totals) > 1 else 0
