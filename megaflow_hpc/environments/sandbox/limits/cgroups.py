"""Uses cgroups (version 2), if the site delegates one, so that the kernel enforces limits immediately.

::

    GROUP/                     delegated: this process may write to it, and it has the memory controller
      megaflow-worker/         the processes that were in GROUP, because only a group without processes may limit others
      megaflow-<pid>-<n>/      one sandbox

Slurm delegates no cgroup to the job's user; a systemd scope with ``Delegate=yes`` does. The kernel's limits are
slightly above the watchdog's, because the watchdog can name the command that is to blame.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from megaflow_hpc.environments.sandbox.spec import SandboxSpec

ROOT = Path("/sys/fs/cgroup")
WORKER = "megaflow-worker"
WANTED = ("memory", "pids", "cpu")
MARGIN = 1.1
"""Ratio of the kernel's limits to those of the spec."""
PERIOD_US = 100_000
"""Period of ``cpu.max`` in microseconds; the kernel's default."""
REMOVE_S = 2.0


def delegated() -> Path | None:
    """Returns the cgroup in which this process may create groups, or ``None`` if the site delegates none."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    path = next((line[3:] for line in lines if line.startswith("0::")), None)
    if path is None:
        return None
    group = ROOT / path.strip("/")
    if group.name == WORKER:
        group = group.parent
    try:
        offered = (group / "cgroup.controllers").read_text().split()
    except OSError:
        return None
    files = (group, group / "cgroup.procs", group / "cgroup.subtree_control")
    is_writable = all(os.access(file, os.W_OK) for file in files)
    return group if "memory" in offered and is_writable else None


def prepare(group: Path) -> bool:
    """Prepares a delegated cgroup to hold those of sandboxes. Returns ``False`` if the kernel refuses."""
    worker = group / WORKER
    try:
        worker.mkdir(exist_ok=True)
        for _ in range(10):  # a process may fork while the others are being moved
            inside = (group / "cgroup.procs").read_text().split()
            if not inside:
                break
            for pid in inside:
                try:
                    (worker / "cgroup.procs").write_text(pid)
                except ProcessLookupError:
                    continue
        offered = (group / "cgroup.controllers").read_text().split()
        (group / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in WANTED if name in offered))
    except OSError:
        return False
    return True


class Cgroup:
    """The cgroup of one sandbox."""

    def __init__(self, parent: Path, name: str, spec: SandboxSpec) -> None:
        self.path = parent / name
        self.path.mkdir()
        self._ooms = 0
        if spec.memory_mb:
            self._set("memory.max", int(spec.memory_mb * 1e6 * MARGIN))
            self._set("memory.swap.max", 0)
        if spec.processes:
            self._set("pids.max", int(spec.processes * MARGIN))
        if spec.cpus:
            self._set("cpu.max", f"{int(spec.cpus * PERIOD_US)} {PERIOD_US}")

    def _set(self, name: str, value: object) -> None:
        try:
            (self.path / name).write_text(str(value))
        except OSError:
            pass  # this controller is not delegated, so only the watchdog enforces the limit

    def add(self, pid: int) -> None:
        """Moves a process into the cgroup. Its future children belong to the cgroup too."""
        try:
            (self.path / "cgroup.procs").write_text(str(pid))
        except OSError:
            pass  # it has exited, or is outside the delegated cgroup

    def cpu_s(self) -> float | None:
        """Returns the CPU seconds of all processes ever in the cgroup, or ``None`` if the kernel does not count
        them."""
        try:
            lines = (self.path / "cpu.stat").read_text().splitlines()
        except OSError:
            return None
        return next((int(line.split()[1]) / 1e6 for line in lines if line.startswith("usage_usec ")), None)

    def new_ooms(self) -> int:
        """Returns the number of processes that the OOM killer has killed since the last call."""
        try:
            lines = (self.path / "memory.events").read_text().splitlines()
        except OSError:
            return 0
        total = next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
        new, self._ooms = total - self._ooms, total
        return new

    def remove(self) -> None:
        """Kills all processes in the cgroup and removes it."""
        self._set("cgroup.kill", 1)
        deadline = time.monotonic() + REMOVE_S
        while True:
            try:
                self.path.rmdir()
                return
            except FileNotFoundError:
                return
            except OSError:
                if time.monotonic() > deadline:
                    return
                time.sleep(0.005)
