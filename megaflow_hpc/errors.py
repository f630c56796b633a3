"""Errors for users. Each message names the value, what was expected, and the remedy."""

from __future__ import annotations

from collections.abc import Sequence

MAX_MESSAGE_CHARACTERS = 20_000
"""Longest message. It may quote another user's file."""


class MegaflowError(Exception):
    """Base of all errors raised on purpose. ``exit_status`` is the exit status of the command line.

    A message longer than :data:`MAX_MESSAGE_CHARACTERS` loses its middle: its beginning names the place, and its end
    the remedy.
    """

    exit_status = 1

    def __init__(self, message: object = "") -> None:
        text = str(message)
        if len(text) > MAX_MESSAGE_CHARACTERS:
            half = MAX_MESSAGE_CHARACTERS // 2
            text = f"{text[:half]} […] {text[-half:]}"
        super().__init__(text)


class ConfigError(MegaflowError):
    """A file or argument is wrong. The message names file, line, value and remedy."""

    exit_status = 2


class Mistakes(ConfigError):
    """All errors of a file. Each message names its own place.

    Args:
        found: the messages, at least one.
    """

    MAX_SHOWN = 20
    """Messages that are shown. The others are counted."""

    def __init__(self, found: Sequence[str]) -> None:
        self.found = list(dict.fromkeys(found))
        lines = self.found[: self.MAX_SHOWN]
        if len(self.found) > self.MAX_SHOWN:
            lines.append(f"… and {len(self.found) - self.MAX_SHOWN} more")
        super().__init__("\n".join(lines))


class SiteError(MegaflowError):
    """The cluster refused or lacks something (partition, account, Apptainer, MPI)."""

    exit_status = 3


class SandboxError(MegaflowError):
    """A sandbox could not be started, or was lost. A failed command in a sandbox is a result, not an error."""


class LimitError(SandboxError):
    """The commands of a sandbox have used up a limit (CPU time, wall time), so it cannot continue."""


class LostError(SandboxError):
    """A container ended for an unknown reason, or cannot start on the files that its commands left."""


class SetupError(SandboxError):
    """A step inside a sandbox failed: a copy in or out, a script of the task, or its health check."""


class UserCodeError(MegaflowError):
    """The Python code of a task or an agent failed. The message names file and line."""


class ModelServiceError(MegaflowError):
    """No engine answered, or an engine could not be started. A task's ``score`` may raise it if its judge is down."""


class StarvedError(MegaflowError):
    """A wait cannot end: no process that would produce the awaited result runs or is queued."""

    exit_status = 69  # EX_UNAVAILABLE of sysexits.h


class LedgerError(MegaflowError):
    """The ledger contradicts what this pod holds, so the pod must not commit any more. Or the ledger is damaged."""
