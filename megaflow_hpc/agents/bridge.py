"""Runs a synchronous agent in a thread, while the event loop owns its sandbox and model.

When the agent calls the sandbox or the model, the event loop does the work and the thread blocks. A thread cannot be
killed. So cancelling the rollout cancels the pending call and rejects later ones: the thread ends at its next call.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class AgentStopped(BaseException):
    """Raised in the agent's thread when the rollout is cancelled. An agent's ``except Exception`` does not catch it."""


class SandboxBridge:
    """Connects an agent's thread to the event loop in which the bridge was created."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._pending: concurrent.futures.Future[Any] | None = None
        self._stopped = False

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs ``work`` in the event loop and blocks until its result is available. Call it from the thread.

        Raises:
            AgentStopped: The rollout was cancelled.
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
        """Cancels the pending work, and rejects further work."""
        with self._lock:
            self._stopped = True
            if self._pending is not None:
                self._pending.cancel()

    async def run(self, program: Callable[[], T], name: str) -> T:
        """Runs ``program`` in a thread and returns its result. Stops it on cancellation. Call it from the event
        loop."""
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
            except RuntimeError:  # the loop is closed, so nothing waits for the result
                pass

        threading.Thread(target=body, name=name, daemon=True).start()
        try:
            return await done
        finally:
            self.stop()
