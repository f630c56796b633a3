"""Control groups, version 2, where the site delegates one to its users: the kernel then holds memory, processes and
CPU shares exactly, and the watchdog only what a cgroup cannot (disk, time).

Slurm delegates none to the job's user; a systemd user session and some batch systems do. One child group per sandbox,
removed with it; ``cgroup.kill`` ends everything in it at once.
"""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
PERIOD_US = 100_000
"""Of ``cpu.max``: the kernel's own default."""


def delegated(root: Path = ROOT, own: str | None = None) -> Path | None:
    """This process's own group, if it may make groups below it that bound memory; else ``None``."""
    if own is None:
        try:
            own = Path("/proc/self/cgroup").read_text()
        except OSError:
            return None
    for line in own.splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            group = root / path.strip("/")
            try:
                offered = (group / "cgroup.controllers").read_text().split()
            except OSError:
                return None
            writable = os.access(group, os.W_OK) and os.access(group / "cgroup.subtree_control", os.W_OK)
            writable = writable and os.access(group / "cgroup.procs", os.W_OK)
            return group if writable and "memory" in offered else None
    return None
