"""Processes of this host and their words, as text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from megaflow_hpc.host import process


def processes() -> Iterator[tuple[int, list[str]]]:
    """Pid and words of every process of this host; no words where they cannot be read."""
    return ((pid, [word.decode("utf-8", "replace") for word in process.argv(pid)]) for pid in process.processes())


def environment(pid: int) -> dict[str, str]:
    """The environment of a process of ours; empty where it is gone."""
    pairs = (entry.decode("utf-8", "replace") for entry in process.environment(pid))
    return dict(pair.split("=", 1) for pair in pairs if "=" in pair)


def kill(pid: int) -> bool:
    """Ends a process by SIGKILL; ``False`` where there is none with this pid."""
    return process.kill_each([pid]) == 1


def processes_of(*words: str) -> list[int]:
    """Pids of this host's processes that have each of ``words`` as an argument, ``srun`` apart; lowest first."""
    return sorted(pid for pid, said in processes() if set(words) <= set(said) and "srun" not in said[0])


def workers_of(run: Path) -> list[int]:
    """Pids of a run's worker ranks on this host: those that have a runner for a child."""
    ranks = processes_of("megaflow_hpc.pod", str(run))
    return [pid for pid in ranks if Path(f"/proc/{pid}/task/{pid}/children").read_text()]
