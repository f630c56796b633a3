"""Starts, for rank 0, a child process per finished part of its journal that makes the shard; rank 0 never waits.

Nothing of HDF5 or numpy is loaded here; the work is done by ``python -m megaflow_hpc.trajectories.journal.shards RUN
PART``.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections import deque
from pathlib import Path

from megaflow_hpc.rundir.layout import RunDir

logger = logging.getLogger(__name__)


def _start(run: RunDir, part: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "megaflow_hpc.trajectories.journal.shards", str(run), str(part)]
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PMI", "MPI", "HYDRA"))}
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, env=kept)


def make_shard(run: RunDir, part: Path) -> bool:
    """Makes the shard of a journal file in a child process, waits for it, and returns whether it was made."""
    try:
        with _start(run, part) as child:
            return child.wait() == 0
    except OSError as error:
        logger.warning("no shard is made: %s", error)
        return False


class ShardMaker:
    """Makes the shards of finished parts, one after another, in a child process of low priority.

    For the loop of rank 0: :meth:`add` never waits. When a child has ended, the next is started as soon as another part
    is finished. ``gather`` does without the shards that are not made when the pod ends.
    """

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._waiting: deque[Path] = deque()
        self._child: subprocess.Popen[bytes] | None = None

    def add(self, part: Path) -> None:
        """Queues a finished part of the journal."""
        self._waiting.append(part)
        self.poll()

    def poll(self) -> None:
        """Starts the next child if none is running."""
        if self._child is not None and self._child.poll() is None:
            return
        self._child = None
        if not self._waiting:
            return
        try:
            self._child = _start(self._run, self._waiting.popleft())
        except OSError as error:
            logger.warning("no shard is made: %s", error)

    def close(self, wait_s: float = 0.0) -> None:
        """Gives a running child ``wait_s`` seconds, then ends it."""
        self._waiting.clear()
        if self._child is None:
            return
        try:
            self._child.wait(wait_s)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        self._child = None
