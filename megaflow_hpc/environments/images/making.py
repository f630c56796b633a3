"""Makes many images side by side, and says how far that is."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

MOST_AT_ONCE = 4
EVERY_S = 0.25
"""Between two looks at how far it is."""
END_S = 20.0
"""What is under way at an interruption may take so long to end."""


@dataclass(frozen=True)
class Making:
    """How far the making of ``total`` images is."""

    total: int
    looked_up: int
    """Of how many it is known whether they are in the store; nothing is made before all are."""
    there: int = 0
    """In the store at the beginning."""
    to_make: int = 0
    """That it lacked; others are not to be had by their names."""
    made: int = 0
    failed: int = 0
    at_work: int = 0
    steps: int = 0
    """Of Dockerfiles, made."""
    bytes: int = 0
    """Added to the store."""
    elapsed_s: float = 0.0
    """Since the first was begun."""

    @property
    def left_s(self) -> float | None:
        """Expected seconds to the end; ``None`` before the first image is done."""
        done = self.made + self.failed
        return self.elapsed_s / done * (self.to_make - done) if done else None


class Watch(Protocol):
    """Whom it is told what is done, from several threads."""

    def say(self, line: str) -> None:
        """Gets a line for each step that is made, and some for what is fetched."""

    def show(self, state: Making) -> None:
        """Gets how far it is, some times a second."""


Job = Callable[[], Path]
Told = Callable[[int, int, int, float], None]
"""Gets how many are made, failed and under way, and since when in seconds."""


def at_once() -> int:
    """How many images are made at a time: one for each processor of this process, at most four."""
    return min(len(os.sched_getaffinity(0)), MOST_AT_ONCE)


def make_all(
    jobs: Mapping[str, Job], told: Told, stop: Callable[[], None], *, keep_going: bool
) -> tuple[dict[str, Path], dict[str, BaseException]]:
    """Carries out jobs, several at once, in their order; returns what they made, and the errors of those that failed.

    Args:
        stop: ends what is under way, after an interruption.
        keep_going: begin further ones after one has failed.
    """
    waiting, results = deque(jobs.items()), queue.SimpleQueue[tuple[str, Path | BaseException]]()
    made: dict[str, Path] = {}
    failed: dict[str, BaseException] = {}
    begun, halted = [0], threading.Event()
    guard = threading.Lock()

    def work() -> None:
        while True:
            with guard:
                if halted.is_set() or not waiting:
                    return
                name, job = waiting.popleft()
                begun[0] += 1
            try:
                results.put((name, job()))
            except BaseException as error:
                if not keep_going:
                    with guard:
                        halted.set()
                results.put((name, error))

    start = time.monotonic()
    # Daemons: after an interruption nobody has to wait for a registry that does not answer.
    threads = [threading.Thread(target=work, name=f"images {n}", daemon=True) for n in range(min(at_once(), len(jobs)))]
    try:
        for thread in threads:
            thread.start()
        while len(made) + len(failed) < (begun[0] if halted.is_set() else len(jobs)):
            try:
                name, outcome = results.get(timeout=EVERY_S)
            except queue.Empty:
                pass
            else:
                if isinstance(outcome, Path):
                    made[name] = outcome
                else:
                    failed[name] = outcome
            told(len(made), len(failed), begun[0] - len(made) - len(failed), time.monotonic() - start)
    except BaseException:
        halted.set()
        stop()
        end = time.monotonic() + END_S
        for thread in threads:
            if thread.ident is not None:
                thread.join(max(end - time.monotonic(), 0.0))
        raise
    return made, failed
