"""Calls: what the ledger asks of a file system, as data.

The rules (:mod:`~megaflow_hpc.ledger.rules`) are generators that yield these calls and are sent their answers;
:class:`~megaflow_hpc.ledger.files.Files` carries them out. So the very code that pods run can be run through every
interleaving of its calls, and over a file system that misbehaves on purpose. Paths are relative to the run directory.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Names:
    """The names in a directory, private ones left out. Answer: ``tuple[str, ...]``, empty without the directory."""

    room: str


@dataclass(frozen=True)
class Read:
    """A JSON file, opened afresh. Answer: ``dict``, or ``None`` if there is none; ValueError: it is being written."""

    path: str


@dataclass(frozen=True)
class There:
    """Whether a path exists. Answer: ``bool``."""

    path: str


@dataclass(frozen=True)
class Link:
    """Publishes a file whole under a name that only one can have. Answer: ``bool``, whether it was this caller."""

    path: str
    content: Mapping[str, Any] = field(hash=False)
    token: str = ""
    """Names the private file. A repeated call with the same token is the same call: it may have succeeded before."""
    keep: bool = False
    """The private file is linked again for the next call with this token."""


@dataclass(frozen=True)
class Publish:
    """Publishes a file whole, in place of one that may be there."""

    path: str
    content: Mapping[str, Any] = field(hash=False)


@dataclass(frozen=True)
class Rewrite:
    """Overwrites a small file in place: no directory changes, and a reader may see half of it."""

    path: str
    content: Mapping[str, Any] = field(hash=False)


@dataclass(frozen=True)
class Touch:
    """Makes an empty file; one that is there stays."""

    path: str


@dataclass(frozen=True)
class Remove:
    """Removes a file that may be there."""

    path: str


@dataclass(frozen=True)
class Clock:
    """Answer: seconds of a clock of this machine that never stops or jumps."""


@dataclass(frozen=True)
class Length:
    """Answer: bytes of whole records in the journal of ``<pod>.<start>``."""

    owner: str


@dataclass(frozen=True)
class Do:
    """Something that makes results durable. No answer."""

    action: Callable[[], object]


Call = Names | Read | There | Link | Publish | Rewrite | Touch | Remove | Clock | Length | Do
Steps = Generator[Call, Any, T]
