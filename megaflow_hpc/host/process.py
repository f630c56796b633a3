"""Where we run, and processes by identity: a pid alone may have been given to somebody else since."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

SHARED_MEMORY = "/dev/shm"
STALE_S = 60.0
"""A file of shared memory that nobody has mapped for this long belongs to no world that is just starting."""
POD_DIRECTORY = "megaflow-pod"
"""``<this>.<host>.<pid>-<start>.<random>``: a pod's private directory, named by the process that owns it."""


def node_name() -> str:
    """This node as Slurm calls it, else the host's name."""
    return os.environ.get("SLURMD_NODENAME") or os.uname().nodename


@dataclass(frozen=True)
class Identity:
    """A process that cannot be mistaken for a later one of the same pid. ``start`` in clock ticks since boot."""

    pid: int
    start: int

    def __str__(self) -> str:
        return f"{self.pid}-{self.start}"

    @classmethod
    def parse(cls, text: str) -> Identity | None:
        pid, _, start = text.partition("-")
        return cls(int(pid), int(start)) if pid.isdecimal() and start.isdecimal() else None

    @classmethod
    def of(cls, pid: int) -> Identity | None:
        """``None`` if there is no such process, or only its zombie."""
        fields = stat_fields(pid)
        return cls(pid, int(fields[19])) if fields and fields[0] not in "ZX" else None

    def alive(self) -> bool:
        return Identity.of(self.pid) == self

    def kill(self) -> bool:
        """SIGKILL; ``False`` if it was gone."""
        return self.send(signal.SIGKILL)

    def send(self, number: signal.Signals) -> bool:
        """A signal through a pidfd that was checked to be this very process; ``False`` if it was gone."""
        try:
            descriptor = os.pidfd_open(self.pid)
        except (ProcessLookupError, OSError):
            return False
        try:
            if not self.alive():
                return False
            signal.pidfd_send_signal(descriptor, number)
            return True
        except (ProcessLookupError, PermissionError):
            return False
        finally:
            os.close(descriptor)


def stat_fields(pid: int) -> list[str]:
    """Fields of ``/proc/PID/stat`` from the third (state) on: the second may hold blanks and brackets."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].decode().split()
    except OSError:
        return []


def make_pod_directory() -> Path:
    """A private directory of this process, as ``pods.sh`` makes one for its own."""
    me = Identity.of(os.getpid())
    return Path(tempfile.mkdtemp(prefix=f"{POD_DIRECTORY}.{os.uname().nodename}.{me}."))


def sweep_pod_directories(base: str | os.PathLike[str]) -> int:
    """Removes those under ``base`` whose process on this host is gone, and returns how many."""
    prefix, removed = f"{POD_DIRECTORY}.{os.uname().nodename}.", 0
    for entry in os.scandir(base):
        owner = Identity.parse(entry.name.removeprefix(prefix).rpartition(".")[0])
        if not (entry.name.startswith(prefix) and owner) or owner.alive():
            continue
        try:
            if entry.stat(follow_symlinks=False).st_uid != os.getuid():
                continue
        except FileNotFoundError:
            continue  # another janitor's
        shutil.rmtree(entry.path, ignore_errors=True)
        removed += 1
    return removed


def sweep_shared_memory(pattern: str = "mpich*") -> int:
    """Removes MPI's shared memory that a world left which was killed as it started; returns how many files.

    Ranks unlink theirs as soon as all have it mapped, so what lies there, is ours and mapped by nobody is garbage.
    """
    found = [path for path in Path(SHARED_MEMORY).glob(pattern) if _old_and_ours(path)]
    if not found:
        return 0
    mapped = set()
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                with open(f"{entry.path}/maps") as maps:
                    mapped |= {line.rpartition(" ")[2].strip() for line in maps if SHARED_MEMORY in line}
            except OSError:
                continue  # ended meanwhile, or another user's, who has not mapped ours
    gone = [path for path in found if str(path) not in mapped]
    for path in gone:
        path.unlink(missing_ok=True)
    return len(gone)


def _old_and_ours(path: Path) -> bool:
    try:
        status = path.stat()
    except OSError:
        return False
    return status.st_uid == os.getuid() and time.time() - status.st_mtime > STALE_S
