"""Finds which rollouts of a block were already stored by its earlier owners, from the headings in their journals.

A pod needs this once when it takes over a block. It reads the whole journal of each earlier owner once, and renews its
own lease meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.trajectories.journal.frames import HEADER_SIZE
from megaflow_hpc.trajectories.journal.packs import size_of
from megaflow_hpc.trajectories.journal.winners import SUFFIX, base_of, headings, parts

RENEW_BYTES = 8 << 20
"""Journal bytes to read between two calls of ``renew``."""


class StoredBlock(NamedTuple):
    """An earlier, closed epoch of a block."""

    epoch: int
    owner: str
    """``<pod>.<start>``."""
    sealed: int
    """Length of the owner's journal, in bytes, up to the seal. Later records do not count."""


class _Record(NamedTuple):
    end: int
    """End offset, over all parts of the journal."""
    rollout: str


@dataclass
class _Journal:
    """Snapshot of one journal as of the last read."""

    size: tuple[int, int]
    """Number of parts, and size of the last one in bytes, before the read."""
    length: int
    """End offset of the last complete record."""
    records: dict[tuple[int, int], list[_Record]] = field(default_factory=dict)
    """(block, epoch) → records whose rollout did not fail."""


class StoredRollouts:
    """Reads the journals of a block's earlier owners. Not thread-safe.

    Args:
        renew: Called before each journal and every few megabytes, to keep the caller's lease valid.
    """

    def __init__(self, run: RunDir, renew: Callable[[], object] = lambda: None) -> None:
        self._folder = run.journal
        self._renew = renew
        self._journals: dict[str, _Journal] = {}
        """Owner → journal."""

    def ids(self, block: int, held: Iterable[StoredBlock]) -> set[str]:
        """Returns the ids of a block's rollouts that are stored and did not fail.

        Raises:
            ConfigError: A file is not a journal, or has a newer version.
            OSError: The run directory is unavailable.
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
        """Returns the length of a journal's complete records, in bytes. A successor seals the journal there. 0 if
        missing.

        Reads the journal again only if it has grown. Raises the errors of :meth:`ids`.
        """
        journal = self._journals.get(owner)
        if journal is None or journal.size != _size(parts(self._path(owner))):
            journal = self._read(owner)
        return journal.length

    def _read(self, owner: str) -> _Journal:
        """Reads a journal and caches the result. Errors are not cached, so the next call retries."""
        self._renew()
        files = parts(self._path(owner))
        journal = _Journal(_size(files), 0)
        if files:
            journal.length = min(HEADER_SIZE, size_of(files[0]))
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
    return len(files), size_of(files[-1]) if files else 0
