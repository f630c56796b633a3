"""The files of bases and layers as builds need them: unpacked, owned by whom they say, kept for the next build.

::

    PLACE/trees/<key>        a base, or a layer in the form of an overlay's upper directory
    PLACE/partial/<n>        one that is being made

All builds of a process share them. Where scratch gets short, those that no build uses go, the least recently used
first. Nothing outlives the process: what it leaves, killed, the janitor removes.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from megaflow_hpc.environments.images import sif
from megaflow_hpc.errors import SiteError
from megaflow_hpc.host.apptainer import clean_environment, last_line
from megaflow_hpc.host.child import dies_with_parent
from megaflow_hpc.host.files import remove_tree

SHARE_KEPT_FREE, BYTES_KEPT_FREE = 0.25, 20 * 10**9
"""Of the file system: what is not in use goes where less than both is free."""

Make = Callable[[Path], None]


class Trees:
    """The trees below ``place``; threads may share them."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self._guard = threading.Lock()
        self._locks: dict[str, threading.Lock] = {}
        self._used: dict[str, int] = {}
        """Key → builds that use it, in the order of their last use."""
        self._numbers = itertools.count()

    @contextmanager
    def holding(self) -> Iterator[Hold]:
        """Yields a hold, whose trees stay until the context ends."""
        hold = Hold(self)
        try:
            yield hold
        finally:
            with self._guard:
                for key in hold.keys:
                    self._used[key] -= 1
            self._make_room()

    def _take(self, key: str, make: Make) -> Path:
        path = self._place / "trees" / key
        with self._guard:
            self._used[key] = self._used.pop(key, 0) + 1
            lock = self._locks.setdefault(key, threading.Lock())
        try:
            with lock:
                if not os.path.lexists(path):
                    self._make(path, make)
        except BaseException:
            with self._guard:
                self._used[key] -= 1
            raise
        return path

    def _make(self, path: Path, make: Make) -> None:
        partial = self._place / "partial" / str(next(self._numbers))
        for room in (path.parent, partial.parent):
            room.mkdir(mode=0o700, exist_ok=True)
        try:
            make(partial)
            os.rename(partial, path)
        finally:
            remove_tree(partial)

    def _make_room(self) -> None:
        while True:
            disk = shutil.disk_usage(self._place)
            wanted = min(SHARE_KEPT_FREE * disk.total, BYTES_KEPT_FREE)
            with self._guard:
                idle = next((key for key, users in self._used.items() if not users), None)
                if idle is None or disk.free > wanted:
                    return
                del self._used[idle]
                gone = self._place / "partial" / str(next(self._numbers))
                try:
                    os.rename(self._place / "trees" / idle, gone)
                except FileNotFoundError:
                    continue
            remove_tree(gone, ignore_errors=True)


class Hold:
    """What one build uses of the trees."""

    def __init__(self, trees: Trees) -> None:
        self._trees = trees
        self.keys: list[str] = []

    def get(self, key: str, make: Make) -> Path:
        """Returns the tree of ``key``; where there is none, ``make(directory)`` makes it. Blocks."""
        path = self._trees._take(key, make)
        self.keys.append(key)
        return path


def unpack_sif(image: str, namespace: Sequence[str], target: Path) -> None:
    """Unpacks a SIF, its files owned by whom it says, as far as the caller has ids; raises :class:`SiteError`."""
    program = shutil.which("unsquashfs")
    if program is None:
        raise SiteError("unsquashfs: not on PATH, which images are unpacked with; install squashfs-tools")
    offset = str(sif.system_partition(image).offset)
    words = [program, "-n", "-q", "-no-xattrs", "-o", offset, "-d", str(target), image]
    done = subprocess.run(
        [*namespace, *dies_with_parent(), *words],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        env=clean_environment(),
        cwd="/",
        check=False,
    )
    if done.returncode not in (0, 2):  # 2: a device could not be made
        raise SiteError(f"{image}: {last_line(done.stderr.decode('utf-8', 'replace'))}")
