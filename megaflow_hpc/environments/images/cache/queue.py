"""Who waits for room in the cache of a node: the first to come is served first."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from pathlib import Path

from megaflow_hpc.environments.images.cache.shelf import POLL_S, alive, listing


class Queue:
    """Those who wait for room below ``root``, each by a file that bears the identity of its process."""

    def __init__(self, root: Path, identity: str) -> None:
        self.root = root
        self._identity = identity

    def queue_up(self) -> str:
        """Returns a place in the queue for room; give it back with :meth:`leave_queue`."""
        ticket = f"{time.monotonic_ns():020d}.{secrets.token_hex(4)}.{self._identity}"
        (self.root / "queue" / ticket).touch(mode=0o600)
        return ticket

    def leave_queue(self, ticket: str) -> None:
        """Gives a place in the queue back."""
        (self.root / "queue" / ticket).unlink(missing_ok=True)

    def first_in_queue(self) -> str | None:
        """Returns the ticket of who has waited longest; removes those of dead processes."""
        for ticket in sorted(listing(self.root / "queue")):
            if alive(ticket.rpartition(".")[2]):
                return ticket
            self.leave_queue(ticket)
        return None


class Turn:
    """One process's place among those that wait for room, taken when it is first asked for.

    Args:
        deadline: monotonic.
    """

    def __init__(self, queue: Queue, deadline: float) -> None:
        self.deadline = deadline
        self._queue = queue
        self._ticket = ""
        self._pause = POLL_S[0]

    def __enter__(self) -> Turn:
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()

    def come(self) -> bool:
        """Whether nobody has waited for longer."""
        self._ticket = self._ticket or self._queue.queue_up()
        return self._queue.first_in_queue() == self._ticket

    def leave(self) -> None:
        """Gives the place back."""
        ticket, self._ticket = self._ticket, ""
        if ticket:
            self._queue.leave_queue(ticket)

    def wait(self, here: Callable[[], bool]) -> None:
        """Waits a while: until it is this process's turn, or what it waits for is ``here``.

        Raises:
            TimeoutError: it is not before the deadline.
        """
        while True:
            if time.monotonic() >= self.deadline:
                raise TimeoutError(
                    f"everything in {self._queue.root} is in use; raise MEGAFLOW_CACHE_GB, or run fewer slots"
                )
            time.sleep(self._pause)
            self._pause = min(2 * self._pause, POLL_S[1])
            if here() or self.come():
                return
