"""Calls user-written task code with a time limit. Errors name its file and line.

An exception in such code is the user's failure; a lost sandbox remains an infrastructure failure. Synchronous functions
run in their own thread, with a sandbox whose methods block until the result is available.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

from megaflow_hpc.environments.sandbox.sandbox import READ_LIMIT, ApptainerSandbox
from megaflow_hpc.errors import ConfigError, ModelServiceError, SandboxError, UserCodeError
from megaflow_hpc.tasks.judging import Judge, WaitingJudge
from megaflow_hpc.types import ExecResult, Task


async def call(task: Task, method: Callable[..., Any], sandbox: ApptainerSandbox, timeout_s: float, **more: Any) -> Any:
    """Calls one method of a task with its sandbox, in the event loop or in a thread, with a time limit.

    Args:
        more: further keyword arguments of the method.

    Raises:
        UserCodeError: the method raised any other exception, or timed out.
        SandboxError: the sandbox was lost.
        ModelServiceError: raised by the method.
    """
    limit = asyncio.timeout(timeout_s)
    try:
        async with limit:
            if inspect.iscoroutinefunction(method):
                return await method(sandbox, **more)
            # After a timeout, the thread runs until it next uses the sandbox, which is closed by then.
            loop = asyncio.get_running_loop()
            plain = dict(more)
            if isinstance(judge := more.get("judge"), Judge):
                plain["judge"] = WaitingJudge(judge, loop)
            result = await _in_thread(lambda: method(WaitingSandbox(sandbox, loop), **plain), task.id)
            return await result if inspect.isawaitable(result) else result
    except (SandboxError, ModelServiceError):
        raise
    except (Exception, SystemExit) as error:
        if limit.expired():
            raise UserCodeError(
                f"{code_of(method)}: {method.__name__} of task {task.id} ran longer than its {timeout_s:g} s"
            ) from None
        raise _user_error(task, method, error) from error


async def _in_thread(call: Callable[[], Any], name: str) -> Any:
    """Runs ``call`` in a new thread, so that a call that never returns does not occupy the loop's thread pool."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()

    def finish(result: Any, error: BaseException | None) -> None:
        if done.done():
            return
        if error is None:
            done.set_result(result)
        else:
            done.set_exception(error)

    def body() -> None:
        outcome: tuple[Any, BaseException | None]
        try:
            outcome = call(), None
        except (StopIteration, KeyboardInterrupt, GeneratorExit) as error:  # a future cannot hold these
            outcome = None, RuntimeError(repr(error)).with_traceback(error.__traceback__)
        except BaseException as error:
            outcome = None, error
        try:
            loop.call_soon_threadsafe(finish, *outcome)
        except RuntimeError:  # the loop is closed, so nothing waits for the result
            pass

    threading.Thread(target=body, name=f"task-{name}", daemon=True).start()
    return await done


def _user_error(task: Task, method: Callable[..., Any], error: BaseException) -> UserCodeError:
    return UserCodeError(f"{origin(error)}: {method.__name__} of task {task.id} raised {error!r}")


def guarded(call: Callable[[], Any], what: str, kind: type[ConfigError] | type[UserCodeError]) -> Any:
    """Returns the result of ``call``. Converts an exception to an error of type ``kind`` that names ``what`` and the
    line."""
    try:
        return call()
    except (Exception, SystemExit) as error:
        raise kind(f"{what} raised {error!r} at {origin(error)}") from error


def origin(error: BaseException) -> str:
    """Returns ``file:line`` of the innermost frame in user code rather than in a library."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    library = (sys.prefix, sys.base_prefix, os.path.dirname(os.path.dirname(__file__)), "<frozen")
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(library)]
    frame = (frames or traceback.extract_tb(error.__traceback__))[-1]
    return f"{frame.filename}:{frame.lineno}"


def code_of(method: Callable[..., Any]) -> str:
    """Returns ``file:line`` of a method's definition."""
    code = getattr(method, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else repr(method)


class WaitingSandbox:
    """A synchronous sandbox: each method blocks until it is done. For use in a thread."""

    def __init__(self, sandbox: ApptainerSandbox, loop: asyncio.AbstractEventLoop) -> None:
        self._sandbox = sandbox
        self._loop = loop

    def exec(self, command: Any, **options: Any) -> ExecResult:
        """Runs a command and waits for it. ``options`` are those of the sandbox's own ``exec``."""
        return asyncio.run_coroutine_threadsafe(self._sandbox.exec(command, **options), self._loop).result()

    def upload(self, source: str, target: str) -> None:
        """Copies a file or directory from the host into the sandbox."""
        asyncio.run_coroutine_threadsafe(self._sandbox.upload(source, target), self._loop).result()

    def download(self, source: str, target: str) -> None:
        """Copies a file or directory from the sandbox to the host."""
        asyncio.run_coroutine_threadsafe(self._sandbox.download(source, target), self._loop).result()

    def read(self, path: str, limit: int = READ_LIMIT) -> bytes | None:
        """Returns the first ``limit`` bytes of a file, or ``None`` if it is not a regular file."""
        return asyncio.run_coroutine_threadsafe(self._sandbox.read(path, limit), self._loop).result()
