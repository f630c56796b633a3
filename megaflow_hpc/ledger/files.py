"""The ledger's calls carried out on a file system that is shared, caches, repeats requests and goes away for a while.

*Link.* A private file is linked to its public name. A refusal is not believed: where a network file system repeated the
request it says only that the name is taken, and the private file's link count says by whom. A *rename* that was
repeated finds nothing to rename: the file is published once more. *Stale handles* are opened afresh. *An outage* (an
error that says nothing about the file) is waited out here, call by call, so that no operation is left half known: it is
said once when it begins and once when it is over. A *full* file system or quota is the caller's business: the pod keeps
its lease, which needs no room, and tries again.
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, Generic

from megaflow_hpc.host.atomic import file_mode, make_directory, to_json, write_json
from megaflow_hpc.host.files import read_regular
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
    T,
    There,
)
from megaflow_hpc.ledger.calls import Touch as TouchCall
from megaflow_hpc.rundir.layout import RunDir

STALE_TRIES = 5
RETRY_S = 1.0
"""Between two tries while the file system is away."""
GIVE_UP_S = 600.0
AWAY = frozenset(
    (errno.EIO, errno.ENOTCONN, errno.ETIMEDOUT, errno.ESHUTDOWN, errno.EAGAIN, errno.EHOSTDOWN, errno.EHOSTUNREACH)
)
"""Errors of a file system that does not answer."""


def passing(error: OSError) -> bool:
    """Tells whether an error says nothing about the file: it may be there in a while."""
    return error.errno in AWAY or error.errno == errno.ESTALE


MANY = 1000
MOST_LINKS = 1000
"""Links to one private file; file systems have a limit."""


def boot_clock() -> float:
    """Returns the seconds since the machine started, those that it slept included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Files:
    """Carries out the ledger's calls on one run directory.

    Args:
        say: gets a line of text when the file system does not answer, and when it is back.
    """

    def __init__(
        self,
        run: RunDir,
        clock: Callable[[], float] = boot_clock,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._root, self.clock, self.say = run.path, clock, say
        self.journal_length: Callable[[str], int] = lambda owner: 0
        """Bytes of whole records in the journal of a ``<pod>.<start>``."""
        self._rewritten: dict[str, BinaryIO] = {}
        """Path → the open file."""
        self._private: dict[str, tuple[Path, int]] = {}
        """Token → a private file that is used again, and its links."""

    def carry_out(self, steps: Steps[T]) -> T:
        """Carries an operation out, and returns what it does.

        Raises:
            LedgerError: as the operation raises it.
            OSError: see :meth:`answer`.
        """
        operation = Operation(self, steps)
        while not operation.advance(MANY):
            pass
        return operation.result

    def answer(self, call: Call) -> Any:
        """Carries one call out, waiting while the file system is away.

        Raises:
            OSError: no room, no permission, or away for longer than :data:`GIVE_UP_S`.
        """
        if isinstance(call, Do):
            return self._do(call)  # the journal knows best what its errors mean
        stale, away = 0, 0.0
        while True:
            try:
                found = getattr(self, f"_{type(call).__name__.lower()}")(call)
            except OSError as error:
                now = time.monotonic()
                if stale < STALE_TRIES and (error.errno == errno.ESTALE or _repeated(error, call)):
                    stale += 1
                    continue
                if not passing(error) or (away and now - away > GIVE_UP_S):
                    raise
                if not away:
                    away = now
                    self.say(f"the run directory does not answer ({error}); waiting for it")
                time.sleep(RETRY_S)
            else:
                if away:
                    self.say(f"the run directory is back after {time.monotonic() - away:.0f} s")
                return found

    # --- one method per call ---

    def _clock(self, call: Clock) -> float:
        return self.clock()

    def _do(self, call: Do) -> None:
        call.action()

    def _length(self, call: Length) -> int:
        return self.journal_length(call.owner)

    def _names(self, call: Names) -> tuple[str, ...]:
        try:
            return tuple(name for name in os.listdir(self._root / call.room) if not name.startswith("."))
        except FileNotFoundError:
            return ()

    def _read(self, call: Read) -> dict[str, Any] | None:
        try:
            content = json.loads(read_regular(self._root / call.path))
        except FileNotFoundError:
            return None
        except RecursionError:
            raise ValueError(f"{self._root / call.path}: nested too deeply") from None
        if not isinstance(content, dict):
            raise ValueError(f"{self._root / call.path}: not a JSON object")
        return content

    def _there(self, call: There) -> bool:
        try:
            os.stat(self._root / call.path)
        except FileNotFoundError:
            return False
        return True

    def _publish(self, call: Publish) -> None:
        write_json(self._root / call.path, call.content)

    def _rewrite(self, call: Rewrite) -> None:
        # No directory changes, and the file stays open, for a server's sake. What is shorter than before is filled up,
        # and a torn one is read again.
        file = self._rewritten.pop(call.path, None) or open(self._root / call.path, "r+b")  # noqa: SIM115
        try:
            content = to_json(call.content).encode()
            os.pwrite(file.fileno(), content.ljust(os.fstat(file.fileno()).st_size), 0)
            os.fsync(file.fileno())
        except BaseException:
            file.close()  # its handle may be stale: it is opened afresh
            raise
        self._rewritten[call.path] = file

    def _touch(self, call: TouchCall) -> None:
        path = self._root / call.path
        try:
            _mark(path)
        except FileNotFoundError:  # a room that runs made earlier lack
            make_directory(path.parent)
            _mark(path)

    def _remove(self, call: Remove) -> None:
        (self._root / call.path).unlink(missing_ok=True)

    def _link(self, call: Link) -> bool:
        target = self._root / call.path
        private, links = self._private.get(call.token) or (self._own(target.parent / f".{call.token}", call), 1)
        refused = False
        won = not call.keep and _links(private) > links  # by an earlier try of this very call, whatever it was answered
        if not won:
            try:
                self._hard_link(private, target)
                won = True
            except FileExistsError:
                refused = True
                won = _links(private) > links
        if call.keep and won and not refused and links < MOST_LINKS:
            self._private[call.token] = private, links + 1
        else:  # after a refusal as well: a count that is not sure is not counted on
            self._private.pop(call.token, None)
            private.unlink(missing_ok=True)
        return won

    def _hard_link(self, private: Path, target: Path) -> None:
        os.link(private, target)

    def _own(self, private: Path, call: Link) -> Path:
        """The private file of a call; where the call is a repeated one it may be there, and is whole."""
        if call.keep or not private.exists():
            private.unlink(missing_ok=True)
            write_json(private, call.content)
        self._private[call.token] = private, 1
        return private


class Operation(Generic[T]):
    """An operation of the rules that is carried out a part at a time."""

    result: T
    """What it returned, once it has ended."""

    def __init__(self, files: Files, steps: Steps[T]) -> None:
        self._files, self._steps = files, steps
        self._call: Call | None = None

    def advance(self, calls: int) -> bool:
        """Carries out so many more calls; True when the operation has ended.

        Raises:
            LedgerError: as the operation raises it.
            OSError: see :meth:`Files.answer`.
        """
        try:
            if self._call is None:
                self._call = next(self._steps)
            for _ in range(calls):
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


def _mark(path: Path) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if (mode := file_mode(path.parent)) != 0o600:
            os.fchmod(descriptor, mode)
    finally:
        os.close(descriptor)


def _repeated(error: OSError, call: Call) -> bool:
    """Whether a file may have been renamed by a request whose answer was lost: the repeated one finds it no more."""
    return error.errno == errno.ENOENT and isinstance(call, Publish | Link)


def _links(path: Path) -> int:
    """Links to a file, asked of the server: opening is what makes a client look again."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.fstat(descriptor).st_nlink
    finally:
        os.close(descriptor)
