"""Executes the ledger's calls on a shared file system that caches, resends requests and has outages.

- *Link.* A private file is linked to its public name. A refusal is inconclusive, because a network file system may have
  resent the request after its first copy took the name. The private file's link count therefore decides.
- *Rename.* If the file system resends a rename, the source file is missing. The file is then published again.
- *Stale handles.* The file is reopened.
- *Outages.* The error does not show whether the call took effect. Each call is retried until the file system is back,
  so the outcome of every operation is known.
- *Full disks and quotas.* The error is raised to the caller. The pod keeps its lease, because renewing needs no
  additional space, and retries.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, Generic

from megaflow_hpc.host.atomic import file_mode, to_json, write_json
from megaflow_hpc.ledger.accounts import stored_by
from megaflow_hpc.ledger.calls import (
    Call,
    Clock,
    Do,
    Length,
    Link,
    Names,
    Publish,
    Read,
    Remove,
    Rewrite,
    Steps,
    Stored,
    T,
    There,
)
from megaflow_hpc.ledger.calls import Touch as TouchCall
from megaflow_hpc.rundir.layout import RunDir, read_json

MAX_STALE_TRIES = 5
RETRY_S = 1.0
"""Seconds between retries while the file system is unavailable."""
GIVE_UP_S = 600.0
"""After this many seconds without the file system, the call raises its error."""
AWAY = frozenset(
    (errno.EIO, errno.ENOTCONN, errno.ETIMEDOUT, errno.ESHUTDOWN, errno.EAGAIN, errno.EHOSTDOWN, errno.EHOSTUNREACH)
)
"""Error numbers with which an unavailable file system answers."""


def passing(error: OSError) -> bool:
    """Returns whether an error is transient. The file may then still exist."""
    return error.errno in AWAY or error.errno == errno.ESTALE


MAX_LINKS = 1000
"""Maximum number of hard links to one private file, because file systems limit this number."""


def boot_clock() -> float:
    """Returns the seconds since boot, including suspended time."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Files:
    """Executes the ledger's calls on one run directory."""

    def __init__(self, run: RunDir, clock: Callable[[], float] = boot_clock) -> None:
        self._root, self.clock = run.path, clock
        self.journal_length: Callable[[str], int] = lambda owner: 0
        """Function that returns the number of bytes in complete records of the journal of ``<pod>.<start>``."""
        self._rewritten: dict[str, BinaryIO] = {}
        """Open handles of files that are overwritten in place, by path."""
        self._private: dict[str, tuple[Path, int]] = {}
        """Private file that is kept for the next call with the same token, and its link count, by token."""

    def carry_out(self, steps: Steps[T]) -> T:
        """Runs an operation to completion and returns its result.

        Raises:
            LedgerError: The operation raised it.
            OSError: See :meth:`answer`.
        """
        operation = Operation(self, steps)
        while not operation.advance():
            pass
        return operation.result

    def answer(self, call: Call) -> Any:
        """Executes one call and returns its result. Retries while the file system is unavailable.

        Raises:
            OSError: The disk is full, access is denied, or the file system was unavailable for :data:`GIVE_UP_S`.
            ValueError: The call read a file that is not valid JSON.
        """
        if isinstance(call, Do):
            return self._do(call)  # the journal handles its own errors
        stale_tries, began = 0, time.monotonic()
        while True:
            try:
                return getattr(self, f"_{type(call).__name__.lower()}")(call)
            except OSError as error:
                if stale_tries < MAX_STALE_TRIES and (error.errno == errno.ESTALE or _repeated(error, call)):
                    stale_tries += 1
                    continue
                if not passing(error) or time.monotonic() - began > GIVE_UP_S:
                    raise
                time.sleep(RETRY_S)

    # --- one method per call ---

    def _clock(self, call: Clock) -> float:
        return self.clock()

    def _do(self, call: Do) -> None:
        call.action()

    def _length(self, call: Length) -> int:
        return self.journal_length(call.owner)

    def _stored(self, call: Stored) -> int:
        return stored_by(RunDir(self._root), call.owner, call.lease)

    def _names(self, call: Names) -> tuple[str, ...]:
        try:
            names = os.listdir(self._root / call.directory)
            return tuple(name for name in names if call.private or not name.startswith("."))
        except FileNotFoundError:
            return ()

    def _read(self, call: Read) -> dict[str, Any] | None:
        try:
            return read_json(self._root / call.path, dict[str, Any])
        except FileNotFoundError:
            return None

    def _there(self, call: There) -> bool:
        try:
            os.stat(self._root / call.path)
        except FileNotFoundError:
            return False
        return True

    def _publish(self, call: Publish) -> None:
        write_json(self._root / call.path, call.content)

    def _rewrite(self, call: Rewrite) -> None:
        # Keep the file open, and change no directory, to reduce the load of the file server. Pad shorter content.
        # Readers retry if they see a torn file.
        file = self._rewritten.pop(call.path, None) or open(self._root / call.path, "r+b")  # noqa: SIM115
        try:
            content = to_json(call.content).encode()
            os.pwrite(file.fileno(), content.ljust(os.fstat(file.fileno()).st_size), 0)
            os.fsync(file.fileno())
        except BaseException:
            file.close()  # the handle may be stale, so the next call reopens the file
            raise
        self._rewritten[call.path] = file

    def _touch(self, call: TouchCall) -> None:
        path = self._root / call.path
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if (mode := file_mode(path.parent)) != 0o600:
                os.fchmod(descriptor, mode)
        finally:
            os.close(descriptor)

    def _remove(self, call: Remove) -> None:
        (self._root / call.path).unlink(missing_ok=True)

    def _link(self, call: Link) -> bool:
        target = self._root / call.path
        private, links = self._private.get(call.token) or (self._own(target.parent / f".{call.token}", call), 1)
        refused = False
        won = not call.keep and _links(private) > links  # an earlier attempt of this call succeeded
        if not won:
            try:
                self._hard_link(private, target)
                won = True
            except FileNotFoundError:  # the coordinator assumed that this pod is dead, and removed the private file
                self._private.pop(call.token, None)
                raise
            except FileExistsError:
                refused = True
                won = _links(private) > links
        if call.keep and won and not refused and links < MAX_LINKS:
            self._private[call.token] = private, links + 1
        else:  # also after a refusal, because the link count is then uncertain
            self._private.pop(call.token, None)
            private.unlink(missing_ok=True)
        return won

    def remove_private(self) -> None:
        """Removes the private files that were kept for later calls. Raises OSError."""
        for private, _ in self._private.values():
            private.unlink(missing_ok=True)
        self._private.clear()

    def _hard_link(self, private: Path, target: Path) -> None:
        os.link(private, target)

    def _own(self, private: Path, call: Link) -> Path:
        """Returns the private file of a call and creates it if necessary. A file found by a retry is complete."""
        if call.keep or not private.exists():
            private.unlink(missing_ok=True)
            write_json(private, call.content)
        self._private[call.token] = private, 1
        return private


class Operation(Generic[T]):
    """A ledger operation that can be executed in several parts."""

    result: T
    """Result of the operation. Set once the operation has ended."""

    def __init__(self, files: Files, steps: Steps[T]) -> None:
        self._files, self._steps = files, steps
        self._call: Call | None = None

    def advance(self, calls: int = 1000) -> bool:
        """Executes up to ``calls`` further file-system calls. Returns True once the operation has ended.

        Raises:
            LedgerError: The operation raised it.
            OSError: See :meth:`Files.answer`.
        """
        try:
            if self._call is None:
                self._call = next(self._steps)
            while calls > 0:
                calls -= not isinstance(self._call, Clock)
                try:
                    answer = self._files.answer(self._call)
                except (ValueError, OSError) as error:
                    self._call = self._steps.throw(error)
                else:
                    self._call = self._steps.send(answer)
        except StopIteration as stop:
            self.result = stop.value
            return True
        return False


def _repeated(error: OSError, call: Call) -> bool:
    """Returns whether the error may come from a resent request whose first copy already renamed the file."""
    return error.errno == errno.ENOENT and isinstance(call, Publish | Link)


def _links(path: Path) -> int:
    """Returns the link count of a file. Opens the file to make a network client query the server."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.fstat(descriptor).st_nlink
    finally:
        os.close(descriptor)
