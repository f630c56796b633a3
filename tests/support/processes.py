"""Processes of this host and their words, as text."""

from __future__ import annotations

from collections.abc import Iterator

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
