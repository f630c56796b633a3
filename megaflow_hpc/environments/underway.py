"""What :mod:`.commands` keeps of a command under way, and of the worker that runs it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from megaflow_hpc.environments.streams import CappedBuffer, StreamPair


class Worker:
    """A worker of the runner, as its FIFO."""

    def __init__(self, number: int, pipe: int) -> None:
        self.number = number
        self.pipe = pipe
        self.command: CommandUnderWay | None = None


class CommandUnderWay:
    """A command under way."""

    def __init__(self, number: int, worker: Worker, pair: StreamPair, limit: int) -> None:
        self.number = number
        self.worker = worker
        self.pair = pair
        self.buffers = (CappedBuffer(limit), CappedBuffer(limit))
        self.done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.files: list[str] = []
        self.breach = ""
        self.on_output: Callable[[bytes], None] | None = None
        self.listening: asyncio.TimerHandle | None = None
        self.killing: asyncio.Task[None] | None = None
