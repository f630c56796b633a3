"""Where we run, and processes by identity: a pid alone may have been given to somebody else since."""

from __future__ import annotations

import os
from pathlib import Path


def node_name() -> str:
    """This node as Slurm calls it, else the host's name."""
    return os.environ.get("SLURMD_NODENAME") or os.uname().nodename


def start_time(pid: int) -> int | None:
    """Clock ticks since boot at which ``pid`` started (field 22 of /proc/PID/stat); ``None`` if it is not there."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    fields = stat[stat.rindex(b")") + 2 :].split()
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def alive(pid: int, started: int) -> bool:
    """Whether the very process is there still."""
    return pid > 0 and start_time(pid) == started
