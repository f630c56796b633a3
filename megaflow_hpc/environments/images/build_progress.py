"""Builds and pulls many images in parallel, and reports progress."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

MAX_PARALLEL_BUILDS = 4
REPORT_INTERVAL_S = 0.25
CANCEL_TIMEOUT_S = 20.0
"""Seconds to wait for running builds to end after a cancellation."""


@dataclass(frozen=True)
class BuildProgress:
    """Progress of building ``total`` images."""

    total: int
    looked_up: int
    """Images checked against the store so far. Building starts once all are checked."""
    there: int = 0
    """Images that the store already had at the start."""
    to_make: int = 0
    """Images that the store lacks. Names that cannot be resolved are not counted."""
    made: int = 0
    failed: int = 0
    at_work: int = 0
    steps: int = 0
    """Dockerfile steps completed so far."""
    bytes: int = 0
    """Bytes added to the store so far."""
    elapsed_s: float = 0.0
    """Seconds since the first build started."""

    @property
    def left_s(self) -> float | None:
        """Estimated remaining seconds. ``None`` until the first image is done."""
        done = self.made + self.failed
        return self.elapsed_s / done * (self.to_make - done) if done else None


Job = Callable[[], Path]
Report = Callable[[int, int, int, float], None]
"""Callback that receives the numbers of images made, failed and in progress, and the elapsed seconds."""


def at_once() -> int:
    """Returns the number of images to build in parallel: one per available CPU, at most four."""
    return min(len(os.sched_getaffinity(0)), MAX_PARALLEL_BUILDS)


def make_all(
    jobs: Mapping[str, Job], report: Report, stop: Callable[[], None], *, keep_going: bool
) -> tuple[dict[str, Path], dict[str, BaseException]]:
    """Runs jobs in parallel, starting them in order. Returns the results and the exceptions of failed jobs, by name.

    Args:
        stop: Called to end running jobs if this call is interrupted.
        keep_going: Start further jobs after a failure.
    """
    waiting = deque(jobs.items())
    results = queue.SimpleQueue[tuple[str, Path | BaseException]]()
    made: dict[str, Path] = {}
    failed: dict[str, BaseException] = {}
    threads: list[threading.Thread] = []

    def run(name: str, job: Job) -> None:
        try:
            results.put((name, job()))
        except BaseException as error:
            results.put((name, error))

    start = time.monotonic()
    running = 0
    try:
        while waiting or running:
            while waiting and running < at_once():
                # A daemon thread, so that a cancelled program does not wait for an unresponsive registry.
                thread = threading.Thread(target=run, args=waiting.popleft(), daemon=True)
                thread.start()
                threads.append(thread)
                running += 1
            try:
                name, outcome = results.get(timeout=REPORT_INTERVAL_S)
            except queue.Empty:
                pass
            else:
                running -= 1
                if isinstance(outcome, Path):
                    made[name] = outcome
                else:
                    failed[name] = outcome
                    if not keep_going:
                        waiting.clear()
            report(len(made), len(failed), running, time.monotonic() - start)
    except BaseException:
        stop()
        end = time.monotonic() + CANCEL_TIMEOUT_S
        for thread in threads:
            thread.join(max(end - time.monotonic(), 0.0))
        raise
    return made, failed
