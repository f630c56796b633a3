"""Calls of the ledger to a file system, as data.

The rules (:mod:`~megaflow_hpc.ledger.rules`) are generators that yield these calls and are sent their answers;
:class:`~megaflow_hpc.ledger.files.Files` carries them out. So tests run the code of the pods through every interleaving
of its calls, and on a file system that misbehaves on purpose. Paths are relative to the run directory.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Names:
    """Lists a directory without private names. Answer: ``tuple[str, ...]``, empty if the directory is missing."""

    directory: str


@dataclass(frozen=True)
class Read:
    """Opens and reads a JSON file. Answer: ``dict``, or ``None`` if it is missing. ValueError: it is being written."""

    path: str


@dataclass(frozen=True)
class There:
    """Checks whether a path exists. Answer: ``bool``."""

    path: str


@dataclass(frozen=True)
class Link:
    """Publishes a whole file under a name that one process gets. Answer: ``bool``, whether this call got the name."""

    path: str
    content: Mapping[str, Any] = field(hash=False)
    token: str = ""
    """Names the private file. A call with the same token repeats the same call, which may have succeeded before."""
    keep: bool = False
    """Keeps the private file for the next call with this token."""


@dataclass(frozen=True)
class Publish:
    """Publishes a whole file and replaces one that exists."""

    path: str
    content: Mapping[str, Any] = field(hash=False)


@dataclass(frozen=True)
class Rewrite:
    """Overwrites a small file in place. No directory changes, and a reader may see half of it."""

    path: str
    content: Mapping[str, Any] = field(hash=False)


@dataclass(frozen=True)
class Touch:
    """Makes an empty file unless it exists."""

    path: str


@dataclass(frozen=True)
class Remove:
    """Removes a file if it exists."""

    path: str


@dataclass(frozen=True)
class Clock:
    """Reads the clock. Answer: seconds of a clock of this machine that never stops or jumps."""


@dataclass(frozen=True)
class Length:
    """Measures the journal of ``<pod>.<start>``. Answer: bytes of its whole records."""

    owner: str


@dataclass(frozen=True)
class Do:
    """Makes results durable. No answer."""

    action: Callable[[], object]


Call = Names | Read | There | Link | Publish | Rewrite | Touch | Remove | Clock | Length | Do
Steps = Generator[Call, Any, T]
