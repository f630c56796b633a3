"""Which rollouts of a block its earlier holders have stored: only their journals' tables of contents are read, each
once, and of the journals themselves what no table tells of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from megaflow_hpc.rundir.layout import RunDir
from megaflow_hpc.trajectories.journal.contents import Contents, read_contents
from megaflow_hpc.trajectories.journal.frames import HEADER_SIZE
from megaflow_hpc.trajectories.journal.headings import Heading
from megaflow_hpc.trajectories.journal.records import headings
from megaflow_hpc.trajectories.journal.writer import SUFFIX, base_of, parts, valid_length

BEAT_BYTES = 8 << 20
"""Bytes of a journal that are read between two signs of life."""


class Holding(NamedTuple):
    """One epoch of a block that is over."""

    epoch: int
    owner: str
    """``<pod>.<start>``."""
    sealed: int
    """Bytes of its journal that count."""


@dataclass(frozen=True)
class _Known:
    """What is known of one journal, which was read to its end."""

    size: tuple[int, int]
    """Number of parts and size of the last one, when it was looked at."""
    length: int
    """Logical offset behind the last whole record."""
    records: dict[tuple[int, int], list[tuple[int, str]]] | None = None
    """Block and epoch → logical end and rollout of each record that did not fail; ``None`` if only the length is."""


class StoredRollouts:
    """What the journals of earlier holders say; for one thread, which may have to show that it lives.

    Args:
        beat: called between two journals, and of one that has to be read every few megabytes.
    """

    def __init__(self, run: RunDir, beat: Callable[[], object] = lambda: None) -> None:
        self._folder, self._beat = run.journal, beat
        self._known: dict[str, _Known] = {}
        """By owner."""

    def ids(self, block: int, held: Iterable[Holding]) -> set[str]:
        """Returns the rollouts of a block that are stored and did not fail.

        Raises:
            ConfigError: a journal is not one, or of a newer version.
        """
        found: set[str] = set()
        for epoch, owner, sealed in held:
            known = self._known.get(owner)
            if known is None or known.records is None or known.length < sealed:
                known = self._look(owner, whole=True)
            of_block = (known.records or {}).get((block, epoch), ())
            found.update(rollout for end, rollout in of_block if end <= sealed)
        return found

    def length(self, owner: str) -> int:
        """Returns the bytes of whole records in a journal; one that has not grown is not read again."""
        known = self._known.get(owner)
        if known is None or known.size != _size(parts(self._path(owner))):
            known = self._look(owner, whole=False)
        return known.length

    def _look(self, owner: str, whole: bool) -> _Known:
        """Looks at a journal anew; for its length alone, one without a table is read from its last part on.

        Nothing is known of one that could not be read to its end: the next call looks again.
        """
        self._beat()
        found = parts(self._path(owner))
        size, contents = _size(found), read_contents(found)
        if contents is None and not whole:
            known = _Known(size, valid_length(self._path(owner)))
        else:
            end = min(HEADER_SIZE, found[0].stat().st_size) if found else 0
            records: dict[tuple[int, int], list[tuple[int, str]]] = {}
            for heading, end in self._records(found, contents or Contents([])):
                if heading is not None and heading.status != "failed":
                    records.setdefault((heading.block, heading.epoch), []).append((end, heading.id))
            known = _Known(size, end, records)
        self._known[owner] = known
        return known

    def _records(self, found: list[Path], contents: Contents) -> Iterator[tuple[Heading | None, int]]:
        """Yields every record of a journal with its logical end: those that its table tells of, then the others."""
        for listed in contents.records:
            yield listed.heading, listed.end
        if contents.records:
            yield None, contents.covered
        for number in range(contents.part, len(found)):
            start = contents.covered - contents.base if number == contents.part else 0
            if start and start == contents.size:
                continue
            base = contents.base if number == contents.part else base_of(found[number])
            beaten = start
            for frame, heading in headings(found[number], start):
                yield heading, base + frame.end
                if frame.end - beaten >= BEAT_BYTES:
                    beaten = frame.end
                    self._beat()
            self._beat()

    def _path(self, owner: str) -> Path:
        return self._folder / f"{owner}{SUFFIX}"


def _size(found: list[Path]) -> tuple[int, int]:
    return len(found), found[-1].stat().st_size if found else 0
