"""The errors a user can meet. Each message says which value, what was expected and what to do about it."""

from __future__ import annotations

from collections.abc import Sequence

LONGEST = 20_000
"""Characters of a message: what it quotes may be a file of somebody else's."""


class MegaflowError(Exception):
    """Base of everything raised on purpose. ``exit_status`` is what the command line returns for it.

    Of a message longer than :data:`LONGEST` the beginning, which names the place, and the end, which says what to do,
    are kept.
    """

    exit_status = 1

    def __init__(self, message: object = "") -> None:
        text = str(message)
        if len(text) > LONGEST:
            text = f"{text[: LONGEST // 2]} […] {text[-LONGEST // 2 :]}"
        super().__init__(text)


class ConfigError(MegaflowError):
    """A file or argument is wrong: names file, line, value and remedy."""

    exit_status = 2


class Mistakes(ConfigError):
    """All that is wrong with a file, found in one go; each message names its own place.

    Args:
        found: the messages, at least one.
    """

    MOST = 20
    """Messages that are shown; the others are counted."""

    def __init__(self, found: Sequence[str]) -> None:
        self.found = list(dict.fromkeys(found))
        more = len(self.found) - self.MOST
        super().__init__("\n".join([*self.found[: self.MOST], *([f"… and {more} more"] if more > 0 else [])]))


class SiteError(MegaflowError):
    """The cluster refused or lacks something (partition, account, Apptainer, MPI)."""

    exit_status = 3


class SandboxError(MegaflowError):
    """A sandbox could not be started, or was lost. A command that fails in one is a result, not an error."""


class LimitError(SandboxError):
    """A sandbox has used up what it may (CPU time, wall time) and cannot go on: its commands' doing."""


class LostError(SandboxError):
    """A container ended for an unknown reason, or does not start on the files that its commands left."""


class SetupError(SandboxError):
    """A step inside a sandbox failed: a copy in or out, a script of the task, or its health check."""


class UserCodeError(MegaflowError):
    """A task that is Python code raised, or gave something that is no reward: names file and line."""


class ModelServiceError(MegaflowError):
    """No engine answered, or an engine could not be started. A task's ``score`` raises it if its judge is down."""


class StarvedError(MegaflowError):
    """What is waited for cannot come: of those who would make it none is there, and none is queued."""

    exit_status = 69  # EX_UNAVAILABLE of sysexits.h


class LedgerError(MegaflowError):
    """The run directory's claims are not what this pod believes: it must not commit any more."""
