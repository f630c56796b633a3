"""Finds which rollouts of a block its earlier holders have stored, from the headings in their journals.

A pod that takes over a block needs this once. It reads the journal of each earlier holder once, whole, and renews its
own lease meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.trajectories.journal.frames import HEADER_SIZE
from megaflow_hpc.trajectories.journal.winners import SUFFIX, base_of, headings, parts

RENEW_BYTES = 8 << 20
"""Bytes of a journal that are read between two calls of ``renew``."""


class StoredBlock(NamedTuple):
    """One epoch of a block that is over."""

    epoch: int
    owner: str
    """``<pod>.<start>``."""
    sealed: int
    """Bytes of its journal that count."""


class _Record(NamedTuple):
    end: int
    """Offset of its end, over all parts of the journal."""
    rollout: str


@dataclass
class _Journal:
    """The contents of one journal when it was read."""

    size: tuple[int, int]
    """Number of parts, and bytes of the last one, before it was read."""
    length: int
    """Offset behind the last whole record."""
    records: dict[tuple[int, int], list[_Record]] = field(default_factory=dict)
    """(block, epoch) → the records that did not fail."""


class StoredRollouts:
    """Reads the journals of earlier holders; for one thread.

    Args:
        renew: called before each journal and every few megabytes, so that the caller's lease stays valid.
    """

    def __init__(self, run: RunDir, renew: Callable[[], object] = lambda: None) -> None:
        self._folder = run.journal
        self._renew = renew
        self._journals: dict[str, _Journal] = {}
        """By owner."""

    def ids(self, block: int, held: Iterable[StoredBlock]) -> set[str]:
        """Returns the rollouts of a block that are stored and did not fail.

        Raises:
            ConfigError: a file is not a journal, or has a newer version.
            OSError: the run directory does not answer.
        """
        stored: set[str] = set()
        for epoch, owner, sealed in held:
            journal = self._journals.get(owner)
            if journal is None or journal.length < sealed:
                journal = self._read(owner)
            records = journal.records.get((block, epoch), ())
            stored.update(record.rollout for record in records if record.end <= sealed)
        return stored

    def length(self, owner: str) -> int:
        """Returns the bytes of whole records in a journal, where a successor seals it; 0 if it is missing.

        Reads the journal again only if it has grown. Raises as :meth:`ids`.
        """
        journal = self._journals.get(owner)
        if journal is None or journal.size != _size(parts(self._path(owner))):
            journal = self._read(owner)
        return journal.length

    def _read(self, owner: str) -> _Journal:
        """Reads a journal and caches the result. After an error nothing is cached, so the next call reads it again."""
        self._renew()
        files = parts(self._path(owner))
        journal = _Journal(_size(files), 0)
        if files:
            journal.length = min(HEADER_SIZE, files[0].stat().st_size)
        for path in files:
            base = base_of(path)
            renewed = 0
            for frame, heading in headings(path):
                journal.length = base + frame.end
                if heading is not None and heading.status != "failed":
                    of_claim = journal.records.setdefault((heading.block, heading.epoch), [])
                    of_claim.append(_Record(journal.length, heading.id))
                if frame.end - renewed >= RENEW_BYTES:
                    renewed = frame.end
                    self._renew()
            self._renew()
        self._journals[owner] = journal
        return journal

    def _path(self, owner: str) -> Path:
        return self._folder / f"{owner}{SUFFIX}"


def _size(files: list[Path]) -> tuple[int, int]:
    return len(files), files[-1].stat().st_size if files else 0
