"""Runs a synchronous agent beside the event loop that owns its sandbox and model.

The agent has a thread of its own; where it waits for the sandbox or the model, the work is done in the event loop. A
thread cannot be killed, so cancelling the rollout cancels the work it waits for and refuses any more: the thread ends
at its next wait.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Stopped(BaseException):
    """Raised in the agent's thread once the rollout is cancelled; no ``except Exception`` of an agent holds it up."""


class Bridge:
    """Between one agent's thread and the event loop. Make it in the loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._pending: concurrent.futures.Future[Any] | None = None
        self._stopped = False

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """From the thread: carries ``work`` out in the event loop and returns its result."""
        with self._lock:
            if self._stopped:
                work.close()
                raise Stopped
            self._pending = asyncio.run_coroutine_threadsafe(work, self._loop)
            pending: concurrent.futures.Future[T] = self._pending
        try:
            return pending.result()
        except concurrent.futures.CancelledError:
            raise Stopped from None

    def stop(self) -> None:
        with self._lock:
            self._stopped = True
            if self._pending is not None:
                self._pending.cancel()

    async def run(self, program: Callable[[], T], name: str) -> T:
        """From the loop: runs ``program`` in a thread to its end, or to its stop if this is cancelled."""
        done: asyncio.Future[T] = self._loop.create_future()

        def finish(result: T | None, error: BaseException | None) -> None:
            if done.done():
                return
            if error is not None:
                done.set_exception(error)
            else:
                done.set_result(result)  # type: ignore[arg-type]

        def body() -> None:
            try:
                outcome: tuple[T | None, BaseException | None] = (program(), None)
            except Stopped:
                outcome = (None, RuntimeError("the rollout was cancelled"))
            except BaseException as error:
                outcome = (None, error)
            try:
                self._loop.call_soon_threadsafe(finish, *outcome)
            except RuntimeError:  # the loop is closed: nobody waits any more
                pass

        threading.Thread(target=body, name=name, daemon=True).start()
        try:
            return await done
        finally:
            self.stop()
