"""Runs a synchronous agent in a thread, beside the event loop that owns its sandbox and model.

Where the agent waits for the sandbox or the model, the work is done in the event loop. A thread cannot be killed, so
cancelling the rollout cancels the work that it waits for and refuses any further: the thread ends at its next wait.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class AgentStopped(BaseException):
    """Raised in the agent's thread once the rollout is cancelled; an agent's ``except Exception`` does not catch it."""


class SandboxBridge:
    """Connects one agent's thread with the event loop in which it is made."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._pending: concurrent.futures.Future[Any] | None = None
        self._stopped = False

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Called in the thread: runs ``work`` in the event loop and returns its result.

        Raises:
            Stopped: The rollout is cancelled.
        """
        with self._lock:
            if self._stopped:
                work.close()
                raise AgentStopped
            self._pending = asyncio.run_coroutine_threadsafe(work, self._loop)
            pending: concurrent.futures.Future[T] = self._pending
        try:
            return pending.result()
        except concurrent.futures.CancelledError:
            raise AgentStopped from None

    def stop(self) -> None:
        """Cancels the work that the thread waits for, and refuses any further."""
        with self._lock:
            self._stopped = True
            if self._pending is not None:
                self._pending.cancel()

    async def run(self, program: Callable[[], T], name: str) -> T:
        """Called in the loop: runs ``program`` in a thread and returns its result; stops it if cancelled."""
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
            except AgentStopped:
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
