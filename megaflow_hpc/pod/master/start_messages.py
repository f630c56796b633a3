"""The messages that start rollouts. A task is packed once for all its samples, and put into each message as it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import msgpack

from megaflow_hpc.host.wire import pack
from megaflow_hpc.pod.scheduling.work import Work
from megaflow_hpc.types import Attempt

TASKS_KEPT = 4096
"""Packed tasks in memory."""

_HEAD = b"\x89" + pack("op") + pack("start") + pack("task")  # a map of nine pairs, its parts one by one


class Starts:
    """
    Args:
        tasks: task dictionaries by id.
    """

    def __init__(self, tasks: Mapping[str, Any], job_id: str) -> None:
        self._tail = pack("job_id") + pack(job_id)
        self._packer = msgpack.Packer(use_bin_type=True, unicode_errors="surrogatepass", default=str)
        self._task = lru_cache(TASKS_KEPT)(lambda task_id: pack(tasks[task_id]))

    def pack(self, work: Work, rank: int, attempts: Sequence[Attempt] = (), partial: str = "") -> bytes:
        """What ``rank`` has to know to run ``work`` after ``attempts``, going on with ``partial`` if that is named."""
        rest = {
            "rollout": vars(work.rollout),
            "attempt": work.attempt,
            "attempts": [vars(attempt) for attempt in attempts],
            "epoch": work.epoch,
            "rank": rank,
            "partial": partial,
        }
        return b"".join((_HEAD, self._task(work.rollout.task_id), self._packer.pack(rest)[1:], self._tail))
