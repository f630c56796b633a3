"""Errors for users. Each message names the value, what was expected, and the remedy."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Sequence
from typing import Any

MAX_MESSAGE_CHARACTERS = 20_000
"""Maximum length of an error message in characters. A message may quote another user's file, which may be arbitrarily
long."""


class MegaflowError(Exception):
    """Base class of all errors that the package raises deliberately. ``exit_status`` is the command's exit status.

    A message longer than :data:`MAX_MESSAGE_CHARACTERS` is truncated in the middle.
    """

    exit_status = 1

    def __init__(self, message: object = "") -> None:
        text = str(message)
        if len(text) > MAX_MESSAGE_CHARACTERS:
            half = MAX_MESSAGE_CHARACTERS // 2
            text = f"{text[:half]} […] {text[-half:]}"
        super().__init__(text)


class ConfigError(MegaflowError):
    """A file or argument is invalid. The message names the file, line, value and remedy."""

    exit_status = 2


class Mistakes(ConfigError):
    """All errors found in a file. Each message names its location.

    Args:
        found: The messages, at least one.
    """

    MAX_SHOWN = 20
    """Maximum number of messages to show. The rest are only counted."""

    def __init__(self, found: Sequence[str]) -> None:
        self.found = list(dict.fromkeys(found))
        lines = self.found[: self.MAX_SHOWN]
        if len(self.found) > self.MAX_SHOWN:
            lines.append(f"… and {len(self.found) - self.MAX_SHOWN} more")
        super().__init__("\n".join(lines))


class SiteError(MegaflowError):
    """The cluster refused a request or lacks something (partition, account, Apptainer, MPI)."""

    exit_status = 3


class SandboxError(MegaflowError):
    """A sandbox could not be started, or was lost. A command that fails in a sandbox is a result, not an error."""


class LimitError(SandboxError):
    """The commands in a sandbox exhausted a limit (CPU time, wall time), so the sandbox cannot continue."""


class LostError(SandboxError):
    """A container ended for an unknown reason, or cannot be restarted because of changes that its commands made."""


class SetupError(SandboxError):
    """A step inside a sandbox failed: an upload or download, a script of the task, or the task's health check."""


class ServiceError(SandboxError):
    """A service of a rollout did not become healthy, or ended while the rollout ran."""


class UserCodeError(MegaflowError):
    """The user's Python code for a task or an agent failed. The message names the file and line."""


class ModelServiceError(MegaflowError):
    """No engine responded, or an engine could not be started. A task's ``score`` may raise this error if its judge is
    down."""

    answer: Any = None
    """The gateway's decoded response, if there was one."""


class UnscoredError(MegaflowError):
    """A stored rollout cannot be scored again, because its record lacks files, or because the scorer failed."""


class StarvedError(MegaflowError):
    """A wait would never end, because no process that could produce the awaited result is running or queued."""

    exit_status = 69  # EX_UNAVAILABLE of sysexits.h


class LedgerError(MegaflowError):
    """The ledger is damaged, or contradicts the state of this pod. The pod must not commit anything further."""


_FILE_REMEDIES = {
    errno.ENOSPC: "free space on that file system, or use another",
    errno.EDQUOT: "remove files, or ask for a larger quota",
    errno.EFBIG: "raise the limit of file sizes (ulimit -f)",
    errno.EROFS: "use a directory on a writable file system",
    errno.EIO: "the file system failed; try again, and tell the site if it happens again",
    errno.ESTALE: "the file system failed; try again, and tell the site if it happens again",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
}


def file_error(error: Exception) -> str:
    """Returns the message of an error. An error of the file system gets its path and a remedy."""
    if not isinstance(error, OSError) or error.errno is None:
        return str(error)
    # A failed write names no file. Name the full file system instead, if it is one of the usual ones.
    place = error.filename or (", ".join(_full_directories()) if error.errno == errno.ENOSPC else "")
    remedy = _FILE_REMEDIES.get(error.errno, "correct the path or its permissions" if error.filename else "")
    return (f"{place}: " if place else "") + str(error.strerror) + (f"; {remedy}" if remedy else "")


def _full_directories() -> list[str]:
    """Returns which of the working, temporary and home directories are on a file system without free space."""
    full = []
    for folder in dict.fromkeys((os.getcwd(), os.environ.get("TMPDIR", "/tmp"), os.path.expanduser("~"))):
        with contextlib.suppress(OSError):
            space = os.statvfs(folder)
            if not space.f_bavail or (space.f_files and not space.f_favail):
                full.append(folder)
    return full
