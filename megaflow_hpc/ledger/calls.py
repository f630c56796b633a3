"""Defines the file-system calls of the ledger as data.

The rules (:mod:`~megaflow_hpc.ledger.rules`) are generators that yield these calls and receive the results.
:class:`~megaflow_hpc.ledger.files.Files` executes the calls. Tests can therefore run the same code through every
interleaving of its calls, and on a file system with injected faults. Paths are relative to the run directory.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Names:
    """Lists a directory. Result: ``tuple[str, ...]``, empty if the directory is missing."""

    directory: str
    private: bool = False
    """True to include private names, which begin with a dot."""


@dataclass(frozen=True)
class Read:
    """Opens and reads a JSON file. Result: ``dict``, or ``None`` if the file is missing.

    Raises:
        ValueError: The file is not valid JSON, for example because another process is writing it.
    """

    path: str


@dataclass(frozen=True)
class There:
    """Checks whether a path exists. Result: ``bool``."""

    path: str


@dataclass(frozen=True)
class Link:
    """Publishes a complete file under a name that only one process can take. Result: ``bool``, true if this call took
    the name."""

    path: str
    content: Mapping[str, Any] = field(hash=False)
    token: str = ""
    """Identifies the private file. A call with the same token as an earlier call is a retry, and the earlier call may
    have succeeded."""
    keep: bool = False
    """True to keep the private file, so that the next call with this token can link it again."""


@dataclass(frozen=True)
class Publish:
    """Writes a complete file atomically, replacing any existing file."""

    path: str
    content: Mapping[str, Any] = field(hash=False)


@dataclass(frozen=True)
class Rewrite:
    """Overwrites a small file in place, without changing its directory. Readers may see a torn file."""

    path: str
    content: Mapping[str, Any] = field(hash=False)


@dataclass(frozen=True)
class Touch:
    """Creates an empty file unless it exists."""

    path: str


@dataclass(frozen=True)
class Remove:
    """Removes a file if it exists."""

    path: str


@dataclass(frozen=True)
class Clock:
    """Reads this machine's monotonic clock. Result: ``float``, in seconds."""


@dataclass(frozen=True)
class Length:
    """Measures the journal of a pod start, ``<pod>.<start>``. Result: ``int``, the number of bytes in complete
    records."""

    owner: str


@dataclass(frozen=True)
class Stored:
    """Counts the rollouts that ``<pod>.<start>`` has stored. Result: ``int``. The count in its lease may be lower."""

    owner: str
    lease: Mapping[str, Any] = field(hash=False)


@dataclass(frozen=True)
class Do:
    """Calls ``action``, which makes results durable. Result: ``None``."""

    action: Callable[[], object]


Call = Names | Read | There | Link | Publish | Rewrite | Touch | Remove | Clock | Length | Stored | Do
Steps = Generator[Call, Any, T]
