"""The open lease: a consumer of the campaign's rollouts says that it may yet add blocks.

``RUN/ledger/open/<consumer>`` is there from the plan on, or from :meth:`OpenLease.open`, until the consumer closes it,
whether the consumer runs or not. Meanwhile the campaign is not finished and its engines stay. Pods without work wait as
long as they see the lease renewed within :data:`~megaflow_hpc.ledger.ending.OPEN_S`.
"""

from __future__ import annotations

import os
import threading
import time

from megaflow_hpc.errors import LedgerError
from megaflow_hpc.host.atomic import make_directory
from megaflow_hpc.ledger.adding import TOKEN
from megaflow_hpc.ledger.calls import Publish, Read, Remove, Rewrite, There
from megaflow_hpc.ledger.ending import finish
from megaflow_hpc.ledger.files import Files
from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.rundir.marks import OPEN, Marks

RENEW_S = 30.0


class OpenLease:
    """The open lease of one consumer, as its owner uses it. All methods may be repeated, and raise OSError.

    Args:
        consumer: its name, unique among those of the run; of what trains a policy, the policy's.

    Raises:
        LedgerError: the name is no name of a file.
    """

    def __init__(self, run: RunDir, consumer: str) -> None:
        if not TOKEN.match(consumer):
            raise LedgerError(f"consumer {consumer!r}: letters, digits and ._- alone; it names a file")
        self.run, self.consumer = run, consumer
        self._path, self._marks, self._files = f"{OPEN}/{consumer}", Marks(run), Files(run)
        self._renewed = 0.0
        self._leave = threading.Event()
        self._thread: threading.Thread | None = None

    def open(self) -> None:
        """Keeps the campaign open; also one that is finished, which goes on with ``resume``.

        Raises:
            LedgerError: the campaign is cancelled.
        """
        self._check()
        self.put()
        try:
            self._check()
        except LedgerError:
            self._files.answer(Remove(self._path))  # whoever cancelled may have listed before
            raise

    def put(self) -> None:
        """Writes the lease, or renews it."""
        make_directory(self.run.path / OPEN)
        self._files.answer(Publish(self._path, self._said()))
        self._renewed = time.monotonic()

    def renew(self) -> bool:
        """Renews the lease where that is due; call often. False where it was closed: the campaign is cancelled."""
        if time.monotonic() - self._renewed < RENEW_S:
            return True
        try:
            self._files.answer(Rewrite(self._path, self._said()))
        except FileNotFoundError:
            return False
        self._renewed = time.monotonic()
        there: bool = self._files.answer(There(self._path))  # an open file can be written after it was removed
        return there

    def keep(self) -> None:
        """Opens the lease, and has a thread renew it until :meth:`leave` or :meth:`close`. Raises as :meth:`open`."""
        self.open()
        self._leave.clear()
        self._thread = threading.Thread(target=self._keep, name="open-lease", daemon=True)
        self._thread.start()

    def leave(self) -> None:
        """Renews no more; the campaign stays open, for the consumer to come back."""
        self._leave.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def close(self) -> None:
        """Lets the campaign end: nothing more is added."""
        self.leave()
        self._files.answer(Remove(self._path))
        self._files.carry_out(finish(self.consumer))  # of pods there may be none left

    def _keep(self) -> None:
        while not self._leave.wait(RENEW_S):
            try:
                if not self.renew():
                    return
            except OSError:
                continue  # full or away; the next renewal may do

    def _check(self) -> None:
        if self._marks.cancelled:
            raise LedgerError(f"{self.run}: is cancelled; continue it with: megaflow-hpc resume {self.run}")

    def _said(self) -> dict[str, object]:
        try:
            known = self._files.answer(Read(self._path)) or {}
        except ValueError:
            known = {}
        counter = int(known.get("counter", 0)) + 1
        return {"consumer": self.consumer, "counter": counter, "host": os.uname().nodename, "pid": os.getpid()}
