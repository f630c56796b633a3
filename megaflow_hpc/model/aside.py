"""Work on large documents beside the event loop, in slices: fair between those who asked, and to the loop.

Decoders and encoders keep the interpreter's lock for as long as they work, so a thread alone would not let an event
loop go on: such work calls :func:`give_way` every now and then. There the loop gets the lock, and then the work of
whoever else waits goes on, so that nobody's large request waits for the end of another's. One thread works at a time,
since each further one would compete with the loop.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any, TypeVar
from weakref import WeakValueDictionary

T = TypeVar("T")
ASIDE = 2**20
"""Bytes of a document from which on it is dealt with beside the loop; smaller ones need not wait for another's."""
asker: ContextVar[str] = ContextVar("asker", default="")
"""Whose request it is: the works of one follow one another."""
_ASKERS = 64
"""Askers whose works take turns; those of more wait for a thread."""
_SLICE_S = 0.002
"""Processor time of a slice at least: on a busy machine who has given way waits long for the next."""
_PAUSE_S = 5e-5
"""Pause between two slices: long enough for a loop that waits for the lock to get it."""


class Turns:
    """Of several threads one works at a time; who gives way goes to the end of the line."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._line: deque[threading.Lock] = deque()
        self._taken = False

    def __enter__(self) -> None:
        with self._mutex:
            if not self._taken:
                self._taken = True
                return
            ticket = self._ticket()
        ticket.acquire()

    def __exit__(self, *_: object) -> None:
        with self._mutex:
            self._taken = bool(self._line)
            if self._line:
                self._line.popleft().release()

    def pass_on(self) -> None:
        """Lets the others in the line work before this thread goes on."""
        with self._mutex:
            if not self._line:
                return
            ticket = self._ticket()
            self._line.popleft().release()
        ticket.acquire()

    def _ticket(self) -> threading.Lock:
        """A place at the end of the line: its lock is released when it is that thread's turn."""
        ticket = threading.Lock()
        ticket.acquire()
        self._line.append(ticket)
        return ticket


_turns = Turns()
_threads = ThreadPoolExecutor(_ASKERS, "large-documents")
_here = threading.local()
_queues: WeakValueDictionary[tuple[int, str], asyncio.Lock] = WeakValueDictionary()
"""Event loop and asker → whose turn it is among the asker's own works."""


async def aside(size: int, work: Callable[..., T], *args: Any) -> T:
    """Does some work: at once for a document of few bytes, else in a thread, by turns with that of other askers."""
    if size <= ASIDE:
        return work(*args)
    loop = asyncio.get_running_loop()
    key = id(loop), asker.get()
    queue = _queues.get(key) or _queues.setdefault(key, asyncio.Lock())
    await queue.acquire()
    done = loop.run_in_executor(_threads, _in_turn, work, args)

    def ended(future: asyncio.Future[T]) -> None:
        queue.release()  # not before: who hangs up has no second one worked on meanwhile
        if not future.cancelled():
            future.exception()  # which nobody may wait for any more

    done.add_done_callback(ended)
    return await asyncio.shield(done)


def give_way() -> None:
    """Lets the event loop and other askers go on; on the loop itself nobody would be served by a pause."""
    began = getattr(_here, "began", None)
    if began is not None and time.thread_time() - began >= _SLICE_S:
        time.sleep(_PAUSE_S)
        _turns.pass_on()
        _here.began = time.thread_time()


def _in_turn(work: Callable[..., T], args: tuple[Any, ...]) -> T:
    with _turns:
        _here.began = time.thread_time()
        return work(*args)
