"""Which rollouts of a block its earlier holders have stored: only their journals are read, each once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.trajectories.journal.checks import Heading
from megaflow_hpc.trajectories.journal.frames import HEADER_SIZE
from megaflow_hpc.trajectories.journal.records import headings
from megaflow_hpc.trajectories.journal.writer import SUFFIX, base_of, parts, valid_length


class Holding(NamedTuple):
    """One epoch of a block that is over."""

    epoch: int
    owner: str
    """``<pod>.<start>``."""
    sealed: int
    """Bytes of its journal that count."""


class StoredRollouts:
    """What the journals of earlier holders say; for one thread, which may have to show that it lives.

    Args:
        beat: called between two parts of a journal, which are read for a second or so each.
    """

    def __init__(self, run: RunDir, beat: Callable[[], object] = lambda: None) -> None:
        self._folder, self._beat = run.journal, beat
        self._read: dict[str, tuple[list[tuple[Heading, int]], int]] = {}
        """Owner → headings of its records with the logical offsets of their ends, and the end of the last record."""
        self._lengths: dict[str, tuple[tuple[int, int], int]] = {}
        """Owner → number of parts and size of the last one, and the length that follows."""

    def ids(self, block: int, held: Iterable[Holding]) -> set[str]:
        """Returns the rollouts of a block that are stored and did not fail.

        Raises:
            ConfigError: a journal is not one, or of a newer version.
        """
        found = set()
        for epoch, owner, sealed in held:
            if owner not in self._read or self._read[owner][1] < sealed:
                self._read[owner] = self._headings(owner)
            for heading, end in self._read[owner][0]:
                if (heading.block, heading.epoch) == (block, epoch) and end <= sealed and heading.status != "failed":
                    found.add(heading.id)
        return found

    def length(self, owner: str) -> int:
        """Returns the bytes of whole records in a journal; one that has not grown is not read again."""
        found = parts(self._path(owner))
        size = len(found), found[-1].stat().st_size if found else 0
        known = self._lengths.get(owner)
        if known is None or known[0] != size:
            self._beat()
            self._lengths[owner] = known = size, valid_length(self._path(owner))
        return known[1]

    def _headings(self, owner: str) -> tuple[list[tuple[Heading, int]], int]:
        found, end = [], HEADER_SIZE
        for part in parts(self._path(owner)):
            self._beat()
            base = base_of(part)
            for frame, heading in headings(part):
                end = base + frame.end
                if heading is not None:
                    found.append((heading, end))
        return found, end

    def _path(self, owner: str) -> Path:
        return self._folder / f"{owner}{SUFFIX}"
