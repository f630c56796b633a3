"""Where we run, and processes by identity: a pid alone may have been given to somebody else since."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from dataclasses import dataclass
from pathlib import Path

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
        if entry.name.startswith(prefix) and owner and not owner.alive() and entry.stat().st_uid == os.getuid():
            shutil.rmtree(entry.path, ignore_errors=True)
            removed += 1
    return removed
