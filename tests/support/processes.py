"""Processes of this host, as /proc shows them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from megaflow_hpc.host.process import Identity


def processes() -> Iterator[tuple[int, list[str]]]:
    """Pid and words of every process whose command line can be read."""
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                words = Path(entry.path, "cmdline").read_bytes().decode("utf-8", "replace").split("\0")
            except OSError:
                continue  # ended meanwhile
            yield int(entry.name), words


def environment(pid: int) -> dict[str, str]:
    """The environment of a process of ours; empty where it is gone."""
    try:
        pairs = Path(f"/proc/{pid}/environ").read_bytes().decode("utf-8", "replace").split("\0")
    except OSError:
        return {}
    return dict(pair.split("=", 1) for pair in pairs if "=" in pair)


def kill(pid: int) -> bool:
    """Ends a process by SIGKILL; ``False`` where there is none with this pid."""
    process = Identity.of(pid)
    return process is not None and process.kill()


def parent(pid: int) -> int:
    """The pid of a process's parent; 0 where it is gone."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, IndexError):
        return 0


def processes_of(*words: str) -> list[int]:
    """Pids of this host's processes that have each of ``words`` as an argument, ``srun`` apart; lowest first."""
    return sorted(pid for pid, said in processes() if set(words) <= set(said) and "srun" not in said[0])
