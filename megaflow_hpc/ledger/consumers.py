"""Keeps a campaign open for its consumers: processes that read rollouts and may add more, such as a trainer.

The file ``RUN/ledger/open/<consumer>`` is created by planning or by :meth:`OpenLease.open`. It exists until the
consumer closes it, whether or not the consumer is running. As long as it exists, the campaign is not finished and its
engines keep running. Pods without work wait until the lease expires.

A campaign is finished once all blocks are done and no consumer may add more. The finished mark records the number of
blocks that it covers (:func:`megaflow_hpc.rundir.marks.counts`). A mark that covers fewer blocks than exist is void.
This happens if a block is added after the mark was written, or while a pod is about to write it. Processes never delete
marks, because they might delete a newer one.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from megaflow_hpc.errors import LedgerError
from megaflow_hpc.host.atomic import make_directory
from megaflow_hpc.ledger.blocks import TOKEN
from megaflow_hpc.ledger.calls import Clock, Names, Publish, Read, Remove, Steps, There
from megaflow_hpc.ledger.files import Files
from megaflow_hpc.ledger.lease import TIMES, Lease
from megaflow_hpc.ledger.names import DONE, TASKS, all_done, block_numbers, done_blocks
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.marks import FINISHED, OPEN, Marks, counts

READ_S = 10.0
"""Seconds between two reads of open leases by a pod. It lists their names at every poll."""


@dataclass
class Consumers:
    """Tracks the consumers that may add blocks. A lease that is first seen counts as just renewed."""

    open_s: float = TIMES.open_s
    opened: bool = False
    """True if any consumer could add blocks at the last :meth:`look`."""
    awaited: bool = False
    """True if any consumer had an unexpired lease at the last :meth:`look`."""
    _leases: dict[str, Lease] = field(default_factory=dict)
    _read_at: float | None = None

    def look(self) -> Steps[None]:
        """Lists the consumers. Reads their leases if the last read was at least :data:`READ_S` seconds ago."""
        names = yield Names(OPEN)
        self.opened = bool(names)
        if not names:
            self.awaited, self._leases = False, {}
            return
        self._leases = {name: self._leases.get(name) or Lease(f"{OPEN}/{name}") for name in sorted(names)}
        now: float = yield Clock()
        some_unread = any(lease.unchanged_since is None for lease in self._leases.values())
        if some_unread or self._read_at is None or now - self._read_at >= READ_S:
            self._read_at = now
            for lease in self._leases.values():
                yield from lease.look()
        self.awaited = any(lease.unchanged_s(now) < self.open_s for lease in self._leases.values())


def finish(by: str, known: Iterable[int] = ()) -> Steps[bool]:
    """Writes the finished mark if the campaign is finished. Returns whether it is finished.

    Args:
        by: Name of the pod or consumer that writes the mark.
        known: Blocks that exist, even if a stale listing does not show them.
    """
    blocks = set(known)
    while not (yield Names(OPEN)):
        marks = yield Names(DONE)
        if len(marks) < len(blocks):
            return False
        done = done_blocks(marks)
        blocks.update(done)
        blocks.update(block_numbers((yield Names(TASKS))))
        if not all_done(done, blocks):
            return False
        before = len(blocks)
        if counts((yield Read(FINISHED)), before):
            return True
        yield Publish(FINISHED, {"by": by, "blocks": before})
        blocks.update(block_numbers((yield Names(TASKS))))
        if len(blocks) == before:
            return True
        # This mark may have replaced a mark that covers more blocks, and the pod that wrote that mark may have exited.
        # So check again.
    return False


RENEW_S = 30.0


class OpenLease:
    """A consumer's own lease, which keeps the campaign open. All methods are idempotent and may raise OSError.

    Args:
        consumer: Name of the consumer, unique in the run. A trainer uses the name of its policy.

    Raises:
        LedgerError: The consumer's name is not a valid file name.
    """

    def __init__(self, run: RunDir, consumer: str) -> None:
        if not TOKEN.match(consumer):
            raise LedgerError(f"consumer {consumer!r}: expected only letters, digits and ._-, because it names a file")
        self.run, self.consumer = run, consumer
        self._lease, self._marks, self._files = Lease(f"{OPEN}/{consumer}"), Marks(run), Files(run, time.monotonic)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def open(self) -> None:
        """Creates the lease. If the campaign has already finished, ``resume`` continues it.

        Raises:
            LedgerError: The campaign was cancelled.
        """
        self._refuse_if_cancelled()
        self.put()
        try:
            self._refuse_if_cancelled()
        except LedgerError:
            self._files.answer(Remove(self._lease.path))  # the cancelling process may not have seen this lease
            raise

    def put(self) -> None:
        """Creates or renews the lease."""
        make_directory(self.run.path / OPEN)
        now = time.monotonic()
        self._files.carry_out(self._lease.look())
        self._files.carry_out(self._lease.publish(now, self._content()))

    def renew(self) -> bool:
        """Renews the lease if it is due. Call it frequently. Returns false if the lease was removed because the
        campaign was cancelled."""
        now = time.monotonic()
        if now - self._lease.renewed_at < RENEW_S:
            return True
        self._files.carry_out(self._lease.look())
        try:
            self._files.carry_out(self._lease.rewrite(now, self._content()))
        except FileNotFoundError:
            return False
        exists: bool = self._files.answer(There(self._lease.path))  # an open file stays writable after its removal
        return exists

    def keep(self) -> None:
        """Opens the lease and renews it in a background thread until :meth:`leave` or :meth:`close`. Raises the errors
        of :meth:`open`."""
        self.open()
        self._stop.clear()
        self._thread = threading.Thread(target=self._keep, name="open-lease", daemon=True)
        self._thread.start()

    def leave(self) -> None:
        """Stops renewing the lease without removing it. The campaign stays open, so that the consumer can return."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def close(self) -> None:
        """Removes the lease, so that the campaign can finish. The consumer must not add blocks afterwards."""
        self.leave()
        self._files.answer(Remove(self._lease.path))
        self._files.carry_out(finish(self.consumer))  # no pod may be left to do so

    def _keep(self) -> None:
        while not self._stop.wait(RENEW_S):
            try:
                if not self.renew():
                    return
            except OSError:
                continue  # the disk is full or unavailable, and the next renewal may succeed

    def _refuse_if_cancelled(self) -> None:
        if self._marks.cancelled:
            raise LedgerError(f"{self.run}: is cancelled; continue it with: megaflow-hpc resume {self.run}")

    def _content(self) -> dict[str, object]:
        return {"consumer": self.consumer, "host": os.uname().nodename, "pid": os.getpid()}
